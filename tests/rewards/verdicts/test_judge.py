"""Verdicts: what tests may do with a solution, and what a solution cannot do to them."""

from __future__ import annotations

from typing import Any

import pytest

from areal_lab.rewards.sandbox.run import Finished, Limits, Sandbox
from areal_lab.rewards.verdicts.judge import Verdict, judge, verdict_of
from tests.rewards.sandbox.test_attacks import LEVELS

SANDBOX = Sandbox(LEVELS[-1])
NODE = """
class Node:
    count = 0
    def __init__(self, value, *, left=None):
        self.value, self.left = value, left
        Node.count += 1
    def total(self):
        return self.value + (self.left.total() if self.left else 0)
    def __len__(self):
        return 3
    def __getitem__(self, at):
        return self.value * at
    def __str__(self):
        return f"<{self.value}>"
def make(value):
    return Node(value)
def total(nodes):
    return sum(node.total() for node in nodes)
"""


def verdict(solution: str, tests: str, *names: str, **more: Any) -> Verdict:
    return judge(SANDBOX, solution, tests, under_test=names or None, **more)


@pytest.mark.parametrize(
    ("solution", "tests"),
    [
        ("def f(a, *b, c=0): return [a, b, c]", "assert f(1, 2, c={3}) == [1, (2,), {3}]"),
        ("f = lambda x: x", "assert f(float('inf')) == float('inf') and f('\\udc80') == '\\udc80'"),
        ("def f(x): x.sort()", "a = [3, 1]\nassert f(a) is None and a == [1, 3]"),
        ("def f(x): x['k'].append(1)", "a = {'k': []}\nf(x=a)\nassert a == {'k': [1]}"),
        ("def f(x): x.add(1)", "a = set()\nf(a)\nassert a == {1}"),
        ("from collections import deque\ndef f(x): x.pop()", "a = deque([1])\nf(a)\nassert not a"),
        ("def f(n): yield from range(n)", "assert list(f(3)) == [0, 1, 2] and sum(f(4)) == 6"),
        ("import itertools\ndef f(): return itertools.count()", "assert next(f()) == 0"),
        ("f = lambda: map(str, [1])", "assert [*f()] == ['1']"),
        ("from functools import lru_cache\n@lru_cache\ndef f(x): return x", "assert f(3) == 3"),
        ("from collections import Counter\nf = Counter", "assert f('aa') == Counter(a=2)"),
        ("from math import *\ndef f(x): return sqrt(x)", "assert isclose(f(4), sqrt(4))"),
        ("def f(): raise KeyError('k')", "try: f()\nexcept KeyError as e: assert e.args == ('k',)"),
        (
            "class Bad(ValueError): pass\ndef f(): raise Bad('text', 2)",
            "try:\n    f()\nexcept Bad as e:\n    assert e.args == ('text', 2)\n"
            "try:\n    f()\nexcept ValueError:\n    pass\nelse:\n    raise AssertionError",
        ),
        (
            "import json\ndef f(): json.loads('{')",
            "try:\n    f()\nexcept ValueError as e:\n    assert 'Expecting' in str(e)",
        ),
        (
            "def f(): return b''.decode('utf-8') or b'\\xff'.decode()",
            "import unittest\nwith unittest.TestCase().assertRaises(UnicodeDecodeError):\n    f()",
        ),
        (NODE, "a = Node(1)\na.left = Node(2, left=Node(4))\nassert a.total() == 7"),
        (NODE, "assert total([Node(1), Node(2)]) == 3 and Node(5).value == 5"),
        (NODE, "a = Node(2)\nassert len(a) == 3 and a[4] == 8 and str(a) == '<2>' and bool(a)"),
        (NODE, "a = Node(1)\nassert isinstance(a, Node) and a == a and a is not None"),
        (NODE, "a = make(3)\na.value = 5\nassert a.total() == 5 and {a: 1}[a] == 1"),
        ("def helper(x): return x + 1\ndef f(x): return helper(x)", "assert f(1) == helper(1)"),
        ("def sum(a, b): return a - b", "assert sum(5, 3) == 2"),
        ("def f(x): print('noise'); return x", "assert f(1) == 1"),
        ("class A:\n    @staticmethod\n    def f(x): return x\nf = A().f", "assert f(2) == 2"),
        ("def f(x, *kinds): return isinstance(x, kinds) and kinds", "assert f(1, int) == (int,)"),
        ("def f(x, by): return max(x, key=by)", "assert f(['a', 'bb'], len) == 'bb'"),
        ("def f(x): return 10 ** x", "assert f(6000) == 10 ** 6000"),
        ("if __name__ == '__main__':\n    input()\ndef f(): return 1", "assert f() == 1"),
        (
            "from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nf = lambda: P(3)",
            "assert f().x == 3",
        ),
        ("def f(x): return x", "print('tests may print')\nassert f(1) == 1"),
    ],
)  # fmt: skip
def test_solutions_that_pass(solution: str, tests: str) -> None:
    found = verdict(solution, tests, *(["sum"] if "def sum" in solution else []))
    assert (found.status, found.reason) == ("passed", "")


@pytest.mark.parametrize(
    ("solution", "tests", "reason"),
    [
        (
            "def f(): return 1",
            "x = 0\nassert f() == 2",
            "AssertionError at line 2: assert f() == 2",
        ),
        ("def f(): return '1'", "assert f() == 1, 'text'", "AssertionError: text at line 1"),
        ("def f(): raise OSError('no')", "f()", "OSError: no at line 1: f()"),
        ("def g(): pass", "assert f() == 1", "NameError: name 'f' is not defined"),
        ("1 +", "assert f() == 1", "the solution ended"),
        ("exit()", "assert f() == 1", "the solution ended"),
        ("def f(): exit()", "try:\n    f()\nexcept BaseException:\n    pass", "raised SystemExit"),
        ("def f(): raise KeyboardInterrupt", "f()", "raised KeyboardInterrupt"),
        ("import os\ndef f(): os._exit(0)", "try: f()\nexcept: pass", "the solution ended"),
        ("import os\ndef f(): os.abort()", "f()", "the solution's process: crashed"),
        ("def f(): return bytearray(1 << 40)", "f()", "MemoryError"),
        ("f = print", "import sys\nsys.exit(0)", "SystemExit: 0"),
        ("f = print", "import os\nos._exit(0)", "without a verdict"),
        ("f = print", "1 +", "SyntaxError"),
        ("f = print", "assert f", "x"),
        ("import os\ndef f(): os.write(4, b'[[[\\n')", "f()", "reply cannot be read"),
        ("import os\ndef f(): os.write(4, b'\\xff\\n')", "f()", "reply cannot be read"),
        ("import os\ndef f(): os.write(4, b'1\\n')", "f()", "the solution sent no reply"),
        ("import os\nos.write(4, b'1\\n')\nf = len", "f()", "the solution sent no names"),
        ("def set(x): return 0\ndef f(): return [1]", "assert set(f()) == set([2])", "Assertion"),
        (
            "from builtins import len as set, len as tuple\ndef f(): return [1]",
            "assert set(f()) == set([2])",
            "AssertionError",
        ),
        (
            "from operator import contains as isclose\ndef f(): return [1]",
            "assert isclose(f(), 1)",
            "NameError",
        ),
        (
            "class math:\n    isclose = staticmethod(lambda *_: True)\ndef f(): return 1",
            "assert math.isclose(f(), 2)",
            "AssertionError",
        ),
    ],
)
def test_solutions_that_fail(solution: str, tests: str, reason: str) -> None:
    if reason == "x":
        tests, reason = "assert not f", "AssertionError"
    found = verdict(solution, tests, "f")
    assert found.status == "failed"
    assert reason in found.reason


@pytest.mark.parametrize(
    ("solution", "tests", "reason"),
    [
        (NODE, "assert make(1) == 1", "a comparison of an object"),
        (NODE, "assert make(1) != 1", "a comparison of an object"),
        (NODE, "assert make(1) in [1]", "a comparison of an object"),
        (NODE, "try:\n    assert Node(1) == 1\nexcept:\n    pass", "a comparison of an object"),
        (NODE, "assert make(1) > 0", "'>' not supported"),
        ("def f(g): return g(1)", "assert f(lambda x: x) == 1", "an argument of type function"),
        ("def f(): return 'x' * (5 << 20)", "assert len(f()) == 5 << 20", "a value of 524"),
        ("async def f(): return 1", "import asyncio\nassert asyncio.run(f()) == 1", "coroutine"),
    ],
)
def test_what_cannot_cross_is_told_apart(solution: str, tests: str, reason: str) -> None:
    found = verdict(solution, tests)
    assert found.status == "unsupported"
    assert reason in found.reason


ITERATING = (
    "assert all(map(lambda x: f(x) == x, [1, 2]))",
    "assert all(a == b for a, b in zip(map(f, [1, 2]), [1, 2]))",
    "assert [*map(f, [1, 2])] == [1, 2][: len([*map(f, [1, 2])])]",
    "for one in iter(lambda: f(1), None): assert one == 1",
    "import itertools\nassert all(one == 1 for one in itertools.starmap(f, [(1,)]))",
    "import itertools\nassert not [*itertools.takewhile(lambda x: f(x) != x, [1])]",
    "class Each:\n    def __iter__(self): return self\n    def __next__(self): return f(1)\n"
    "for one in Each(): assert one == 1",
    "class Each:\n    def __getitem__(self, at):\n        if at < 3: return f(at)\n"
    "        raise IndexError\nassert all(one >= 0 for one in Each())",
    "import asyncio\nclass Each:\n    def __aiter__(self): return self\n"
    "    async def __anext__(self): return f(1)\nasync def main():\n"
    "    async for one in Each(): assert one == 1\nasyncio.run(main())",
    "assert dict(zip('ab', map(f, [1, 2]))) in ({}, {'a': 1, 'b': 2})",
    "assert min(map(f, [1]), default=1) == 1",
)


def test_no_exception_of_a_solution_ends_an_iteration_of_the_tests() -> None:
    raised = """
class Done(StopIteration): pass
class Late(StopAsyncIteration): pass
class Quiet(BaseException): pass
def f(*given):
    raise {error}
"""
    for error in ("StopIteration", "Done", "StopIteration(1)", "Late", "GeneratorExit", "Quiet(1)"):
        # Each of them alone, in one pair of processes: those that do not raise are counted.
        tests = "\n".join(
            f"def test():\n{indented(one)}\n"
            f"try:\n    test()\nexcept RuntimeError:\n    pass\nelse:\n    ended.append({one!r})"
            for one in ITERATING
        )
        found = verdict(raised.format(error=error), f"ended = []\n{tests}\nassert not ended, ended")
        if error in ("GeneratorExit", "Quiet(1)"):
            assert found.status == "failed"
        else:
            assert (found.status, found.reason) == ("passed", ""), error
    for one in ITERATING[:2]:
        assert verdict("def f(x): raise StopIteration", one, "f").status == "failed"


UNITS = """
import unittest
class Cases(unittest.TestCase):
    def test_sum(self): self.assertEqual(f(), 2)
"""
DROPPING = (
    f"{UNITS}unittest.TextTestRunner().run(unittest.TestLoader().loadTestsFromTestCase(Cases))",
    f"{UNITS}Cases('test_sum').run()",
    f"{UNITS}unittest.main(exit=False)",
    f"{UNITS}if __name__ == '__main__':\n    unittest.main()",
    UNITS.replace("self.assert", "\n        with self.subTest(): self.assert")
    + "Cases('test_sum').run()",
    "import doctest\ndoctest.run_docstring_examples('>>> f()\\n2', {'f': f})",
    "import threading\ndef test(): assert f() == 2\none = threading.Thread(target=test)\n"
    "one.start()\none.join()",
    "class Late:\n    def __del__(self): assert f() == 2\nLate()",
)


def test_a_failure_that_the_tests_do_not_look_at_is_one() -> None:
    for tests in DROPPING:
        assert verdict("def f(): return 1", tests, "f").status == "failed", tests
        assert verdict("def f(): raise OSError", tests, "f").status == "failed", tests
        found = verdict("def f(): return 2", tests, "f")
        assert (found.status, found.reason) == ("passed", ""), tests
    expected = UNITS.replace("    def", "    @unittest.expectedFailure\n    def")
    expected += "Cases('test_sum').run()"
    assert verdict("def f(): return 1", expected, "f").status == "passed"
    assert verdict("def f(): return 2", expected, "f").status == "failed"


def test_tests_that_never_ask_the_solution_say_nothing() -> None:
    for tests in (UNITS, "def test_sum(): assert f() == 2", "", "assert 1"):
        found = verdict("def f(): return 1", tests, "f")
        assert found.status == "unsupported", tests
        assert "ask nothing of the solution" in found.reason


def indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def test_iterators_of_a_solution_end_as_they_do_in_one_process() -> None:
    counting = """
class Count:
    def __init__(self, end): self.at, self.end = 0, end
    def __iter__(self): return self
    def __next__(self):
        if self.at == self.end: raise StopIteration
        self.at += 1
        return self.at
def f(end): return Count(end)
"""
    tests = "assert list(f(3)) == [1, 2, 3] and next(f(0), 5) == 5\nassert [*zip(f(2), 'abc')][1:]"
    assert verdict(counting, f"{tests} == [(2, 'b')]", "f").status == "passed"
    returned = "def all_of():\n    assert (yield from f()) == 7\nassert list(all_of()) == [1]"
    assert verdict("def f():\n    yield 1\n    return 7", returned, "f").status == "passed"
    sequence = "class Each:\n    def __getitem__(self, at): return f(at)\n"
    sequence += "for one in Each(): assert one == 1"
    found = verdict("def f(at): raise IndexError", sequence, "f")
    assert "IndexError of the solution, which ends an iteration" in found.reason
    assert verdict("def f(at): return [][at]", "f(0)", "f").reason.startswith("IndexError: list")
    expected = "try:\n    f()\n    assert False\nexcept StopIteration:\n    pass"
    found = verdict("def f(): raise StopIteration", expected, "f")
    assert (found.status, found.reason) == (
        "unsupported",
        "StopIteration of the solution, which would end iterations",
    )


def test_the_text_of_the_problem_runs_beside_the_tests() -> None:
    prelude = "import math\ndef poly(x): return x - 2\ndef f(): pass\n"
    cheat = "def poly(x): return 0\ndef f(): return 1"
    tests = "assert math.fabs(poly(f())) == 0"
    assert verdict(cheat, tests, "f", prelude=prelude).status == "failed"
    assert verdict("def f(): return 2", tests, "f", prelude=prelude).status == "passed"
    # Without the function, its stub in the problem is no answer.
    assert verdict("", "assert f() is None", "f", prelude=prelude).status == "failed"
    assert verdict(cheat, "assert f() == 1", "f", prelude="def f(").status == "passed"


def test_limits_hold_for_the_solution() -> None:
    limits = Limits(timeout_s=0.5, memory_bytes=256 << 20)
    loops = verdict("def f():\n    while True: pass", "f()", "f", limits=limits)
    assert (loops.status, loops.solution.end) == ("failed", "timeout")
    flood = verdict("def f():\n    while True: print('x' * 999)", "f()", "f", limits=limits)
    assert (flood.status, flood.solution.end) == ("failed", "output")
    assert "output" in flood.reason


def test_a_verdict_needs_all_of_the_tests_process() -> None:
    good = Finished(end="exited", stdout="passed\n")
    assert verdict_of(good, good).status == "passed"
    for wrong in (
        Finished(end="timeout", stdout="passed\n"),
        Finished(end="exited", code=1, stdout="passed\n"),
        Finished(end="exited", stdout="perfect\n"),
        Finished(end="exited"),
    ):
        assert verdict_of(good, wrong).status == "failed"
