"""The rules for cells: each planted algorithm is named, layout passes."""

from __future__ import annotations

from textwrap import indent

import pytest

from tests.notebooks.rules import problems

ALGORITHMS = {
    "clip in numpy": "loss = np.minimum(ratio * a, np.clip(ratio, 0.8, 1.2) * a)",
    "clip in torch": "loss = -torch.min(ratio * a, ratio.clamp(0.8, 1.2) * a)",
    "clip in Python": "loss = min(ratio * a, max(0.8, min(ratio, 1.2)) * a)",
    "clip of every token": "losses = [max(r, 1.2) if a > 0 else r * a - b * r + a * b for r in rs]",
    "ratio": "ratio = (new - old).exp()",
    "mean by hand": "advantages = [r - sum(rewards) / len(rewards) for r in rewards]",
    "mean of an array": "advantages = rewards - rewards.mean()",
    "dot product": "total = sum(w * x for w, x in zip(weights, xs))",
    "import of statistics": "from statistics import fmean",
    "import of a part of torch": "import torch.nn.functional as F",
    "one function of numpy": "from numpy import cumsum",
    "matrix product": "y = a @ b",
    "discounted returns": "for r in rewards:\n    total = r + gamma * total\n    out.append(total)",
    "discounted returns in a list": "for r in rewards:\n    out.append(r + gamma * out[-1])",
    "returns in two names": "for r in rewards:\n    y = r + g * x\n    x = y",
    "count": "for lag in lags:\n    counts[lag] += 1",
    "queue": "while waiting:\n    start(waiting.pop())",
    "simpy": "import simpy",
    "simpy process": "def serve(env):\n    yield env.timeout(1.0)",
    "numpy scan": "total = rewards.cumsum()",
    "frame": "table = frame.groupby('lag').agg('size')",
    "roofline": "seconds = 2 * parameters * sequences / flops_per_s + context * cache / bandwidth",
    "class": "class Engine:\n    speed = 1.0",
    "recursion": "def fib(n):\n    return fib(n - 1)",
    "long function": "def f(x):\n" + indent("\n".join(f"x{i} = g(x)" for i in range(6)), "    "),
    "loop in a function": "def f(xs):\n    for x in xs:\n        g(x)",
    "formula as a lambda": "f = lambda r, a: r * a - b * r",
    "many small formulas": "\n".join(f"x{i} = a{i} * b{i} - c{i}" for i in range(7)),
}

LAYOUT = {
    "control": 'eta = mo.ui.slider(steps=[0, 1, 2, 4], value=2, label="eta")',
    "library": "results = {seed: simulate(config, seed=seed) for seed in range(3)}",
    "share for display": 'mo.md(f"{100 * (new / old - 1):.0f} % faster, {seconds / 60:.1f} min")',
    "altair": (
        'chart = (alt.Chart(frame).mark_line().encode(x="lag:Q", y="mean(share):Q")'
        ".transform_window(total='sum(share)') + rule | other) & third"
    ),
    "altair alone": "alt.Chart(f).transform_aggregate(m='mean(x)').properties(width=9)",
    "path": 'folder = mo.notebook_dir() / "assets" / "small" / "run"',
    "array for the library": "ratios = np.linspace(0.4, 1.8, 141)",
    "tensor for the library": "a = torch.tensor([1.0, -1.0])",
    "text": 'text = "a" + "b" + name + "c" + other',
    "rows": "rows = [{'eta': eta, 'oldest': result.oldest} for eta, result in results.items()]",
    "loop that lays out": "for axis, name in zip(axes, names):\n    axis.set_title(name)",
    "loop with its own names": "for x in xs:\n    y = f(x)\n    show(y)",
    "axis limits": "top = max(value for value in values) * 1.1",
    "callback": "on_change = lambda value: set_state(value)",
    "fields of results": "rows = [(r.log, r.idle.mean, r.sum) for r in results]",
    "stop": 'mo.stop(not button.value, mo.md("Press the button."))',
    "count": "n = sum(1 for row in rows if row.chosen)",
}


def cell(body: str) -> str:
    returned = indent(body, "    ")
    return f"import marimo\napp = marimo.App()\n\n@app.cell\ndef _():\n{returned}\n    return\n"


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_in_a_cell_is_found(name: str) -> None:
    assert problems(cell(ALGORITHMS[name])), ALGORITHMS[name]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_in_a_function_or_the_setup_is_found(name: str) -> None:
    body = indent(ALGORITHMS[name], "    ")
    assert problems(f"@app.function\ndef helper():\n{body}\n")
    assert problems(f"with app.setup:\n{body}\n")


@pytest.mark.parametrize("name", LAYOUT)
def test_layout_passes(name: str) -> None:
    assert problems(cell(LAYOUT[name])) == []


def test_a_problem_says_where_and_what() -> None:
    assert problems(cell(ALGORITHMS["mean of an array"])) == ["line 6: computes by .mean()"]
