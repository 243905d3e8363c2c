"""verl: one line a step, `step:N - key:value - key:value`; synchronous, one step off, fully async.

Also its file logger (`{"step": N, "data": {...}}`) and its printed configuration.
Sources: verl/utils/logger/aggregate_logger.py, verl/trainer/ppo/{metric_utils,ray_trainer}.py,
recipes one_step_off_policy and fully_async_policy, releases 0.2 to 0.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from areal_lab.foreign.assemble import (
    Table,
    attempts,
    derive,
    derive_gpus,
    finish_run,
    note_once,
)
from areal_lab.foreign.config_values import settings_of
from areal_lab.foreign.literal import flat, read_dict
from areal_lab.foreign.quantities import UNREAD, known, number, resolution
from areal_lab.foreign.record import ImportedRun, Step
from areal_lab.foreign.scan import Row, Rows
from areal_lab.foreign.text import Line
from areal_lab.foreign.verl_digits import drop_cut_ends, three_decimals

ANCHORS: Final = (b"step:", b"'actor_rollout_ref'")

KEYS: Final[Table] = {
    "timing_s/step": "step_time_s",
    "timing/step": "step_time_s",
    "perf/time_per_step": "step_time_s",
    "timing_s/gen": "generation_s",
    "timing/gen": "generation_s",
    "timing_s/update_actor": "training_s",
    "timing/update_actor": "training_s",
    "timing_s/update_critic": "critic_s",
    "timing/update_critic": "critic_s",
    "timing_s/old_log_prob": "old_logprob_s",
    "timing/old_log_prob": "old_logprob_s",
    "timing_s/ref": "reference_s",
    "timing/ref": "reference_s",
    "timing_s/reward": "reward_s",
    "timing_s/adv": "advantage_s",
    "timing/adv": "advantage_s",
    "timing_s/update_weights": "weight_sync_s",
    "timing_s/sync_rollout_weights": "weight_sync_s",
    "timing_s/timing_s/param_sync": "weight_sync_s",
    "timing_s/param_sync": "weight_sync_s",
    "timing_s/testing": "validation_s",
    "timing/testing": "validation_s",
    "timing_s/save_checkpoint": "save_s",
    "timing/save_checkpoint": "save_s",
    "response_length/mean": "response_length_mean",
    "response_length/max": "response_length_max",
    "response_length/min": "response_length_min",
    "response_length/clip_ratio": "truncated_fraction",
    "prompt_length/mean": "prompt_length_mean",
    "prompt_length/max": "prompt_length_max",
    "critic/score/mean": "reward_mean",
    "actor/pg_clipfrac": "clip_fraction",
    "actor/entropy": "entropy",
    "actor/entropy_loss": "entropy",
    "actor/grad_norm": "grad_norm",
    "actor/lr": "learning_rate",
    "actor/kl_loss": "reference_kl",
    "rollout_corr/kl": "drift_kl",
    "mismatch/mismatch_kl": "drift_kl",
    "training/rollout_probs_diff_mean": "drift_prob_abs_mean",
    "training/off_policy/trajectory_staleness/mean": "lag_mean",
    "training/off_policy/trajectory_staleness/max": "lag_max",
    "perf/total_num_tokens": "tokens",
    "perf/throughput": "tokens_per_s_per_gpu",
    "perf/mfu/actor": "mfu",
    "mfu/actor": "mfu",
    "num_turns/mean": "turns_mean",
    "fully_async/rollouter/idle_ratio": "rollout_idle_printed",
}
_TRAINING: Final = ("timing_s/", "timing/", "actor/", "critic/", "response_length/", "fully_async/")
_GOES_ON: Final = "#goes on"
_VALIDATION: Final = re.compile(r"val(?:-core|-aux)?/")
_START: Final = re.compile(r"(?:^|[^\w/:.+])step:(\d{1,9})(?:\s*-\s+|\s+-|\s*$)")
_SEPARATOR: Final = re.compile(r"\s+-\s+|\s+-(?=[A-Za-z_])|(?<=[\w.)\]])-\s+(?=[A-Za-z_])")
_LISTED: Final = re.compile(r"(?:\\n)?['\"],?\s*\]?[\s'\"(]*$")
"""What stands behind a line in a list of lines."""
_KEY: Final = re.compile(r"[A-Za-z_][^\s:][^:]{0,160}|[A-Za-z_]")
_PIECE: Final = re.compile(r"[\w/@.+\-]*(?::\s?_?[\w.+\-()]*)?|[\d.e+\-]+")
_PAIR: Final = re.compile(r"[A-Za-z_][\w/@.+\- ]*:\s?_?[\w.+\-()]*")
_LISTED_PAIR: Final = re.compile(r"\s*-\s+[A-Za-z_][\w@.+\-]*/[\w/@.+\-]+:[-\dni]\S*\s*(?:-\s|$)")
"""A line of a record that was printed with a pair a line."""
_BAR_BEHIND: Final = re.compile(r"(?<=[\d)a])(?:Training Progress|Generating|Processed)\b.*$|\r.*$")
_BARS: Final = ("Training Progress", "Generating", "Processed", "\r")
_OTHER_BLANK: Final = re.compile(r"[^\S ]")
RECORD_CHARACTERS: Final = 200_000
CONFIG_LINES: Final = 3000


class Extractor:
    """Lines `step:N - ...` with continuations, and the printed configuration."""

    def __init__(self) -> None:
        self._open: Line | None = None
        self._text = ""
        self._ended = True
        self._patience = 0
        self._config: list[str] | None = None
        self._config_of: Line | None = None

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        starts = _starts(line.text)
        for at, behind in pairwise([*starts, len(line.text)]):
            self.close(into)
            self._open, self._text = line, _before_quote(line.text[at:behind])
            self._ended, self._patience = line.ended or behind < len(line.text), 4
        if starts:
            return self._patience
        if self._config is not None:
            return self._read_config(line, into)
        if self._open is not None:
            if line.may_continue(self._open) and _continuation(line.text, self._text):
                listed = _LISTED_PAIR.match(line.text) is not None
                joined = f" {line.text.strip()}" if listed else line.text
                self._text += joined.lstrip() if self._text.endswith(" ") else joined
                self._ended = line.ended
                self._patience = 4
                if len(self._text) > RECORD_CHARACTERS:
                    self.close(into)
            else:
                self._patience -= 1
            if self._patience <= 0:
                self.close(into)
            return self._patience
        if (begin := line.text.find("{'actor_rollout_ref'")) >= 0:
            self._config, self._config_of = [line.text[begin:]], line
            return self._finish_config(into)
        return 0

    def _read_config(self, line: Line, into: Rows) -> int:
        assert self._config is not None
        assert self._config_of is not None
        if line.may_continue(self._config_of):
            self._config.append(line.text)
            return self._finish_config(into)
        return 1

    def _finish_config(self, into: Rows) -> int:
        assert self._config is not None
        text = "\n".join(self._config)
        # the brace behind the last value; parsed only where it may be complete
        if text.count("{") <= text.count("}") or len(self._config) > CONFIG_LINES:
            self._end_config(into)
            return 0
        return 1

    def _end_config(self, into: Rows) -> None:
        if self._config is None:
            return
        parsed = read_dict("\n".join(self._config))
        self._config = None
        if parsed.value:
            into.add(Row(kind="config", step=None, values=flat(parsed.value)))
        if not parsed.complete:
            into.unread["settings of a configuration that is cut"] += 1

    def close(self, into: Rows) -> None:
        """See `scan.Extractor`."""
        self._end_config(into)
        if self._open is None:
            return
        line, text, ended = self._open, _before_bar(self._text), self._ended
        self._open = None
        started = _START.search(text)
        assert started is not None
        values, lost, goes_on = _pairs(text[started.end() :], ended=ended)
        into.unread["values that are cut or unreadable"] += lost
        step = int(started[1])
        trained = any(key.startswith(_TRAINING) for key in values)
        validated = any(_VALIDATION.match(key) for key in values)
        if not values:
            return

        def add(kind: str, chosen: dict[str, str]) -> None:
            row = Row(kind=kind, step=step, values=chosen, cut=lost > 0)
            row.process, row.pid, row.time_s = line.process, line.pid, line.time_s
            row.line = line.number
            into.add(row)

        if validated:
            add("validation", {k: v for k, v in values.items() if _VALIDATION.match(k)})
        if trained:
            rest = {k: v for k, v in values.items() if not _VALIDATION.match(k)}
            if goes_on or next(reversed(values)) not in rest:
                rest[_GOES_ON] = "nan"  # the record goes on behind its last number
            add("train", rest)
        elif not validated:
            add("other", values)


def _starts(text: str) -> list[int]:
    """Positions of `_START`, which begins at most one character before `step:`."""
    found: list[int] = []
    end, at = 0, text.find("step:")
    while at >= 0:
        begun = _START.match(text, max(end, at - 1))
        if begun is not None:
            found.append(begun.start())
            end = begun.end()
        at = text.find("step:", at + 5)
    return found


def _before_quote(text: str) -> str:
    return _LISTED.sub("", text) if "'" in text or '"' in text else text


def _before_bar(text: str) -> str:
    return _BAR_BEHIND.sub("", text) if any(one in text for one in _BARS) else text


def _pieces(text: str) -> list[str]:
    """Split at `_SEPARATOR`; by far most records have ` - ` only."""
    joined = text.replace(" - ", "\n")
    mixed = "  " in text or " -" in joined or "- " in joined
    if mixed or _OTHER_BLANK.search(text) is not None:
        return _SEPARATOR.split(text)
    return joined.split("\n")


def _continuation(text: str, before: str) -> bool:
    """True if a line without a prefix is the rest of a broken record."""
    if _LISTED_PAIR.match(text) is not None:
        return True
    pieces = _SEPARATOR.split(text.strip())
    if not pieces or (not pieces[0] and len(pieces) == 1):
        return False
    if len(pieces) == 1:
        last = _SEPARATOR.split(before)[-1]
        unfinished = ":" not in last or last.endswith((":", "-", "e", ".", "(", "/"))
        if unfinished:
            return _PIECE.fullmatch(pieces[0]) is not None
        return re.fullmatch(r"[\d.e+\-)]{1,20}", pieces[0]) is not None
    head = pieces[0].removeprefix("- ")
    return _PIECE.fullmatch(head) is not None and all(
        _PAIR.fullmatch(one) is not None for one in pieces[1:-1]
    )


def _pairs(text: str, *, ended: bool) -> tuple[dict[str, str], int, bool]:
    """Pairs of a record, the number of those that are cut or unreadable, and if the last one is."""
    values: dict[str, str] = {}
    lost, goes_on = 0, False
    pieces = [one for one in _pieces(text.strip()) if one.strip()]
    for index, piece in enumerate(pieces):
        key, colon, value = piece.rpartition(":")
        key, value = key.strip(), value.strip()
        last = index == len(pieces) - 1
        cut = not colon or not _is_key(key)
        cut = cut or (last and (not ended or value.endswith((".", "e", "-", "+"))))
        if cut or value == "" or number(value) is UNREAD:
            lost, goes_on = lost + 1, last
        elif key in values and values[key] != value:
            lost += 1  # two records that ran into each other: neither value is sure
            values[key] = "nan"
        else:
            values[key] = value
    return values, lost, goes_on


@lru_cache(maxsize=4096)
def _is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def keyed(values: Mapping[str, Any]) -> int:
    """How many keys of a record are verl's: see `readers.Reader`."""
    return sum(key in KEYS for key in values) + sum(
        key.startswith(("timing_per_token_ms/", "critic/", "val-core/")) for key in values
    )


def row_of(values: Mapping[str, Any]) -> str:
    """Kind of a record of a file: train, validation or other."""
    if any(key.startswith(_TRAINING) for key in values):
        return "train"
    return "validation" if any(_VALIDATION.match(key) for key in values) else "other"


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework="verl", step_base=1, unread=found.unread)
    for row in found.rows:
        if row.kind == "config":
            run.settings |= settings_of(row.values)
    rows = [row for row in found.rows if row.kind == "train" and row.step is not None]
    if not rows:
        run.refused = _no_steps(found)
        return run
    drop_cut_ends(rows, run)
    _name_mode(rows, run)
    rounded = three_decimals(rows, run)
    if any(row.step == 0 for row in rows):
        run.step_base = 0
    run.attempts = attempts(
        rows, KEYS, run, lambda row, step: _finish(row, step, run, rounded=rounded), by_pid=True
    )
    if run.mode == "fully async":
        _count_optimizer_steps(run)
    if rounded:
        run.version = "0.4 or older"
        run.notes.append(
            "Three decimals: a clip fraction, divergence or learning rate of 0.000 is unknown."
        )
    _add_validation(found.rows, run)
    return finish_run(run)


def _no_steps(found: Rows) -> str:
    if any(row.kind == "other" and "train/loss" in row.values for row in found.rows):
        return "The records have a loss and no rewards or samples: supervised fine-tuning, not RL."
    if any(row.kind == "validation" for row in found.rows):
        return "The log has validations only, and no training step."
    if any(row.kind == "other" for row in found.rows):
        return "The records have no metric of a training step."
    return "The log has a configuration, but no training step."


def _name_mode(rows: Sequence[Row], run: ImportedRun) -> None:
    keys = {key for row in rows for key in row.values}
    processes = {row.process for row in rows}
    if any(key.startswith("fully_async/") for key in keys) or any(
        one.startswith("FullyAsync") for one in processes
    ):
        run.mode = "fully async"
        run.notes.append(
            "Times of a record are sums over the steps between two weight updates; "
            "`gen` is the trainer's wait."
        )
    elif {"timing_s/wait_prev_gen", "timing_s/generate_async"} & keys or any(
        one.startswith("OneStepOff") for one in processes
    ):
        run.mode = "one step off"
    elif any(one.startswith(("TaskRunner", "main_task")) for one in processes):
        run.mode = "synchronous"


def _finish(row: Row, step: Step, run: ImportedRun, *, rounded: bool) -> None:
    values = step.values
    if rounded:
        for name in (
            "clip_fraction",
            "drift_kl",
            "learning_rate",
            "drift_prob_abs_mean",
            "reference_kl",
        ):
            if values.get(name) == 0:
                values[name] = None
    if run.mode == "fully async":
        _finish_async(row, step, run)
    elif run.mode == "one step off":
        _finish_one_step_off(row, step, run)
    total, testing, saving = (values.get(one) for one in ("step_time_s", "validation_s", "save_s"))
    if isinstance(total, float) and not row.cut:
        outside = sum(one for one in (testing, saving) if isinstance(one, float))
        derive(
            step,
            run,
            "step_time_without_validation_s",
            total - outside,
            "timing_s/step - timing_s/testing - timing_s/save_checkpoint",
        )
    own = row.values
    run.unknown.pop(_GOES_ON, None)
    tokens, lengths = (
        own.get("perf/total_num_tokens"),
        [known(own.get(one)) for one in ("response_length/mean", "prompt_length/mean")],
    )
    throughput, time = own.get("perf/throughput"), known(own.get("perf/time_per_step"))
    if throughput is not None and time:
        rate = known(throughput)
        if rate:
            derive_gpus(
                step,
                run,
                tokens,
                rate * time,
                spread=resolution(throughput) / rate + resolution(own["perf/time_per_step"]) / time,
                how="perf/total_num_tokens / (perf/throughput x perf/time_per_step)",
            )
    if lengths[0] is not None and lengths[1] is not None and known(tokens):
        samples = known(tokens) / (lengths[0] + lengths[1])  # type: ignore[operator]  # checked
        if run.mode != "fully async" and abs(samples - round(samples)) < 1e-3 * max(
            1, samples**0.5
        ):
            derive(
                step,
                run,
                "samples_per_step",
                round(samples),
                "perf/total_num_tokens / (response_length/mean + prompt_length/mean)",
            )


def _finish_async(row: Row, step: Step, run: ImportedRun) -> None:
    values = step.values
    if "generation_s" in values:
        values["wait_for_batch_s"] = values.pop("generation_s")
    wait, total = values.get("wait_for_batch_s"), values.get("step_time_s")
    if isinstance(wait, float) and isinstance(total, float) and total > 0:
        derive(step, run, "trainer_idle", wait / total, how="timing_s/gen / timing_s/step")
    values["version"] = step.step
    values["#global"] = known(row.values.get("training/global_step"))


def _count_optimizer_steps(run: ImportedRun) -> None:
    """Optimizer steps between weight updates, by `training/global_step`."""
    for attempt in run.attempts:
        before: Step | None = None
        for one in attempt.steps:
            now = one.values.pop("#global", None)
            then, version = (
                (0.0, 0)
                if before is None
                else (before.other.get("training/global_step"), before.step)
            )
            if isinstance(now, float) and then is not None and one.step == version + 1:
                derive(
                    one,
                    run,
                    "optimizer_steps",
                    int(now - then),
                    "differences of training/global_step",
                )
            before = one


def _finish_one_step_off(row: Row, step: Step, run: ImportedRun) -> None:
    values, own = step.values, row.values
    if "timing_s/wait_prev_gen" in own:
        values["wait_for_batch_s"] = known(own["timing_s/wait_prev_gen"])
    elif "timing_s/generate_async" in own:
        values["wait_for_batch_s"] = values.get("generation_s")
        values["generation_s"] = known(own["timing_s/generate_async"])
    elif values.pop("generation_s", None) is not None:
        run.ambiguous["generation_s"] = (
            "`timing_s/gen` of one-step-off runs is generation up to 0.6 and the trainer's wait "
            "from 0.7 on, and the log does not tell its version"
        )
    note_once(run, "Generation overlaps with training: parts do not add up to the step.")


def _add_validation(rows: Sequence[Row], run: ImportedRun) -> None:
    for row in rows:
        if row.kind != "validation":
            continue
        core = {
            k: known(v)
            for k, v in row.values.items()
            if k.startswith(("val-core/", "val/test_score/"))
            and ("/mean" in k or k.startswith("val/test_score/"))
        }
        for key, value in core.items():
            entry = {"step": row.step, "value": value}
            if len(core) > 1:
                entry["name"] = key  # type: ignore[assignment]  # a text among numbers
            run.validation.append(entry)  # type: ignore[arg-type]  # a dict of quantities
