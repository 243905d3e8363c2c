"""What happens to a log on its way: terminals, collectors, pastes. Each takes and gives text."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Final

_NUMBER: Final = re.compile(r"(?<=[:=] )\d+\.\d+(?=[,}\s])|(?<=:)\d+\.\d+(?= - )")
_NOISE: Final = (
    "(WorkerDict pid=4411) INFO 05-01 12:00:00 [loggers.py:116] Engine 000: Avg prompt throughput: "
    "0.0 tokens/s, Running: 12 reqs, Waiting: 0 reqs",
    "(raylet) Warning: 3 workers died",
    '(vLLMHttpServer pid=7, ip=10.0.0.9) INFO:     127.0.0.1:1 - "POST /generate HTTP/1.1" 200 OK',
    "[2026-05-01 12:00:00] [WARNING] something: took 12.5 s",
    "INFO 05-01 12:00:00 [worker.py:12] sleeping: 3",
)


def prefixed(text: str) -> str:
    """Ray's prefix before each line."""
    return _lines(text, lambda line: f"(Main pid=123, ip=10.0.0.1) {line}")


def quoted(text: str) -> str:
    """A quote of an issue."""
    return _lines(text, lambda line: f"> {line}")


def colored(text: str) -> str:
    """Colors as Ray sets them."""
    return _lines(text, lambda line: f"\x1b[36m{line}\x1b[0m")


def colored_marks(text: str) -> str:
    """Colors that have lost their escape character."""
    return _lines(text, lambda line: f"[36m{line}[0m")


def carriage_returns(text: str) -> str:
    """Line ends of Windows."""
    return text.replace("\r\n", "\n").replace("\n", "\r\n")


def wrapped(width: int) -> Callable[[str], str]:
    """A terminal of `width` columns."""
    return lambda text: "\n".join(
        line[at : at + width]
        for line in text.split("\n")
        for at in range(0, max(1, len(line)), width)
    )


def interleaved(text: str) -> str:
    """Lines of other processes between all lines."""
    rng = random.Random(3)
    return "\n".join(
        one for line in text.split("\n") for one in (line, *rng.sample(_NOISE, rng.randint(0, 2)))
    )


def with_missing(seed: int) -> Callable[[str], str]:
    """NaN and infinity in place of some numbers."""

    def change(text: str) -> str:
        rng = random.Random(seed)
        return _NUMBER.sub(
            lambda found: rng.choice(("nan", "inf", "-inf", found[0], found[0])), text
        )

    return change


DAMAGES: Final[Mapping[str, Callable[[str], str]]] = {
    "prefixed": prefixed,
    "quoted": quoted,
    "colored": colored,
    "colored marks": colored_marks,
    "carriage returns": carriage_returns,
    "wrapped at 80": wrapped(80),
    "wrapped at 120": wrapped(120),
    "wrapped at 97": wrapped(97),
    "interleaved": interleaved,
    "missing 1": with_missing(1),
    "missing 2": with_missing(2),
    "prefixed and colored": lambda text: colored(prefixed(text)),
    "interleaved and prefixed": lambda text: prefixed(interleaved(text)),
}


def _lines(text: str, change: Callable[[str], str]) -> str:
    ended = text.endswith("\n")
    lines = text.removesuffix("\n").split("\n")
    return "\n".join(change(line) for line in lines) + ("\n" if ended else "")
