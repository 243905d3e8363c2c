"""Tiny models with random weights, and what a plain forward pass says about generated tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from areal_lab.engines.embedded.batcher import Batcher, Sample
from areal_lab.engines.protocol import GenerateRequest, SamplingParams

VOCABULARY = 97
END_TOKEN = 1
CONTEXT = 256

SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": END_TOKEN,
    "pad_token_id": 0,
}


def tiny_model(
    kind: str = "llama", seed: int = 0, *, tied: bool = False, **shape: int
) -> PreTrainedModel:
    """A causal model in float32, with weights large enough that its distributions are uneven."""
    torch.manual_seed(seed)
    model: PreTrainedModel
    match kind:
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **shape}, tie_word_embeddings=tied))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=tied))
        case _:
            config = Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=tied)
            model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.mul_(4)
    return model.eval()


def request(
    name: str, prompt: Sequence[int], max_new_tokens: int = 8, seed: int = 0, **sampling: object
) -> GenerateRequest:
    """A request that ends only at its length, unless set otherwise."""
    stops = sampling.get("stop_token_ids") or sampling.get("stop")
    values = {"ignore_eos": not stops, **sampling}
    return GenerateRequest(
        request_id=name,
        prompt_tokens=tuple(prompt),
        sampling=SamplingParams(
            max_new_tokens=max_new_tokens,
            seed=seed,
            **values,  # type: ignore[arg-type]
        ),
    )


def ragged_requests(count: int, seed: int = 0) -> list[GenerateRequest]:
    """Prompts and responses of many lengths; prompts share prefixes, and some are equal."""
    chance = random.Random(seed)
    base = [chance.randrange(2, VOCABULARY) for _ in range(24)]
    requests = []
    for index in range(count):
        shared = base[: chance.randrange(1, 24)]
        own = [chance.randrange(2, VOCABULARY) for _ in range(chance.randrange(1, 9))]
        prompt = base if index % 3 == 0 else shared + own
        requests.append(request(f"r{index}", prompt, chance.randrange(1, 40), seed=index))
    return requests


def run(batcher: Batcher) -> dict[str, Sample]:
    """Step until nothing is left; the samples by request id."""
    ended = {}
    while batcher.running or batcher.waiting:
        for sample in batcher.step():
            ended[sample.request.request_id] = sample
    return ended


@torch.no_grad()
def plain_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0
) -> Tensor:
    """Log-probs of `tokens` after `prompt`, by one unbatched forward pass."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)


def largest_error(model: PreTrainedModel, sample: Sample, temperature: float = 1.0) -> float:
    """Largest difference between reported and plainly computed log-probs."""
    plain = plain_logprobs(model, sample.request.prompt_tokens, sample.tokens, temperature)
    return float((plain - torch.tensor(sample.logprobs)).abs().max())
