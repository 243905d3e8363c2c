"""Every function in one graph: `torch.compile(fullgraph=True)`, value and gradient.

In one fresh interpreter for all of them, without the shape checks that tests switch on, and all
functions of a family in one graph: what the compiler costs is paid once. When a family fails, its
functions are compiled one by one, to say which.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_lab.functional import logprobs_and_entropy
from tests.functional.case import Case
from tests.functional.test_table import FAMILIES, ROOT, cases_of, flat, with_leaves

TRACED_BACKWARD = {"logprobs_and_entropy (kept logits)", "logprobs_and_entropy (top-k, top-p)"}
"""Those with an autograd function of their own, which writes into its buffers: the backward pass is
traced as well. Elsewhere autograd differentiates the captured graph, a third of the work."""


def compile_together(cases: Sequence[Case], backend: str) -> None:
    """Values and gradients of these functions in one graph, each equal to the eager one."""

    def everything(inputs: list[list[Tensor]]) -> list[list[Tensor]]:
        return [flat(case.function(*each)) for case, each in zip(cases, inputs, strict=True)]

    torch.compiler.reset()
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    results: list[Any] = []
    for function in (everything, compiled):
        inputs = [with_leaves(case, 0) for case in cases]
        outputs = function(inputs)
        carrying = [o.square().sum() for part in outputs for o in part if o.requires_grad]
        if carrying:
            sum(carrying[1:], start=carrying[0]).backward()
        results.append((outputs, [[x.grad for x in each] for each in inputs]))
    for case, values, gradients in zip(
        cases, *(zip(*parts, strict=True) for parts in zip(*results, strict=True)), strict=True
    ):
        for eager, ours in (values, gradients):
            for one, other in zip(ours, eager, strict=True):
                assert (one is None) == (other is None), case.name
                if one is not None:
                    torch.testing.assert_close(
                        one.detach(), other.detach(), msg=lambda m, c=case: f"{c.name}: {m}"
                    )


def compile_family(family: str) -> None:
    """All functions of a family in one graph; where that fails, say with which of them."""
    cases = [case for case in cases_of(family) if "compile" not in case.reasons]
    deeper = [case for case in cases if case.name in TRACED_BACKWARD]
    others = [case for case in cases if case.name not in TRACED_BACKWARD]
    for part, backend in ((others, "eager"), (deeper, "aot_eager")):
        try:
            if part:
                compile_together(part, backend)
        except Exception:
            for case in part:
                print(f"{family}: {case.name}", file=sys.stderr)
                compile_together([case], backend)
            raise


@pytest.mark.slow
def test_functions_compile_to_one_graph():
    code = "from tests.functional import test_compile as t; t.compile_all()"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert process.stdout.split() == list(FAMILIES), process.stderr[-4000:]


def compile_all() -> None:
    """Say each family that compiles."""
    # Tracing makes millions of small objects: an eighth of its time went into looking at them.
    gc.disable()
    for family in FAMILIES:
        compile_family(family)
        print(family, flush=True)
    refuse_targets_outside_the_vocabulary()


def refuse_targets_outside_the_vocabulary() -> None:
    """Compiled code cannot look at values, but its gather of the target refuses."""
    hidden, weight = torch.randn(3, 2), torch.randn(5, 2)
    compiled = torch.compile(logprobs_and_entropy, fullgraph=True, backend="aot_eager")
    compiled(hidden, weight, torch.tensor([0, 4, 1]))
    with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
        compiled(hidden, weight, torch.tensor([0, -1, 1]))
