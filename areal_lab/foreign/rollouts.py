"""Files of samples: reward, length and truncation of a step from what a run has dumped.

    verl         DATA_DIR/N.jsonl        input output gts score step
    slime        PATH/N.pt               {"rollout_id", "samples"}, by torch with weights_only
    NeMo-RL      train_data_stepN.jsonl  content rewards input_lengths token_loss_mask ...
    TRL          completions_N.parquet   step prompt completion REWARD... advantage

Texts are not kept. A pickle is never executed: without torch it is refused.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from areal_lab.foreign.quantities import known, whole
from areal_lab.foreign.record import Attempt, ImportedRun, Step
from areal_lab.foreign.scan import Row

FILE_BYTES: Final = 2 * 1024**3
_STEP_IN_NAME: Final = re.compile(r"(?:step_?|completions_|^)(\d{1,9})$")


def number_in_name(path: Path) -> int | None:
    """Step in a file's name, such as `train_data_step12.jsonl` or `12.pt`."""
    found = _STEP_IN_NAME.search(path.name.partition(".")[0])
    return int(found[1]) if found is not None else None


def from_samples(rows: Sequence[Row], numbers: Sequence[int | None]) -> ImportedRun:
    """Steps of dumped samples.

    Args:
        rows: one a sample, with `reward` and perhaps `length`.
        numbers: step by number of the file, for samples that do not have theirs.
    """
    kind = rows[0].kind.removesuffix(" sample")
    run = ImportedRun(framework=kind, step_base=1)
    by_step: dict[int, list[Row]] = {}
    for row in rows:
        number = row.step if row.step is not None else numbers[row.source]
        if number is None:
            run.unread["samples without the number of their step"] += 1
        else:
            by_step.setdefault(number, []).append(row)
    if not by_step:
        run.refused = "The samples have no step, and the file's name has no number."
        return run
    run.attempts = [Attempt(steps=[_step(one, by_step[one]) for one in sorted(by_step)])]
    run.derived = dict.fromkeys(run.steps[0].values, "samples of a step")
    if kind == "verl":
        run.notes.append("The dump has texts and no lengths in tokens.")
    return run


def _step(number: int, rows: Sequence[Row]) -> Step:
    step = Step(step=number, values={"samples_per_step": len(rows)})
    step.values["reward_mean"] = _mean([known(row.values["reward"]) for row in rows])
    lengths = [known(row.values["length"]) for row in rows if "length" in row.values]
    if lengths:
        step.values["response_length_mean"] = _mean(lengths)
        step.values["response_length_max"] = max(one for one in lengths if one is not None)
    return step


def read_pickle(path: Path) -> ImportedRun:
    """Read slime's `N.pt` with torch's `weights_only`, which executes nothing."""
    if importlib.util.find_spec("torch") is None:
        return ImportedRun(
            framework=None,
            refused=f"{path.name} is a pickle, which is read with torch's weights_only or not at "
            "all, and torch is not installed.",
        )
    if path.stat().st_size > FILE_BYTES:
        raise ValueError(
            f"{path} has more than {FILE_BYTES:,} bytes, which is the most that is read"
        )
    torch: Any = importlib.import_module("torch")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # of many types; the text would repeat what the file has
        return ImportedRun(
            framework=None,
            refused=f"{path.name} is not a file of tensors and plain values; anything else in a "
            "pickle would have to be executed.",
        )
    samples = content.get("samples") if isinstance(content, dict) else None
    if not isinstance(samples, list) or not all(isinstance(one, dict) for one in samples):
        return ImportedRun(framework=None, refused=f"{path.name} has no list of samples.")
    return _from_slime(samples, whole(content.get("rollout_id")))


def _from_slime(samples: Sequence[Mapping[str, Any]], number: int | None) -> ImportedRun:
    run = ImportedRun(framework="slime", step_base=0)
    if number is None:
        run.refused = "The file has samples, but not the number of their rollout."
        return run
    lengths = [known(one.get("response_length")) for one in samples]
    rewards = [known(one.get("reward")) for one in samples]
    states = [str(one.get("status", "")).lower() for one in samples]
    step = Step(step=number, values={"samples_per_step": len(samples)})
    step.values["reward_mean"] = _mean(rewards)
    step.values["response_length_mean"] = _mean(lengths)
    told = [one for one in lengths if one is not None]
    step.values["response_length_max"] = max(told, default=None)
    if all(states) and states:
        step.values["truncated_fraction"] = sum("truncated" in one for one in states) / len(states)
    run.attempts = [Attempt(steps=[step])]
    run.derived = dict.fromkeys(step.values, "samples of the file")
    return run


def read_parquet(path: Path) -> ImportedRun:
    """Read TRL's `completions_N.parquet`: samples of a step, and their reward if it is one."""
    run = ImportedRun(framework="trl", step_base=1)
    if importlib.util.find_spec("pyarrow") is None:
        run.refused = f"{path.name} is a Parquet file, and pyarrow is not installed."
        return run
    parquet: Any = importlib.import_module("pyarrow.parquet")
    try:
        names = parquet.read_schema(path).names
        texts = {"prompt", "completion", "prompt_id", "step", "advantage", "image", "images"}
        rewards = [one for one in names if one not in texts]
        if not {"step", "completion", "advantage"} <= set(names):
            run.framework, run.refused = None, f"{path.name} has no columns of completions."
            return run
        table = parquet.read_table(path, columns=["step", *rewards]).to_pylist()
    except Exception as error:  # of many types, by the damage
        raise ValueError(
            f"{path} is not a readable Parquet file: {type(error).__name__}"
        ) from error
    numbers = sorted({found for one in table if (found := whole(one.get("step"))) is not None})
    steps = []
    for number in numbers:
        chosen = [one for one in table if whole(one.get("step")) == number]
        step = Step(step=number, values={"samples_per_step": len(chosen)})
        if len(rewards) == 1:
            step.values["reward_mean"] = _mean([known(one[rewards[0]]) for one in chosen])
        steps.append(step)
    run.attempts = [Attempt(steps=steps)]
    run.derived = {"samples_per_step": "rows of a step"}
    if len(rewards) > 1:
        run.ambiguous["reward_mean"] = "the file has several rewards and not their weights"
    run.notes.append("The file has texts and no lengths in tokens.")
    return run


def _mean(values: Sequence[float | None]) -> float | None:
    told = [one for one in values if one is not None]
    return statistics.fmean(told) if told else None
