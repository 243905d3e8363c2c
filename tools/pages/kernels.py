"""`docs/simulator_kernels.md`: the cost model of inference engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from simulator.catalogue.gpu import GPUS, find_gpu
from simulator.costs.coefficients import STATE_EFFICIENCY, kernel_coefficients
from simulator.costs.fp8_kernels import fitted_fp8
from simulator.costs.measured_engine import EAGER_LAYER_S, ENGINES
from simulator.costs.speculation import PASS_S, ROUND_S
from tools.kernels.fit import held_out_errors
from tools.kernels.fp8 import held_out_fp8_errors
from tools.kernels.points import DecodePoint, PrefillPoint, read_points
from tools.kernels.tables import SYSTEMS

PAGE: Final = Path(__file__).parents[2] / "docs" / "simulator_kernels.md"
_INTRODUCTION = """# Cost model of inference engines

<!-- Written by `python -m tools.pages`; a test compares. -->

One decode step of B sequences with C tokens of context in total, on tp GPUs with a bandwidth W and
a peak of F FLOP/s, for a model of P parameters and L layers:

```
gpu  = ((e_w weights / (tp W))^p + (2 P B / (tp F e_c))^p)^(1/p)    reading weights, or computing
     + e_kv cache C / (tp W)                                        reading keys and values
     + e_L L + e_B B + (2 L + 1) all-reduces                        constant times
cpu  = step + B sequence                                       the engine's CPU, by engine
step = max(gpu, cpu)         if the engine's CPU works ahead; otherwise their sum
```

A prefill has the same knee over its tokens, computes attention pairs at `e_a` of the peak, and
makes `e_x` passes over its activations. For a mixture of experts, a step reads the experts that B
tokens are expected to use.
"""

_ENGINES = """CPU time per decode step. A version stands for itself and those after it, up to the
next one of the table. Errors are those on other hosts."""
_AFTER = """
Errors of coefficients are mean absolute relative errors of the GPU's part. *Other models* are
Qwen2.5-3B and -72B and Llama-3.1-8B and -70B, which are held out of the fit (fitted: Qwen2.5-1.5B,
7B, 14B on one GPU, 32B on four). A plain roofline model has errors of 31 to 47 % on the same steps.

## Engines in fp8

`rollout.weight_precision=fp8` and `rollout.kv_cache_precision=fp8` can be set alone or together.
Weights of the layers take 1 byte each and 4 bytes per block of 128 x 128, the embedding and the
head 2 as before; keys and values take 1 byte. Products of the layers reach `e_c` of the fp8 peak,
and a kernel quantizes the input of each, which is in `e_L`. Attention is computed in bf16.

{fp8}

Other GPUs with fp8 units take the mean change from their bf16 coefficients, with an error of at
least +-30 %; GPUs without (A100, Ascend 910B, TPU v6e) are refused. A published server (Qwen3-8B on
an H100, vLLM 0.30, 2026-09) decodes 1, 4 and 16 sequences in 4.8, 5.3 and 7.2 ms; predicted are 5
to 9 % more, because it fuses kernels that quantize. Its cache holds 373 users instead of 327;
predicted are 368.

Weight updates send bf16, and the engines quantize while they load, unless
`weights.quantize_before_sending=true`.

## Experts in MXFP4

gpt-oss is published with experts in MXFP4: blocks of 32 numbers of 4 bits with one scale of 8 bits,
4.25 bits per number; everything else is in bf16. By default engines hold these bytes, read them and
receive them (`rollout.weight_precision=auto`; `bf16` does without), and the trainer holds bf16. No
kernels of MXFP4 were measured: the bytes are read at `e_w` of the bandwidth, and products take as
long as in bf16, as if a kernel converted the numbers on their way. The report warns.

## Windows and states

Layers with a sliding window read at most its tokens, and layers with a state (Gated DeltaNet, Kimi
Delta Attention) read and write it once per sequence and step: both at `e_kv` of the bandwidth,
whatever the context. Published kernel times of Gated DeltaNet on an H100 with 32 to 512 sequences
(`linear_attention.csv`) are met within 4 % on average, and nothing is fitted to them. Over many
tokens (prefill, training) states reach {states:.1%} of the bf16 peak, counted token by token: 16 %
mean error on 24 published times. Windows and states of the running sequences take their memory
before the cache does. A sequence shorter than its window counts with the whole window. Errors of
such models are at least +-30 %, as for mixtures. Kimi Linear decodes 3.98 times as fast as with
full attention at 128K and up to 6 times at 1M (arXiv:2510.26692); predicted are 4.1 and 4.3. Source
of kernel times: AIConfigurator 0.12.0 (2026-09), SGLang 0.5.14.

## Speculative decoding

`rollout.speculative_tokens` drafts k tokens per step and sequence, and verifies k + 1 together:
weights and cache are read once, products have k + 1 times the rows, and a mixture reads more
experts. The draft has `draft_layers` layers like those of the model, and its head; each of its
passes reads them and takes {drafted:.2f} ms more, a step {round:.2f} ms more, fitted to six
published rounds of one sequence on H100s (`speculative_rounds.csv`: SGLang and vLLM, 2025) with a
mean error of 7 % (70B: 21 %). A step adds `acceptance_length` tokens, which depends on draft and
task: engines log it. Large batches are bound by products and gain less, or lose. Trees in batches
are the least certain (+-50 %): a published one gains 2.7 times for one request and 1.6 for eight,
here 2.7 and 2.5.

## Limitations

- **The engine's CPU** differs more than any other input between engines and hosts: measure it
  (`rollout.engine_overhead_s`, `rollout.engine_sequence_s`). The step waits for it if the GPU's
  part is shorter, as for models of a few billion parameters with few sequences.
- **Kernels without a table**: mixtures of experts and latent attention are predicted from the same
  coefficients, with an error of +-30 %.
- **Without CUDA graphs** (`rollout.cuda_graphs=false`) a step takes at least {layer:.2f} ms per
  layer for launches, within a factor of two. Batches beyond the largest graph are not told apart.
- **Not modeled**: sampling over many candidates, structured output; that fewer drafted tokens are
  accepted while the policy moves away from the draft.
- **H800**: not measured. It is the same chip as the H100 with less than half of its NVLink
  bandwidth, and has the H100's coefficients.

## Repeat the fit

`python -m tools.kernels FOLDER` sums the points from AIConfigurator's `systems/data` (needs
pandas and pyarrow), fits, and writes `simulator/costs/data/`; without a folder it fits the shipped
points. For your own engine, `areal-lab calibrate` fits a recorded run.
"""


def page() -> str:
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
    lines += ["", "## Errors", "", *map(_row, _errors())]
    lines += ["", "## CPU time of engines", "", _ENGINES, "", *map(_row, _engines())]
    fp8 = "\n".join(map(_row, _in_fp8()))
    return (
        "\n".join(lines)
        + "\n"
        + _AFTER.format(
            layer=EAGER_LAYER_S * 1e3,
            fp8=fp8,
            states=STATE_EFFICIENCY,
            drafted=1e3 * PASS_S,
            round=1e3 * ROUND_S,
        )
    )


def _in_fp8() -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        (
            *("GPU", "e_w", "e_kv", "e_L us", "e_B us", "e_c", "p", "e_x", "decode"),
            *("other models", "prefill", "other models"),
        ),
        ("---", *("--:",) * 11),
    ]
    for name, at in fitted_fp8().items():
        numbers = (
            *(at.weight_reading, at.cache_reading, at.layer_s * 1e6, at.sequence_s * 1e6),
            *(at.matrix_efficiency, at.knee, at.activation_traffic),
        )
        decode, prefill = held_out_fp8_errors(name, at)
        errors = (at.decode_error, decode, at.prefill_error, prefill)
        rows.append(
            (name, *(f"{one:.3g}" for one in numbers), *(f"{error:.1%}" for error in errors))
        )
    return rows


def _engines() -> list[Sequence[str]]:
    rows: list[Sequence[str]] = [
        ("`rollout.engine`", "ms per step", "us per sequence", "works ahead", "error", "source"),
        ("---", "--:", "--:", "---", "--:", "---"),
    ]
    for name, engine in ENGINES.items():
        error = "?" if engine.error is None else f"{engine.error:.0%}"
        numbers = (f"{engine.step_s * 1e3:.3g}", f"{engine.sequence_s * 1e6:.3g}")
        ahead = "yes" if engine.overlap else "no"
        rows.append((f"`{name}`", *numbers, ahead, error, engine.source))
    return rows


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
