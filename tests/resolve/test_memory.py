"""The estimate of the trainer's memory, against the bytes of all tensors of a real step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.load import load_config
from areal_lab.config.schema import ActorConfig
from areal_lab.data.problems import Problem, ProblemSet
from areal_lab.models.folder import ModelShape, read_model_facts, read_model_shape
from areal_lab.models.locate import resolve_model_path
from areal_lab.resolve.allocation import layout_of
from areal_lab.resolve.memory import Estimate, Part, Trained, estimate, trainer_memory
from areal_lab.training.decoder_layers import Checkpointing
from tests.training import tiny
from tests.training.live_bytes import SHAPE, measured_and_estimated


@pytest.mark.parametrize("checkpointing", [False, True, "selective"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_tensors_of_a_step_are_within_five_percent(
    tmp_path: Path, dtype: str, *, lora: bool, checkpointing: Checkpointing
) -> None:
    folder = tiny.save_model(tmp_path / "model", **SHAPE)
    peak, estimated = measured_and_estimated(
        folder, 1024, dtype=dtype, use_lora=lora, lora_rank=8, gradient_checkpointing=checkpointing
    )
    assert estimated.tensors == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize(("kind", "tied"), [("qwen2", False), ("qwen3", True)])
def test_other_models_are_within_five_percent(
    tmp_path: Path,
    kind: str,
    dtype: str,
    *,
    tied: bool,
    lora: bool,
) -> None:
    folder = tiny.save_model(tmp_path / "model", kind=kind, tied=tied, **SHAPE)
    actor = {"dtype": dtype, "use_lora": lora, "lora_rank": 8}
    peak, estimated = measured_and_estimated(folder, 1024, **actor)
    assert estimated.tensors == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    "actor",
    [
        {"advantage": "gae"},
        {"advantage": "gae", "kl_ctl": 0.1},
        {"kl_loss_coef": 0.1},
        {"more": {"teacher.path": "MODEL"}},
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_other_models_beside_the_policy_are_within_five_percent(
    tmp_path: Path, actor: dict[str, Any], *, tied: bool
) -> None:
    folder = tiny.save_model(tmp_path / "model", tied=tied, **SHAPE)
    if "more" in actor:
        actor = {"more": {"teacher.path": str(folder)}}
    peak, estimated = measured_and_estimated(folder, 512, **actor)
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
    whole, small = estimate(config, folder), estimate(config, folder, problems=problems)
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
    many = Estimate(parts=parts, tokens=4096, processes=3)
    assert many.lines(8 << 30)[0].endswith("of tensors in each of 3 processes")
    assert many.resident[0] == 3 * least
    note = estimated.note(least - 1)
    assert note is not None
    assert note.endswith("take less; a smaller model")


def test_a_7b_model_takes_sixteen_bytes_per_parameter_and_its_activations() -> None:
    shape = ModelShape(
        kind="qwen2",
        head_width=128,
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


def test_a_gpu_takes_bfloat16_and_larger_tiles_of_logits() -> None:
    config = load_config("tiny", ["actor.dtype=auto"])
    folder = resolve_model_path(config.actor.path)
    there = estimate(config, folder, device="cuda")
    low = estimate(config.with_settings({"actor.dtype": "bfloat16"}), folder)
    assert there is not None
    assert low is not None
    here = {part.name: part.bytes for part in low.parts}
    for part in there.parts:
        assert part.bytes >= here[part.name] if part.name == "logits" else here[part.name]
    lines = there.lines(8 << 30)
    assert lines[2].strip().startswith("on a GPU, besides its context")
    assert not any("resident" in line for line in lines)


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


def test_checkpoints_beside_training_take_a_copy_of_model_and_state(tmp_path: Path) -> None:
    folder = tiny.save_model(tmp_path / "model")
    config = tiny.settings_for(folder).config
    parameters = read_model_facts(folder).parameters
    for changes, numbers, once in (
        ({"checkpoint.asynchronous": True}, 4, 0),
        ({"checkpoint.asynchronous": True, "checkpoint.resumable": False}, 1, 0),
        ({"checkpoint.asynchronous": True, "allocation_mode": "embedded:d1+fsdp:d2"}, 1.5, 1),
        ({"checkpoint.asynchronous": True, "allocation_mode": "embedded:d1+fsdp:d1t2"}, 1.5, 1),
        ({}, 0, 0),
    ):
        changed = config.with_settings(changes)
        estimated = estimate(changed, folder, layout_of(changed).trainer)
        assert estimated is not None
        copies = [part.bytes for part in estimated.parts if part.name == "copy for checkpoints"]
        assert sum(copies) == 4 * numbers * parameters, changes
        assert estimated.once_bytes == 4 * once * parameters, changes
