"""What the trainer gets right, and how fast it is: parity, log-probs, whole steps."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from areal_lab.functional.logprobs.token_logprobs import logprobs_and_entropy
from areal_lab.training.attention import TREE_ATTENTION
from areal_lab.training.decoder_layers import Checkpointing
from areal_lab.training.step import StepOutcome, train_batch
from tools.gpu_day.hardware import known_gpu, random_matrix
from tools.gpu_day.record import Day, host_waits
from tools.gpu_day.workload import (
    SHAPES,
    estimated_bytes,
    learner_for,
    random_batch,
    random_model,
    step_flops,
)

_FLOAT32_BARS: Final = MappingProxyType({"max_logprob": 1e-4, "grad_norm": 1e-3})
_BF16_BARS: Final = MappingProxyType({"mean_logprob": 5e-3, "max_logprob": 0.1})


class _Case(NamedTuple):
    dtype: str
    attention: str
    checkpointing: Checkpointing = False


def parity(day: Day) -> None:
    """Log-probs and gradient norm of one step, by kernel and type."""
    cases = [_Case("float32", "sdpa"), _Case("bfloat16", "sdpa")]
    if day.cuda:
        cases += [_Case("bfloat16", "varlen"), _Case("bfloat16", "flex")]
    cases.append(_Case("bfloat16", "auto", "selective"))
    for prompt_tokens in (1, 20 if day.tiny else 300):
        for case in cases:
            measure = partial(_compared, day, case, prompt_tokens)
            day.check("parity", measure, **case._asdict(), shared_prompt_tokens=prompt_tokens)


@cache
def _on_cpu(prompt_tokens: int, tiny: bool) -> StepOutcome:
    return _step_of(torch.device("cpu"), _Case("float32", "sdpa"), prompt_tokens, tiny)


def _step_of(device: torch.device, case: _Case, prompt_tokens: int, tiny: bool) -> StepOutcome:
    """A step of the tiny model, whose weights are the same on each device."""
    made = random_model(
        "tiny", attention=TREE_ATTENTION, dtype=torch.float32, device=torch.device("cpu")
    )
    learner = learner_for(
        made.to(device),  # type: ignore[arg-type]  # transformers' stubs of torch's `to`
        dtype=case.dtype,
        attention=case.attention,
        gradient_checkpointing=case.checkpointing,
        max_tokens_per_mb=4096,
    )
    longest = 30 if tiny else 200
    request = random_batch(
        1,
        vocabulary=SHAPES["tiny"]["vocab_size"],
        groups=4,
        samples=4,
        prompt_tokens=prompt_tokens,
        response_tokens=lambda draw: draw.randint(longest // 10, longest),
    )
    return train_batch(learner, request)


def _compared(day: Day, case: _Case, prompt_tokens: int) -> Mapping[str, Any]:
    expected = _on_cpu(prompt_tokens, day.tiny)
    found = _step_of(day.device, case, prompt_tokens, day.tiny)
    ours, theirs = (torch.cat([r.logprobs.float() for r in o.records]) for o in (found, expected))
    apart = (ours - theirs).abs()
    errors = {
        "max_logprob": float(apart.max()),
        "mean_logprob": float(apart.mean()),
        "grad_norm": abs(found.metrics["grad_norm"] / expected.metrics["grad_norm"] - 1),
    }
    bars = _FLOAT32_BARS if case.dtype == "float32" else _BF16_BARS
    return {**errors, "bars": dict(bars), "ok": all(errors[n] <= bar for n, bar in bars.items())}


def logprobs(day: Day) -> None:
    """Log-probs, entropy and gradients over a product and the two of its gradient."""
    full = ((8192, 151936, 1536), (32768, 151936, 1536), (32768, 151936, 3584))
    for tokens, vocabulary, hidden in ((256, 1024, 64),) if day.tiny else full:
        measure = partial(_logprobs, day, tokens, vocabulary, hidden)
        about = {"tokens": tokens, "vocabulary": vocabulary, "hidden": hidden}
        day.check("log-probs", measure, **about)


def _logprobs(day: Day, tokens: int, vocabulary: int, hidden: int) -> Mapping[str, Any]:
    h = random_matrix(day, tokens, hidden).requires_grad_()
    w = (0.02 * random_matrix(day, vocabulary, hidden)).requires_grad_()
    y = torch.randint(vocabulary, (tokens,), device=day.device)

    def products() -> None:
        for start in range(0, tokens, 4096):
            rows = h.data[start : start + 4096]
            logits = rows @ w.data.T
            _ = logits @ w.data, logits.T @ rows

    def whole() -> None:
        h.grad = w.grad = None
        logprobs_and_entropy(h, w, y).logprobs.sum().backward()

    least_s = day.seconds(products, repeats=5, warmup=2)
    with day.peak() as peak:
        ours_s = day.seconds(whole, repeats=5, warmup=2)
        most = peak()
    some = slice(0, 1024)
    exact = torch.log_softmax(h.data[some].double() @ w.data.double().T, 1)
    exact = exact.gather(1, y[some, None])[:, 0]
    found = logprobs_and_entropy(h.data[some], w.data, y[some]).logprobs.double()
    return {
        "products_s": least_s,
        "products_tflops": 6 * tokens * vocabulary * hidden / least_s / 1e12,
        "seconds": ours_s,
        "over_products": ours_s / least_s,
        "peak_bytes": most,
        "max_logprob_error": float((found - exact).abs().max()),
    }


class _Step(NamedTuple):
    """A training step; eight samples for each prompt."""

    model: str
    attention: str
    checkpointing: Checkpointing
    compiled: bool = False
    prompt_tokens: int = 1
    groups: int = 8
    sequence_tokens: int = 2048
    micro_batch_tokens: int = 16384


def train(day: Day) -> None:
    """Steps by kernel, checkpointing and compilation, and one of half the size."""
    one_and_a_half = partial(_Step, "Qwen2.5-1.5B")
    cases = [
        one_and_a_half("sdpa", "selective"),
        one_and_a_half("varlen", "selective"),
        one_and_a_half("varlen", "selective", compiled=True),
        one_and_a_half("varlen", "selective", compiled=True, groups=4),
        one_and_a_half("flex", "selective", prompt_tokens=512),
        one_and_a_half("varlen", True, compiled=True, micro_batch_tokens=32768),
    ]
    if day.tiny:
        tiny = partial(_Step, "tiny", sequence_tokens=40, micro_batch_tokens=512)
        cases = [tiny("sdpa", "selective", groups=2), tiny("sdpa", True, groups=1, prompt_tokens=8)]
    for case in cases:
        day.check("train step", partial(_train, day, case), **case._asdict())


def _train(day: Day, case: _Step) -> Mapping[str, Any]:
    model = random_model(
        case.model, attention=TREE_ATTENTION, dtype=torch.float32, device=day.device
    )
    learner = learner_for(
        model,
        dtype="bfloat16",
        attention=case.attention,
        gradient_checkpointing=case.checkpointing,
        compile=case.compiled,
        max_tokens_per_mb=case.micro_batch_tokens,
    )
    requests = [
        random_batch(
            seed,
            vocabulary=model.config.vocab_size,
            groups=case.groups,
            samples=8,
            prompt_tokens=case.prompt_tokens,
            response_tokens=lambda _: case.sequence_tokens - case.prompt_tokens,
        )
        for seed in range(4)
    ]
    first_s = day.wall_s(lambda: train_batch(learner, requests[0]))
    with day.peak() as peak, host_waits() as waits:
        train_batch(learner, requests[1])
        most = peak()
    outcomes: list[StepOutcome] = []
    work = [partial(train_batch, learner, request) for request in requests[2:]]
    step_s = day.wall_s(lambda: outcomes.extend(one() for one in work)) / len(work)
    values, flops = outcomes[-1].metrics, step_flops(learner, requests[-1])
    gpu, packed = known_gpu(day), values["packed_tokens"]
    return {
        "sequences": 8 * case.groups,
        "packed_tokens": packed,
        "first_step_s": first_s,
        "step_s": step_s,
        "tokens_per_s": packed / step_s,
        "tflops": flops / step_s / 1e12,
        "mfu": None if gpu is None else flops / step_s / gpu.flops_per_s,
        "optimizer_steps": values["optimizer_steps"],
        "micro_batches": values["micro_batches"],
        "host_waits": waits if day.cuda else None,
        "peak_bytes": most,
        "estimated_bytes": estimated_bytes(learner, case.model),
    }
