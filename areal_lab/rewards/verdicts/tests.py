"""The tests' side: run them with proxies for the solution's definitions, and report a verdict.

Every comparison happens here, between objects created here. Meaning of a name in the tests, in
order of priority:

| name | is |
| --- | --- |
| under test | a call of the solution |
| defined by the tests, or by the text that comes with the problem | that |
| a builtin, or a module of the standard library | that: a solution cannot redefine `set` |
| imported by the solution under its own name from the standard library | that |

If the tested names are unknown, all other definitions of the solution are.
"""

from __future__ import annotations

import _ast
import builtins
import io
import os
import sys

from areal_lab.rewards.sandbox.cell import LINK_IN, LINK_OUT
from areal_lab.rewards.verdicts import literals

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

PASSED, FAILED, UNSUPPORTED = "passed", "failed", "unsupported"
_FILE = "tests.py"
_SHOWN = ("__name__", "__doc__")
_ENDS_ITERATION = (StopIteration, StopAsyncIteration)


class Unsupported(BaseException):
    """The tests need something that cannot be sent, such as a comparison of the solution's objects.

    Not an Exception, so tests that expect one do not catch it.
    """


class Ended(BaseException):
    """The solution has no more replies, or sent an invalid one."""


def main(argument: dict[str, Any]) -> None:
    """Run the tests and write the verdict, a line and optionally a reason, to standard output.

    `argument` has `tests`, their text; `prelude`, text of the problem that runs before them;
    `under_test`, names or None; `solution`, whose imports are read.
    """
    report = os.dup(1)
    os.dup2(2, 1)  # output of the tests is not a verdict
    sys.set_int_max_str_digits(0)
    link = Link()
    module = type(sys)("__main__")  # `unittest.main` looks for tests there
    sys.modules["__main__"] = module
    sys.argv[:] = [_FILE]
    try:
        _run(argument, link, module.__dict__)
    except BaseException as error:
        passed = isinstance(error, SystemExit) and error.code is False  # so does `unittest.main`
        if not passed:
            link.failures.append(_reason(error, argument["tests"]))
    status, reason = (FAILED, link.failures[-1]) if link.failures else (PASSED, "")
    if status == PASSED and not link.asked:
        status, reason = UNSUPPORTED, "the tests ask nothing of the solution: any would pass"
    # Even if the tests caught the exception.
    if link.trouble:
        status, reason = link.trouble
    elif status == FAILED and link.opaque:
        status = UNSUPPORTED
    os.write(report, f"{status}\n{reason[:2000]}".encode(errors="replace"))


def _run(argument: dict[str, Any], link: Link, names: dict[str, Any]) -> None:
    defined, errors = link.names()
    try:
        exec(compile(argument["prelude"], "problem.py", "exec", dont_inherit=True), names)
    except SyntaxError:
        pass  # a text to be continued; the solution has all of it
    tree = compile(argument["tests"], _FILE, "exec", literals.ONLY_TREE, dont_inherit=True)
    under_test = argument["under_test"]
    for name in under_test or ():
        names.pop(name, None)  # the problem has a stub of the function to complete
    left = undefined(tree) - names.keys() - set(dir(builtins)) - set(under_test or ())
    link.named = {one.id for one in walk(tree) if isinstance(one, _ast.Name)}
    names.update({name: __import__(name) for name in left & sys.stdlib_module_names})
    names.update(imports(argument["solution"], left - names.keys()))
    for name in left - names.keys() if under_test is None else under_test:
        if name in errors:
            names[name] = link.error_type(name)
        elif name in defined:
            names[name] = defined[name]
    _note_dropped(argument["tests"], link.failures)
    exec(compile(tree, _FILE, "exec", dont_inherit=True), names)


def _note_dropped(tests: str, failures: list[str]) -> None:
    """Record failures that do not reach the tests: in a runner, a thread, a `__del__`."""

    def dropped(event: Any) -> None:
        failures.append(_reason(event.exc_value, tests))

    def note(module: str, owner: str, reason: Callable[[Any], str]) -> None:
        runner = getattr(__import__(module), owner)
        run = runner.run

        def noted(self: Any, *given: Any, **more: Any) -> Any:
            result = run(self, *given, **more)
            if text := reason(result):
                failures.append(text)
            return result

        runner.run = noted

    sys.unraisablehook = dropped
    if "thread" in tests:
        setattr(__import__("threading"), "excepthook", dropped)  # noqa: B010 -- its type has none
    if "unittest" in tests:
        note("unittest", "TestCase", _of_unittest)
    if "doctest" in tests:
        note("doctest", "DocTestRunner", lambda one: f"doctest: {one}" if one.failed else "")


def _of_unittest(result: Any) -> str:
    """Last failure of a result of unittest; empty without one."""
    if result.wasSuccessful():
        return ""
    for case, trace in [*result.errors, *result.failures][-1:]:
        return f"{case.id()}: {trace.splitlines()[-1]}"
    return "a test that is to fail passed"


def _reason(error: BaseException, tests: str) -> str:
    """One line: the error, and the line of the tests."""
    trace, number = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == _FILE:
            number = trace.tb_lineno
        trace = trace.tb_next
    line = tests.splitlines()[number - 1].strip() if number else ""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return " ".join(f"{text} at line {number}: {line}".split()) if line else text


# --- names ---------------------------------------------------------------------------------------


def walk(tree: Any) -> Iterator[Any]:
    """A node of a syntax tree and all nodes below it."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        for field in node._fields:
            value = getattr(node, field, None)
            children = value if isinstance(value, list) else [value]
            left += [one for one in children if isinstance(one, _ast.AST)]


def undefined(tree: Any) -> set[str]:
    """Names that a program uses but does not define anywhere."""
    used: set[str] = set()
    made: set[str] = set()
    for node in walk(tree):
        match node:
            case _ast.Name(id=name, ctx=_ast.Load()):
                used.add(name)
            case _ast.Name(id=name) | _ast.arg(arg=name):
                made.add(name)
            case _ast.FunctionDef(name=name) | _ast.ClassDef(name=name):
                made.add(name)
            case _ast.alias(name=name, asname=other):
                made.add(other or name.partition(".")[0])
            case _ast.ExceptHandler(name=str(name)):
                made.add(name)
    return used - made


def imports(solution: str, wanted: set[str]) -> dict[str, Any]:
    """Imports of a solution from modules of the standard library, of the wanted names.

    Under its own name: `from builtins import len as sorted` would change the result of tests.
    """
    try:
        tree = compile(solution, "solution.py", "exec", literals.ONLY_TREE, dont_inherit=True)
    except (SyntaxError, ValueError):
        return {}
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, _ast.ImportFrom) and not node.level and node.module:
            given = {one.name for one in node.names}
            chosen = wanted if "*" in given else wanted & given
            if chosen and node.module.partition(".")[0] in sys.stdlib_module_names:
                module = __import__(node.module, fromlist=["*"])
                found.update({one: getattr(module, one) for one in chosen if hasattr(module, one)})
    return found


# --- the link ------------------------------------------------------------------------------------


class Link:
    """The pipes to the solution."""

    def __init__(self) -> None:
        self._replies = io.BufferedReader(io.FileIO(LINK_IN, closefd=False), 1 << 16)
        self._errors: dict[str, type[Exception]] = {}
        self._of_functions: set[int] = set()
        self._references = 0
        self.named: set[str] = set()
        """Names in the tests."""
        self.asked = False
        """True if the tests asked anything of the solution."""
        self.failures: list[str] = []
        """Failures of the tests, even if they continue."""
        self.opaque = False
        """True if a function of the solution returned something that is not a literal."""
        self.trouble: tuple[str, str] | None = None
        """Status and reason, once the tests cannot pass any more."""

    def names(self) -> tuple[dict[str, Any], dict[str, list[str]]]:
        """Definitions of the solution, and the bases of its exceptions, by name."""
        match self._receive():
            case ("names", dict() as defined, dict() as errors):
                pass
            case _:
                raise self.ended("the solution sent no names")
        for name, bases in errors.items():
            known = [one for one in map(_built_in_error, bases) if one]
            self._errors[str(name)] = type(str(name), (known[0] if known else Exception,), {})
        self._of_functions = {
            _number(one) for name, one in defined.items() if isinstance(one, Handle)
        }
        return defined, errors

    def error_type(self, name: str) -> type[Exception]:
        """Proxy for an exception that the solution defines."""
        return self._errors[name]

    def ask(
        self, function: Handle | str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        """Call a function of the solution; returns its value, or raises its exception."""
        if self.trouble:
            raise Ended
        self.asked = True
        self._send(literals.write(("call", function, arguments, keywords), self._refer))
        before = self._references
        match self._receive():
            case ("value", value, dict() as changed):
                plain = isinstance(function, Handle) and _number(function) in self._of_functions
                self.opaque |= plain and self._references > before
                self._change([*arguments, *keywords.values()], changed)
                return value
            case ("raise", [*names], [*given], str(text)):
                error = self._error([str(one) for one in names], given, text)
                if isinstance(error, _ENDS_ITERATION):
                    raise self._end_of_iteration(function, list(map(str, names)), given)
                if isinstance(error, IndexError) and _in_getitem():
                    raise self.unsupported(f"{names[0]} of the solution, which ends an iteration")
                raise error
            case ("unsupported", str(reason)):
                raise self.unsupported(reason)
        raise self.ended("the solution sent no reply")

    def unsupported(self, reason: str) -> Unsupported:
        """Record that the tests need something that cannot be sent."""
        self.trouble = self.trouble or (UNSUPPORTED, reason)
        return Unsupported(reason)

    def ended(self, reason: str) -> Ended:
        """Record that the solution has ended."""
        self.trouble = self.trouble or (FAILED, reason)
        return Ended(reason)

    def _error(self, names: list[str], given: list[Any], text: str) -> BaseException:
        for name in names:
            kind = self._errors.get(name) or _built_in_error(name)
            if kind:
                for arguments in (given, [text]):
                    try:
                        return kind(*arguments)
                    except Exception:
                        continue  # some take other arguments than they keep
        return self.ended(f"the solution raised {names[0] if names else 'nothing'}")

    def _end_of_iteration(
        self, function: Handle | str, names: list[str], given: list[Any]
    ) -> BaseException:
        """Convert a StopIteration, which as a call's result must not end a `map` or `zip` of the
        tests.

        As in a generator (PEP 479). Tests that name the raised exception may expect it, and then it
        is unknown who caught it.
        """
        if isinstance(function, str) and function == "next" and "StopIteration" in names:
            return StopIteration(*given)  # with the return value of a generator
        if self.named & set(names):
            return self.unsupported(f"{names[0]} of the solution, which would end iterations")
        return RuntimeError(f"the solution raised {names[0]}")

    def _change(self, given: list[Any], changed: dict[Any, Any]) -> None:
        """Apply changes to arguments, as a call in this process would."""
        for number, new in changed.items():
            match given[number], new:
                case (list() as old, list()) | (bytearray() as old, bytearray()):
                    old[:] = new
                case (dict() as old, dict()) | (set() as old, set()):
                    old.clear()
                    old.update(new)
                case (old, _) if type(old).__name__ == "deque":
                    old.clear()
                    old.extend(new)
                case _:
                    raise self.ended("the solution changed the type of an argument")

    def _refer(self, value: object) -> int:
        if isinstance(value, Handle):
            return _number(value)
        raise self.unsupported(f"an argument of type {type(value).__name__}")

    def _resolve(self, number: int) -> Handle:
        self._references += 1
        return Handle(self, number)

    def _send(self, text: str) -> None:
        data = memoryview(text.encode("ascii") + b"\n")
        try:
            while data:
                data = data[os.write(LINK_OUT, data) :]
        except OSError:
            raise self.ended("the solution ended") from None

    def _receive(self) -> Any:
        line = self._replies.readline(literals.MOST_BYTES + 2)
        if not line.endswith(b"\n"):
            raise self.ended("the solution ended" if not line else "its reply is too long")
        try:
            return literals.read(line.decode("ascii"), self._resolve)
        except ValueError as error:
            raise self.ended(f"the solution's reply cannot be read: {error}") from None


def _in_getitem() -> bool:
    """Return whether a sequence of the tests is asking: an IndexError ends an iteration over it."""
    frame: Any = sys._getframe()
    while frame is not None:
        if (frame.f_code.co_name, frame.f_code.co_filename) == ("__getitem__", _FILE):
            return True
        frame = frame.f_back
    return False


def _built_in_error(name: object) -> type[Exception] | None:
    found = getattr(builtins, str(name), None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None


class Handle:
    """An object of the solution, which stays in its process.

    It can be called and inspected, but is never compared there: the solution would learn the
    expected value, and could claim to be equal.
    """

    __slots__ = ("_link", "_number")

    def __init__(self, link: Link, number: int) -> None:
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_number", number)

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        """Call it in its process."""
        return _ask(self, self, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _SHOWN:
            raise AttributeError(name)  # asked for by Python, not by tests
        return _ask(self, "getattr", (self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", (self, name, value))

    def __getitem__(self, key: Any) -> Any:
        return _ask(self, "getitem", (self, key))

    def __setitem__(self, key: Any, value: Any) -> None:
        _ask(self, "setitem", (self, key, value))

    def __iter__(self) -> Any:
        return _ask(self, "iter", (self,))

    def __next__(self) -> Any:
        return _ask(self, "next", (self,))

    def __len__(self) -> int:
        return int(_ask(self, "len", (self,)))

    def __bool__(self) -> bool:
        return _ask(self, "bool", (self,)) is True

    def __str__(self) -> str:
        return str(_ask(self, "str", (self,)))

    def __repr__(self) -> str:
        return str(_ask(self, "repr", (self,)))

    def __instancecheck__(self, value: Any) -> bool:
        return _ask(self, "isinstance", (value, self)) is True

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Handle) and _number(other) == _number(self):
            return True
        link: Link = object.__getattribute__(self, "_link")
        raise link.unsupported("a comparison of an object of the solution")

    def __hash__(self) -> int:
        return _number(self)


def _number(handle: Handle) -> int:
    number: int = object.__getattribute__(handle, "_number")
    return number


def _ask(
    handle: Handle,
    function: Handle | str,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any] | None = None,
) -> Any:
    link: Link = object.__getattribute__(handle, "_link")
    return link.ask(function, arguments, keywords or {})
