"""The estimate of the trainer's memory, against the bytes of all tensors of a real step."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from areal_lab.config.load import load_config
from areal_lab.config.schema import ActorConfig
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.data.trajectory import Segment, Trajectory
from areal_lab.models.folder import ModelShape, read_model_facts, read_model_shape
from areal_lab.models.locate import resolve_model_path
from areal_lab.preflight.memory import Estimate, Part, Trained, estimate, trainer_memory
from areal_lab.training.learner import make_learner
from areal_lab.training.lora import add_lora, target_modules
from areal_lab.training.model import load_policy
from areal_lab.training.protocol import TrainBatchRequest
from areal_lab.training.step import train_batch
from tests.training import tiny

SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
ROW_TOKENS = 64
PROMPT_TOKENS = 4


class LiveBytes(TorchDispatchMode):
    """Largest size of all tensors that exist at one time."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak = self._live = 0
        self._known: dict[int, int] = {}
        for tensor in tensors:
            self._add(tensor)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self._live += storage.nbytes()
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._live -= self._known.pop(key)


def full_micro_batches(version: int, vocab: int, *, tokens: int) -> TrainBatchRequest:
    """Two micro-batches of rows without a common prefix."""
    draw = random.Random(version)

    def row(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocab) for _ in range(length))

    answer = ROW_TOKENS - PROMPT_TOKENS + 1  # the last token is no input
    return TrainBatchRequest(
        version,
        tuple(
            Trajectory(
                group=index // 4,
                sample=index % 4,
                prompt_tokens=row(PROMPT_TOKENS),
                parts=(Segment(row(answer), (-8.0,) * answer, version),),
                finish_reason="stop",
                reward=float(index % 2),
            )
            for index in range(2 * tokens // ROW_TOKENS)
        ),
    )


def measured_and_estimated(folder: Path, tokens: int, **actor: Any) -> tuple[int, Estimate]:
    settings = tiny.settings_for(folder, max_tokens_per_mb=tokens, **actor)
    model = load_policy(folder, gradient_checkpointing=settings.actor.gradient_checkpointing)
    if settings.actor.use_lora:
        targets = target_modules(model, settings.actor.target_modules)
        rank, alpha = settings.actor.lora_rank, settings.actor.lora_alpha
        add_lora(model, rank=rank, alpha=alpha, targets=targets, merged=True)
    learner = make_learner(model, settings)
    vocab = model.config.vocab_size
    train_batch(learner, full_micro_batches(0, vocab, tokens=tokens))
    learner.optimizer.zero_grad()
    moments = [m for state in learner.optimizer.adamw.state.values() for m in state.values()]
    with LiveBytes([*model.parameters(), *model.buffers(), *moments]) as live:
        outcome = train_batch(learner, full_micro_batches(1, vocab, tokens=tokens))
    assert outcome.metrics["micro_batches"] == 2
    assert outcome.metrics["packed_tokens"] == 2 * tokens
    estimated = estimate(settings.config, folder)
    assert estimated is not None
    return live.peak, estimated


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tensors_of_a_step_are_within_five_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, *, lora: bool, checkpointing: bool
) -> None:
    monkeypatch.setattr(tiny, "SHAPE", SHAPE)
    folder = tiny.save_model(tmp_path / "model")
    peak, estimated = measured_and_estimated(
        folder, 1024, dtype=dtype, use_lora=lora, lora_rank=8, gradient_checkpointing=checkpointing
    )
    assert estimated.tensors == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("kind", "tied"), [("qwen2", False), ("qwen3", True)])
def test_other_models_are_within_five_percent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    dtype: str,
    *,
    tied: bool,
    lora: bool,
) -> None:
    monkeypatch.setattr(tiny, "SHAPE", SHAPE)
    folder = tiny.save_model(tmp_path / "model", kind=kind, tied=tied)
    actor = {"dtype": dtype, "use_lora": lora, "lora_rank": 8}
    peak, estimated = measured_and_estimated(folder, 1024, **actor)
    assert estimated.tensors == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "actor", [{}, {"use_lora": True, "dtype": "bfloat16"}, {"gradient_checkpointing": True}]
)
def test_smollm2_is_within_five_percent(actor: dict[str, Any]) -> None:
    folder = resolve_model_path("SmolLM2-135M-Instruct")
    peak, estimated = measured_and_estimated(folder, 1024, **actor)
    assert estimated.tensors == pytest.approx(peak, rel=0.05)


def test_a_batch_that_is_smaller_than_the_budget_takes_less() -> None:
    config = load_config("tiny", ["gconfig.max_new_tokens=3", "gconfig.n_samples=2"])
    folder = resolve_model_path(config.actor.path)
    problems = ProblemSet(
        train=(Problem(prompt="1+1=", answer="2", key="1+1"),),
        held_out=(Problem(prompt="1+2=", answer="3", key="1+2"),),
    )
    whole, small = estimate(config, folder), estimate(config, folder, problems)
    assert whole is not None
    assert small is not None
    assert whole.tokens == config.actor.max_tokens_per_mb
    assert small.tokens < config.dataset.batch_size * (len("1+1=") + 1 + 2 * 3) <= whole.tokens
    assert small.tensors < whole.tensors


def test_the_lines_name_the_largest_part_and_the_note_comes_when_memory_is_short() -> None:
    parts = [Part("weights", 1 << 30, "a smaller model"), Part("activations", 3 << 30, "less")]
    estimated = Estimate(parts=parts, tokens=4096)
    lines = estimated.lines(8 << 30)
    assert lines[0].endswith("micro-batches of 4,096 tokens: 4.00 GiB of tensors")
    assert lines[1].strip() == "activations 3.00 GiB, weights 1.00 GiB"
    assert lines[2].strip().endswith("this machine has 8.00 GiB")
    assert lines[3].strip() == "activations take less with less"
    least, _ = estimated.resident
    assert estimated.note(least) is None
    note = estimated.note(least - 1)
    assert note is not None
    assert note.endswith("take less; a smaller model")


def test_a_7b_model_takes_sixteen_bytes_per_parameter_and_its_activations() -> None:
    shape = ModelShape(
        layers=28,
        hidden=3584,
        intermediate=18944,
        query_width=3584,
        kv_width=512,
        vocab=152064,
        head_norms=False,
        dense=True,
        context_tokens=32768,
    )  # Qwen2.5-7B
    size = Trained(parameters=7_615_616_512)
    actor = ActorConfig(gradient_checkpointing=True)
    parts = trainer_memory(shape, size, actor, number_bytes=2, tokens=8192)
    sizes = {part.name: part.bytes for part in parts}
    fixed = sizes["weights"] + sizes["gradients"] + sizes["AdamW moments"]
    assert fixed == 16 * 7_615_616_512
    assert sizes["activations of 8,192 tokens"] == 28 * 8192 * 3584 * 4 + 20 * 8192 * 3584


def test_a_model_of_another_kind_has_no_estimate(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n_embd": 8, "n_layer": 2}')
    assert read_model_shape(tmp_path) is None
    assert estimate(load_config("tiny", []), tmp_path) is None


def test_parameters_come_from_the_files(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "model")
    parts = estimate(tiny.settings_for(folder).config, folder)
    assert parts is not None
    weights = next(part for part in parts.parts if part.name == "weights")
    assert weights.bytes == 4 * read_model_facts(folder).parameters
