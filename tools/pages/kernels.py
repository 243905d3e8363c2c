"""The documentation page of the engines' cost model: `python -m tools.pages.kernels`."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.catalogue.find_gpu import GPUS, find_gpu
from simulator.costs.decode import ENGINE_S
from simulator.costs.typical_coefficients import kernel_coefficients
from tools.kernels.fit import held_out_errors
from tools.kernels.points import DecodePoint, PrefillPoint, read_points
from tools.kernels.tables import SYSTEMS

_INTRODUCTION = """# What an engine's time is made of

<!-- Written by `python -m tools.pages.kernels > docs/simulator_kernels.md`; a test compares. -->

One decode step of B sequences with C tokens of context in all, on tp GPUs with a bandwidth W and a
peak of F FLOP/s, for a model of P parameters and L layers:

```
gpu  = ((e_w weights / (tp W))^p + (2 P B / (tp F e_c))^p)^(1/p)    reading weights, or computing
     + e_kv cache C / (tp W)                                        reading keys and values
     + e_L L + e_B B + (2 L + 1) all-reduces                        what waits for nothing
step = max(gpu, engine)      the engine's CPU works ahead; or the sum, where it does not
```

A prefill has the same knee over its tokens, the pairs of its attention at `e_a` of the peak, and
`e_x` passes over its activations. Of a mixture of experts those are read that B tokens are expected
to take.
"""

_AFTER = """
Errors are mean absolute relative ones, of the GPU's part. *Other models* are Qwen2.5-3B and -72B
and Llama-3.1-8B and -70B, which the fit has not seen (the fit: Qwen2.5-1.5B, 7B, 14B on one GPU,
32B on four). A bare roofline misses the same decode steps by 31 to 47 %.

## What is not in them

- **The engine's CPU**: {engine:.1f} ms per step by default (`rollout.engine_overhead_s`). It is
  what published speeds of one sequence have over the kernels of small models, and it is the input
  that differs most between engines and hosts: measure it. The step waits for it while the GPU's
  part is shorter, which happens to models of a few billion parameters with few sequences.
- **Kernels without a table**: mixtures of experts and latent attention are predicted from the same
  coefficients, and say +-30 %.
- **Batches beyond CUDA graphs**, sampling over many candidates, structured output, speculative
  decoding.
- **H800**: nobody measured it for us. It is the same chip as the H100, with the H100's coefficients
  and less than half of its NVLink.

## Fit it again

`python -m tools.kernels FOLDER` sums the points from AIConfigurator's `systems/data` (needs
pandas and pyarrow), fits, and writes `simulator/costs/data/`; without a folder it fits the points
that come with the simulator. For an engine of your own, `areal-lab calibrate` fits a recorded run.
"""


def kernel_page() -> str:
    """The page as Markdown."""
    rows: list[Sequence[str]] = [
        ("GPU", "e_w", "e_kv", "e_L us", "e_B us", "e_c", "p", "e_a", "e_x", "decode", "prefill"),
        ("---", *("--:",) * 10),
    ]
    for gpu in GPUS.values():
        at = kernel_coefficients(gpu)
        numbers = (
            *(at.weight_reading, at.cache_reading, at.layer_s * 1e6, at.sequence_s * 1e6),
            *(at.matrix_efficiency, at.knee, at.attention_efficiency, at.activation_traffic),
        )
        errors = (f"{at.decode_error:.1%}", f"{at.prefill_error:.1%}")
        rows.append((gpu.name, *(f"{number:.3g}" for number in numbers), *errors))
    lines = [_INTRODUCTION, "## Coefficients", "", *map(_row, rows), ""]
    by_source: dict[str, list[str]] = {}
    for gpu in GPUS.values():
        said = kernel_coefficients(gpu).provenance
        by_source.setdefault(said.replace(f"of the {gpu.name} ", ""), []).append(gpu.name)
    lines += [f"- **{', '.join(names)}**: {source}." for source, names in by_source.items()]
    lines += ["", "## How well they do", "", *map(_row, _errors())]
    return "\n".join(lines) + "\n" + _AFTER.format(engine=ENGINE_S * 1e3)


def _errors() -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        (
            *("GPU", "decode steps", "error", "other models", "prefills", "error", "other models"),
            *("engine's all-reduce", "NCCL"),
        ),
        ("---", *("--:",) * 8),
    ]
    for name in SYSTEMS:
        at = kernel_coefficients(find_gpu(name))
        decode, prefill = held_out_errors(name, at)
        steps = [p for p in read_points(DecodePoint) if p.gpu == name and not p.held_out]
        prefills = [p for p in read_points(PrefillPoint) if p.gpu == name and not p.held_out]
        rows.append(
            (
                *(name, str(len(steps)), f"{at.decode_error:.1%}", f"{decode:.1%}"),
                *(str(len(prefills)), f"{at.prefill_error:.1%}", f"{prefill:.1%}"),
                *(f"{at.links.error:.1%}", f"{at.links.nccl_error:.1%}"),
            )
        )
    return rows


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(kernel_page(), end="")
