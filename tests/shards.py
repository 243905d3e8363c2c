"""Run the tests in a few plain pytest processes, each of which collects only its own files.

    python -m tests.shards [--shards N] [arguments of pytest ...]

Each worker of pytest-xdist collects every file: 22 CPU seconds a worker, before the first test. The
files are divided here by their recorded seconds (`seconds.json`), so that each file is collected
once. `conftest.py` drops what belongs to another shard; all arguments of pytest work except those
that name an output file or need the terminal (`--junitxml`, `--pdb`), for which run pytest itself.

Record the seconds anew with `python -m pytest -n 2 --dist loadfile --junitxml FILE` and
`python -m tests.shards --record FILE`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
SECONDS = TESTS / "seconds.json"
SHARD = "AREAL_LAB_SHARD"
"""Environment variable with the index and the number of shards, such as `0/2`."""
_USUAL_S = 3.0  # of a file without recorded seconds
_NO_TESTS = 5  # exit code of pytest that collected none
_SECTION = re.compile(r"={3,} (?!test session starts).* ={3,}$")
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def divided(seconds: Mapping[str, float], shards: int) -> list[list[str]]:
    """Files of each shard: the longest first, each to the shard with the least seconds so far."""
    found: list[list[str]] = [[] for _ in range(shards)]
    load = [0.0] * shards
    for name in sorted(seconds, key=lambda name: (-seconds[name], name)):
        least = load.index(min(load))
        found[least].append(name)
        load[least] += seconds[name]
    return found


@cache
def files_of_this_shard() -> frozenset[Path] | None:
    """The test files of this process; None if it runs them all."""
    if SHARD not in os.environ:
        return None
    index, shards = map(int, os.environ[SHARD].split("/"))
    recorded = json.loads(SECONDS.read_text())
    names = (str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py"))
    seconds = {name: recorded.get(name, _USUAL_S) for name in names}
    return frozenset(TESTS / name for name in divided(seconds, shards)[index])


def total(ends: Sequence[str]) -> str:
    """One summary of the last lines of several pytest processes: `1 failed, 3 passed`."""
    counts: Counter[str] = Counter()
    for end in ends:
        for number, what in re.findall(r"(\d+) ([a-z]+)", _COLOR.sub("", end).split(" in ")[0]):
            counts[{"errors": "error", "warnings": "warning"}.get(what, what)] += int(number)
    return ", ".join(f"{number} {what}" for what, number in counts.items()) or "no tests ran"


def run(shards: int, arguments: Sequence[str]) -> int:
    """Run pytest in each shard; print progress at once, and the failures of each at its end."""
    start = time.monotonic()
    color = ["--color=yes"] if sys.stdout.isatty() else []
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "pytest", *color, *arguments],
            env={**os.environ, SHARD: f"{index}/{shards}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches them once, from here
        )
        for index in range(shards)
    ]
    ends: list[list[str]] = [[] for _ in processes]
    last = ["" for _ in processes]

    def follow(index: int) -> None:
        output = processes[index].stdout
        assert output is not None
        for line in output:
            if ends[index] or _SECTION.match(_COLOR.sub("", line).strip()):
                ends[index].append(line)
            else:
                print(f"[{index + 1}] {line}", end="", flush=True)
            last[index] = line if line.strip() else last[index]
        print(*ends[index], sep="", end="", flush=True)

    threads = [threading.Thread(target=follow, args=(n,), daemon=True) for n in range(shards)]
    for thread in threads:
        thread.start()
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            for process in processes:
                process.wait()
            break
        except KeyboardInterrupt:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, number)
    for thread in threads:
        thread.join(timeout=10)
    print(f"{total(last)} in {time.monotonic() - start:.0f} s")
    codes = {process.wait() for process in processes}
    return max((abs(code) for code in codes - {0, _NO_TESTS}), default=0 if 0 in codes else 5)


def record(file: Path) -> None:
    """Write the seconds of each file from a report of pytest in JUnit's format."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for case in ElementTree.parse(file).iter("testcase"):
        seconds[case.attrib["classname"]] += float(case.attrib["time"])
    names = {str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}
    found = {
        name.removeprefix("tests.").replace(".", "/") + ".py": s for name, s in seconds.items()
    }
    kept = {name: round(s, 1) for name, s in sorted(found.items()) if name in names}
    SECONDS.write_text(json.dumps(kept, indent=0) + "\n")


def main() -> int:
    """Parse the two options; everything else is pytest's."""
    shards, arguments = 3, sys.argv[1:]
    if arguments[:1] == ["--record"]:
        record(Path(arguments[1]))
        return 0
    if arguments[:1] == ["--shards"]:
        shards, arguments = int(arguments[1]), arguments[2:]
    return run(shards, arguments)


if __name__ == "__main__":
    sys.exit(main())
