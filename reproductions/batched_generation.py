"""Strong scaling of batched generation, 1.5B on 8 to 128 GPUs (AReaL's article on v0.3, Figure 2).

Not a training run: the time to generate one batch of 512 x 16 responses of equal length. The length
is not printed; it is the one number fitted to the curve, and is used nowhere else.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from benchmarks.harness import Arguments
from reproductions.calibration import ENGINE_OVERHEAD
from reproductions.report.harness import expected, main, run
from reproductions.report.records import Parameter, Reproduction, Row
from simulator.stats.statistics import Estimate

BAR = 0.15
TOKENS = Parameter(
    name="workload.answers.mean_tokens",
    value=10_200,
    unit="tokens, all responses equal",
    source="fitted to this curve; 9,277 is the mean response of the 1.5B run",
    fitted=True,
)
SETTINGS = (
    "workload.answers.kind=constant",
    "rollout.max_running=1024",
    "trainer.step_s=0.001",
    "weights.update_s=0",
    "workload.steps=3",
    "workload.warmup_steps=1",
)
OTHER_TOKENS = (8_192, 9_277, 12_288)
WHY = (
    "With few GPUs the cache is full, and reading it takes most of a step. With 64 and 128 GPUs a "
    "step is as long as the engine's CPU time: more GPUs gain nothing, as the article says.",
    "With the lengths of a training run, the longest response, of 27,648 tokens, would delay 128 "
    "GPUs: at most 0.22 million tokens/s. The figure must therefore use responses of equal "
    "length, or short responses.",
    "Our simulation is too high in the middle of the curve and too low at its end. The kernel "
    "times are from SGLang 0.5, the curve from 0.4.6; a CPU time that grows with the batch would "
    "move both ends.",
)


def reproduce(arguments: Arguments) -> Reproduction:
    """Generate on every number of GPUs."""
    printed: dict[str, float] = expected("batched_generation")["tokens_per_s"]
    rows = [
        Row(
            name=f"{gpus} GPUs",
            paper=value,
            ours=_exactly(_run(int(gpus), float(TOKENS.value), arguments)),
            unit="generated tokens/s",
            bar=BAR,
            fitted=True,
        )
        for gpus, value in printed.items()
    ]
    return Reproduction(
        name="batched_generation",
        claim=(
            "Generation of one batch by the 1.5B model does not get faster beyond 64 GPUs: 0.129, "
            "0.228, 0.399, 0.623 and 0.646 million tokens/s on 8, 16, 32, 64 and 128 GPUs."
        ),
        rows=rows,
        parameters=(ENGINE_OVERHEAD, TOKENS),
        why=WHY,
        sensitivity=[
            _other(tokens, printed, arguments)
            for tokens in (() if arguments.quick else OTHER_TOKENS)
        ],
    )


def _exactly(value: float) -> Estimate:
    return Estimate(value, value, value)


def _other(tokens: int, printed: dict[str, float], arguments: Arguments) -> dict[str, Any]:
    gaps = {
        f"gap on {gpus}": f"{_run(int(gpus), tokens, arguments) / value - 1:+.1%}"
        for gpus, value in printed.items()
    }
    return {"response, tokens": tokens, **gaps}


def _run(gpus: int, tokens: float, arguments: Arguments) -> float:
    # Training takes almost no time. Lengths are equal, so all seeds give the same.
    arguments = replace(arguments, repeats=1)
    settings = (
        f"workload.answers.mean_tokens={tokens}",
        f"cluster.gpus={gpus + 8}",
        f"cluster.rollout_gpus={gpus}",
        *SETTINGS,
    )
    preset = "table_1_1.5b_synchronous"
    return run(preset, (ENGINE_OVERHEAD,), *settings, arguments=arguments).results[0].tokens_per_s


if __name__ == "__main__":
    main(reproduce, __doc__)
