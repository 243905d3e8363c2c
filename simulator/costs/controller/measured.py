"""Measured inputs of the controller's costs, and a file that replaces them.

    {"controller_inputs": {"read_token_s": 3.0e-7, "read_error": 0.02}, ...}   JSON

A benchmark may print other keys beside `controller_inputs`. Inputs that it leaves out keep the
packaged figures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Final

from areal_lab.config.problem import ConfigError, Problem, refusal
from areal_lab.config.record import About, NonNegative, Positive, Record

KEY: Final = "controller_inputs"
_ERRORS: Final = {"read_token_s": "read_error", "message_s": "message_error"}
"""Inputs, and the names of their errors."""


class ControllerInputs(Record):
    """What reading, packing, telling and moving responses takes; measured on 2 cores, 2026-11."""

    reply_token_bytes: Annotated[NonNegative, About(unit="bytes")] = 43.0
    """JSON of one generated token in a reply of SGLang, with its log-prob."""
    read_token_s: NonNegative = 0.38e-6
    """CPU time of one core to read it into arrays: `json.loads`, then numpy. 0.40 on a quiet
    machine; orjson takes 0.30."""
    read_error: NonNegative = 0.05
    """Relative difference between the two. Other processors differ by more."""
    packed_token_bytes: Annotated[NonNegative, About(unit="bytes")] = 8.0
    """The same packed: int32 and float32; versions are spans."""
    message_s: NonNegative = 0.16e-3
    """The controller's time for one message: a call of Ray 2.60 among 3,000 at a time."""
    message_error: NonNegative = 2.75
    """The same for one call at a time, 0.6 ms."""
    metadata_bytes: Annotated[NonNegative, About(unit="bytes")] = 211.0
    """JSON about one packed response: host, place, length, spans of versions, reward."""
    stream_bytes_per_s: Annotated[Positive, About(unit="bytes/s")] = 200e6 / 0.38
    """One HTTP stream into memory (`readinto`), on a machine under load; 2.4e9 on a quiet one."""
    request_s: NonNegative = 0.35e-3
    """One HTTP range request on a connection that is kept, without the bytes."""
    source: str = (
        "json.loads, Ray 2.60 calls and HTTP range requests measured on 2 cores (Python 3.11, "
        "2026-11)"
    )
    """Origin of the figures, for reports."""


def load_inputs(path: str | Path) -> ControllerInputs:
    """Read a file as in the module docstring; the packaged inputs if `path` is empty.

    Raises:
        ConfigError: the file is missing, is not such a file, or a value is not allowed.
    """
    if not str(path):
        return ControllerInputs()
    try:
        told: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(path, f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise _wrong(path, f"is not JSON: {error}") from None
    given = told.get(KEY) if isinstance(told, dict) else None
    if not isinstance(given, dict):
        raise _wrong(path, f"has no object {KEY!r}, as benchmarks print it")
    measured = {error: 0.0 for name, error in _ERRORS.items() if name in given}
    try:
        return ControllerInputs(**{"source": f"measured: {path}", **measured, **given})
    except ConfigError as error:
        found = (Problem(p.kind, "controller.inputs", f"{path}: {p}") for p in error.problems)
        raise ConfigError(*found) from None


def _wrong(path: str | Path, text: str) -> ConfigError:
    return refusal(
        "controller.inputs",
        f"controller.inputs is {str(path)!r}, but it {text}; leave it empty for the packaged ones",
    )
