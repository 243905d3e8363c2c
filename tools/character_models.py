"""Train the packaged models for co-simulation: `python -m tools.character_models NAME FOLDER`.

    Adder-102K    123+456=  ->  9750<end>       Sorter-102K    39184=  ->  13489<end>

A Llama of two layers and 102,000 parameters, one token per character, trained from random weights
on correct responses to random problems. Training stops at a measured accuracy of sampled responses,
in the middle of learning: that leaves a policy gradient something to learn, and something to lose.
Each takes under a minute on one core; the same torch on the same kind of processor gives the same
bytes. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from transformers import LlamaForCausalLM

from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.data.small_tasks import reversed_sums, sorted_digits
from areal_lab.data.tokenize import TextCodec
from benchmarks.tiny_model import write_tiny_model
from tools.tiny_model import Lines, accuracy, as_lines, write_source

BATCH: Final = 128
LEARNING_RATE: Final = 1e-3
MEASURE_EVERY: Final = 10
"""Steps between two measurements of the accuracy."""
MOST_STEPS: Final = 4000
SEED: Final = 1
END: Final = "<end>"


@dataclass(frozen=True, slots=True)
class Start:
    """A task, and where its supervised training stops."""

    problems: Callable[..., ProblemSet]
    accuracy: float
    """Of sampled responses, from which the training stops."""


STARTS: Final = {
    "Adder-102K": Start(partial(reversed_sums, digits=(3, 3)), 0.47),
    "Sorter-102K": Start(partial(sorted_digits, digits=(4, 8)), 0.61),
}


def batches(codec: TextCodec, start: Start) -> Iterator[Lines]:
    """Endless batches: new problems each 20,000, so that few are seen twice."""
    seed = SEED
    while True:
        seed += 1
        problems = start.problems(seed=seed).train
        for first in range(0, len(problems) - BATCH + 1, BATCH):
            yield solved(codec, problems[first : first + BATCH])


def solved(codec: TextCodec, problems: tuple[Problem, ...]) -> Lines:
    """The problems with their gold answers, each with an end token."""
    return as_lines(
        codec.encode_all([problem.prompt for problem in problems]),
        codec.encode_all([f"{problem.answer}{END}" for problem in problems]),
    )


def train(model: LlamaForCausalLM, codec: TextCodec, start: Start, *, most_steps: int) -> int:
    """Train with AdamW until the accuracy is reached; returns the number of steps."""
    tested = solved(codec, start.problems(seed=SEED).held_out)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, (0.9, 0.95), weight_decay=0.01)
    for step, lines in enumerate(batches(codec, start), start=1):
        logits = model(lines.tokens[:, :-1]).logits
        learned = lines.response[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits[learned], lines.tokens[:, 1:][learned])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step == most_steps:
            return step
        if step % MEASURE_EVERY == 0 and accuracy(model, tested, greedy=False) >= start.accuracy:
            return step
    raise AssertionError("batches do not end")


def make(name: str, folder: Path, *, most_steps: int = MOST_STEPS) -> dict[str, Any]:
    """Write a trained model as a Hugging Face folder; returns what `source.json` says."""
    began_s, start = time.process_time(), STARTS[name]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as untrained:
        write_tiny_model(
            Path(untrained), seed=SEED, initializer_range=0.05, kv_heads=4, intermediate_size=176
        )
        model = LlamaForCausalLM.from_pretrained(untrained, dtype=torch.float32)
        codec = TextCodec.load(untrained)
        steps = train(model, codec, start, most_steps=most_steps)
        model.bfloat16().save_pretrained(folder)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (folder / file).write_bytes((Path(untrained) / file).read_bytes())
    stored = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tested = solved(codec, start.problems(seed=SEED).held_out)
    return write_source(
        folder,
        stored,
        began_s=began_s,
        made_by=f"python -m tools.character_models {name}, from random weights and generated "
        "problems",
        steps=steps,
        batch=BATCH,
        seed=SEED,
        accuracy_sampled=accuracy(stored, tested, greedy=False),
        accuracy_greedy=accuracy(stored, tested, greedy=True),
    )


def main() -> None:
    """Parse the command line, train, and say how well the model does."""
    parser = argparse.ArgumentParser(description="train a model for co-simulation")
    parser.add_argument("name", choices=tuple(STARTS))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(json.dumps(make(arguments.name, arguments.folder), indent=1))


if __name__ == "__main__":
    main()
