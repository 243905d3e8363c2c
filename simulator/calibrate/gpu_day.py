"""Calibrate this library's trainer and engine to the facts of a day on a GPU (`tools/gpu_day`).

    train step --> trainer.time_factor, fixed_s        of the fastest kind of step
    decode step, prefill --> rollout.decode_*, prefill_*
    product, attention, copy --> notes: what this card reaches of what the simulator assumes

Each line of the file is one fact as a JSON object. Facts that failed or were skipped are counted in
a note. The file may have several parts of a day, one after another.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from areal_lab.host.foreign import parse_json, read_table_text
from areal_lab.host.terminal import printable
from simulator.calibrate.engine import fit_decode, fit_prefill
from simulator.calibrate.fit import EnginePoint, PartFit
from simulator.calibrate.fit_run import Calibration, own_settings
from simulator.calibrate.step_table import MeasuredStep, StepTableFit, fit_steps
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.costs.trainers import SPEEDS
from simulator.workload.recorded_run import Value

KIND: Final = "areal_lab"
_LARGE: Final = 4096
"""Rows from which a product counts as large."""
_AS_MEASURED: Final = ("trainer.proximal_logprobs=false", "workload.minibatches=1")
"""A step of one minibatch, whose own forward pass has the proximal log-probs."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One line."""

    path: Path
    line: int
    values: Mapping[str, Any]

    def number(self, name: str) -> float:
        """A positive number.

        Raises:
            ValueError: it is missing, or not one.
        """
        value: Any = self.values.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        raise ValueError(
            f"{self.path}, line {self.line}: {name} is {json.dumps(value, default=str)[:80]}, "
            "but must be a number > 0; leave the line out"
        )


def read_day(path: Path) -> list[Fact]:
    """The facts of a file; blank lines are left out.

    Raises:
        ValueError: there is no file or no fact, or a line is none.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist (looked in {Path.cwd()})")
    found = []
    for number, line in enumerate(read_table_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            values = parse_json(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is not valid JSON: {error}") from error
        if not isinstance(values, dict) or not isinstance(values.get("fact"), str):
            raise ValueError(
                f"{path}, line {number} is not a fact of tools.gpu_day: it must be an object with "
                'a "fact"'
            )
        found.append(Fact(path, number, values))
    if not found:
        raise ValueError(f"{path} is empty; python -m tools.gpu_day train decode writes facts")
    return found


def calibrate_day(path: Path, overrides: Sequence[str] = ()) -> Calibration:
    """Fit what the file has facts of.

    Args:
        overrides: settings `a.b=c` that are copied into the result; `model` chooses one of the
            measured models, by default the one with the most facts.

    Raises:
        ValueError: there are too few steps of the engine, and none of the trainer.
    """
    own = own_settings(overrides)
    read = read_day(path)
    facts = [fact for fact in read if fact.values["fact"] != "end"]
    usable = [fact for fact in facts if not {"failed", "skipped"} & fact.values.keys()]
    model = str(own.get("model") or _model(usable, path))
    of_model = [fact for fact in usable if fact.values.get("model") == model]
    machine = next((f.values for f in usable if f.values["fact"] == "machine"), {})
    gpu = str(own.get("cluster.gpu") or machine.get("gpu") or "")
    notes = [*_origin(read, machine), *_ceilings(usable, gpu)]
    if lost := len(facts) - len(usable):
        notes.append(f"{lost} of {len(facts)} facts failed or were skipped")
    settings: dict[str, Value] = {}
    try:
        find_model(model)
        settings["model"] = model
    except ValueError:
        notes.append(
            f"the simulator has no model {model}: set model in the file to one of its speed"
        )
    if gpu:
        settings["cluster.gpu"] = gpu
    training = None
    if "model" in settings and gpu:
        training = _fit_training(of_model, path, model, gpu, notes)
    else:
        notes.append("training steps need a known model and card (cluster.gpu): not fitted")
    parts = _fit_engine(of_model, notes)
    if training is None and not parts:
        raise ValueError(
            f"{path} has no training step and too few decode steps of {model} to fit; "
            + (" ".join(notes[-2:]) or "run: python -m tools.gpu_day train decode")
        )
    about = printable(f"fitted to the day {path.name} ({len(of_model)} facts of {model})")
    settings |= {name: value for part in parts for name, value in part.settings.items()}
    if training is not None:
        settings |= training.settings
    settings["calibration.source"] = about
    settings |= {f"calibration.{part.name}_error": part.held_out_error for part in parts}
    return Calibration(
        source=path,
        about=about,
        run=None,
        parts=tuple(parts),
        lengths=None,
        settings={**settings, **own},
        notes=tuple(notes),
    )


def _model(facts: Sequence[Fact], path: Path) -> str:
    counts: dict[str, int] = defaultdict(int)
    for fact in facts:
        if isinstance(name := fact.values.get("model"), str):
            counts[name] += 1
    if not counts:
        raise ValueError(
            f"{path} has no fact of a model; run: python -m tools.gpu_day train decode"
        )
    return max(counts, key=lambda name: counts[name])


def _origin(facts: Sequence[Fact], machine: Mapping[str, Any]) -> Iterator[str]:
    ends = [fact.values for fact in facts if fact.values["fact"] == "end"]
    if any(end.get("tiny") or end.get("device") == "cpu" for end in ends):
        yield "measured with tiny shapes or on a CPU: costs of no GPU"
    elif machine.get("card"):
        yield printable(f"measured on one {machine['card']}")


def _ceilings(facts: Sequence[Fact], gpu: str) -> Iterator[str]:
    """What the card reaches, beside what the trainer's speed assumes."""
    if not gpu:
        return
    known, assumed = find_gpu(gpu), SPEEDS[KIND]
    large = [
        fact.number("tflops") * 1e12 / known.flops_per_s
        for fact in facts
        if fact.values["fact"] == "product" and fact.number("rows") >= _LARGE
    ]
    if large:
        yield (
            f"large products reach {median(large):.0%} of the peak; the simulator has "
            f"{assumed.matrix_efficiency:.0%}"
        )
    attention = [
        fact.number("both_tflops") * 1e12 / known.flops_per_s
        for fact in facts
        if fact.values["fact"] == "attention"
    ]
    if attention:
        yield (
            f"attention reaches {median(attention):.0%} of the peak, forward and backward; the "
            f"simulator has {assumed.attention_efficiency:.0%}"
        )
    copies = [
        fact.number("read_and_written_tb_per_s") * 1e12 / known.memory_bytes_per_s
        for fact in facts
        if fact.values["fact"] == "copy on the device"
    ]
    if copies:
        yield f"copies on the device reach {median(copies):.0%} of the data sheet's bandwidth"


def _fit_training(
    facts: Sequence[Fact], path: Path, model: str, gpu: str, notes: list[str]
) -> StepTableFit | None:
    kinds: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        if fact.values["fact"] == "train step":
            kinds[_kind(fact.values)].append(fact)
    if not kinds:
        notes.append("no training step was measured")
        return None
    # Steps of two sizes separate a fixed time; of as many, those of the fastest kind.
    most = max(map(len, kinds.values()))
    speeds = {
        name: min(fact.number("step_s") / _tokens(fact) for fact in of)
        for name, of in kinds.items()
        if len(of) == most
    }
    chosen = min(speeds, key=lambda name: speeds[name])
    steps = [
        MeasuredStep(
            row=fact.line,
            seconds=fact.number("step_s"),
            lengths=[int(fact.number("sequence_tokens"))] * int(fact.number("sequences")),
            gpus=1,
            micro_batch_tokens=int(fact.number("micro_batch_tokens")),
            minibatches=1,
        )
        for fact in kinds[chosen]
    ]
    named = (f"trainer.kind={KIND}", f"model={model}", f"cluster.gpu={gpu}")
    config = load_simulation(None, (*named, *_AS_MEASURED))
    fit = fit_steps(path, steps, config, own={})
    notes.append(f"training: steps with {chosen}")
    notes.extend(fit.lines())
    return fit


def _kind(values: Mapping[str, Any]) -> str:
    compiled = "compiled" if values.get("compiled") else "not compiled"
    kept = values.get("checkpointing")
    return printable(
        f"{values.get('attention')} attention, checkpointing {str(kept).lower()}, {compiled}, "
        f"prompts of {values.get('prompt_tokens')} tokens"
    )


def _tokens(fact: Fact) -> float:
    return fact.number("sequence_tokens") * fact.number("sequences")


def _fit_engine(facts: Sequence[Fact], notes: list[str]) -> list[PartFit]:
    """Decode steps, and prefills in addition to them; [] with too few."""
    steps, prefills = (
        [fact for fact in facts if fact.values["fact"] == name]
        for name in ("decode step", "prefill")
    )
    try:
        decode = fit_decode(
            [
                EnginePoint(
                    seconds=fact.number("step_s"),
                    steps=1.0,
                    sequences=fact.number("rows"),
                    context_tokens=fact.number("rows") * fact.number("context"),
                    place=place,
                )
                for place, fact in enumerate(steps, 1)
            ],
            "decode steps",
        )
    except ValueError as error:
        if any(f"line {fact.line}:" in str(error) for fact in steps):
            raise
        notes.append(str(error))
        return []
    points = [
        EnginePoint(
            seconds=fact.number("step_s"),
            steps=1.0,
            sequences=1.0,
            context_tokens=fact.number("tokens"),
            prompt_tokens=fact.number("tokens"),
            prompt_pairs=fact.number("pairs"),
            place=place,
        )
        for place, fact in enumerate(prefills, 1)
    ]
    prefill = fit_prefill(points, decode) if points else None
    if prefill is None:
        notes.append("too few prefills to fit: the cost model computes them")
        return [decode]
    return [decode, prefill]
