"""Duration of decode steps: of one, of many in closed form, and the inverse.

    B  sequences that decode together
    C  tokens of context, summed over them; every step adds B

    gpu(B, C) = smooth_max(e_w weights / W, 2 P B / (F e_c))   reading weights, or computing
                + e_kv cache C / W                             reading keys and values
                + e_L layers + e_B B + all-reduces             constant times
    engine(B) = step + B sequence                              CPU, by engine (`engine_cpu`)
    step      = max(gpu, engine + launches) when the engine's CPU works while the GPU does, else
                max(gpu, launches) + engine; CUDA graphs have no launches

For a fixed B the GPU's part grows linearly from step to step, so m steps are a sum of two
arithmetic series: a simulation needs one event per change of the batch, not one per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from simulator.catalogue.gpu import GPU
from simulator.catalogue.transformer import ModelShape
from simulator.costs.coefficients import KernelCoefficients, plain, sequence_read_s, smooth_max
from simulator.costs.communication import engine_all_reduce_s
from simulator.costs.engine_memory import check_tensor_parallel
from simulator.costs.fp8_kernels import FP8Kernels, precise_coefficients
from simulator.costs.measured_engine import ENGINE_S, MeasuredDecode
from simulator.costs.speculation import Speculation
from simulator.costs.weight_bytes import BF16, EngineNumbers

_ROUNDING = 1e-6
"""Fraction of a step that may be missing at its end: times are sums of many floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """Decode steps of one engine: a model on the GPUs of one tensor-parallel group."""

    model: ModelShape
    gpu: GPU
    tensor_parallel: int
    coefficients: KernelCoefficients
    overhead_s: float
    """CPU time of the engine per step, without a slowdown."""
    overhead_sequence_s: float = 0.0
    """CPU time per sequence of the step."""
    launch_s: float = 0.0
    """CPU time to launch the kernels of a step, without a slowdown; 0 with CUDA graphs."""
    overlap: bool = True
    """The engine prepares the next step while the GPU computes."""
    slowdown: float = 1.0
    """Factor on all times of this engine, for stragglers."""
    measured: MeasuredDecode | None = None
    """Replaces the formula."""
    numbers: EngineNumbers = BF16
    """Precision of weights and cache."""
    fp8: FP8Kernels | None = None
    """Speed of products in fp8; None if weights are in bf16."""
    speculation: Speculation | None = None
    """Drafts: seconds are then those of a token, so a step divided by the tokens it adds."""
    context_token_s: float = field(init=False)
    """GPU seconds of a step per token of context."""
    engine_s: float = field(init=False)
    """CPU seconds of a step; 0 for a measured step, which includes them."""
    engine_sequence_s: float = field(init=False)
    """CPU seconds of a step per sequence; 0 for a measured step."""
    floor_s: float = field(init=False)
    """Least seconds of a step without sequences: the engine's CPU and its launches."""
    _base_s: dict[int, float] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("overhead_s", "overhead_sequence_s", "launch_s", "slowdown"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (value == 0 and name == "slowdown"):
                least = "> 0" if name == "slowdown" else ">= 0"
                raise ValueError(f"{name} is {value}, but must be a number {least}")
        check_tensor_parallel(self.model, self.gpu, self.tensor_parallel)
        if self.measured is not None:
            engine_s, sequence_s, launch_s = 0.0, 0.0, 0.0
            token_s = self.measured.context_token_s
        else:
            engine_s, sequence_s = self.overhead_s, self.overhead_sequence_s
            launch_s = self.launch_s
            shards = self.model.cache_shards(self.tensor_parallel)
            cached = self.numbers.cache_bytes_per_token(self.model)
            read_s = cached / shards / self.gpu.memory_bytes_per_s
            token_s = self.coefficients.cache_reading * read_s
            if self.speculation is not None:
                accepted = self.speculation.accepted
                token_s *= self.speculation.more_reading(self.model) / accepted
                engine_s, sequence_s = engine_s / accepted, sequence_s / accepted
                launch_s /= accepted
        object.__setattr__(self, "engine_s", engine_s * self.slowdown)
        object.__setattr__(self, "engine_sequence_s", sequence_s * self.slowdown)
        object.__setattr__(self, "floor_s", (engine_s + launch_s) * self.slowdown)
        object.__setattr__(self, "context_token_s", token_s * self.slowdown)

    @property
    def provenance(self) -> str:
        """Source of the numbers, for reports."""
        if self.measured is not None:
            return self.measured.provenance
        return self.coefficients.provenance

    @property
    def error(self) -> float:
        """Mean absolute relative error of the GPU's part on the points used for the fit.

        At least 0.3 for mixtures of experts, latent attention, windows and states, whose kernels
        were not measured.
        """
        if self.measured is not None:
            return self.measured.error
        dense = plain(self.model)
        if self.speculation is not None:
            least = self.speculation.error if dense else max(self.speculation.error, 0.3)
            return max(self.coefficients.decode_error, least)
        return self.coefficients.decode_error if dense else max(self.coefficients.decode_error, 0.3)

    def base_s(self, sequences: int) -> float:
        """GPU seconds of a step of `sequences` sequences, without reading the cache."""
        try:
            return self._base_s[sequences]
        except KeyError:
            return self._base_s.setdefault(sequences, sum(self._parts(sequences).values()))

    def cpu_s(self, sequences: int) -> float:
        """CPU seconds of a step."""
        return self.engine_s + self.engine_sequence_s * sequences

    def gpu_s(self, sequences: int, context_tokens: float) -> float:
        """GPU seconds of a step."""
        return self.base_s(sequences) + self.context_token_s * context_tokens

    def step_s(self, sequences: int, context_tokens: float) -> float:
        """Seconds of a step, the engine's CPU included."""
        taken_s = self.gpu_s(sequences, context_tokens) + self._added_s(sequences)
        return max(taken_s, self._least_s(sequences))

    def steps_s(self, sequences: int, context_tokens: float, steps: int) -> float:
        r"""Seconds of `steps` steps during which no sequence joins or leaves.

        Step k = 0, 1, ... has the context C + k B, and takes g + k d on the GPU, with the engine's
        CPU if it does not overlap. The first n of them are shorter than the CPU's time E and wait
        for it:

        $$ n E + \sum_{k=n}^{m-1} (g + k d) $$
        """
        token_s = self.context_token_s
        first_s = self.base_s(sequences) + token_s * context_tokens
        if not self.overlap:
            first_s += self.cpu_s(sequences)
        growth_s = token_s * sequences
        least_s = self.floor_s + self.engine_sequence_s * sequences
        waiting = _waiting_steps(least_s - first_s, growth_s, steps) if first_s < least_s else 0
        reading = steps * (steps - 1) // 2 - waiting * (waiting - 1) // 2
        return waiting * least_s + (steps - waiting) * first_s + growth_s * reading

    def steps_within(self, sequences: int, context_tokens: float, seconds: float) -> int:
        """Whole steps that are done after `seconds`: the inverse of `steps_s`."""
        if seconds <= 0:
            return 0
        first_s = self.base_s(sequences) + self.context_token_s * context_tokens
        first_s += self._added_s(sequences)
        growth_s, least_s = self.context_token_s * sequences, self._least_s(sequences)
        most = int(seconds / least_s) + 1 if least_s else 0
        waiting = _waiting_steps(least_s - first_s, growth_s, most)
        left_s = seconds - waiting * least_s
        if left_s <= 0:
            first_s, growth_s, waiting, left_s = least_s, 0.0, 0, seconds
        else:
            first_s += growth_s * waiting
        # The positive root of m first + m (m - 1) / 2 growth = left.
        half_s = first_s - growth_s / 2
        root = math.sqrt(half_s * half_s + 2 * growth_s * left_s)
        guess = 2 * left_s / (half_s + root) if half_s > 0 else (root - half_s) / growth_s
        done = waiting + int(guess)
        # The end of a step may be a rounding error later.
        while self.steps_s(sequences, context_tokens, done + 1) <= seconds + _ROUNDING * first_s:
            done += 1
        return done

    def parts(self, sequences: int, context_tokens: float) -> Mapping[str, float]:
        """Seconds of a step by part; they sum to `step_s`."""
        parts = {**self._parts(sequences), "reading cache": self.context_token_s * context_tokens}
        gpu_s = sum(parts.values())
        cpu_s = max(self._added_s(sequences), self._least_s(sequences) - gpu_s)
        parts["engine CPU"] = max(0.0, cpu_s)
        return parts

    def _added_s(self, sequences: int) -> float:
        """CPU seconds of a step that the GPU waits for."""
        return 0.0 if self.overlap else self.cpu_s(sequences)

    def _least_s(self, sequences: int) -> float:
        """Seconds that the CPU needs for a step."""
        return self.floor_s + self.engine_sequence_s * sequences

    def _parts(self, sequences: int) -> dict[str, float]:
        if sequences < 1:
            raise ValueError(f"sequences of a decode step is {sequences}, but must be >= 1")
        if self.measured is not None:
            return {"measured": self.measured.base_s(sequences) * self.slowdown}
        model, gpu, split, at = self.model, self.gpu, self.tensor_parallel, self.coefficients
        drafts = self.speculation
        rows = sequences if drafts is None else sequences * drafts.rows
        weights = self.numbers.decode_weight_bytes(model, sequences=rows) / split
        reading_s = at.weight_reading * weights / gpu.memory_bytes_per_s
        products_s = smooth_max(reading_s, self._computing_s(rows), at.knee)
        message = rows * model.hidden * 2
        reduces_s = (2 * model.layers + 1) * engine_all_reduce_s(
            message, split, gpu, links=at.links
        )
        parts = {
            "reading weights": reading_s,
            "computing": products_s - reading_s,
            "layers": at.layer_s * model.layers,
            "sequences": at.sequence_s * rows,
            "all-reduce": reduces_s,
        }
        if model.window is not None or model.linear is not None:
            one_s = sequence_read_s(model, gpu, at, self.numbers, split)
            parts["windows and states"] = one_s * sequences
        if drafts is not None:
            parts["drafting"] = drafts.drafting_s(
                model, gpu, at, self.numbers, tensor_parallel=split, sequences=sequences
            )
            parts = {name: seconds / drafts.accepted for name, seconds in parts.items()}
        return {name: seconds * self.slowdown for name, seconds in parts.items()}

    def _computing_s(self, tokens: float) -> float:
        """Seconds of the products of `tokens` rows at the peak's share that large ones reach."""
        model, gpu, at = self.model, self.gpu, self.coefficients
        if self.fp8 is None:
            flops = model.linear_flops_per_token() * tokens / self.tensor_parallel
            return flops / (gpu.flops_per_s * at.matrix_efficiency)
        efficiency = at.matrix_efficiency
        seconds = self.fp8.computing_s(model, gpu, efficiency, tokens=tokens, head_tokens=tokens)
        return seconds / self.tensor_parallel


def _waiting_steps(missing_s: float, growth_s: float, steps: int) -> int:
    """The steps, of the first `steps`, whose GPU part is shorter than the engine's CPU time.

    The first one is by `missing_s` shorter, each further one by `growth_s` less.
    """
    if missing_s <= 0:
        return 0
    if missing_s >= growth_s * steps:
        return steps
    return min(steps, math.ceil(missing_s / growth_s))


def decode_cost(
    model: ModelShape,
    gpu: GPU,
    tensor_parallel: int = 1,
    *,
    overhead_s: float | None = None,
    overhead_sequence_s: float = 0.0,
    launch_s: float = 0.0,
    overlap: bool = True,
    slowdown: float = 1.0,
    measured: MeasuredDecode | None = None,
    coefficients: KernelCoefficients | None = None,
    numbers: EngineNumbers = BF16,
    fp8: FP8Kernels | None = None,
    speculation: Speculation | None = None,
) -> DecodeCost:
    """Decode steps of a model on a GPU.

    Args:
        overhead_s: CPU time of the engine per step; None is `ENGINE_S`.
        overhead_sequence_s: the same per sequence.
        launch_s: CPU time to launch a step's kernels; 0 with CUDA graphs.
        overlap: the CPU works on the next step while the GPU computes; False adds both.
        slowdown: factor on all times, for stragglers.
        measured: measured steps, which replace formula and overhead.
        coefficients: custom coefficients of bf16; None uses the GPU's.
        numbers: precision of weights and cache.
        fp8: custom coefficients of fp8; None uses the GPU's.
        speculation: what a step drafts; None nothing.
    """
    known, kernels = precise_coefficients(gpu, numbers, coefficients, fp8)
    return DecodeCost(
        model=model,
        gpu=gpu,
        tensor_parallel=tensor_parallel,
        coefficients=known,
        overhead_s=ENGINE_S if overhead_s is None else overhead_s,
        overhead_sequence_s=overhead_sequence_s,
        launch_s=launch_s,
        overlap=overlap,
        slowdown=slowdown,
        measured=measured,
        numbers=numbers,
        fp8=kernels,
        speculation=speculation,
    )
