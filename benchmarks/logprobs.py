"""Log-probs and entropy from hidden states, forward and backward: time and memory.

The floor is the three bare matrix products: logits into preallocated memory, and the two gradients
as new tensors, which every implementation must create. Implementations take turns, each between two
floors:

    floor_ratio      wall time over that of the floors before and after; median of the repeats
    best_ratio       smallest wall time over the smallest of the floor: least disturbed
    cpu_ratio        as floor_ratio by CPU time of all threads, which a busy machine disturbs less
    seconds          wall time, median
    peak_mib         peak memory above the inputs, of which `gradients_mib` are the two gradients

Memory: a new process per figure creates the inputs, runs the same on tiny inputs (so that the
libraries are loaded), then resets the kernel's record of its largest resident size
(/proc/self/clear_refs), runs once and reads the record (VmHWM), less what was resident before.
Everything counts: gradients, buffers of the libraries, the process's own heap. Linux only.

`rows` are `logprobs_and_entropy` by default; `baselines` the same with all logits kept, plain
log_softmax of all logits, and the same eagerly in chunks of 512 tokens with checkpointing.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from areal_lab.functional.logprobs.token_logprobs import logprobs_and_entropy
from benchmarks.harness import parse, report, spread, table

T = TypeVar("T")

EAGER_TOKENS = 512
MIB = 1 << 20


class Size(NamedTuple):
    """Shapes of the inputs, in float32."""

    tokens: int
    vocab: int
    hidden: int = 1024


SIZES = (Size(2048, 32_768), Size(8192, 32_768), Size(1024, 152_064))
QUICK_SIZES = (Size(512, 8192, 256),)
TINY = Size(64, 512, 32)


def ours(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The function with its defaults."""
    return logprobs_and_entropy(hidden, weight, targets)


def ours_all_kept(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The function with memory for all logits."""
    all_bytes = hidden.shape[0] * weight.shape[0] * hidden.element_size()
    return logprobs_and_entropy(hidden, weight, targets, cache_bytes=all_bytes)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Plain log_softmax of all logits."""
    log_p = (hidden @ weight.T).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def plain_in_chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same in chunks of tokens, each recomputed in the backward pass."""
    parts = [
        checkpoint(plain, part, weight, wanted, use_reentrant=False)
        for part, wanted in zip(
            hidden.split(EAGER_TOKENS), targets.split(EAGER_TOKENS), strict=True
        )
    ]
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


IMPLEMENTATIONS: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "logprobs_and_entropy": ours,
    "all logits kept": ours_all_kept,
    "plain log_softmax": plain,
    "plain in checkpointed chunks": plain_in_chunks,
}


class Inputs(NamedTuple):
    """Hidden states and weights as of a model at its start; the weights of the loss."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    to_logprobs: Tensor
    to_entropy: Tensor


def make_inputs(size: Size) -> Inputs:
    """Random inputs, always the same; logits are about normal."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(size.tokens, size.hidden, generator=generator)
    weight = torch.randn(size.vocab, size.hidden, generator=generator).div_(size.hidden**0.5)
    return Inputs(
        hidden.requires_grad_(),
        weight.requires_grad_(),
        torch.randint(size.vocab, (size.tokens,), generator=generator),
        torch.randn(size.tokens, generator=generator),
        torch.randn(size.tokens, generator=generator),
    )


def forward_backward(name: str, inputs: Inputs) -> None:
    """Gradients of a weighted sum of log-probs and entropies, replacing older ones."""
    inputs.hidden.grad = inputs.weight.grad = None
    logprobs, entropy = IMPLEMENTATIONS[name](*inputs[:3])
    loss = (logprobs * inputs.to_logprobs).sum() + (entropy * inputs.to_entropy).sum()
    loss.backward()


def peak_mib(name: str, size: Size) -> float:
    """Peak memory above the inputs; run it in a new process."""
    inputs = make_inputs(size)
    forward_backward(name, make_inputs(TINY))
    Path("/proc/self/clear_refs").write_text("5")
    before_kib = _status_kib("VmRSS")
    forward_backward(name, inputs)
    return (_status_kib("VmHWM") - before_kib) / 1024


def _status_kib(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


class Timing(NamedTuple):
    """Seconds of one run."""

    wall_s: float
    cpu_s: float


class Turn(NamedTuple):
    """Time of one run, and the mean of the floors before and after it."""

    run: Timing
    floor: Timing


def turns(size: Size, names: tuple[str, ...], repeats: int) -> dict[str, list[Turn]]:
    """Repeatedly time each implementation between two floors."""
    inputs = make_inputs(size)
    logits = torch.empty(size.tokens, size.vocab)

    @torch.no_grad()
    def floor() -> tuple[Tensor, Tensor]:
        torch.mm(inputs.hidden, inputs.weight.T, out=logits)
        return logits @ inputs.weight, logits.T @ inputs.hidden

    results: dict[str, list[Turn]] = {name: [] for name in names}
    for name in names:
        forward_backward(name, inputs)
    floor()
    before = timed(floor)
    for _ in range(repeats):
        for name in names:
            run = timed(partial(forward_backward, name, inputs))
            after = timed(floor)
            between = Timing(*((a + b) / 2 for a, b in zip(before, after, strict=True)))
            results[name].append(Turn(run, between))
            before = after
    return results


def timed(run: Callable[[], object]) -> Timing:
    """Run once."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run()
    return Timing(time.perf_counter() - wall_s, time.process_time() - cpu_s)


def in_fresh_process(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a function in a new interpreter."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(function, *arguments).result()


def measure(size: Size, names: tuple[str, ...], repeats: int) -> list[dict[str, Any]]:
    """A row per implementation."""
    results = in_fresh_process(turns, size, names, repeats)
    rows = []
    for name in names:
        of_name = results[name]
        ratios = spread([turn.run.wall_s / turn.floor.wall_s for turn in of_name])
        fastest = min(turn.run.wall_s for turn in of_name)
        fastest_floor = min(turn.floor.wall_s for turn in of_name)
        rows.append(
            {
                "implementation": name,
                "tokens": size.tokens,
                "vocab": size.vocab,
                "peak_mib": in_fresh_process(peak_mib, name, size),
                "gradients_mib": 4 * size.hidden * (size.tokens + size.vocab) / MIB,
                "floor_ratio": ratios["median"],
                "min": ratios["min"],
                "max": ratios["max"],
                "best_ratio": fastest / fastest_floor,
                "cpu_ratio": statistics.median(t.run.cpu_s / t.floor.cpu_s for t in of_name),
                "seconds": statistics.median(turn.run.wall_s for turn in of_name),
                "floor_seconds": statistics.median(turn.floor.wall_s for turn in of_name),
            }
        )
    return rows


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=3, quick_repeats=2)
    sizes = QUICK_SIZES if arguments.quick else SIZES
    names = tuple(IMPLEMENTATIONS)
    if arguments.quick:
        names = ("logprobs_and_entropy", "plain log_softmax")
    measured = [row for size in sizes for row in measure(size, names, arguments.repeats)]
    rows = [row for row in measured if row["implementation"] == names[0]]
    baselines = [row for row in measured if row["implementation"] != names[0]]
    if not arguments.json:
        print(table(baselines), end="\n\n")
    report(
        {
            "rows": rows,
            "baselines": baselines,
            "hidden": sizes[0].hidden,
            "spread": {
                f"floor_ratio at {row['tokens']} x {row['vocab']}": {
                    "median": row["floor_ratio"],
                    "min": row["min"],
                    "max": row["max"],
                }
                for row in rows
            },
        },
        arguments,
    )


if __name__ == "__main__":
    main()
