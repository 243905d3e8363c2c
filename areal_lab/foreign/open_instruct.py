"""open-instruct: a panel of rich for each step, a row a group of keys: `time  total: 60.5 | ...`.

    ╭──────────────── Metrics ────────────────╮
    │  other  episode: 64 | training_step: 1  │
    │  time   total: 60.50 | training: 21.25  │
    ╰─────────────────────────────────────────╯

Values have two decimals, and those below 1e-5 an exponent, so that `0.00` is unknown.
Sources: open_instruct/{grpo_fast,grpo_utils,data_loader,model_utils}.py, 2025-03 to 2026-08.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from areal_lab.foreign.assemble import Table, attempts, finish_run
from areal_lab.foreign.quantities import UNREAD, number, whole
from areal_lab.foreign.record import ImportedRun
from areal_lab.foreign.scan import Row, Rows
from areal_lab.foreign.text import Line

ANCHORS: Final = ("─ Metrics ─".encode(), b"- Metrics -")

KEYS: Final[Table] = {
    "time/total": "step_time_s",
    "time/training": "training_s",
    "time/saving": "save_s",
    "time/trainer_waiting_for_data": "wait_for_batch_s",
    "time/trainer_idling": "wait_for_batch_s",
    "time/weight_sync": "weight_sync_s",
    "scores": "reward_mean",
    "val/sequence_lengths": "response_length_mean",
    "val/sequence_lengths_max": "response_length_max",
    "val/sequence_lengths_min": "response_length_min",
    "policy/clipfrac_avg": "clip_fraction",
    "policy/entropy_avg": "entropy",
    "debug/vllm_local_reverse_kl": "drift_kl",
    "debug/vllm_vs_local_logprob_diff_mean": "drift_logp_abs_mean",
    "optim/grad_norm": "grad_norm",
    "lr": "learning_rate",
}
_OWN: Final = ("val/sequence_lengths", "time/trainer_", "real_batch_size_ratio")
"""Prefixes of keys that TRL's PPO does not have."""
_GROUP: Final = re.compile(r"(?P<group>[A-Za-z][\w.@-]{0,40})\s{2,}(?P<items>\S.*)")
_ITEM: Final = re.compile(r"(?P<name>[^:|]{1,120}): (?P<value>\S{1,40})")
_ROWS: Final = 400
"""Most lines of a panel."""


class Extractor:
    """Panels titled `Metrics`."""

    def __init__(self) -> None:
        self._line: Line | None = None
        self._groups: list[tuple[str, str]] = []
        self._rows = 0

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        text = line.text.strip()
        if re.search(r"[─-] Metrics [─-]", text) is not None:
            self.close(into)
            self._line, self._groups, self._rows = line, [], _ROWS
            return 6
        if self._line is None:
            return 0
        self._rows -= 1
        if text[:1] in "╰+" and text[-1:] in "╯+" and len(text) > 2:
            self._keep(into, whole_panel=True)
            return 0
        if text[:1] in "│|" and len(text) > 2 and self._rows > 0:
            self._read(text[1:].removesuffix("│").removesuffix("|").rstrip(), text[-1:] in "│|")
        return 6

    def _read(self, text: str, closed: bool) -> None:
        """Add a row, or the rest of the one before; without its border a row is cut."""
        found = _GROUP.fullmatch(text.strip())
        if found is not None and len(text) - len(text.lstrip()) < 5:
            self._groups.append((found["group"], found["items"]))
        elif self._groups:
            group, items = self._groups[-1]
            self._groups[-1] = (group, f"{items} {text.strip()}")
        if not closed and self._groups:
            group, items = self._groups[-1]
            self._groups[-1] = (group, f"{items} |{_CUT}: {_CUT} |")

    def close(self, into: Rows) -> None:
        """See `scan.Extractor`."""
        self._keep(into, whole_panel=False)

    def _keep(self, into: Rows, *, whole_panel: bool) -> None:
        line, self._line = self._line, None
        if line is None:
            return
        values: dict[str, Any] = {}
        for place, (group, items) in enumerate(self._groups):
            cut = not whole_panel and place == len(self._groups) - 1
            _add_items(values, group, items, into, cut=cut)
        if not values:
            into.unread["panels without values"] += 1
            return
        row = Row(kind="console", step=whole(values.get("training_step")), values=values)
        row.process, row.pid, row.time_s = line.process, line.pid, line.time_s
        row.line, row.cut = line.number, not whole_panel
        into.add(row)


_CUT: Final = "#cut"


def _add_items(values: dict[str, Any], group: str, items: str, into: Rows, *, cut: bool) -> None:
    """Add the pairs of a row of the panel; where it is cut, without the last one."""
    pieces = [one.strip() for one in items.split("|") if one.strip()]
    for place, piece in enumerate(pieces):
        found = _ITEM.fullmatch(piece)
        broken = place + 1 < len(pieces) and pieces[place + 1].startswith(_CUT)
        if piece.startswith(_CUT):
            continue
        if found is None or broken or (cut and place == len(pieces) - 1):
            into.unread["values that are cut or unreadable"] += 1
            continue
        name, value = found["name"].strip(), found["value"]
        if " " in name or number(value) is UNREAD:
            into.unread["values that are cut or unreadable"] += 1
            continue
        key = name if group == "other" else f"{group}/{name}"
        values[key] = None if value in ("0.00", "-0.00") else value


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    own = sum(key.startswith(_OWN) for key in values)
    return own + sum(key in KEYS for key in values) if own else 0


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="open-instruct", step_base=1, unread=found.unread)
    rows = []
    for row in found.rows:
        if (own := whole(row.values.get("training_step"))) is not None:
            row.step = own
        if not KEYS.keys() & row.values.keys():
            continue
        if row.step is None:
            run.unread["panels without their step"] += 1
            continue
        rows.append(row)
    if not rows:
        run.refused = "The log has no training step with metrics."
        return run
    if not any({"scores", "val/sequence_lengths"} & row.values.keys() for row in rows):
        run.refused = "The steps have no scores and no samples: not RL."
        return run
    for row in rows:
        for name in ("training_step", "global_step", "episode", "epoch"):
            row.values.pop(name, None)
    run.mode = "asynchronous" if any(map(_waits, rows)) else None
    run.attempts = attempts(rows, KEYS, run)
    run.notes.append(
        "The console has two decimals: 0.00 is unknown. Counts of tokens are left out, because "
        "they were multiplied by the number of learners (pull request 1808)."
    )
    return finish_run(run)


def _waits(row: Row) -> bool:
    return any(key.startswith("time/trainer_") for key in row.values)
