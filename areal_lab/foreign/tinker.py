"""tinker-cookbook: `metrics.jsonl`, an object a step with steps from 0; a service trains.

The console has the same as a table with six decimals, so that `0.000000` is unknown, without the
keys that end with `:total` and `:count`. Its names were cut at 30 characters until 2026-03.
Sources: tinker_cookbook/rl/{train,metrics}.py, tinker_cookbook/utils/ml_log.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from areal_lab.foreign.assemble import Table, attempts, finish_run
from areal_lab.foreign.config_values import settings_of
from areal_lab.foreign.quantities import UNREAD, number, whole
from areal_lab.foreign.record import ImportedRun
from areal_lab.foreign.scan import Row, Rows
from areal_lab.foreign.text import Line

ANCHORS: Final = ("┃ Metric".encode(), b"| Metric ")

KEYS: Final[Table] = {
    "time/total": "step_time_s",
    "time/sampling": "generation_s",
    "time/train_step": "training_s",
    "time/train": "training_s",
    "env/all/reward/total": "reward_mean",
    "env/all/ac_tokens_per_turn": "tokens_per_turn",
    "env/all/turns_per_episode": "turns_mean",
    "optim/kl_sample_train_v1": "drift_kl",
    "optim/entropy": "entropy",
    "optim/lr": "learning_rate",
    "env/all/total_ac_tokens": "response_tokens",
}


class Extractor:
    """Tables `Metric | Value` below a title `Step 3`; a name that rich has cut ends with `…`."""

    def __init__(self) -> None:
        self._title: tuple[int, int] | None = None
        self._row: Row | None = None
        self._wants = 0

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        text = line.text.strip()
        if (found := _TITLE.fullmatch(text)) is not None:
            self._title = int(found[1]), line.number
            return self._wants
        cells = [one.strip() for one in re.split("[│┃|]", text)]
        if len(cells) != 4 or cells[0] or cells[3]:
            ends = self._row is not None and text[:1] in "└╰" and text != ""
            if ends:
                self._keep(into, cut=False)
            self._wants = 0 if ends else max(0, self._wants - 1)
            return self._wants
        if cells[1:3] == ["Metric", "Value"]:
            self.close(into)
            title, self._title = self._title, None
            near = title is not None and line.number - title[1] <= _TITLE_LINES
            self._row = Row(kind="console", step=title[0] if near and title else None, values={})
            self._row.process, self._row.pid, self._row.line = line.process, line.pid, line.number
            self._row.time_s = line.time_s
        elif self._row is not None:
            self._read(cells[1], cells[2], into)
        self._wants = _PATIENCE
        return self._wants

    def _read(self, name: str, value: str, into: Rows) -> None:
        assert self._row is not None
        if "…" in name + value or number(value) is UNREAD or " " in name or not (name and value):
            into.unread["values that are cut or unreadable"] += 1
        elif re.fullmatch(r"-?0\.000000", value) is not None:
            self._row.values[name] = None  # of six decimals
        else:
            self._row.values[name] = value

    def close(self, into: Rows, /) -> None:
        """See `scan.Extractor`."""
        self._keep(into, cut=True)

    def _keep(self, into: Rows, *, cut: bool) -> None:
        row, self._row = self._row, None
        if row is not None and row.values:
            row.cut = cut
            into.add(row)


_TITLE: Final = re.compile(r"Step (\d{1,9})")
_TITLE_LINES: Final = 8
"""Most lines from the title to the heading, with lines of others between them."""
_PATIENCE: Final = 12


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    return sum(
        key in KEYS or key.startswith(("env/all/", "optim/", "progress/batch")) for key in values
    )


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="tinker-cookbook", step_base=0, unread=found.unread)
    rows = []
    for row in found.rows:
        if row.kind == "config":
            run.settings |= settings_of(row.values)
            continue
        if row.step is None:
            row.step = whole(row.values.get("progress/batch"))
        if row.step is not None and KEYS.keys() & row.values.keys():
            rows.append(row)
    run.unread["tables without their step"] += sum(
        row.step is None and row.kind == "console" for row in found.rows
    )
    if not rows:
        run.refused = "The log has no training step with metrics."
        return run
    run.attempts = attempts(rows, KEYS, run)
    return finish_run(run)
