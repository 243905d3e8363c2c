"""Files of records without a console's shape: JSON lines, CSV of a tracker, saved trainer states.

Their records are pairs by key; which framework they belong to is decided by the keys (`read.py`).
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from typing import Any, Final

from areal_lab.foreign.literal import flat, read_dict
from areal_lab.foreign.quantities import known, whole
from areal_lab.foreign.scan import Row, Rows
from areal_lab.foreign.text import STRONG_START, Line
from areal_lab.host.foreign import parse_yaml

STEP_KEYS: Final = ("_step", "step", "Step", "global_step", "iteration")
"""Keys of the step's number in files, by preference."""
TIME_KEYS: Final = ("_timestamp", "time", "timestamp", "wall_time")
CELLS: Final = 20_000
"""Most columns of a table."""

JSON_ANCHORS: Final = (
    b'"step"',
    b'"_step"',
    b'"global_step"',
    b'"progress/batch"',
    b'"train/global_step"',
    b'"trainer/global_step"',
    b'"global_step/max_steps"',
    b'"token_loss_mask"',
)
_LINES_KEPT: Final = 200_000


class JsonLines:
    """One JSON object a line; metrics may be nested below `data` or `metrics`."""

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        text = line.text.strip().rstrip(",")
        if not text.startswith('{"'):
            return 0
        parsed = read_dict(text)
        if not parsed.complete:
            into.unread["JSON lines that are cut"] += 1
            return 0
        values = dict(parsed.value)
        for name in ("data", "metrics"):
            inner = values.get(name)
            if isinstance(inner, dict):
                del values[name]
                values |= inner
        row = _sample(values, line.number) or keyed_row(flat(values), line.number)
        if row is not None:
            into.add(row)
        return 0

    def close(self, _into: Rows, /) -> None:
        """See `scan.Extractor`."""


def _sample(values: Mapping[str, Any], line: int) -> Row | None:
    """Row of a sample that verl or NeMo-RL has dumped, without its texts and tokens."""
    if "score" in values and ("output" in values or "gts" in values):
        return Row(
            kind="verl sample",
            step=whole(values.get("step")),
            line=line,
            values={"reward": values["score"]},
        )
    mask, reward = values.get("token_loss_mask"), values.get("rewards")
    if not isinstance(mask, list) or "token_ids" not in values:
        return None
    reward = reward[0] if isinstance(reward, list) and len(reward) == 1 else reward
    return Row(
        kind="nemo-rl sample",
        step=None,
        line=line,
        values={"reward": reward, "length": sum(known(one) or 0 for one in mask)},
    )


def keyed_row(values: dict[str, Any], line: int) -> Row | None:
    """Row of a file's record; the step's number is the first known key."""
    if any(key.startswith("_wandb") for key in values):
        return None  # of the summary of a run
    step = next((whole(values[key]) for key in STEP_KEYS if key in values), None)
    time_s = next((known(values[key]) for key in TIME_KEYS if key in values), None)
    numbers = {
        key: value
        for key, value in values.items()
        if not isinstance(value, list | bool)
        and key not in TIME_KEYS
        and (not isinstance(value, str) or len(value) < 80)
    }
    if len(numbers) < 2:
        return None
    return Row(kind="", step=step, values=numbers, time_s=time_s, line=line)


CSV_ANCHORS: Final = (b"step", b"Step")
_CSV_HEADER: Final = re.compile(
    r"(?:^|,)\"?(?:_step|step|Step|global_step|train/global_step|trainer/global_step)\"?(?:,|$)"
)
_RUN_COLUMN: Final = re.compile(r"(?P<run>.{1,200}) - (?P<key>[^-\s].*)")


class CsvTable:
    """CSV of a tracker: a header with a step, then one record a line."""

    def __init__(self) -> None:
        self._columns: list[str] | None = None
        self._header = ""

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        if self._columns is None:
            return self._read_header(line.text, into)
        if self._header:
            first, header, self._header = line.text.partition(",")[0], self._header, ""
            if known(first) is None and _is_header(line.text):  # a terminal broke the header
                return self._read_header(header + line.text, into)
        if line.text.strip():
            self._read(line, into)
        return 1

    def _read_header(self, text: str, into: Rows) -> int:
        if text.count(",") < 1 or _CSV_HEADER.search(text) is None or not _is_header(text):
            return 0
        self._header, self._columns = text, _named(_cells(text) or [], into)
        return 1

    def _read(self, line: Line, into: Rows) -> None:
        assert self._columns is not None
        cells = _cells(line.text)
        if cells is None or len(cells) > len(self._columns) or len(cells) < 2:
            into.unread["lines that are no row of the table"] += 1
            return
        if len(cells) < len(self._columns) or not line.ended:
            into.unread["values that are cut or unreadable"] += 1
            cells = cells[:-1]  # the last one may be cut
        pairs = {name: value for name, value in zip(self._columns, cells, strict=False) if name}
        row = keyed_row(pairs, line.number)
        if row is not None and row.step is not None:
            into.add(row)
        else:
            into.unread["lines that are no row of the table"] += 1

    def close(self, _into: Rows, /) -> None:
        """See `scan.Extractor`."""
        self._columns = None


def _is_header(text: str) -> bool:
    cells = _cells(text)
    return cells is not None and all(re.fullmatch(r"[^{}=]{1,300}", one) for one in cells)


def _cells(text: str) -> list[str] | None:
    try:
        cells = next(csv.reader([text]), [])
    except csv.Error:
        return None
    return cells if len(cells) <= CELLS else None


def _named(columns: list[str], into: Rows) -> list[str]:
    """Keys of columns; `RUN - key` of a panel without its run, minima and maxima left out."""
    names, runs = [], set()
    for one in columns:
        name = one.strip()
        if name.endswith(("__MIN", "__MAX")):
            name = ""
        elif (found := _RUN_COLUMN.fullmatch(name)) is not None:
            runs.add(found["run"])
            name = found["key"]
        names.append(name)
    if len(runs) > 1:
        into.marks["runs in one table"] = len(runs)
    return names


STATE_ANCHORS: Final = (b'"log_history"',)
_TOTALS: Final = re.compile(
    r'"(max_steps|train_batch_size|logging_steps|num_train_epochs)":\s*(\d{1,12})\s*[,}\n]?'
)


class TrainerState:
    """`trainer_state.json` of a Hugging Face trainer: records below `log_history`."""

    def __init__(self) -> None:
        self._text: str | None = None
        self._ended = False

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        text = line.text
        if self._text is None:
            at = text.find('"log_history"')
            if at < 0:
                return 0
            self._text, text = "", text[at + len('"log_history"') :]
        for name, amount in _TOTALS.findall(text):
            into.marks[name] = int(amount)
        noise = STRONG_START.match(text) is not None and not text.lstrip().startswith('{"')
        if noise or (line.chain and text.strip()[:1] not in '"{}],'):
            return 1
        if not self._ended:
            self._text = _read_objects(self._text + text.strip(), line, into)
            self._ended = self._text.lstrip(", :[").startswith("]")
        return 1

    def close(self, into: Rows) -> None:
        """See `scan.Extractor`."""
        if self._text is not None and "{" in self._text and not self._ended:
            into.unread["records that are cut"] += 1
        self._text, self._ended = None, False


def _read_objects(text: str, line: Line, into: Rows) -> str:
    """Add rows of the flat objects in a text; return what is behind the last one."""
    at = 0
    while (begin := text.find("{", at)) >= 0 and (end := text.find("}", begin)) >= 0:
        parsed = read_dict(text[begin : end + 1])
        at = end + 1
        into.unread["values that are cut or unreadable"] += parsed.lost
        row = keyed_row(dict(parsed.value), line.number)
        if row is not None:
            into.add(row)
    if len(text) - at > _OBJECT_CHARACTERS:
        into.unread["records that are too long"] += 1
        return ""
    return text[at:]


ARRAY_ANCHORS: Final = (b"[",)
_OBJECT_CHARACTERS: Final = 1_000_000


class JsonArray:
    """A file that is one JSON array of flat objects, as an exported history."""

    def __init__(self) -> None:
        self._text: str | None = None
        self._other = False

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        if self._other or (self._text is None and line.number > 3):
            return 0
        text = line.text.strip()
        if self._text is None:
            self._other = re.match(r"\[\s*(?:\{|$)", text) is None
            self._text = ""
            if self._other:
                return 0
        if STRONG_START.match(text) is None or text.startswith('{"'):
            self._text = _read_objects(self._text + text, line, into)
        return 1

    def close(self, into: Rows, /) -> None:
        """See `scan.Extractor`."""
        if self._text and "{" in self._text:
            into.unread["records that are cut"] += 1
        self._text, self._other = None, False


YAML_ANCHORS: Final = (
    b"wandb_version:",
    b"_wandb:",
    b"actor_rollout_ref:",
    b"per_device_train_batch_size:",
)
_YAML_LINE: Final = re.compile(r"\s*(?:[\w.\-/\"']+:(?:\s.*)?|- .*|#.*|)$")


class YamlConfig:
    """`config.yaml` of wandb, or of a framework: settings of the run."""

    def __init__(self) -> None:
        self._lines: list[str] | None = None
        self._cut = False

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        if self._lines is None:
            if (
                re.match(
                    r"(?:wandb_version|_wandb|actor_rollout_ref|per_device_train_batch_size):",
                    line.text,
                )
                is None
            ):
                return 0
            self._lines = []
        if _YAML_LINE.match(line.text) is None or len(self._lines) > _LINES_KEPT:
            into.unread["lines that are no setting"] += bool(line.text.strip())
            return 1
        if not line.ended:
            into.unread["values that are cut or unreadable"] += 1
            return 1
        self._lines.append(line.text)
        return 1

    def close(self, into: Rows) -> None:
        """See `scan.Extractor`."""
        lines, self._lines = self._lines, None
        if not lines:
            return
        try:
            found = parse_yaml("\n".join(lines))
        except ValueError:
            into.unread["configurations that are no YAML"] += 1
            return
        if isinstance(found, dict):
            into.add(Row(kind="config", step=None, values=flat(_values(found))))


def _values(config: Mapping[Any, Any]) -> dict[str, Any]:
    """Settings without wandb's level `value`."""
    return {
        str(key): one["value"]
        if isinstance(one, dict) and set(one) <= {"value", "desc"} and "value" in one
        else one
        for key, one in config.items()
    }
