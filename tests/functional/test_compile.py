"""Every function in one graph: `torch.compile(fullgraph=True)`, value and gradient.

In one fresh interpreter for all of them, without the shape checks that tests switch on: what
loading the compiler costs is paid once.
"""

from __future__ import annotations

import subprocess
import sys

import torch

from tests.functional.test_table import FAMILIES, ROOT, cases_of, flat, with_leaves


def compile_family(family: str) -> None:
    """Value and gradient of each function of a family in one graph."""
    for case in cases_of(family):
        if "compile" in case.reasons:
            continue
        torch.compiler.reset()
        compiled = torch.compile(case.function, fullgraph=True, backend="aot_eager")
        results = []
        for function in (case.function, compiled):
            leaves = with_leaves(case, 0)
            outputs = flat(function(*leaves))
            carrying = [o.square().sum() for o in outputs if o.requires_grad]
            if carrying:
                sum(carrying[1:], start=carrying[0]).backward()
            results.append(([o.detach() for o in outputs], [x.grad for x in leaves]))
        eager, ours = results
        torch.testing.assert_close(ours[0], eager[0], msg=lambda m, c=case: f"{c.name}: {m}")
        for one, other in zip(ours[1], eager[1], strict=True):
            assert (one is None) == (other is None), case.name
            if one is not None:
                torch.testing.assert_close(one, other, msg=lambda m, c=case: f"{c.name}: {m}")


def test_functions_compile_to_one_graph():
    code = "from tests.functional import test_compile as t; t.compile_all()"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert process.stdout.split() == list(FAMILIES), process.stderr[-4000:]


def compile_all() -> None:
    """Say each family that compiles."""
    for family in FAMILIES:
        compile_family(family)
        print(family, flush=True)
