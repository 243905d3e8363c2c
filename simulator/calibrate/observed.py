"""Set up a simulation from the log of another framework, and fit it to the logged step.

    imported log + settings of the user --observe--> Observed (seconds of a step by part, settings)
                                        --fit_step--> FittedStep: factors of trainer and engines
                                                      from the logged parts, other_s from the rest

An imported log is the object that `areal-lab import --json` prints. What a log cannot say is asked
for in one message; what is assumed is listed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from simulator.assembly.simulate import replicate
from simulator.calibrate.fit_run import own_settings
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.config.schema import SimulationConfig
from simulator.report.notes import LARGE_REST, rest_cause
from simulator.report.step_parts import part, seconds_of
from simulator.run.result import Replicated
from simulator.stats.least_squares import root_near
from simulator.workload.recorded_run import Value

PARTS: Final[Mapping[str, Sequence[str]]] = {
    "generation": ("generation_s",),
    "wait": ("wait_for_batch_s",),
    "log-probs": ("logprobs_s", "old_logprob_s", "reference_s"),
    "update": ("training_s", "critic_s"),
    "rewards, advantages": ("reward_s", "advantage_s"),
    "weights": ("weight_sync_s",),
}
"""Parts of a step, with the logged seconds that they are the sum of."""
_TRAINERS: Final[Mapping[str, str]] = {
    "areal": "areal",
    "megatron-rl": "megatron",
    "miles": "megatron",
    "nemo-rl": "megatron",
    "prime-rl": "prime_rl",
    "slime": "megatron",
}
"""Kind of trainer of a framework; the others have FSDP2."""
_ENGINES: Final[Mapping[str, str]] = {"vllm": "vllm-0.8", "sglang": "sglang-0.5"}
_FACTORS: Final = (0.05, 20.0)
_USUAL: Final = (0.5, 2.0)
"""Beyond these, a factor says that a setting is wrong rather than what a system costs."""
_TRAINING: Final = "trainer.time_factor"
_GENERATION: Final = "rollout.time_factor"
_OTHER: Final = "colocation.other_s"
_TOO_LONG: Final = (
    "; what is missing would be negative: parts of the step are simulated too slow, most likely "
    "because the lengths are too long"
)
_OTHER_S: Final = (0.01, 3600.0)
_MOST_TRUNCATED: Final = 0.5
"""Above this share, mean and share say nothing of the lengths that the cap cut off."""
_START: Final = {"workload.steps": 6, "workload.warmup_steps": 2}
"""Steps of a synchronous run, in which no pipeline fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A logged run, as the simulator sees it."""

    framework: str
    asynchronous: bool
    steps: int
    """Logged steps that the medians are of."""
    step_s: float
    """Median seconds per step, validation left out."""
    parts: Mapping[str, float]
    """Median seconds of the logged parts, by name of `PARTS`."""
    settings: Mapping[str, Value]
    """Settings of `simulate`, by dotted name, without fitted ones."""
    own: Mapping[str, Value]
    """Those of them that the user gave."""
    assumed: Sequence[str] = field(default=())
    """What neither the log nor the user says, a line each."""

    @property
    def other_s(self) -> float:
        """Seconds of a step that no logged part explains; below 0 where parts overlap."""
        return self.step_s - sum(self.parts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedStep:
    """The simulated run that is fitted to the logged step."""

    observed: Observed
    config: SimulationConfig
    run: Replicated
    fitted: Mapping[str, float]
    """Fitted settings, by dotted name."""
    lines: Sequence[str]
    """Result of the fit, a line for each number."""

    def simulated(self) -> dict[str, float]:
        """Seconds per step by part, mean over seeds."""
        each = [seconds_of(result) for result in self.run.results]
        return {name: math.fsum(one[name] for one in each) / len(each) for name in each[0]}


def observe(log: Mapping[str, Any], overrides: Sequence[str] = ()) -> Observed:
    """Set up a simulation of a logged run.

    Args:
        log: the object that `areal-lab import --json` prints.
        overrides: settings of `simulate`, `a.b=c` each; `gpus=16xH100` gives number and type.

    Raises:
        ValueError: nothing can be simulated without what the log does not say: one line for each of
            these, with the setting and where to find the value; or a setting is wrong.
    """
    overrides = [one for given in overrides for one in _with_gpu_type(given)]
    own = own_settings(overrides)
    steps = _steady(log.get("steps") or [])
    seconds = [one for one in map(_step_s, steps) if one]
    if not seconds:
        raise ValueError(
            "the log has no seconds per step, so that there is nothing to compare with; "
            f"areal-lab import read {len(log.get('steps') or [])} steps of it"
        )
    parts = {name: value for name in PARTS if (value := _part_s(name, steps)) is not None}
    found = _Settings(log=log, steps=steps, own=own)
    mode = log.get("mode") or "synchronous"
    asynchronous = mode != "synchronous" or "wait" in parts
    settings = found.all(asynchronous=asynchronous, parts=parts)
    load_simulation(None, settings)
    return Observed(
        framework=str(log.get("framework") or "unknown"),
        asynchronous=asynchronous,
        steps=len(seconds),
        step_s=median(seconds),
        parts=parts,
        settings=settings,
        own=own,
        assumed=found.assumed,
    )


def fit_step(observed: Observed, *, seeds: int = 2) -> FittedStep:
    """Fit one number to each logged part, so that the simulated step is the logged one.

    `trainer.time_factor` makes training as long as logged. Where the same GPUs generate and train,
    `rollout.time_factor` does so for generation, and `colocation.other_s` is what is then missing
    in the step. The generation of an asynchronous run is hidden behind training: it is predicted.

    Args:
        seeds: simulated runs whose mean is fitted.
    """
    settings = {**_START, "seeds": seeds, "name": observed.framework, **observed.settings}
    fitted: dict[str, float] = {}
    lines: list[str] = []
    start = {
        **{name: float(settings.get(name, 1.0)) for name in (_TRAINING, _GENERATION)},
        _OTHER: float(settings.get(_OTHER, 0.0)),
    }
    runs: dict[tuple[float, ...], Replicated] = {}

    def run(more: Mapping[str, float]) -> Replicated:
        tried = tuple({**start, **more}[name] for name in start)
        if tried not in runs:
            config = load_simulation(None, {**settings, **more})
            runs[tried] = replicate(config, processes=1)
        return runs[tried]

    def fit(name: str, measured_s: float, of: str, ends: tuple[float, float]) -> None:
        value = part(of)

        def gap(tried: float) -> float:
            simulated_s = run({**fitted, name: _rounded(tried)}).estimate(value).mean
            return math.log(simulated_s / measured_s)

        def nearer(tried: float, off: float) -> float:
            """The value if the part is proportional to the factor, or contains the seconds."""
            if name == _OTHER:
                return tried - measured_s * math.expm1(off)
            return tried * math.exp(-off)

        root = root_near(gap, start[name], nearer, *ends)
        fitted[name] = _rounded(root.value)
        if not root.reached:
            off = math.exp(gap(root.value)) - 1
            lines.append(
                f"{name}={fitted[name]:g} is the end of its range: the simulated {of} is "
                f"{off:+.0%} off the logged {measured_s:.4g} s; ratios are of simulated runs"
                + (_TOO_LONG if name == _OTHER and off > 0 else "")
            )
        else:
            line = f"{name}={fitted[name]:g}, so that {of} takes {measured_s:.4g} s as logged"
            if name != _OTHER and not _USUAL[0] <= root.value <= _USUAL[1]:
                line += "; that is far from 1, so check the type of GPU, the model and the layout"
            if name == _OTHER and root.value > LARGE_REST * measured_s:
                line += rest_cause(root.value / measured_s)
            lines.append(line)

    if "update" in observed.parts:
        fit(_TRAINING, observed.parts["update"], "update", _FACTORS)
    if settings["cluster.placement"] == "colocated":
        if "generation" in observed.parts:
            fit(_GENERATION, observed.parts["generation"], "generation", _FACTORS)
        fit(_OTHER, observed.step_s, "step", _OTHER_S)
    config = load_simulation(None, {**settings, **fitted})
    return FittedStep(
        observed=observed, config=config, run=run(fitted), fitted=fitted, lines=tuple(lines)
    )


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


class _Settings:
    """Settings of a logged run: the user's first, then the log's, then assumptions."""

    def __init__(
        self,
        *,
        log: Mapping[str, Any],
        steps: Sequence[Mapping[str, Any]],
        own: Mapping[str, Value],
    ) -> None:
        self.log, self.steps, self.own = log, steps, own
        self.assumed: list[str] = []
        self._missing: list[str] = []

    def all(self, *, asynchronous: bool, parts: Mapping[str, float]) -> dict[str, Value]:
        """Every setting, by dotted name.

        Raises:
            ValueError: a line for each setting that must be given.
        """
        found: dict[str, Value | None] = {
            "model": self._model(),
            "cluster.gpus": self._need(
                "cluster.gpus", self._gpus(), "gpus=16xH100: the number and type of all GPUs"
            ),
            "cluster.gpu": self._gpu(),
            **self._workload(),
            **self._trainer(parts),
            **self._rollout(),
            **self._placement(asynchronous),
        }
        if self._missing:
            raise ValueError("the log does not say, so give:\n  " + "\n  ".join(self._missing))
        logged = {name: value for name, value in found.items() if value is not None}
        return {**logged, **self.own}

    def _need(self, name: str, value: Any, where: str) -> Any:
        """The user's or the log's value; asked for if there is none."""
        if name in self.own:
            return self.own[name]
        if value is None and where not in self._missing:
            self._missing.append(where)
        return value

    def _assume(self, name: str, value: Any, why: str) -> Any:
        """The user's value; else one that is listed as an assumption."""
        if name in self.own:
            return self.own[name]
        self.assumed.append(f"{name}={value}: {why}")
        return value

    def _mean(self, name: str) -> float | None:
        return _median_of(name, self.steps)

    def _gpus(self) -> int | None:
        return _whole(self.log.get("gpus")) or _whole(self._mean("gpus"))

    def _gpu(self) -> Any:
        if self._gpus() is None and "cluster.gpus" not in self.own:
            return None  # asked for with their number
        return self._need(
            "cluster.gpu", None, "gpu=H100: the type; wandb-metadata.json has it as `gpu`"
        )

    def _model(self) -> Any:
        logged = self.log.get("model")
        if logged is not None and "model" not in self.own:
            try:
                find_model(str(logged))
            except ValueError:
                logged = None
        return self._need(
            "model", logged, "model=Qwen/Qwen3-4B: a name, or the path of its config.json"
        )

    def _workload(self) -> dict[str, Any]:
        samples = _whole(self.log.get("samples_per_step")) or _whole(self._mean("samples_per_step"))
        prompts = _whole(self.log.get("prompts_per_step"))
        each = _whole(self.log.get("samples_per_prompt"))
        name = "workload.samples_per_prompt"
        each = self._need(
            name, each, f"{name}=8: responses to each prompt (rollout.n, num_generations)"
        )
        if prompts is None and samples and each and samples % each == 0:
            prompts = samples // each
        name = "workload.prompts_per_batch"
        prompts = self._need(
            name, prompts, f"{name}=128: prompts of a training step (data.train_batch_size)"
        )
        lengths = self._lengths(prompts * each if prompts and each else None)
        return {
            "workload.prompts_per_batch": prompts,
            "workload.samples_per_prompt": each,
            "workload.minibatches": self._minibatches(),
            **lengths,
        }

    def _minibatches(self) -> Any:
        name = "workload.minibatches"
        logged = _whole(self.log.get("minibatches")) or _whole(self._mean("optimizer_steps"))
        if name in self.own or logged:
            return self.own.get(name, logged)
        return self._assume(name, 1, "optimizer steps of a batch are not logged")

    def _lengths(self, samples: int | None) -> dict[str, Any]:
        name = "workload.answers.mean_tokens"
        mean = self._need(
            name, self._mean("response_length_mean"), f"{name}=2000: mean response length"
        )
        share = self._mean("truncated_fraction")
        longest = max((one.get("response_length_max") or 0 for one in self.steps), default=0)
        cap = _whole(self.log.get("max_response"))
        if cap is None and share and longest:
            cap = int(longest)  # a truncated response has the length of the cap
        name = "workload.answers.max_tokens"
        cap = self._need(name, cap, f"{name}=8192: the cap (data.max_response_length)")
        found: dict[str, Any] = {
            "workload.answers.mean_tokens": mean,
            "workload.answers.max_tokens": cap,
            "workload.prompt_tokens": self._prompt(mean, samples),
        }
        given = {"workload.answers.sigma", "workload.answers.tail", "workload.answers.kind"}
        name = "workload.answers.truncated_share"
        if given & self.own.keys() or name in self.own:
            return found
        if share and share <= _MOST_TRUNCATED:
            found[name] = share
            return found
        why = (
            f"{share:.0%} of the responses are cut off, which does not say how long they would be"
            if share
            else "the log has no share of truncated responses to fit the spread to"
        )
        self.assumed.append(f"workload.answers.tail=math: {why}")
        found["workload.answers.tail"] = "math"
        return found

    def _prompt(self, response: Any, samples: int | None) -> Any:
        name = "workload.prompt_tokens"
        logged = self._mean("prompt_length_mean")
        tokens = self._mean("tokens")
        if logged is None and tokens and response and samples:
            logged = tokens / samples - response
        if name in self.own or (logged is not None and logged >= 0):
            return self.own.get(name, round(logged or 0))
        return self._assume(name, 256, "prompt lengths are not logged")

    def _trainer(self, parts: Mapping[str, float]) -> dict[str, Any]:
        framework = str(self.log.get("framework") or "")
        kind = _TRAINERS.get(framework, "fsdp2")
        joined = "log-probs" in parts and self._mean("logprobs_s") is not None
        if joined:
            self.assumed.append(
                "log-probs of the old and of the reference policy: the log joins their seconds"
            )
        return {
            "trainer.kind": self._assume("trainer.kind", kind, f"the usual trainer of {framework}"),
            "trainer.critic": self._mean("critic_s") is not None,
            "trainer.proximal_logprobs": joined or self._mean("old_logprob_s") is not None,
            "trainer.reference_logprobs": joined or self._mean("reference_s") is not None,
        }

    def _rollout(self) -> dict[str, Any]:
        engine = _ENGINES.get(str(self.log.get("engine") or "").lower())
        name = "rollout.tensor_parallel"
        parallel = _whole(self.log.get("engine_tp"))
        if parallel is None:
            parallel = self._assume(name, 1, "GPUs of an engine are not logged")
        if engine is None and "rollout.engine" not in self.own:
            self.assumed.append("rollout.engine=default: the engine is not logged")
        return {name: parallel, "rollout.engine": engine}

    def _placement(self, asynchronous: bool) -> dict[str, Any]:
        if not asynchronous:
            return {
                "cluster.placement": self._assume(
                    "cluster.placement", "colocated", "the usual one of a synchronous run"
                ),
                "schedule.name": "synchronous",
            }
        logged = _whole(self.log.get("rollout_gpus"))
        name = "cluster.rollout_gpus"
        split = self._need(name, logged, "rollout_gpus=8: the GPUs that generate; the others train")
        if self.log.get("mode") == "one step off":
            return {name: split, "schedule.name": "one_step_overlap", **_OVER_NETWORK}
        eta = self._assume("schedule.eta", 1.0, "the bound on staleness is not logged")
        return {name: split, "schedule.name": "asynchronous", "schedule.eta": eta, **_OVER_NETWORK}


_OVER_NETWORK: Final = {"cluster.placement": "disaggregated", "weights.backend": "nccl"}


def _with_gpu_type(override: str) -> list[str]:
    """`gpus=16xH100` as two settings."""
    name, _, value = override.partition("=")
    count, cross, kind = value.partition("x")
    if name.strip() in ("gpus", "cluster.gpus") and cross and count.strip().isdigit():
        return [f"cluster.gpus={count.strip()}", f"cluster.gpu={kind.strip()}"]
    return [override]


def _steady(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Steps without start-up: not the first of three or more, and none that is marked."""
    kept = [one for one in steps if not one.get("warm_up")]
    kept = [one for one in kept if one.get("role") != "orchestrator"] or kept
    return kept[1:] if len(kept) >= 3 and len(kept) == len(steps) else kept


def _step_s(step: Mapping[str, Any]) -> float | None:
    names = ("step_time_without_validation_s", "step_time_s", "trainer_step_s")
    return next((step[name] for name in names if step.get(name)), None)


def _part_s(name: str, steps: Sequence[Mapping[str, Any]]) -> float | None:
    """Median seconds of a part, over the steps that log some of it."""
    sums = []
    for step in steps:
        logged = [step[one] for one in PARTS[name] if step.get(one) is not None]
        if logged:
            sums.append(math.fsum(logged))
    return median(sums) if sums else None


def _median_of(name: str, steps: Sequence[Mapping[str, Any]]) -> float | None:
    values = [one[name] for one in steps if one.get(name) is not None]
    return median(values) if values else None


def _whole(value: Any) -> int | None:
    return int(value) if value else None
