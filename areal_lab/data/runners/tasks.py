"""The tasks of an environment as problems: `dataset.type=environment`.

environment_problems --hello, list--> a runner, by the environment's Python --> Problem of each task
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from areal_lab.config.sections import EnvironmentConfig
from areal_lab.data.jsonl import split_problems
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.data.runners.loop import MARK, end_marked
from areal_lab.host.processes import inherited_environment, last_lines, lifeline

LOOP: Final = Path(__file__).with_name("loop.py")
STANDARDS: Final = Path(__file__).with_name("standards")
START_TIMEOUT_S: Final = 900.0
"""Longest wait until a runner has loaded an environment: imports of some libraries take minutes on
a busy machine."""
REQUIREMENTS: Final[Mapping[str, str]] = {
    "inspect": "inspect-ai>=0.3.280,<0.3.290",
    "verifiers": "verifiers>=0.4,<0.5",
}
"""Library of each shipped standard, for the Python of an environment."""
OLDEST_PYTHON: Final = (3, 11)
_LAST_LINES: Final = 3
_PROBE_TIMEOUT_S: Final = 60.0
_PROBE: Final = """
import importlib.metadata, json, sys
try:
    version = importlib.metadata.version(sys.argv[1])
except importlib.metadata.PackageNotFoundError:
    version = None
print(json.dumps([sys.version_info[:2], version]))
"""


def environment_problems(
    environment: EnvironmentConfig, *, eval_size: int = 0, seed: int = 0
) -> ProblemSet:
    """The tasks of an environment, split.

    Raises:
        ValueError: in one line, that names the setting.
    """
    problems = problems_of_tasks(described(environment)[1])
    where = f"environment {environment.name}"
    return split_problems(problems, [], names=(where, where), eval_size=eval_size, seed=seed)


def problems_of_tasks(tasks: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """Problems of tasks, whose text is for logs: the runner has the tasks."""
    return [
        Problem(
            prompt=str(task.get("prompt") or f"task {task['id']}"),
            answer="",
            key=str(task["id"]),
            metadata={"task": str(task["id"])},
        )
        for task in tasks
    ]


def described(environment: EnvironmentConfig) -> tuple[str, list[dict[str, Any]]]:
    """Version of the library of an environment, and its tasks.

    Raises:
        ValueError: in one line, that names the setting.
    """
    version, tasks = json.loads(_asked(json.dumps(hello(environment)), str(python_of(environment))))
    return version, tasks


def hello(environment: EnvironmentConfig) -> dict[str, Any]:
    """The first request to a runner of an environment, checked.

    Raises:
        ValueError: in one line, that names the setting.
    """
    if not environment.name:
        raise ValueError(
            "environment.name is empty, but must name an environment: environment=NAME"
        )
    shipped = {path.stem.removeprefix("of_"): path for path in sorted(STANDARDS.glob("of_*.py"))}
    file = shipped.get(environment.standard, Path(environment.standard).expanduser().absolute())
    if not file.is_file():
        raise ValueError(
            f"environment.standard is {environment.standard!r}, but must be one of "
            f"{', '.join(shipped)}, or a file with a class Standard"
        )
    return {
        "call": "hello", "standard": str(file), "name": environment.name,
        "args": dict(environment.args),
    }  # fmt: skip


def python_of(environment: EnvironmentConfig) -> Path:
    """The Python of an environment.

    Raises:
        ValueError: in one line, that names the setting.
    """
    python = Path(environment.python).expanduser().absolute()
    if not environment.python or not os.access(python, os.X_OK) or python.is_dir():
        raise ValueError(
            f"environment.python is {environment.python!r}, but must be the Python of the "
            "environment, such as envs/NAME/bin/python"
        )
    return python


def installed(python: Path, package: str) -> tuple[tuple[int, int], str | None]:
    """Version of a Python, and that of a package in it, which is not imported; None without it.

    Raises:
        ValueError: in one line; it does not run, or is older than 3.8.
    """
    given = f"environment.python is {str(python)!r}"
    try:
        ended = subprocess.run(
            [str(python), "-c", _PROBE, package],
            capture_output=True, check=False, timeout=_PROBE_TIMEOUT_S, stdin=subprocess.DEVNULL,
            env={**inherited_environment(), "PYTHONSAFEPATH": "1"},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{given}, which does not run: {type(error).__name__}") from None
    try:
        (major, minor), version = json.loads(ended.stdout)
        return (int(major), int(minor)), None if version is None else str(version)
    except (ValueError, TypeError):
        said = ended.stderr.decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
        raise ValueError(f"{given}, which is no Python: {said[-1][:200]}") from None


def command(python: Path, descriptor: int) -> list[str]:
    """Command of a runner that serves a socket."""
    return [str(python), "-P", str(LOOP), str(descriptor)]


def variables(python: Path, mark: str) -> dict[str, str]:
    """Variables of a runner: the programs of its environment are found first, and its hash seed is
    fixed, since the tasks of some change with it. The paths of PYTHONPATH are absolute, since tool
    servers are started in other folders.
    """
    local = "127.0.0.1,localhost"
    paths = os.environ.get("PYTHONPATH")
    absolute = map(os.path.abspath, paths.split(os.pathsep)) if paths else ()
    return {
        MARK: mark,
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join(absolute),
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY", ""), local])),
        "no_proxy": ",".join(filter(None, [os.environ.get("no_proxy", ""), local])),
    }


@lru_cache(maxsize=8)
def _asked(greeting: str, python: str) -> str:
    """Version and tasks; a run loads its problems more than once, and a process takes seconds."""
    ours, theirs = socket.socketpair()
    mark = secrets.token_hex(8)
    with ours, theirs, lifeline() as (fd, watched), tempfile.NamedTemporaryFile() as log:
        process = subprocess.Popen(
            command(Path(python), theirs.fileno()),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[theirs.fileno(), fd],
            env={**inherited_environment(), **variables(Path(python), mark), **watched},
            start_new_session=True,
        )  # fmt: skip
        theirs.close()
        try:
            ours.settimeout(START_TIMEOUT_S)
            first = {"id": 1, **json.loads(greeting)}
            with ours.makefile("rwb") as lines:
                for request in (first, {"id": 2, "call": "list"}, {"id": 3, "call": "close"}):
                    lines.write(json.dumps(request).encode() + b"\n")
                lines.flush()
                version = _value(lines.readline(), "the hello")["version"]
                tasks = checked_tasks(_value(lines.readline(), "the list of tasks"))
        except (OSError, _NoReply) as error:
            process.kill()
            process.wait()
            raise ValueError(
                f"environment: its runner gave no reply ({error or type(error).__name__}); "
                f"{said(Path(log.name))}"
            ) from error
        finally:
            process.kill()
            process.wait()
            end_marked(mark)
    return json.dumps([version, tasks])


def said(log: Path) -> str:
    """The end of a log in one line."""
    return f"it said: {' | '.join(last_lines(log, _LAST_LINES).splitlines())}"


class _NoReply(Exception):
    """The runner ended, or sent something else."""


def _value(line: bytes, what: str) -> Any:
    try:
        reply = json.loads(line)
        if "error" in reply:
            raise ValueError(f"environment: {reply['error']}")
        return reply["value"]
    except (json.JSONDecodeError, TypeError, KeyError, UnicodeDecodeError):
        raise _NoReply(f"to {what}: {line[:60]!r}") from None


def checked_tasks(value: Any) -> list[dict[str, Any]]:
    """The tasks of a reply.

    Raises:
        ValueError: in one line; they are no tasks, or two have one id.
    """
    tasks = value.get("tasks") if isinstance(value, Mapping) else None
    if not isinstance(tasks, list) or not all(
        isinstance(one, Mapping) and isinstance(one.get("id"), str | int) for one in tasks
    ):
        raise ValueError(f"environment: its tasks are {value!r:.60}, but must each have an id")
    ids = [str(one["id"]) for one in tasks]
    if len(set(ids)) < len(ids):
        twice = next(one for one in ids if ids.count(one) > 1)
        raise ValueError(f"environment: two tasks have the id {twice!r}")
    return [dict(one) for one in tasks]
