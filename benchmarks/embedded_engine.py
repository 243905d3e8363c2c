"""The embedded engine's continuous batching against `transformers.generate` on the same requests.

Response lengths are long-tailed (log-normal, fixed per request, end-of-sequence ignored); prompts
share no prefix, so that only the batching differs. Both use one model, one thread count, float32,
temperature 1. `generate` gets static batches of the size the engine may run, left-padded, each as
long as its longest response; only requested tokens count. Variants take turns.

    ratio                      tokens/s of the engine over tokens/s of generate, by wall time
    cpu_ratio                  the same by CPU time, which a busy machine disturbs less
    bound                      gain of perfect batching: rows computed over rows needed
    max_logprob_error          engine against one plain forward per request, float32
    max_logprob_error_retract  the same after an interruption, under each token's weights
    max_float64_error          engine against a plain forward in float64
    max_float64_error_of_plain the plain float32 forward against the one in float64: the rounding
                               error of float32 on this model, about 2e-5 on SmolLM2-135M;
                               on random weights of the same shape all errors are below 1e-5

    python -m benchmarks.embedded_engine --json [--quick]
"""

from __future__ import annotations

import copy
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from areal_lab.engines.embedded.attention import IMPLEMENTATION
from areal_lab.engines.embedded.batcher import Batcher, Sample
from areal_lab.engines.protocol import GenerateRequest, PauseMode, SamplingParams
from areal_lab.engines.weights.folder import deduplicated_state
from areal_lab.models.locate import ModelNotFound, resolve_model_path
from benchmarks.harness import Arguments, parse, report, spread

T = TypeVar("T")

MODEL = "SmolLM2-135M-Instruct"
THREADS = 1
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 24, 1.0, 256
PROMPT_TOKENS = (16, 64)


def main() -> None:
    """Measure and report."""
    arguments = parse(__doc__, repeats=3, quick_repeats=1)
    torch.set_num_threads(THREADS)
    model, name = load_model(arguments)
    served = copy.deepcopy(model)
    served.set_attn_implementation(IMPLEMENTATION)
    batch_size = 8 if arguments.quick else 16
    requests = draw_requests(2 * batch_size, model.config.vocab_size)
    wanted = sum(request.sampling.max_new_tokens for request in requests)

    engine: list[Timing] = []
    generate: list[Timing] = []
    samples: list[Sample] = []
    for _ in range(arguments.repeats):
        timing, samples = timed(lambda: run_engine(served, requests, batch_size))
        engine.append(timing)
        generate.append(timed(lambda: run_generate(model, requests, batch_size))[0])
    ratios = [g.wall_s / e.wall_s for e, g in zip(engine, generate, strict=True)]
    cpu_ratios = [g.cpu_s / e.cpu_s for e, g in zip(engine, generate, strict=True)]
    per_s = {
        "engine_tokens_per_s": [wanted / timing.wall_s for timing in engine],
        "generate_tokens_per_s": [wanted / timing.wall_s for timing in generate],
        "engine_tokens_per_cpu_s": [wanted / timing.cpu_s for timing in engine],
        "generate_tokens_per_cpu_s": [wanted / timing.cpu_s for timing in generate],
    }
    lengths = [request.sampling.max_new_tokens for request in requests]
    report(
        {
            "ratio": statistics.median(ratios),
            "cpu_ratio": statistics.median(cpu_ratios),
            "bound": length_bound(lengths, batch_size),
            **{name: statistics.median(values) for name, values in per_s.items()},
            **errors(model, requests[:batch_size], samples),
            "model": name,
            "threads": THREADS,
            "max_running_requests": batch_size,
            "requests": len(requests),
            "tokens": wanted,
            "longest_tokens": max(lengths),
            "spread": {
                "ratio": spread(ratios),
                "cpu_ratio": spread(cpu_ratios),
                **{name: spread(values) for name, values in per_s.items()},
            },
        },
        arguments,
    )


class Timing(NamedTuple):
    """Seconds of one run."""

    wall_s: float
    cpu_s: float


def timed(run: Callable[[], T]) -> tuple[Timing, T]:
    """Run once; returns the times and the result."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = run()
    return Timing(time.perf_counter() - wall_s, time.process_time() - cpu_s), result


def load_model(arguments: Arguments) -> tuple[PreTrainedModel, str]:
    """SmolLM2 if its package is installed, else random weights of its shape; tiny if quick."""
    if not arguments.quick:
        try:
            folder = resolve_model_path(MODEL)
        except ModelNotFound:
            pass  # random weights compute at the same speed
        else:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), MODEL
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096 if arguments.quick else 49152,
        hidden_size=288 if arguments.quick else 576,
        intermediate_size=768 if arguments.quick else 1536,
        num_hidden_layers=4 if arguments.quick else 30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    name = "tiny" if arguments.quick else "random weights, SmolLM2-135M's shape"
    return LlamaForCausalLM(config).eval(), name


def draw_requests(count: int, vocabulary: int) -> list[GenerateRequest]:
    """Random prompts and log-normal response lengths, always the same."""
    chance = random.Random(7)
    return [
        GenerateRequest(
            request_id=str(index),
            prompt_tokens=tuple(
                chance.randrange(vocabulary) for _ in range(chance.randint(*PROMPT_TOKENS))
            ),
            sampling=SamplingParams(
                max_new_tokens=max(
                    1,
                    min(MOST_TOKENS, round(chance.lognormvariate(math.log(MEDIAN_TOKENS), SIGMA))),
                ),
                ignore_eos=True,
                seed=index,
            ),
        )
        for index in range(count)
    ]


def run_engine(
    model: PreTrainedModel, requests: Sequence[GenerateRequest], batch_size: int
) -> list[Sample]:
    """Generate all requests with a batcher."""
    batcher = Batcher(model, version="0", max_running_requests=batch_size)
    for request in requests:
        batcher.add(request)
    return finish(batcher)


def finish(batcher: Batcher) -> list[Sample]:
    """Step until all requests have finished."""
    ended = []
    while batcher.running or batcher.waiting:
        ended += batcher.step()
    return ended


def run_generate(
    model: PreTrainedModel, requests: Sequence[GenerateRequest], batch_size: int
) -> None:
    """The same requests in static batches, in the same order."""
    torch.manual_seed(0)
    for first in range(0, len(requests), batch_size):
        batch = requests[first : first + batch_size]
        width = max(len(request.prompt_tokens) for request in batch)
        tokens = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(tokens)
        for row, request in enumerate(batch):
            tokens[row, width - len(request.prompt_tokens) :] = torch.tensor(request.prompt_tokens)
            mask[row, width - len(request.prompt_tokens) :] = 1
        longest = max(request.sampling.max_new_tokens for request in batch)
        with torch.inference_mode():
            cast(Any, model).generate(
                tokens,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                min_new_tokens=longest,
                max_new_tokens=longest,
                pad_token_id=0,
            )


def length_bound(lengths: Sequence[int], batch_size: int) -> float:
    """Rows that static batches compute per row needed: the gain of perfect batching."""
    computed = sum(
        max(lengths[first : first + batch_size]) * len(lengths[first : first + batch_size])
        for first in range(0, len(lengths), batch_size)
    )
    return computed / sum(lengths)


def errors(
    model: PreTrainedModel, requests: Sequence[GenerateRequest], samples: Sequence[Sample]
) -> dict[str, float]:
    """Largest differences of log-probs; those against float64 over as many samples as requests."""
    exact = copy.deepcopy(model).double()
    against_exact, plain_against_exact = [], []
    for sample in samples[: len(requests)]:
        truth = plain_logprobs(exact, sample)
        against_exact.append((torch.tensor(sample.logprobs) - truth).abs().max().item())
        plain_against_exact.append((plain_logprobs(model, sample) - truth).abs().max().item())
    return {
        "max_logprob_error": max(logprob_error({"0": model}, sample) for sample in samples),
        "max_logprob_error_retract": retract_error(model, requests),
        "max_float64_error": max(against_exact),
        "max_float64_error_of_plain": max(plain_against_exact),
    }


@torch.inference_mode()
def plain_logprobs(model: PreTrainedModel, sample: Sample) -> Float[Tensor, " T"]:
    """Log-probs of the sampled tokens by one forward pass over prompt and tokens."""
    prompt = sample.request.prompt_tokens
    ids = torch.tensor([[*prompt, *sample.tokens]])
    logits: Tensor = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)


def logprob_error(models: Mapping[str, PreTrainedModel], sample: Sample) -> float:
    """Largest difference from a plain forward under the weights of each span."""
    reported = torch.tensor(sample.logprobs)
    worst = 0.0
    for span in sample.spans:
        error = (plain_logprobs(models[span.version], sample) - reported).abs()
        worst = max(worst, error[span.start : span.end].max().item())
    return worst


def retract_error(model: PreTrainedModel, requests: Sequence[GenerateRequest]) -> float:
    """The same after a `retract` pause in which other weights were loaded."""
    changed = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.02 * float(weight.std()))
    served = copy.deepcopy(model)
    served.set_attn_implementation(IMPLEMENTATION)
    batcher = Batcher(served, version="0", max_running_requests=len(requests))
    for request in requests:
        batcher.add(request)
    ended = []
    for _ in range(MEDIAN_TOKENS // 2):
        ended += batcher.step()
    batcher.pause(PauseMode.RETRACT)
    batcher.replace_weights(deduplicated_state(changed), "1", flush=True)
    batcher.resume()
    ended += finish(batcher)
    return max(logprob_error({"0": model, "1": changed}, sample) for sample in ended)


if __name__ == "__main__":
    main()
