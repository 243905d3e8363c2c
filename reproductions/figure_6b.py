"""Figure 6b: tokens generated per second on 4 nodes, with and without interruptible generation.

All numbers are predictions.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.harness import Arguments
from reproductions.calibration import CALIBRATED, MEMORY, parameters
from reproductions.harness import Reproduction, Row, expected, length, main, run
from simulator.result import Replicated, SimulationResult

GAIN = 0.05
RARELY_S = 1050
OTHERS: Mapping[str, tuple[str, ...]] = {
    "24 GPUs generate": ("rollout_gpus=24", "gpus=56"),
    "24 generate, 8 train": ("rollout_gpus=24", "gpus=32"),
    f"new weights every {RARELY_S:,} s": (f"trainer.step_s={RARELY_S}", "eta=.inf"),
    f"24 GPUs, every {RARELY_S:,} s": (
        *("rollout_gpus=24", "gpus=56"),
        *(f"trainer.step_s={RARELY_S}", "eta=.inf"),
    ),
}
"""What the figure does not print, otherwise."""
CHUNK_TOKENS = 4096
WHY = ("",)


def reproduce(arguments: Arguments) -> Reproduction:
    """Simulate both models both ways."""
    printed = expected("figure_6b")
    rows: list[Row] = []
    for model, bars in printed["tokens_per_s"].items():
        runs = {kind: _run(model, kind, arguments) for kind in bars}
        ratio = runs["interruptible"].ratio(runs["not_interruptible"], _generated_per_s)
        gain = type(ratio)(ratio.mean - 1, ratio.low - 1, ratio.high - 1)
        rows.append(
            Row(
                name=f"{model}: gain",
                paper=printed["gain"][model],
                ours=gain,
                unit="share",
                bar=GAIN,
                points=True,
            )
        )
        rows += [
            Row(
                name=f"{model} {kind.replace('_', ' ')}",
                paper=bars[kind],
                ours=runs[kind].estimate(_generated_per_s),
                unit="generated tokens/s",
            )
            for kind in bars
        ]
    return Reproduction(
        name="figure_6b",
        claim=(
            "On 4 nodes, interruptible generation gives 12 and 17 % more tokens per second for "
            "1.5B and 7B (Figure 6b)."
        ),
        rows=rows,
        parameters=(*CALIBRATED, MEMORY),
        why=WHY,
        sensitivity=[
            _under_other(name, settings, list(printed["gain"]), arguments)
            for name, settings in ({} if arguments.quick else OTHERS).items()
        ],
    )


def _under_other(
    name: str, settings: tuple[str, ...], models: list[str], arguments: Arguments
) -> dict[str, str]:
    """Both gains, and what is generated with interruption, under other assumptions."""
    said = {"instead": name}
    for model in models:
        runs = [
            _run(model, kind, arguments, *settings)
            for kind in ("interruptible", "not_interruptible")
        ]
        gain = runs[0].ratio(runs[1], _generated_per_s).mean - 1
        rates = " / ".join(f"{one.estimate(_generated_per_s).mean / 1e3:.0f}k" for one in runs)
        said |= {f"gain {model}": f"{gain:.1%}", f"{model}, with / without": rates}
    return said


def _run(model: str, kind: str, arguments: Arguments, *settings: str) -> Replicated:
    setting = f"schedule.interruptible={str(kind == 'interruptible').lower()}"
    sizes = length(arguments, steps=18, warmup=6, quick=(8, 3))
    preset = f"figure_6b_{model.lower()}"
    chosen = parameters(model)
    return run(preset, chosen, setting, *sizes, *settings, arguments=arguments)


def _generated_per_s(result: SimulationResult) -> float:
    return result.counts.generated_tokens / result.window_s


if __name__ == "__main__":
    main(reproduce, __doc__)
