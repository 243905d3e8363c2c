"""What a cell may do: make controls, call the library, lay out what comes back. Nothing else.

`problems(text)` reads the syntax of a notebook and names what looks like an algorithm. A rule is a
tripwire, not a proof: it has to catch what a person would write by hand, and to let layout pass.

| a cell may not | because that is how one writes |
| --- | --- |
| import anything but `MODULES` | simpy processes, statistics, random draws |
| use more of numpy and torch than `ARRAYS`: arrays in, nothing computed | tensor maths |
| use `@`, or call a method of `COMPUTES` (`.mean()`, `.cumsum()`, ...) | reductions, scans |
| write over 3 operators of arithmetic in one expression, or 12 in a cell | formulas |
| use `sum(...)` in arithmetic, or take a sum or extreme of products | means, dot products, clips |
| use `while`, `yield`, recursion, or define a class | queues, events, state |
| carry a value from one turn of a `for` to the next | recurrences, scans |
| define a function of more than 5 statements, or with a loop | helpers of a library |

Numbers converted for display (`100 * (new / old - 1)`), charts put together by `+`, `|` and `&`,
paths put together by `/`, and comprehensions that lay out rows are within these limits. What is
beyond them is a function of the library, with a docstring and tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

MODULES: Final = {
    *("marimo", "altair", "numpy", "pandas", "matplotlib", "torch"),
    *("areal_lab", "simulator", "cosim", "reproductions"),
    *("__future__", "collections.abc", "dataclasses", "datetime", "functools", "html", "importlib"),
    *("io", "json", "os", "pathlib", "sys", "tempfile", "textwrap", "time", "typing"),
}
ARRAYS: Final = {
    *("array", "asarray", "arange", "linspace", "geomspace", "logspace", "zeros", "ones", "full"),
    *("tensor", "as_tensor", "from_numpy", "get_num_threads", "set_num_threads", "inf", "nan"),
    *("uint8", "int32", "int64", "float32", "float64", "ndarray", "dtype", "Tensor"),
}
"""What is used of numpy and torch: arrays to hand to the library, and their types."""
COMPUTES: Final = {
    *("sum", "mean", "std", "var", "median", "quantile", "percentile", "prod", "dot", "matmul"),
    *("cumsum", "cumprod", "cummax", "cummin", "diff", "corr", "cov", "convolve", "einsum"),
    *("exp", "log", "log1p", "expm1", "sqrt", "square", "softmax", "log_softmax", "sigmoid"),
    *("clip", "clamp", "minimum", "maximum", "where", "argmin", "argmax", "argsort", "backward"),
    *("groupby", "rolling", "ewm", "expanding", "agg", "aggregate", "apply", "transform"),
    *("pivot_table", "resample", "searchsorted", "bincount", "histogram", "reduceat", "accumulate"),
    *("reduce", "partition", "interp", "polyfit", "random", "normal", "choice", "shuffle"),
}
"""Methods and functions that compute, of arrays, tensors and frames."""
LAYERS: Final = (ast.Add, ast.BitOr, ast.BitAnd)
MOST_OPERATORS: Final = 3
MOST_OPERATORS_OF_A_CELL: Final = 12
MOST_STATEMENTS: Final = 5

_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)


def problems(text: str) -> list[str]:
    """Lines of a notebook that look like an algorithm: `line 12: ...`, in their order."""
    found = {problem for part in ast.parse(text).body for problem in _part(part)}
    return [f"line {line}: {message}" for line, message in sorted(found)]


Problem = tuple[int, str]


def _part(part: ast.stmt) -> Iterator[Problem]:
    """Problems of a cell, of the setup, or of a function at the top."""
    for node in ast.walk(part):
        yield from _imports(node)
        yield from _names(node)
        yield from _control_flow(node)
        yield from _reductions(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if not _is_cell(node):
                yield from _function(node)
        elif isinstance(node, ast.For):
            yield from _carried(node)
    total = 0
    for expression in _formulas(part):
        operators = _operators(expression)
        total += operators
        if operators > MOST_OPERATORS:
            yield expression.lineno, f"a formula of {operators} operators: {_short(expression)}"
    if total > MOST_OPERATORS_OF_A_CELL:
        yield part.lineno, f"{total} operators of arithmetic in one cell"


def _imports(node: ast.AST) -> Iterator[Problem]:
    names = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or "."]
        if names[0] in {"numpy", "torch"}:
            for alias in node.names:
                if alias.name not in ARRAYS:
                    yield node.lineno, f"uses {names[0]}.{alias.name}"
    for name in names:
        if name not in MODULES and name.split(".")[0] not in MODULES:
            yield node.lineno, f"imports {name}"
        if name.startswith(("numpy.", "torch.")):
            yield node.lineno, f"imports {name}"


def _names(node: ast.AST) -> Iterator[Problem]:
    match node:
        case ast.Attribute(value=ast.Name(id="np" | "numpy" | "torch" as module), attr=name):
            if name not in ARRAYS:
                yield node.lineno, f"uses {module}.{name}"
        case ast.Call(func=ast.Attribute(value=owner, attr=name)):
            if name in COMPUTES and not _is_module(owner):
                yield node.lineno, f"computes by .{name}()"
        case _:
            pass


def _control_flow(node: ast.AST) -> Iterator[Problem]:
    match node:
        case ast.While():
            yield node.lineno, "a while loop"
        case ast.Yield() | ast.YieldFrom():
            yield node.lineno, "a generator"
        case ast.ClassDef():
            yield node.lineno, f"defines the class {node.name}"
        case ast.BinOp(op=ast.MatMult()):
            yield node.lineno, f"a matrix product: {_short(node)}"
        case ast.Call(func=ast.Attribute(attr="_unparsable_cell")):
            yield node.lineno, "a cell that Python cannot read"
        case _:
            pass


def _reductions(node: ast.AST) -> Iterator[Problem]:
    """Means, products and clips that are written with what Python has without imports."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.Mult, ast.Div, ast.Pow)):
        for side in (node.left, node.right):
            if _called(side) == "sum":
                yield node.lineno, f"a mean or share by hand: {_short(node)}"
    name = _called(node)
    if name in {"sum", "min", "max"} and isinstance(node, ast.Call):
        inside = [each for argument in node.args for each in ast.walk(argument)]
        products = [each for each in inside if isinstance(each, ast.BinOp) and _is_product(each)]
        nested = [each for each in inside if _called(each) in {"min", "max"}]
        if products or nested:
            yield node.lineno, f"{name} over products, or a clip by hand: {_short(node)}"


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> Iterator[Problem]:
    inside = list(ast.walk(node))
    if isinstance(node, ast.Lambda):
        if sum(_operators(each) for each in _formulas(node)) > 1:
            yield node.lineno, f"a formula as a lambda: {_short(node)}"
        return
    statements = [each for each in inside if isinstance(each, ast.stmt)]
    written = len(statements) - 1 - (ast.get_docstring(node) is not None)
    if written > MOST_STATEMENTS:
        yield node.lineno, f"{node.name}() has {written} statements"
    if any(isinstance(each, ast.For | ast.AsyncFor) for each in inside):
        yield node.lineno, f"{node.name}() has a loop"
    if any(_called(each) == node.name for each in inside):
        yield node.lineno, f"{node.name}() calls itself"


def _carried(loop: ast.For) -> Iterator[Problem]:
    """What a turn of the loop reads before it assigns it: a value of the turn before."""
    nodes = [node for statement in loop.body for node in _in_order(statement)]
    assigned = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    seen: set[str] = set()
    for node in nodes:
        last = isinstance(node, ast.Subscript) and ast.unparse(node.slice) == "-1"
        if last or isinstance(node, ast.AugAssign):
            yield node.lineno, f"a value carried through a loop: {_short(node)}"
        elif isinstance(node, ast.Name) and node.id in assigned:
            if isinstance(node.ctx, ast.Store):
                seen.add(node.id)
            elif node.id not in seen:
                yield node.lineno, f"a value carried through a loop: {node.id}"


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes as they are evaluated: the value of an assignment before its target."""
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        yield from _in_order(node.value)
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from _in_order(target)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)


def _formulas(part: ast.AST) -> Iterator[ast.BinOp]:
    """The outermost expressions of arithmetic."""
    if isinstance(part, ast.BinOp) and isinstance(part.op, _ARITHMETIC):
        yield part
        return
    for child in ast.iter_child_nodes(part):
        yield from _formulas(child)


def _operators(expression: ast.expr) -> int:
    """Operators of arithmetic in an expression; none if it only joins charts, text or paths."""
    operators = [
        node
        for node in ast.walk(expression)
        if isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC)
    ]
    joins = all(isinstance(node.op, LAYERS) for node in operators)
    paths = all(isinstance(node.op, ast.Div) and _has_text(node) for node in operators)
    return 0 if joins or paths else len(operators)


def _has_text(node: ast.BinOp) -> bool:
    constants = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return any(isinstance(value, str) for value in constants)


def _is_product(node: ast.BinOp) -> bool:
    return isinstance(node.op, ast.Mult | ast.Pow) and not (
        isinstance(node.left, ast.Constant) or isinstance(node.right, ast.Constant)
    )


def _called(node: ast.AST) -> str | None:
    """The name of a function that is called by its bare name."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id
    return None


def _is_module(owner: ast.expr) -> bool:
    """Whether a name is called of marimo, of altair, or of a module that `ARRAYS` is for."""
    first = ast.unparse(owner).split(".")[0].split("(")[0]
    return first in {"mo", "alt", "marimo", "altair", "np", "numpy", "torch"}


def _is_cell(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and any(
        ast.unparse(decorator).startswith("app.cell") for decorator in node.decorator_list
    )


def _short(node: ast.AST) -> str:
    text = ast.unparse(node).replace("\n", " ")
    return text if len(text) <= 70 else f"{text[:67]}..."
