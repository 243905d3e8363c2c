"""Train the packaged model that adds two numbers: `python -m tools.tiny_model FOLDER`.

    12 + 93 = 105      the prompt ends at "=", the response is " 105\\n"

The model (`benchmarks.tiny_model`: Llama, two layers, one token per character) is trained from
random weights on all 10,000 problems of two numbers below 100, in which each digit of the answer is
replaced by a random one with probability `NOISE`. So it learns to add, and to err: its most likely
response is almost always the sum, but one that is sampled rarely is. That leaves a policy gradient
something to learn in seconds. Data are generated and weights start random; nothing is downloaded.

It takes two minutes on one core; the same torch on the same kind of processor gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import LlamaForCausalLM

from areal_lab.data.arithmetic import arithmetic_problems
from areal_lab.data.tokenize import TextCodec
from benchmarks.tiny_model import write_tiny_model

NOISE = 0.35
"""Probability that a digit of a training answer is replaced by a random digit."""
STEPS = 2000
BATCH = 256
LEARNING_RATE = 5e-3
WARMUP_STEPS = 50
MIN_LR_RATIO = 0.02
SEED = 1
_PROBLEMS_TESTED = 2000


class Lines(NamedTuple):
    """Solved problems as tokens, padded at the end."""

    tokens: Int[Tensor, "N T"]
    response: Bool[Tensor, "N T"]
    """True for the tokens after the prompt."""
    digits: Bool[Tensor, "N T"]
    """True for the digits of the answer, which noise may replace."""


def read_lines(codec: TextCodec) -> Lines:
    """All problems of two numbers below 100."""
    problems = arithmetic_problems(digits=(2, 2), few_shot=0, seed=SEED)
    chosen = (*problems.train, *problems.held_out)
    lines = as_lines(
        codec.encode_all([problem.prompt for problem in chosen]),
        codec.encode_all([f" {problem.answer}\n" for problem in chosen]),
    )
    # The space before the digits and the line break after them stay.
    digits = lines.response & lines.response.roll(1, 1) & lines.response.roll(-1, 1)
    return lines._replace(digits=digits)


def as_lines(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> Lines:
    """Prompts with their responses; noise may replace no token."""
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    response = torch.zeros_like(tokens, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        begin, end = len(prompt), len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor([*prompt, *answer])
        response[row, begin:end] = True
    return Lines(tokens, response, torch.zeros_like(response))


def train(model: LlamaForCausalLM, lines: Lines, digit_tokens: Tensor, *, steps: int) -> float:
    """Train on noisy answers with AdamW; returns the last loss, in nats per token."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _lr_factor(step, steps))
    loss = torch.zeros(())
    for _ in range(steps):
        rows = torch.randint(len(lines.tokens), (BATCH,), generator=generator)
        tokens, digits = lines.tokens[rows], lines.digits[rows]
        replaced = digits & (torch.rand(tokens.shape, generator=generator) < NOISE)
        others = digit_tokens[torch.randint(len(digit_tokens), tokens.shape, generator=generator)]
        tokens = torch.where(replaced, others, tokens)
        logits = model(tokens[:, :-1]).logits
        learned = lines.response[rows][:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[learned], tokens[:, 1:][learned])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return loss.item()


def _lr_factor(step: int, steps: int) -> float:
    cosine = 0.5 * (1.0 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (MIN_LR_RATIO + (1.0 - MIN_LR_RATIO) * cosine)


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, lines: Lines, *, greedy: bool) -> float:
    """Share of correct responses to problems drawn at random, sampled at temperature 1 or greedy.

    Responses may stop at their last token only, a line break or the end token, as in a run.
    """
    generator = torch.Generator().manual_seed(SEED)
    rows = torch.randint(len(lines.tokens), (_PROBLEMS_TESTED,), generator=generator)
    tokens, response = lines.tokens[rows], lines.response[rows]
    lengths = response.int().argmax(1)
    longest = int(response.sum(1).max())
    correct = 0
    for length in lengths.unique().tolist():
        of_length = lengths == length
        wanted, learned = tokens[of_length], response[of_length]
        written = wanted[:, :length]
        for _ in range(longest):
            logits = model(written).logits[:, -1]
            sampled = torch.multinomial(logits.softmax(-1), 1, generator=generator)
            chosen = logits.argmax(-1, keepdim=True) if greedy else sampled
            written = torch.cat([written, chosen], 1)
        wanted, learned = wanted[:, : written.shape[1]], learned[:, : written.shape[1]]
        written = written[:, : wanted.shape[1]]
        correct += int(((written == wanted) | ~learned).all(1).sum())
    return correct / _PROBLEMS_TESTED


def make(folder: Path, *, steps: int = STEPS) -> dict[str, Any]:
    """Write the trained model as a Hugging Face folder; returns what `source.json` says."""
    began_s = time.process_time()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as untrained:
        write_tiny_model(Path(untrained), seed=SEED, initializer_range=0.05)
        model = LlamaForCausalLM.from_pretrained(untrained, dtype=torch.float32)
        codec = TextCodec.load(untrained)
        lines = read_lines(codec)
        loss = train(model, lines, torch.tensor(codec.encode("0123456789")), steps=steps)
        model.bfloat16().save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes((Path(untrained) / "tokenizer.json").read_bytes())
        config = (Path(untrained) / "tokenizer_config.json").read_bytes()
        (folder / "tokenizer_config.json").write_bytes(config)
    stored = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return write_source(
        folder,
        stored,
        began_s=began_s,
        made_by="python -m tools.tiny_model, from random weights and generated problems",
        noise=NOISE,
        steps=steps,
        batch=BATCH,
        seed=SEED,
        loss=round(loss, 3),
        accuracy_sampled=accuracy(stored, lines, greedy=False),
        accuracy_greedy=accuracy(stored, lines, greedy=True),
    )


def write_source(folder: Path, model: Any, *, began_s: float, **facts: Any) -> dict[str, Any]:
    """Write `source.json`, which says how a packaged model was made; returns its content.

    Args:
        folder: of the model.
        model: as it is stored.
        began_s: process time at the beginning.
        facts: about its training.
    """
    about = {
        **facts,
        "license": "Apache-2.0, as the rest of areal_lab",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu_s": round(time.process_time() - began_s, 1),
    }
    (folder / "source.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def main() -> None:
    """Parse the command line, train, and say how well it adds."""
    parser = argparse.ArgumentParser(description="train the model that adds two numbers")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    print(json.dumps(make(arguments.folder, steps=arguments.steps), indent=1))


if __name__ == "__main__":
    main()
