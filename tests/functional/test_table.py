"""Every function under every transform, and the table of docs/functional/transforms.md.

`python -m tests.functional.test_table` regenerates the table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

from tests.functional.case import COLUMNS, Case, ragged

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "functional" / "transforms.md"
FAMILIES = tuple(sorted(path.stem for path in (Path(__file__).parent / "cases").glob("[!_]*.py")))


def cases_of(family: str) -> list[Case]:
    return list(importlib.import_module(f"tests.functional.cases.{family}").CASES)


ALL = [(family, case) for family in FAMILIES for case in cases_of(family)]


def flat(output: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, dict):
        output = output.values()
    return [tensor for part in output for tensor in flat(part)]


def scalar(case: Case) -> Callable[..., Tensor]:
    """Sum of squares of what carries a gradient; squares make the second derivative matter."""

    def total(*inputs: Tensor) -> Tensor:
        outputs = [o for o in flat(case.function(*inputs)) if o.is_floating_point()]
        return sum((o.square().sum() for o in outputs), start=torch.zeros((), dtype=torch.double))

    return total


def with_leaves(case: Case, seed: int) -> list[Tensor]:
    inputs = [x.clone() for x in case.sample(seed)]
    return [x.requires_grad_() if x.is_floating_point() else x for x in inputs]


def expected_gradients(case: Case, seed: int) -> list[Tensor]:
    leaves = with_leaves(case, seed)
    chosen = [leaves[i] for i in case.differentiable]
    return list(torch.autograd.grad(scalar(case)(*leaves), chosen, materialize_grads=True))


def in_positions(case: Case, seed: int) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """The function of the differentiable inputs only, and those inputs."""
    inputs = case.sample(seed)

    def of_chosen(*chosen: Tensor) -> Any:
        full = list(inputs)
        for index, value in zip(case.differentiable, chosen, strict=True):
            full[index] = value
        return case.function(*full)

    leaves = tuple(inputs[i].clone().requires_grad_() for i in case.differentiable)
    return of_chosen, leaves


def check_eager(case: Case) -> None:
    """Finite results; a gradient for the inputs that say so, and for no other."""
    leaves = with_leaves(case, 0)
    outputs = flat(case.function(*leaves))
    for output in outputs:
        assert not output.is_floating_point() or output.isfinite().all()
    carrying = [o.sum() for o in outputs if o.requires_grad]
    assert bool(carrying) == bool(case.differentiable)
    if carrying:
        sum(carrying[1:], start=carrying[0]).backward()
    for index, leaf in enumerate(leaves):
        assert (leaf.grad is not None) == (index in case.differentiable), f"input {index}"


def check_grad(case: Case) -> None:
    ours = grad(scalar(case), argnums=case.differentiable)(*case.sample(0))
    torch.testing.assert_close(list(ours), expected_gradients(case, 0))
    of_chosen, leaves = in_positions(case, 0)
    differentiable = lambda *x: tuple(o for o in flat(of_chosen(*x)) if o.requires_grad)  # noqa: E731
    assert torch.autograd.gradcheck(differentiable, leaves)


def check_vmap(case: Case) -> None:
    """Every input mapped, the mask too; equal to a loop, as are per-sample gradients."""
    samples = [case.sample(seed) for seed in range(3)]
    stacked = [torch.stack(column) for column in zip(*samples, strict=True)]
    loop = [flat(case.function(*sample)) for sample in samples]
    ours = flat(vmap(case.function)(*stacked))
    torch.testing.assert_close(ours, [torch.stack(column) for column in zip(*loop, strict=True)])
    if case.differentiable:
        gradients = vmap(grad(scalar(case), argnums=case.differentiable))(*stacked)
        rows = [expected_gradients(case, seed) for seed in range(3)]
        expected = [torch.stack(column) for column in zip(*rows, strict=True)]
        torch.testing.assert_close(list(gradients), expected)


def check_jacrev(case: Case) -> None:
    of_chosen, leaves = in_positions(case, 0)
    carrying = [o.requires_grad for o in flat(of_chosen(*leaves))]

    def outputs(*inputs: Tensor) -> tuple[Tensor, ...]:
        kept = zip(flat(of_chosen(*inputs)), carrying, strict=True)
        return tuple(output for output, keep in kept if keep)

    argnums = tuple(range(len(leaves)))
    ours = jacrev(outputs, argnums=argnums)(*(leaf.detach() for leaf in leaves))
    torch.testing.assert_close(
        flat(ours), flat(torch.autograd.functional.jacobian(outputs, leaves))
    )


def check_double_backward(case: Case) -> None:
    """Along random directions (`fast_mode`), where a wrong entry can hide only by chance."""
    of_chosen, leaves = in_positions(case, 0)
    differentiable = lambda *x: tuple(o for o in flat(of_chosen(*x)) if o.requires_grad)  # noqa: E731
    assert torch.autograd.gradgradcheck(differentiable, leaves, fast_mode=True)


def check_layouts(case: Case) -> None:
    assert case.layouts is not None
    padded, packed = case.layouts(ragged())
    torch.testing.assert_close(flat(padded), flat(packed), rtol=1e-12, atol=1e-12)


PREFACE = """# Functions and transforms

Each cell of these tables is a test in `tests/functional/test_table.py`. The file also checks this
page; `python -m tests.functional.test_table` regenerates it.

- `eager`: finite results, and a gradient for exactly the documented inputs.
- `grad`: `torch.func.grad` equals autograd and finite differences.
- `vmap`: all inputs mapped, including the mask; values and per-sample gradients equal a loop.
- `jacrev`: equals autograd's Jacobian.
- `compile`: `torch.compile(fullgraph=True)`, value and gradient.
- `double backward`: finite differences of the gradient, along random directions.
  For a Hessian use `jacrev(jacrev(f))`: the recurrence of returns and the log-probs from hidden
  states have no forward mode, so `torch.func.hessian` and `jvp` fail on them.
- `packed = padded`: equal results to 1e-12 in float64, with NaN on the padding."""

CHECKS = {
    "eager": check_eager,
    "grad": check_grad,
    "vmap": check_vmap,
    "jacrev": check_jacrev,
    "double backward": check_double_backward,
    "packed = padded": check_layouts,
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=f"{family}: {case.name}") for family, case in ALL]
)
def test_function_under_transforms(case, request):
    failed = {}
    for column, check in CHECKS.items():
        if column in case.reasons:
            continue
        if column != "eager":  # which has looked at the shapes of these calls
            request.getfixturevalue("unchecked_shapes")
        try:
            check(case)
        except Exception as error:  # the other columns tell more
            failed[column] = error
    if failed:
        raise ExceptionGroup(f"{case.name} under {', '.join(failed)}", [*failed.values()])


def table() -> str:
    """The page: a table per family, a reason under it wherever a cell is not a yes."""
    lines = [PREFACE]
    for family in FAMILIES:
        notes: list[str] = []
        lines += ["", f"## {family}", "", "| function | " + " | ".join(COLUMNS) + " |"]
        lines.append("| --- |" + " --- |" * len(COLUMNS))
        for case in cases_of(family):
            cells = []
            for column in COLUMNS:
                reason = case.reasons.get(column)
                if reason and reason not in notes:
                    notes.append(reason)
                cells.append(f"no ({notes.index(reason) + 1})" if reason else "yes")
            lines.append(f"| `{case.name}` | " + " | ".join(cells) + " |")
        if notes:
            lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(lines) + "\n"


def test_the_table_in_the_docs_is_this_one():
    assert PAGE.read_text() == table(), "run `python -m tests.functional.test_table`"


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(table())
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(ALL)} functions")
