"""How fast the embedded engine is: steps by batch and context, prefills, and `generate` beside."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from areal_lab.engines.embedded.attention import IMPLEMENTATION
from areal_lab.engines.embedded.batcher import Batcher
from areal_lab.engines.protocol import GenerateRequest, SamplingParams
from tools.gpu_day.hardware import known_gpu
from tools.gpu_day.record import Day, host_waits
from tools.gpu_day.workload import random_model, random_tokens


def decode(day: Day) -> None:
    """Steps by batch and context, prefills by length, and `generate` beside them."""
    grid: tuple[tuple[int, int, bool], ...] = (
        *((1, 512, False), (1, 4096, False), (16, 1024, False), (64, 512, False)),
        *((64, 2048, False), (64, 1024, True), (256, 512, False), (256, 2048, False)),
        (256, 1024, True),
    )
    prompts: tuple[int, ...] = (256, 1024, 2048, 4096, 8192)
    if day.tiny:
        grid = tuple((rows, n, n == 24) for rows, n in ((1, 8), (2, 24), (4, 8), (4, 16), (8, 24)))
        grid += ((8, 8, False), (1, 48, False))
        prompts = (8, 16, 32, 48)
    dtype = torch.bfloat16 if day.cuda else torch.float32
    for shape in ("tiny",) if day.tiny else ("Qwen2.5-1.5B", "Qwen2.5-0.5B"):
        model = random_model(shape, attention=IMPLEMENTATION, dtype=dtype, device=day.device)
        model.requires_grad_(False)
        for rows, context, ragged in grid:
            measure = partial(_decode, day, model, rows, context, ragged)
            day.check("decode step", measure, model=shape, rows=rows, ragged=ragged)
        for tokens in prompts:
            day.check("prefill", partial(_prefill, day, model, tokens), model=shape, tokens=tokens)
        rows, context = (4, 8) if day.tiny else (64, 1024)
        measure = partial(_generate, day, model, rows, context)
        day.check("generate step", measure, model=shape, rows=rows, context=context)


def _batcher(model: PreTrainedModel, lengths: list[int], steps: int) -> Batcher:
    batcher = Batcher(model, version="0", max_running_requests=len(lengths))
    draw, vocabulary = random.Random(0), model.config.vocab_size
    for index, length in enumerate(lengths):
        sampling = SamplingParams(max_new_tokens=steps, seed=index, ignore_eos=True)
        prompt = random_tokens(draw, vocabulary, length)
        batcher.add(GenerateRequest(request_id=str(index), prompt_tokens=prompt, sampling=sampling))
    return batcher


def _decode(
    day: Day, model: PreTrainedModel, rows: int, context: int, ragged: bool
) -> Mapping[str, Any]:
    steps = 4 if day.tiny else 20
    draw = random.Random(1)
    lengths = [draw.randint(1, 2 * context - 1) if ragged else context for _ in range(rows)]
    batcher = _batcher(model, lengths, 400)

    def until_all_run() -> None:
        while batcher.waiting:
            batcher.step()

    def work(count: int) -> None:
        for _ in range(count):
            batcher.step()

    admit_s = day.wall_s(until_all_run)
    work(3)
    step_s = day.wall_s(lambda: work(steps)) / steps
    read = sum(sample.length for sample in batcher.running)
    with host_waits() as waits:
        batcher.step()
    gpu = known_gpu(day)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    floor = weights + read * _cache_bytes_per_token(model)
    return {
        "context": read / rows - (steps - 1) / 2,
        "admit_s": admit_s,
        "step_s": step_s,
        "tokens_per_s": rows / step_s,
        "host_waits": waits if day.cuda else None,
        "least_bytes": floor,
        "over_memory_floor": None if gpu is None else step_s * gpu.memory_bytes_per_s / floor,
        "cache_bytes": batcher.cache_bytes,
    }


def _cache_bytes_per_token(model: PreTrainedModel) -> int:
    config = model.config
    head = config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * head) * (
        model.dtype.itemsize
    )


def _prefill(day: Day, model: PreTrainedModel, tokens: int) -> Mapping[str, Any]:
    """A pass that reads one prompt and samples its first token."""
    seconds = []
    for _ in range(3):
        batcher = _batcher(model, [tokens], 2)
        seconds.append(day.wall_s(batcher.step))
    return {"step_s": min(seconds), "first_s": seconds[0], "pairs": tokens * (tokens + 1) // 2}


def _generate(day: Day, model: PreTrainedModel, rows: int, context: int) -> Mapping[str, Any]:
    """A decode step of transformers' own loop: the difference of two lengths."""
    few, more = 2, 6 if day.tiny else 66
    prompt = torch.randint(2, model.config.vocab_size, (rows, context), device=day.device)

    def run(tokens: int) -> Callable[[], object]:
        plain: Any = model
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        mask = torch.ones_like(prompt)
        return partial(plain.generate, prompt, attention_mask=mask, do_sample=True, **limits)

    model.set_attn_implementation("sdpa")
    try:
        run(few)()
        step_s = (day.wall_s(run(more)) - day.wall_s(run(few))) / (more - few)
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
    return {"step_s": step_s, "tokens_per_s": rows / step_s}
