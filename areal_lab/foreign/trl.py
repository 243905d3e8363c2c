"""TRL's GRPOTrainer and its other online trainers, and what prints in their shape.

That is unsloth, ms-swift, and verifiers up to 0.1.9.

A Python dictionary every `logging_steps`, a notebook's table, `trainer_state.json`, or the same
keys below `train/` in a tracker. Steps are numbered by the bar before the record, else by order.
Sources: trl/trainer/{grpo,ppo,online_dpo}_trainer.py 0.14 to 1.9, transformers 4 and 5
(`trainer_callback.py`), unsloth's notebook banner, ms-swift's `global_step/max_steps`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from areal_lab.foreign.assemble import Table, attempts, finish_run, note_once
from areal_lab.foreign.config_values import settings_of
from areal_lab.foreign.dicts import DictExtractor, Header
from areal_lab.foreign.quantities import UNREAD, clock, known, number, resolution, seconds, whole
from areal_lab.foreign.record import ImportedRun, Step
from areal_lab.foreign.scan import Row, Rows
from areal_lab.foreign.text import Line

ANCHORS: Final = (
    b"'loss':",
    b"'reward':",
    b"'train_runtime':",
    b"'eval_",
    b"Training Loss",
    b"Unsloth",
    b"'completions/",
    b"'objective/",
)

KEYS: Final[Table] = {
    "step_time": "step_time_s",
    "completions/mean_length": "response_length_mean",
    "mean_completion_length": "response_length_mean",
    "completions/max_length": "response_length_max",
    "max_completion_length": "response_length_max",
    "completions/min_length": "response_length_min",
    "min_completion_length": "response_length_min",
    "completions/clipped_ratio": "truncated_fraction",
    "clipped_completions_ratio": "truncated_fraction",
    "reward": "reward_mean",
    "reward_std": "reward_std",
    "frac_reward_zero_std": "zero_variance_fraction",
    "clip_ratio/region_mean": "clip_fraction",
    "clip_ratio": "clip_fraction",
    "entropy": "entropy",
    "entropy/mean": "entropy",
    "kl": "reference_kl",
    "sampling/sampling_logp_difference/mean": "drift_logp_abs_mean",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "tokens/completion": "response_length_mean",
    # PPOTrainer, RLOOTrainer up to 0.21, OnlineDPOTrainer; their `kl` and `entropy` are sums
    "objective/scores": "reward_mean",
    "policy/clipfrac_avg": "clip_fraction",
    "policy/entropy_avg": "entropy",
    "lr": "learning_rate",
}
_OLD_LENGTH: Final = "completion_length"
"""Mean length of TRL up to 0.16; of unsloth it is another one."""
_RL: Final = re.compile(
    r"reward$|reward_std$|completions?[/_]|mean_completion_length|rewards/[^/]+(?:/mean|/std)?$"
    r"|frac_reward_zero_std|clip_ratio|objective/scores$"
)
_OWN: Final = re.compile(
    r"completions?[/_]|mean_completion_length|rewards/|frac_reward_zero_std|objective/scores"
    r"|clip_ratio/|sampling/|profiling/Time taken|tokens/completion|num_tokens$"
    r"|entropy/mean$|global_step/max_steps|train_speed"
)
"""Keys that only these trainers have: `reward`, `kl` and `lr` are everyone's."""
_PREFERENCE: Final = ("rewards/chosen", "rewards/margins", "logps/chosen")
_DICT_KEY: Final = re.compile(
    r"['\"](?:loss|reward|train_runtime|eval_\w+|(?:completions|objective)/\w+)['\"]: ?"
)
_FIRST_KEY: Final = re.compile(r"['\"][\w/ .()@-]{1,80}['\"]:\s?")
_CODE: Final = re.compile(r"(?:\w\s*=|\breturn|\bprint\()\s*$")
"""Source code before a dictionary."""
_BAR: Final = re.compile(r"(\d{1,9})/(\d{1,9}) \[\s*([\d:]{4,12})\s?<")
_OTHER_BAR: Final = re.compile(r"(?<![A-Za-z ])\s{0,3}(?!Train)[A-Za-z][^:|%]{2,60}:\s*\d{1,3}%\|")
"""Bar with a name, such as that of an engine's prompts; the trainer's has none, or `Train`."""
_NOTEBOOK_BAR: Final = re.compile(r"\[\s*(\d{1,9})/(\d{1,9})\s+([\d:]{4,12})\s+<")


class Extractor:
    """Dictionaries with bars before them, and notebook tables."""

    def __init__(self) -> None:
        self._bar: tuple[int, int, float] | None = None
        self._dicts = DictExtractor(_header, finish=self._finish)
        self._columns: list[str] | None = None
        self._tagged = False
        self._others = 0
        self._heading = ""
        self._html = ""
        self._banner = 0

    def feed(self, line: Line, into: Rows) -> int:
        """See `scan.Extractor`."""
        found = _BAR.search(line.text) or _NOTEBOOK_BAR.search(line.text)
        if _OTHER_BAR.search(line.text) is not None:
            found = None
        if found is not None and (elapsed := clock(found[3])) is not None:
            self._bar = int(found[1]), int(found[2]), elapsed
            into.marks["max_steps"] = self._bar[1]
            into.marks["bar step"], into.marks["bar seconds"] = self._bar[0], int(elapsed)
        if "Unsloth" in line.text and ("Num GPUs" in line.text or "==((" in line.text):
            into.marks["unsloth"], self._banner = 1, 12
        if self._banner > 0:
            self._banner -= 1
            _read_banner(line.text, into)
        self._read_table(line, into)
        wants = self._dicts.feed(line, into)
        table = self._columns is not None or bool(self._html)
        return max(wants, self._banner, 3 if table else 0)

    def _finish(self, row: Row, _into: Rows) -> None:
        if self._bar is not None and self._bar[1] > 0:
            row.values["#bar"], row.values["#bar_s"] = self._bar[0], self._bar[2]
        self._bar = None

    def _read_table(self, line: Line, into: Rows) -> None:
        """A notebook's table: columns between tabs, bars or tags."""
        if "<t" not in line.text and not self._html:
            if self._columns is None or not self._tagged:
                self._read_cells(_cells(line.text), line, into)
            return
        self._html = (self._html + line.text)[-ROW_CHARACTERS:]
        *rows, self._html = self._html.split("</tr>")
        for row in rows:
            found = _HTML_CELL.findall(row[row.rfind("<tr") :])
            self._read_cells([one.strip() for one in found], line, into, tagged=True)
        if "<t" not in self._html:
            self._html = ""

    def _read_cells(
        self, cells: list[str], line: Line, into: Rows, *, tagged: bool = False
    ) -> None:
        if cells and cells[0].lower() == "step" and "Training Loss" in cells:
            self._columns = [re.sub(r"\s*/\s*", "/", one) for one in cells]
            self._heading, self._tagged, self._others = line.text, tagged, 0
            into.marks["table"] = 1
            return
        if self._columns is None or len(cells) < 2 or not cells[0].isdigit():
            # A terminal may break the heading.
            if self._heading and "reward" in line.text + self._heading and "\t" in line.text:
                self._heading, text = "", self._heading + line.text
                self._columns = [re.sub(r"\s*/\s*", "/", one.strip()) for one in text.split("\t")]
            self._others += 1
            if self._others > _AFTER_TABLE:
                self._columns = None
            return
        if any(number(one) is UNREAD for one in cells[:-1]):
            into.unread["lines that are no row of the table"] += 1
            return
        self._heading, self._others = "", 0
        if len(cells) > len(self._columns):
            into.unread["lines that are no row of the table"] += 1
            return
        if len(cells) < len(self._columns) or not line.ended or _shorter(cells):
            into.unread["values that are cut or unreadable"] += 1
            cells = cells[:-1]
        values = dict(zip(self._columns, cells, strict=False))
        step = whole(values.pop("Step", None) or values.pop("step", None))
        if step is not None and values:
            into.add(
                Row(kind="table", step=step, values=values, line=line.number, time_s=line.time_s)
            )

    def close(self, into: Rows) -> None:
        """See `scan.Extractor`."""
        self._dicts.close(into)
        self._columns, self._html = None, ""


ROW_CHARACTERS: Final = 50_000
_AFTER_TABLE: Final = 40
"""Other lines behind which a table of a text has ended."""
_HTML_CELL: Final = re.compile(r"<t[dh][^<>]{0,300}>([^<>]{0,300})</t[dh]>")


def _cells(text: str) -> list[str]:
    """Cells of a row: between tabs, or between bars as GitHub's Markdown has them."""
    if "\t" not in text and "|" in text:
        text = text.strip().removeprefix("|").removesuffix("|").replace("|", "\t")
    return [one.strip() for one in text.split("\t")]


def _shorter(cells: Sequence[str]) -> bool:
    """True if the last number has fewer decimals than all others, which are alike."""
    decimals = [len(one.partition(".")[2]) for one in cells if "." in one]
    return len(decimals) > 2 and len(set(decimals[:-1])) == 1 and decimals[-1] < decimals[0]


def _header(line: Line) -> Header | None:
    text = line.text
    if (key := _DICT_KEY.search(text)) is None:
        return None
    brace = text.rfind("{'", 0, key.start() + 1)
    if brace < 0:
        brace = text.rfind('{"', 0, key.start() + 1)
    if brace >= 0:
        if re.search(r"(?:perf|rollout|step|eval|Global step) \d+: ?$", text[:brace]):
            return None  # of another framework
        if _CODE.search(text[:brace]) is not None:
            return None
        return Header(kind="train", step=None, start=brace)
    first = _FIRST_KEY.search(text)
    if first is None or "': {'" in text[: key.start()]:
        return None
    lead = text[: first.start()].strip()
    return (
        Header(kind="train", step=None, start=first.start(), opened=True)
        if len(lead) < 12
        else None
    )


_BANNER: Final = (
    ("gpus", re.compile(r"Data Parallel GPUs = ([\d,]{1,9})")),
    ("gpus", re.compile(r"Num GPUs(?: used)? = ([\d,]{1,9})")),
    ("samples_per_step", re.compile(r"Total batch size \([^)]*\) = ([\d,]{1,12})")),
    ("max_steps", re.compile(r"Total steps = ([\d,]{1,15})")),
)


def _read_banner(text: str, into: Rows) -> None:
    for name, pattern in _BANNER:
        if (found := pattern.search(text)) is not None:
            into.marks[name] = int(found[1].replace(",", ""))


def bare(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without the prefix of trackers."""
    return {key.removeprefix("train/"): value for key, value in values.items()}


def keyed(values: Mapping[str, Any]) -> int:
    """See `readers.Reader`."""
    keys = bare(values)
    if not any(_OWN.match(key) for key in keys):
        return 0
    return sum(
        key in KEYS or key.startswith(("rewards/", "completions/", "profiling/Time taken"))
        for key in keys
    )


def step_of(values: Mapping[str, Any]) -> int | None:
    """Number of the step in a file's record."""
    for key in ("train/global_step", "global_step", "step", "_step", "Step"):
        if key in values:
            return whole(values[key])
    return None


def assemble(found: Rows) -> ImportedRun:
    """See `readers.Reader`."""
    run = ImportedRun(framework=_name(found), unread=found.unread)
    for row in found.rows:
        if row.kind == "config":
            run.settings |= settings_of(row.values)
    records = [row for row in found.rows if row.kind != "config"]
    for row in records:
        row.values = bare(row.values)
    keys = {key for row in records for key in row.values}
    offline = any(one in keys for one in _PREFERENCE) and "objective/scores" not in keys
    if offline or not any(_RL.match(key) for key in keys):
        run.refused = _not_rl(keys)
        return run
    rows = [row for row in records if _is_step(row.values)]
    _number(rows, records, run, found)
    _validations(records, run)
    if not rows:
        run.refused = "The log has evaluations and summaries, but no training step."
        return run
    run.attempts = attempts(rows, KEYS, run, lambda row, step: _finish(row, step, run))
    for attempt in run.attempts:
        _differences(attempt.steps, run, timed="step_time" not in keys)
    _settle(found, run)
    run.step_base = 1
    return finish_run(run)


def _name(found: Rows) -> str:
    keys = {key for row in found.rows[:200] for key in row.values}
    if found.marks["unsloth"] or found.marks["table"]:
        return "unsloth"
    if "global_step/max_steps" in keys or any(key.startswith("train_speed(") for key in keys):
        return "ms-swift"
    # TRL had one or the other, in turn; unsloth adds its own beside TRL's.
    if any({_OLD_LENGTH, "completions/mean_length"} <= row.values.keys() for row in found.rows):
        return "unsloth"
    if "tokens/completion" in keys or any(key.startswith("wall_clock/") for key in keys):
        return "verifiers"
    return "trl"


def _not_rl(keys: set[str]) -> str:
    if any(one in keys for one in _PREFERENCE):
        return "The records have rewards of chosen and rejected texts: preference training, not RL."
    if not keys & {"loss", "Training Loss"}:
        return "The log has evaluations and summaries, but no training step."
    return "The records have a loss and no rewards or samples: supervised fine-tuning, not RL."


def _is_step(values: Mapping[str, Any]) -> bool:
    if any(key.startswith("eval_") for key in values) or "train_runtime" in values:
        return False
    return (
        "loss" in values
        or "reward" in values
        or "Training Loss" in values
        or any(_RL.match(key) for key in values)
    )


def _number(rows: Sequence[Row], records: Sequence[Row], run: ImportedRun, found: Rows) -> None:
    """Number steps by their own number, by the bar before them, or by order."""
    for row in records:
        if row.step is None and (own := row.values.get("global_step/max_steps")) is not None:
            row.step = whole(str(own).partition("/")[0])
            if (total := whole(str(own).partition("/")[2])) is not None:
                found.marks["max_steps"] = total
    if all(row.step is not None for row in rows):
        return
    seen = [whole(row.values.get("#bar")) or 0 for row in rows]
    skipped, total = _before_first(rows), found.marks["max_steps"]
    buffered = _buffered(seen, total) if not skipped else None
    bars = _regular(seen)
    increasing = bars[:1] > [0] and all(one < two for one, two in pairwise(bars))
    fits = not total or not bars or bars[-1] <= total
    if increasing and fits and buffered is None and _proportional(rows, bars):
        for row, bar in zip(rows, bars, strict=True):
            row.step = bar
        run.notes.append("Steps are numbered by the progress bar before each record.")
        return
    apart = buffered or (_distance(seen) if increasing else None) or 1
    for order, row in enumerate(rows, 1):
        row.step = apart * (order + (skipped or 0))
        row.values.pop("#bar_s", None)  # of another record
    if apart > 1 or buffered:
        run.notes.append(
            f"Steps are numbered by order, {apart} apart as the bars tell: the bars do not stand "
            "beside their records, because the output was buffered."
        )
    elif skipped is None and any(seen):
        run.numbered = False
        run.notes.append(
            "The records have no number of their step, and the bars do not stand beside them: "
            "numbers are their order."
        )
    elif skipped is None:
        run.notes.append(
            "Steps are numbered by order, because the records have no number; the log may begin "
            "later than its run."
        )
    else:
        run.notes.append("Steps are numbered by order and epoch: the records have no number.")


def _buffered(bars: Sequence[int], total: int) -> int | None:
    """Steps between two records of output that was written in bursts of several records.

    A burst stands behind the bar of its last record, or of the one behind it, which is cut. So that
    with `d` steps between records, of which `j` end with the burst, `d j <= bar < d (j + 2)`.
    """
    places = [place for place, bar in enumerate(bars) if bar > 0]
    if places[:1] != [0] or len(places) > (len(bars) + 1) // 2 or len(bars) < 4:
        return None
    ends = [*places[1:], len(bars)]
    if len(places) == 1 and bars[0] != total:
        return None  # a paste may begin anywhere
    if len(places) > 1:
        ends.pop()  # of the last burst more may have been written
        if bars[places[-1]] == total:  # at the end of the run, however few records there were
            places.pop()
    low = max(bars[place] // (end + 2) + 1 for place, end in zip(places, ends, strict=False))
    high = min(bars[place] // end for place, end in zip(places, ends, strict=False))
    high = min(high, total // len(bars)) if total else high
    steps = [bars[place] for place in places]
    for apart in range(max(1, low), high + 1):
        gaps = zip(pairwise(steps), pairwise(places), strict=True)
        if all(
            abs(two - one - apart * (end - begin)) <= apart for (one, two), (begin, end) in gaps
        ):
            return apart if low == high else None
    return None


def _distance(bars: Sequence[int]) -> int | None:
    """Steps between two records, if all bars tell the same whole number."""
    known_bars = [(place, bar) for place, bar in enumerate(bars) if bar > 0]
    apart = {(b - a) / (j - i) for (i, a), (j, b) in pairwise(known_bars)}
    if len(apart) != 1 or (distance := min(apart)) < 1 or distance != int(distance):
        return None
    return int(distance)


def _regular(bars: Sequence[int]) -> list[int]:
    """Give records without a bar, as the first of a paste, their place among equal distances."""
    distance = _distance(bars)
    if distance is None:
        return list(bars)
    place, bar = next((place, bar) for place, bar in enumerate(bars) if bar > 0)
    filled = [bar + distance * (one - place) for one in range(len(bars))]
    return filled if filled[0] > 0 else list(bars)


def _proportional(rows: Sequence[Row], steps: Sequence[int]) -> bool:
    """False if the epochs of the first and the last record do not grow with these steps."""
    ends = []
    for row, step in ((rows[0], steps[0]), (rows[-1], steps[-1])):
        epoch = known(row.values.get("epoch"))
        if epoch is None or "epoch" not in row.values:
            return True
        error = 2 * resolution(row.values["epoch"])
        ends.append(((epoch - error) / step, (epoch + error) / step))
    (low, high), (least, most) = ends
    return low <= most and least <= high


def _before_first(rows: Sequence[Row]) -> int | None:
    """Records before the first one, as far as the epochs tell, which grow by the same amount."""
    epochs = [known(row.values.get("epoch")) for row in rows]
    told = [one for one in epochs if one is not None]
    if len(rows) < 2 or len(told) < len(rows):
        return None
    error = 2 * resolution(rows[0].values["epoch"])
    record = (told[-1] - told[0]) / (len(told) - 1)
    if record <= 0 or any(
        abs(told[0] + record * place - one) > error + 0.25 * record
        for place, one in enumerate(told)
    ):
        return None
    count = told[0] / record
    spread = error / record + count * error / (record * (len(told) - 1))
    if spread > 2.5 or abs(count - round(count)) > 0.25 + spread / 2 or count < 0.5:
        return None
    return round(count) - 1


def _validations(records: Sequence[Row], run: ImportedRun) -> None:
    last: int | None = 0
    for row in records:
        if "eval_reward" in row.values:
            run.validation.append(
                {
                    "step": row.step if row.step is not None else last,
                    "value": known(row.values["eval_reward"]),
                }
            )
        elif row.step is not None:
            last = row.step


def _finish(row: Row, step: Step, run: ImportedRun) -> None:
    values = row.values
    for name in ("#bar", "#bar_s"):
        step.other.pop(name, None)
        run.unknown.pop(name, None)
    if _OLD_LENGTH in values and "response_length_mean" not in step.values:
        if run.framework == "unsloth":
            run.ambiguous["response_length_mean"] = (
                "unsloth's `completion_length` is not the mean length of completions"
            )
        else:
            step.values["response_length_mean"] = known(values[_OLD_LENGTH])
    step.values["#tokens"] = known(values.get("num_tokens"))
    step.values["#epoch"] = known(values.get("epoch"))
    step.values["#bar_s"] = known(values.get("#bar_s"))
    if "#bar_s" not in values and (spent := seconds(str(values.get("elapsed_time", "")))):
        step.values["#bar_s"] = spent[0]
    if (
        isinstance(values.get("reward"), str)
        and row.kind == "train"
        and "e+" in str(values.get("num_tokens", ""))
    ):
        note_once(run, "Values have four significant digits (transformers 5).")


def _differences(steps: Sequence[Step], run: ImportedRun, *, timed: bool) -> None:
    """Tokens of a step from the running total, and its time from the bar where none is printed."""
    before: Step | None = None
    for one in steps:
        total = one.values.get("#tokens")
        if isinstance(total, float):
            previous = (
                before.values.get("#tokens")
                if before is not None
                else (0.0 if _first(steps) else None)
            )
            if isinstance(previous, float) and total >= previous:
                span = one.step - before.step if before is not None else one.step
                one.values["tokens"] = (total - previous) / max(1, span)
                run.derived["tokens"] = "differences of `num_tokens`, which counts from the start"
        now, then = one.values.get("#bar_s"), before and before.values.get("#bar_s")
        if (
            timed
            and before is not None
            and isinstance(now, float)
            and isinstance(then, float)
            and now >= then
            and one.step > before.step
        ):
            one.values["step_time_s"] = (now - then) / (one.step - before.step)
            one.values["step_time_resolution_s"] = 1 / (one.step - before.step)
            run.derived["step_time_s"] = "differences of the bar's elapsed time, in whole seconds"
        before = one
    for one in steps:
        for name in ("#tokens", "#epoch", "#bar_s"):
            one.values.pop(name, None)


def _first(steps: Sequence[Step]) -> bool:
    """True if the first record is that of the run's beginning, as far as epochs tell."""
    if len(steps) < 2:
        return bool(steps) and steps[0].step == 1 and isinstance(steps[0].values["#bar_s"], float)
    first, second = (one.values.get("#epoch") for one in steps[:2])
    if not isinstance(first, float) or not isinstance(second, float) or second <= first:
        return False
    return abs(first - (second - first)) <= 0.5 * (second - first)


def _settle(found: Rows, run: ImportedRun) -> None:
    marks = found.marks
    for name in ("gpus", "samples_per_step", "max_steps"):
        if marks[name] and run.framework == "unsloth":
            run.settings.setdefault(name, marks[name])
    if marks["max_steps"]:
        run.settings.setdefault("max_steps", marks["max_steps"])
    if run.framework == "unsloth" and marks["bar step"] > 0 and "step_time_s" in run.missing:
        run.settings["step_time_mean_s"] = marks["bar seconds"] / marks["bar step"]
        run.derived["step_time_mean_s"] = "elapsed time of the bar / its step"
