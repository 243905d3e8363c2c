"""Time of advantages of a million tokens: GAE, packed and padded, against loops over time.

975 sequences with log-normal lengths (sigma 1, cut at 8,192), 1,000,000 tokens or a little more, of
which one in ten is masked, in float32. `seconds` is `gae` on the packed batch, forward only; other
rows use all cores, pad the batch to its longest sequence, add the gradient, or compute V-trace.
Baselines:

- `loop over time, padded`: one vector operation per time step over all rows, as most frameworks do;
- `loop over tokens, floats`: plain Python, the reference that `max_error` is measured against;
- `loop over tokens, tensors`: the same with 0-d tensors, on the first sequences only.

Rows use one thread unless they say otherwise. GAE makes about fifty short passes over memory: a
second core saves a third of the time at best, and if another process uses it, each pass waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from areal_lab.functional.advantages.gae import gae
from areal_lab.functional.advantages.v_trace import vtrace
from areal_lab.functional.segments import Segments, packed_sequences
from benchmarks.harness import parse, repeat, report, spread

SEQUENCES = 975
TOKENS = 1_000_000
MOST_TOKENS = 8_192
GAMMA, LAMBDA = 0.999, 0.95
TENSOR_LOOP_TOKENS = 10_000


class Batch(NamedTuple):
    """Rewards and values of all tokens, packed, with their positions in the padded batch."""

    rewards: Tensor
    values: Tensor
    mask: Tensor
    sequences: Segments
    lengths: Tensor
    exists: Tensor
    """[N, T]: True for tokens, False for padding."""

    def padded(self, tokens: Tensor) -> Tensor:
        """[tokens] to [N, T], zeros on the padding."""
        out = torch.zeros(self.exists.shape, dtype=tokens.dtype)
        out[self.exists] = tokens
        return out


def make_batch(sequences: int, tokens: int) -> Batch:
    """The smallest mean length, in whole tokens, that gives the requested number of tokens."""
    generator = torch.Generator().manual_seed(0)
    # exp of a normal variable with mean -1/2 and deviation 1 has mean 1
    factors = torch.exp(torch.randn(sequences, generator=generator) - 0.5)
    mean = tokens // sequences
    while True:
        lengths = (mean * factors).long().clamp(1, MOST_TOKENS)
        total = int(lengths.sum())
        if total >= tokens:
            break
        mean += 1
    boundaries = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    return Batch(
        rewards=torch.randn(total, generator=generator),
        values=torch.randn(total, generator=generator),
        mask=torch.rand(total, generator=generator) < 0.9,
        sequences=packed_sequences(boundaries, total),
        lengths=lengths,
        exists=torch.arange(int(lengths.max())) < lengths[:, None],
    )


def loop_over_time(rewards: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """[N, T] advantages, one vector operation per time step; masked tokens are skipped."""
    chosen = mask.to(values.dtype)
    next_values = torch.zeros_like(values[:, 0])
    advantage = torch.zeros_like(next_values)
    columns = []
    for t in range(values.shape[1] - 1, -1, -1):
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        keep = chosen[:, t]
        advantage = keep * (delta + GAMMA * LAMBDA * advantage) + (1 - keep) * advantage
        next_values = keep * values[:, t] + (1 - keep) * next_values
        columns.append(advantage)
    return torch.stack(columns[::-1], dim=1) * chosen


def loop_over_tokens(
    rewards: list[Any], values: list[Any], mask: list[bool], lengths: list[int]
) -> list[Any]:
    """Advantages of packed tokens in a loop, with floats or 0-d tensors."""
    out: list[Any] = [0.0] * len(rewards)
    end = 0
    for length in lengths:
        begin, end = end, end + length
        next_value: Any = 0.0
        advantage: Any = 0.0
        for t in range(end - 1, begin - 1, -1):
            if mask[t]:
                delta = rewards[t] + GAMMA * next_value - values[t]
                advantage = delta + GAMMA * LAMBDA * advantage
                next_value = values[t]
                out[t] = advantage
    return out


def ours(batch: Batch) -> dict[str, Callable[[], Tensor]]:
    """The measured functions, by row name."""
    rewards, values, mask, sequences = batch[:4]
    padded = [batch.padded(x) for x in (rewards, values, mask)]
    leaf = values.clone().requires_grad_()
    log_ratio = values / 10

    def gradient() -> Tensor:
        result = gae(
            rewards, leaf, mask, gamma=GAMMA, lambda_=LAMBDA, sequences=sequences
        ).advantages.sum()
        return torch.autograd.grad(result, leaf)[0]

    return {
        "gae, packed": lambda: (
            gae(rewards, values, mask, gamma=GAMMA, lambda_=LAMBDA, sequences=sequences).advantages
        ),
        "gae, packed, forward and backward": gradient,
        "gae, padded": lambda: gae(*padded, gamma=GAMMA, lambda_=LAMBDA).advantages,
        "vtrace, packed": lambda: (
            vtrace(
                rewards, values, log_ratio, mask, gamma=GAMMA, lambda_=LAMBDA, sequences=sequences
            ).advantages
        ),
    }


def baselines(batch: Batch) -> dict[str, tuple[int, Callable[[], Any]]]:
    """The baselines: tokens and function of each row."""
    padded = [batch.padded(x) for x in (batch.rewards, batch.values, batch.mask)]
    lengths = batch.lengths.tolist()
    rewards, values, mask = batch.rewards.tolist(), batch.values.tolist(), batch.mask.tolist()
    few, count = 0, 0
    while few < min(TENSOR_LOOP_TOKENS, batch.rewards.numel()):
        few, count = few + lengths[count], count + 1
    scalars = list(batch.rewards[:few]), list(batch.values[:few])
    return {
        "loop over time, padded": (batch.rewards.numel(), lambda: loop_over_time(*padded)),
        "loop over tokens, floats": (
            batch.rewards.numel(),
            lambda: loop_over_tokens(rewards, values, mask, lengths),
        ),
        "loop over tokens, tensors": (
            few,
            lambda: loop_over_tokens(*scalars, mask, lengths[:count]),
        ),
    }


def measure(case: str, function: Callable[[], Any], *, tokens: int, repeats: int) -> dict[str, Any]:
    """Seconds of one call: wall time, and CPU time of all threads."""
    processor: list[float] = []

    def seconds() -> float:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        function()
        processor.append(time.process_time() - began_cpu_s)
        return time.perf_counter() - began_s

    figures = spread(repeat(seconds, repeats))
    return {
        "case": case,
        "tokens": tokens,
        "seconds": figures["median"],
        "min": figures["min"],
        "max": figures["max"],
        "cpu_seconds": spread(processor[1:])["median"],
        "ns_per_token": 1e9 * figures["median"] / tokens,
    }


def largest_error(batch: Batch) -> float:
    """Maximum error of float64 `gae` against the loop over floats."""
    rewards, values = batch.rewards.double(), batch.values.double()
    result = gae(
        rewards, values, batch.mask, gamma=GAMMA, lambda_=LAMBDA, sequences=batch.sequences
    )
    rows = (rewards.tolist(), values.tolist(), batch.mask.tolist(), batch.lengths.tolist())
    expected = torch.tensor(loop_over_tokens(*rows), dtype=torch.double)
    return float((result.advantages - expected).abs().max())


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=21, quick_repeats=5)
    batch = make_batch(SEQUENCES, TOKENS)
    tokens = batch.rewards.numel()
    functions = ours(batch)
    cores = torch.get_num_threads()
    on_all_cores = measure(
        f"gae, packed, {cores} threads",
        functions["gae, packed"],
        tokens=tokens,
        repeats=arguments.repeats,
    )
    torch.set_num_threads(1)
    rows: list[Mapping[str, Any]] = [
        measure(case, function, tokens=tokens, repeats=arguments.repeats)
        for case, function in functions.items()
    ]
    slow_repeats = 1 if arguments.quick else 3
    rows += [
        measure(case, function, tokens=count, repeats=slow_repeats)
        for case, (count, function) in baselines(batch).items()
    ]
    packed = rows[0]
    report(
        {
            "seconds": packed["seconds"],
            "tokens": tokens,
            "max_error": largest_error(batch),
            "rows": [*rows[:1], on_all_cores, *rows[1:]],
            "spread": {"seconds": {"min": packed["min"], "max": packed["max"]}},
        },
        arguments,
    )


if __name__ == "__main__":
    main()
