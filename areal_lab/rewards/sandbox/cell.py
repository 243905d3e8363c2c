"""The sandboxed process of one program: init, which confines itself, starts the program and reaps.

Descriptors: 0 to 2 of the program; 3 and 4 a link to another cell, if there is one; 5 is init's
status channel to the keeper. Messages on it: `S` the program starts; `E` and four bytes, it ended
with this wait status; `R` and a text, it was not started. A pipe on which init lets the program
start is closed by then.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal, which is slow to import
import _sitebuiltins
import atexit
import builtins
import os
import sys

from areal_lab.rewards.sandbox import kernel
from areal_lab.rewards.sandbox.confine import confine

TYPE_CHECKING = False  # typing is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

LINK_IN, LINK_OUT, STATUS, BUNDLE = 3, 4, 5, 6
OUT_OF_MEMORY = 97
"""Exit code of a program that ends by an uncaught MemoryError."""


def main(take: Callable[[], dict[str, object]]) -> NoReturn:
    """Init of a cell that bubblewrap created: reads its setup from descriptor BUNDLE."""
    setup, job = take(), take()
    os.close(BUNDLE)
    live(setup, job)


def live(setup: dict[str, object], job: dict[str, object]) -> NoReturn:
    """Be init; see `run.request` for the keys. Never returns."""
    try:
        kernel.die_with_parent()
        confine(setup)
        kernel.die_with_parent()  # forgotten when the user changed
        path = setup["path"]
        assert isinstance(path, list)
        sys.path += path
        may_start, start = os.pipe()
        program = os.fork()
    except BaseException as error:
        os.write(STATUS, f"R{error}".encode(errors="replace")[:500])
        os._exit(1)
    if program == 0:
        os.close(STATUS)
        os.close(start)
        if not os.read(may_start, 1):
            os._exit(1)
        os.close(may_start)
        _run(job)
    # Init gets only those of the program's signals that it handles, and Python handles one.
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
    os.write(STATUS, b"S")  # fails, and ends all of this, if the keeper died meanwhile
    # Not before: a program that broke a limit would look like one that could not be started.
    os.write(start, b"S")
    os.close(start)
    os.close(may_start)
    os.closerange(0, STATUS)  # only the program has it, so the other ends see its end
    while True:
        ended, status = os.wait()
        if ended == program:
            break
    os.write(STATUS, b"E" + status.to_bytes(4, "little"))
    os._exit(0)


def enter(ends: list[int]) -> None:
    """Make descriptors 0, 1, ... of `ends`, close all others, and reset the keeper's signals."""
    for number, end in enumerate(ends):
        if end < 0:
            os.close(number)
        else:
            os.dup2(end, number)
    os.closerange(len(ends), 1024)
    _signal.signal(_signal.SIGTERM, _signal.SIG_DFL)


def _run(job: dict[str, object]) -> NoReturn:
    """Run the program of a job in this process, as Python runs a script, and exit."""
    code = 1
    builtins.exit = builtins.quit = _sitebuiltins.Quitter("exit", "the end of input")
    try:
        if "source" in job:
            main = type(sys)("__main__")
            sys.modules["__main__"] = main
            sys.argv[:] = ["program.py"]
            code_of = compile(str(job["source"]), "program.py", "exec", dont_inherit=True)
            exec(code_of, main.__dict__)
        else:
            sys.modules[str(job["module"])].main(job["argument"])
        code = 0
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException as error:
        trace = error.__traceback__  # less this frame
        error = error.with_traceback(trace and trace.tb_next)
        sys.excepthook(type(error), error, error.__traceback__)
        code = OUT_OF_MEMORY if isinstance(error, MemoryError) else 1
    try:
        if threading := sys.modules.get("threading"):
            threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        code = code or 120  # as Python does
    os._exit(code)


def _exit_code(given: object) -> int:
    if given is None or isinstance(given, int):
        return int(given or 0) & 0xFF
    print(given, file=sys.stderr)
    return 1
