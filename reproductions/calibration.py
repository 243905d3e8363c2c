"""Assumptions of the reproductions beyond the paper, and the one fitted number.

    engine CPU per decode step   <- synchronous row of Table 1, 1.5B
    correlation in a group       <- measured on that model (`reproductions.within_prompt`)

Run this to repeat the fit and the measurement. A synchronous step waits for the longest response,
whose length is the cap for any correlation, so that one number is fitted to one number. How many
responses run at the same time under the limit of 512 prompts, and thus the asynchronous rate,
depends on the correlation: a prompt occupies its slot until its last response is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.harness import Arguments
from reproductions.report.harness import expected, length, main, run
from reproductions.report.records import Parameter, Reproduction, Row
from reproductions.within_prompt import correlation_among, measured, with_interval
from simulator.stats.statistics import Estimate

ENGINE_OVERHEAD = Parameter(
    name="rollout.engine_overhead_s",
    value=0.01425,
    unit="s per decode step",
    source=(
        "CPU of SGLang 0.4.6 (schedule, sample, detokenize; the GPU works meanwhile), fitted to "
        "the synchronous row of Table 1, 1.5B; the batched-generation curve flattens at 12.7 ms"
    ),
    fitted=True,
)
GROUP_CORRELATION = Parameter(
    name="workload.answers.group_correlation",
    value=0.743,
    unit="of ln(tokens) within a prompt",
    source=(
        "within-prompt spread of ln(tokens) of R1-Distill-Qwen-1.5B, 0.347 (288 responses to 37 "
        "AIME problems, lengths_within_prompt.csv), against 0.684 of all responses; 0.66 to 0.81 "
        "(95 %)"
    ),
    measured=True,
)
MEMORY = Parameter(
    name="rollout.memory_utilization",
    value=0.7,
    unit="share of memory",
    source="mem_fraction_static in AReaL's released benchmark (build_cmd.py, 2025-05), over 1.5B",
    applies_to="7B, 14B, 32B",
)
LAYOUT_14B = Parameter(
    name="trainer.pipeline_parallel",
    value=8,
    unit="stages",
    source=(
        "AReaL's released 14B settings (qwen3-code/14b.yaml, 2025-06): generation TP 4, training "
        "TP 2 and PP 8; the paper prints none for 14B"
    ),
    applies_to="14B",
)
CALIBRATED = (ENGINE_OVERHEAD, GROUP_CORRELATION)
"""Parameters of all runs of the paper."""
MODELS = ("1.5B", "7B", "14B", "32B")


def parameters(model: str) -> tuple[Parameter, ...]:
    """Parameters of the runs of one model."""
    large = () if model == "1.5B" else (MEMORY,)
    return (*CALIBRATED, *large, *((LAYOUT_14B,) if model == "14B" else ()))


def solve(value: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where an increasing function reaches `target`, by bisection to 1/256 of the range."""
    for _ in range(8):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < target else (low, middle)
    return (low + high) / 2


def fit(arguments: Arguments) -> Reproduction:
    """Repeat the fit and the measurement, and compare them with the stored values."""
    printed = expected("table_1")["rows"]["1.5B"]
    brief = replace(arguments, repeats=min(2, arguments.repeats))

    def step_s(overhead_s: float) -> float:
        chosen = (replace(ENGINE_OVERHEAD, value=overhead_s), GROUP_CORRELATION)
        sizes = length(brief, steps=8, warmup=2, quick=(4, 1))
        return run("table_1_1.5b_synchronous", chosen, *sizes, arguments=brief).step_s.mean

    target_s = 3600 * printed["synchronous_h"] / printed["steps"]
    overhead_s = solve(step_s, target_s, 0.005, 0.025)
    found = (
        (ENGINE_OVERHEAD, Estimate(overhead_s, overhead_s, overhead_s), 0.03),
        (GROUP_CORRELATION, with_interval(measured()), 0.01),
    )
    return Reproduction(
        name="calibration",
        claim="The fitted and the measured number, compared with a repetition.",
        rows=[
            Row(
                name=parameter.name,
                paper=float(parameter.value),
                ours=again,
                unit=parameter.unit,
                bar=bar,
                fitted=parameter.fitted,
            )
            for parameter, again, bar in found
        ],
        parameters=CALIBRATED,
        why=[
            "`paper` is the value in use here.",
            f"Among the measured problems, which are all of one kind, the correlation is "
            f"{correlation_among(measured()):.2f}; a run trains on easy and hard ones.",
        ],
    )


if __name__ == "__main__":
    main(fit, __doc__)
