"""torchforge: a block a step, `=== [global_reduce] - METRICS STEP 3 ===` and lines `  key: value`.

Averages over the calls between two optimizer steps; times of rollouts are of single groups, so that
the time in which engines were busy is unknown. Steps count from 1.
Sources: src/forge/observability/metrics.py, apps/grpo/main.py, 2025-09 to 2025-11.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from areal_lab.foreign.assemble import Table, attempts, derive, finish_run
from areal_lab.foreign.quantities import UNREAD, known, number
from areal_lab.foreign.record import ImportedRun, Step
from areal_lab.foreign.scan import Row, Rows
from areal_lab.foreign.text import Line

ANCHORS: Final = (b"METRICS STEP ",)

_LOOP: Final = "main_perf/continuous_training/"
KEYS: Final[Table] = {
    f"{_LOOP}total_duration_avg_s": "step_time_s",
    f"{_LOOP}waiting_for_buffer/duration_avg_s": "wait_for_batch_s",
    f"{_LOOP}train_step/duration_avg_s": "training_s",
    "reward/evaluate_response/avg_total_reward": "reward_mean",
    "episode/avg_response_tokens": "response_length_mean",
    "episode/max_response_tokens": "response_length_max",
    "episode/min_response_tokens": "response_length_min",
    "generator/generate/avg_tokens_generated": "response_length_mean",
    "episode/avg_prompt_tokens": "prompt_length_mean",
    "episode/max_prompt_tokens": "prompt_length_max",
    "buffer/sample/avg_sampled_policy_age": "lag_mean",
    "buffer/sample/max_sampled_policy_age": "lag_max",
    "grpo_loss/kl_divergence_mean": "reference_kl",
    "rl_trainer/learning_rate": "learning_rate",
}
_HEADER: Final = re.compile(r"=== \[([\w.-]{1,80})\] - METRICS STEP (\d{1,9}) ===")
_PAIR: Final = re.compile(r"([A-Za-z][\w./@-]{2,150}): (\S{1,60})")
_BROKEN: Final = re.compile(r"[A-Za-z]\w*/[\w./@-]+: |[A-Za-z]\w*/\S*$")
_PATIENCE: Final = 40


class Extractor:
    """Blocks of the global logger; those of single processes are counted."""

    def __init__(self) -> None:
        self._row: Row | None = None
        self._patience = 0

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        text = line.text.strip()
        if (found := _HEADER.search(text)) is not None:
            self.close(into)
            if "global" not in found[1].lower():
                into.unread["blocks of single processes"] += 1
                return 0
            self._row = Row(kind="console", step=int(found[2]), values={}, time_s=line.time_s)
            self._row.process, self._row.pid, self._row.line = line.process, line.pid, line.number
            self._patience = _PATIENCE
            return self._patience
        if self._row is None:
            return 0
        if re.fullmatch(r"={6,}", text) is not None:
            self._keep(into, cut=False)
            return 0
        pair = _PAIR.fullmatch(text)
        if pair is not None and number(pair[2]) is not UNREAD and "/" in pair[1]:
            if line.ended:
                self._row.values[pair[1]] = pair[2]
            else:
                into.unread["values that are cut or unreadable"] += 1
            self._patience = _PATIENCE
        else:
            into.unread["values that are cut or unreadable"] += _BROKEN.match(text) is not None
            self._patience -= 1
            if self._patience <= 0:
                self.close(into)
        return self._patience

    def close(self, into: Rows) -> None:
        """See `scan.Extractor`."""
        self._keep(into, cut=True)

    def _keep(self, into: Rows, *, cut: bool) -> None:
        row, self._row = self._row, None
        if row is None or not row.values:
            return
        row.cut = cut
        into.add(row)


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    return sum(
        key in KEYS or key.startswith(("main_perf/continuous_", "rl_trainer_perf/", "buffer/evict"))
        for key in values
    )


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="torchforge", step_base=1, unread=found.unread)
    rows = [row for row in found.rows if row.step is not None and KEYS.keys() & row.values.keys()]
    if not rows:
        run.refused = "The log has no training step with metrics."
        return run
    run.mode = "asynchronous"
    run.attempts = attempts(rows, KEYS, run, lambda row, step: _finish(row, step, run))
    return finish_run(run)


def _finish(row: Row, step: Step, run: ImportedRun) -> None:
    parts = [known(row.values.get(f"{_LOOP}{one}/duration_avg_s")) for one in _SYNC]
    if None not in parts:
        derive(
            step,
            run,
            "weight_sync_s",
            sum(one for one in parts if one is not None),
            "push_weights + update_weights of main_perf/continuous_training",
        )


_SYNC: Final = ("push_weights", "update_weights")
