"""A real run with a tiny random model: real processes, real HTTP, seconds instead of minutes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from areal_lab.config import TrainConfig
from areal_lab.control.events import GroupId
from areal_lab.load import load_config
from areal_lab.pipeline.progress import Silent
from areal_lab.pipeline.reports import StepReport
from areal_lab.pipeline.run import RunResult, RunState, StopSignal, prepare, run

CHARACTERS = "0123456789+-*= \n"


def tiny_model(folder: Path, *, seed: int = 0) -> Path:
    """A random Llama whose tokens are characters, in a Hugging Face folder."""
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    vocabulary["<end>"] = len(vocabulary)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=len(vocabulary) - 1,
            pad_token_id=len(vocabulary) - 1,
            tie_word_embeddings=True,
            initializer_range=0.2,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def tiny_config(folder: Path, *overrides: str) -> TrainConfig:
    """A few steps on one-digit addition; the model and the runs live below `folder`."""
    model = folder / "model"
    if not model.exists():
        tiny_model(model)
    return load_config(
        None,
        [
            f"actor.path={model}",
            f"run_dir={folder / 'runs'}",
            "actor.optimizer.lr=1e-3",
            "actor.dtype=float32",
            "rollout.dtype=float32",
            "rollout.threads=1",
            "actor.threads=1",
            "dataset.batch_size=3",
            "gconfig.n_samples=4",
            "gconfig.max_new_tokens=6",
            "evaluation.max_problems=4",
            "evaluation.samples_per_problem=2",
            "plots=false",
            *overrides,
        ],
    )


def do_run(
    config: TrainConfig,
    *,
    on_step: Callable[[StepReport], None] = lambda _: None,
    answer_tokens: Callable[[GroupId, int], int] | None = None,
    reward_fn: Callable[..., float] | None = None,
    state: RunState | None = None,
    stop: StopSignal | None = None,
) -> RunResult:
    """Run to the end on this thread."""
    return asyncio.run(
        run(
            config,
            prepare(config),
            on_step=on_step,
            display=Silent(),
            stop=stop or StopSignal(),
            answer_tokens=answer_tokens,
            reward_fn=reward_fn,
            state=state,
        )
    )


def count_fives(completion: str, example: dict[str, Any]) -> float:
    """A reward that any model meets now and then, so that every group has differences."""
    del example
    return float(completion.count("5"))


def trained_samples(folder: Path) -> list[list[dict[str, Any]]]:
    """What each step was trained on."""
    files = sorted((folder / "trajectories").glob("step-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
