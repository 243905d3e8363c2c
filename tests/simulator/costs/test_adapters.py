"""LoRA: published steps, sizes by hand, memory, exchanges, updates, and refusals."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from simulator.assembly.build import problems
from simulator.assembly.simulate import simulate
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.config.schema import TrainerConfig, TrainerKind
from simulator.costs.coefficients import DATA, read_table
from simulator.costs.published_steps import shapes
from simulator.costs.switch import offloaded_bytes, refit_s
from simulator.costs.trainers import SPEEDS, trainer_error
from simulator.costs.training import TrainingCost, training_cost
from simulator.costs.training_layout import training_memory
from simulator.costs.training_timing import GRADIENTS, OPTIMIZER, PROXIMAL, REFERENCE
from simulator.costs.weight_bytes import (
    EAGER_TRAFFIC,
    LORA_ERROR,
    Adapters,
    adapted_widths,
    sent_weights,
)
from simulator.costs.weight_sync import weight_sync

H100 = find_gpu("H100")
SMALL, MIXTURE = find_model("Llama-3.1-8B"), find_model("Qwen3-30B-A3B")
COLOCATED = ("cluster.placement=colocated", "schedule.name=synchronous")
KINDS: dict[str, TrainerKind] = {"nemo": "megatron", "prime-rl": "prime_rl", "automodel": "fsdp2"}


class Published(NamedTuple):
    """A published LoRA step, beside one of all weights."""

    row: dict[str, str]
    seconds: float
    full_s: float

    def predicted_s(self, *, rank: int = 16, traffic: float | None = None) -> float:
        """Seconds of the step, or of that of all weights with rank 0."""
        row, before = self.row, "" if rank else "full_"
        kind, model = KINDS[row["system"]], shapes()[row["model"]]
        gpus, tensor, pipeline = (
            int(row[before + name]) for name in ("gpus", "tensor", "pipeline")
        )
        tokens = int(row["tokens"])
        config = TrainerConfig(
            kind=kind,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            pipeline_chunks=10 if pipeline > 1 else 1,
            precision="fp8" if kind == "megatron" else "bf16",
            lora_rank=rank,
            micro_batch_tokens=tokens * int(row["micro_batch"]),
            activation_recompute=kind == "prime_rl",
            proximal_logprobs=False,
        )
        cost = training_cost(config, model, dataclasses.replace(H100, memory_bytes=1e12), gpus)
        assert isinstance(cost, TrainingCost)
        if traffic is not None:
            cost = dataclasses.replace(cost, adapter_traffic=traffic)
        return cost.step([tokens] * int(row["sequences"]), minibatches=1).seconds


ROWS = [
    Published(row, float(row["seconds"]), float(row["full_seconds"]))
    for row in read_table(DATA / "lora_steps.csv")
]
NEMO = [one for one in ROWS if one.row["system"] == "nemo"]
EAGER = [one for one in ROWS if one.row["system"] != "nemo"]


def test_nothing_is_fitted_to_fused_adapters() -> None:
    errors = [one.predicted_s() / one.seconds - 1 for one in NEMO]
    assert np.abs(errors).mean() < 0.06
    assert np.abs(errors).max() < 0.1


def test_lora_is_as_much_faster_as_published_with_the_same_layout() -> None:
    one = NEMO[0]
    published = one.full_s / one.seconds
    assert published == pytest.approx(1.47, abs=0.01)
    predicted = one.predicted_s(rank=0) / one.predicted_s()
    assert predicted == pytest.approx(published, rel=0.05)


def test_the_traffic_of_adapters_of_their_own_is_a_fit() -> None:
    without = np.array([one.predicted_s(traffic=0) for one in EAGER])
    seconds = np.array([one.seconds for one in EAGER])
    per_unit = np.array([one.predicted_s(traffic=1) for one in EAGER]) - without
    column, left = per_unit / seconds, 1 - without / seconds
    assert (column * left).sum() / (column**2).sum() == pytest.approx(EAGER_TRAFFIC, rel=0.02)
    errors = (without + EAGER_TRAFFIC * per_unit) / seconds - 1
    assert np.abs(errors).mean() < 0.11
    assert np.abs(errors).max() < 0.25


def test_flops_are_slightly_more_than_two_thirds() -> None:
    """As published (Schulman et al., "LoRA Without Regret", Thinking Machines Lab, 2025-09-29)."""
    lengths = [2048] * 16
    flops = []
    for rank in (0, 32):
        config = TrainerConfig(kind="megatron", lora_rank=rank, proximal_logprobs=False)
        flops.append(training_cost(config, SMALL, H100, 16).step(lengths, minibatches=1).flops)
    assert 2 / 3 < flops[1] / flops[0] < 0.73


def test_sizes_by_hand() -> None:
    layer = (4096 + 4096) * 2 + (4096 + 1024) * 2 + 3 * (4096 + 14336)
    assert adapted_widths(SMALL) == (32 * layer, 32 * layer)
    assert Adapters(rank=16).parameters(SMALL) == 16 * 32 * layer
    # As peft counts for these matrices: 41,943,040 (0.52 %).
    assert Adapters(rank=16).parameters(SMALL) == 41_943_040
    attention = (2048 + 4096) * 2 + (2048 + 512) * 2
    assert adapted_widths(MIXTURE).used == 48 * (attention + 8 * 3 * (2048 + 768))
    assert adapted_widths(MIXTURE).all == 48 * (attention + 128 * 3 * (2048 + 768))


def test_matrices_of_other_attention_are_adapted_too() -> None:
    """By hand, for one layer of each kind."""
    deepseek = find_model("DeepSeek-V3")
    one = dataclasses.replace(deepseek, layers=1, first_dense_layers=1)
    queries = (7168 + 1536) + (1536 + 128 * 192)
    cached = (7168 + 512 + 64) + (512 + 128 * 256)
    mlp = 3 * (7168 + 18432)
    assert adapted_widths(one).used == queries + cached + (128 * 128 + 7168) + mlp
    qwen = find_model("Qwen3.5-27B")
    assert qwen.linear is not None
    two = dataclasses.replace(qwen, layers=2, linear=dataclasses.replace(qwen.linear, layers=1))
    delta = (5120 + 10240) + (5120 + 6144) + (6144 + 5120)
    attention = (5120 + 2 * 24 * 256) + 2 * (5120 + 4 * 256) + (24 * 256 + 5120)
    assert adapted_widths(two).used == delta + attention + 2 * 3 * (5120 + 17408)


def test_memory_has_gradients_and_optimizer_of_adapters_only() -> None:
    def memory(rank: int, **more: bool):  # type: ignore[no-untyped-def]
        config = TrainerConfig(lora_rank=rank, **more)
        return training_memory(SMALL, config, gpus=8, micro_batch_tokens=8192)

    full, lora = memory(0), memory(16)
    share = Adapters(rank=16).share(SMALL)
    assert lora.parameters == full.parameters
    assert lora.gradients == pytest.approx(share * full.gradients)
    assert lora.optimizer == pytest.approx(share * full.optimizer)
    assert lora.activations == full.activations
    # The reference is the model without adapters.
    assert memory(16, reference_logprobs=True).parameters == lora.parameters
    moved = [
        offloaded_bytes("all", TrainerConfig(lora_rank=rank), SMALL, gpus=8) for rank in (0, 16)
    ]
    assert moved[1] < 0.6 * moved[0]


def test_a_model_that_does_not_fit_trains_with_adapters() -> None:
    large = find_model("Qwen2.5-72B")
    layout = {"kind": "fsdp2", "micro_batch_tokens": 8192}
    with pytest.raises(ValueError, match=r"takes .* GiB per GPU"):
        training_cost(TrainerConfig(**layout), large, H100, 8)
    training_cost(TrainerConfig(**layout, lora_rank=16), large, H100, 8)


@pytest.mark.parametrize("kind", sorted(SPEEDS))
def test_only_adapters_are_exchanged_and_updated(kind: TrainerKind) -> None:
    parts = []
    for rank in (0, 16):
        config = TrainerConfig(
            kind=kind, lora_rank=rank, reference_logprobs=True, micro_batch_tokens=8192
        )
        parts.append(training_cost(config, SMALL, H100, 16).step([4096] * 64, minibatches=1).parts)
    full, lora = parts
    assert lora[GRADIENTS] < 0.3 * full[GRADIENTS]
    fixed = SPEEDS[kind].step_s
    assert lora[OPTIMIZER] - fixed == pytest.approx(
        Adapters(rank=16).share(SMALL) * (full[OPTIMIZER] - fixed), rel=1e-6, abs=1e-9
    )
    # No second model is swapped in.
    assert lora[REFERENCE] == pytest.approx(lora[PROXIMAL])


def test_updates_send_adapters_unless_they_are_merged() -> None:
    config = load_simulation("small", ["trainer.lora_rank=16"])
    sent = sent_weights(config)
    assert sent == Adapters(rank=16)
    assert sent.weight_bytes(SMALL) == 2 * 41_943_040
    config.weights.update_s = config.weights.export_s = config.weights.load_s = None
    small = weight_sync(config.weights, SMALL, H100, sent).seconds
    config.weights.merge_adapters = True
    merged = weight_sync(config.weights, SMALL, H100, sent_weights(config)).seconds
    assert merged == weight_sync(config.weights, SMALL, H100).seconds > small
    assert refit_s("packed", SMALL, sent) < refit_s("packed", SMALL)


def test_the_error_with_adapters_is_at_least_that_between_systems() -> None:
    for kind in SPEEDS:
        config = TrainerConfig(kind=kind, lora_rank=8)
        plain = trainer_error(TrainerConfig(kind=kind), H100, SMALL).error
        assert trainer_error(config, H100, SMALL).error == max(LORA_ERROR, plain)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["weights.merge_adapters=true"], "there are no adapters"),
        (["trainer.lora_rank=8", "trainer.critic=true"], "adapters of a critic are not modeled"),
        (["trainer.lora_rank=8", "trainer.step_s=null", "trainer.mfu=0.4"], "a utilization counts"),
        (
            [
                *("trainer.lora_rank=8", "rollout.weight_precision=fp8"),
                "weights.quantize_before_sending=true",
            ],
            "only adapters travel, in bf16",
        ),
        (
            [*COLOCATED, "trainer.lora_rank=8", "colocation.sleep=discard"],
            "colocation.sleep is discard, but with trainer.lora_rank (8) only adapters come back",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(changes: list[str], message: str) -> None:
    (said,) = problems(load_simulation("small", changes))
    assert message in said.message
    assert "\n" not in said.message


def test_engines_may_drop_weights_that_an_update_brings_back() -> None:
    dropped = [*COLOCATED, "colocation.sleep=discard"]
    lora = ["trainer.lora_rank=8", "trainer.step_s=null"]
    for changes in ([], [*lora, "weights.merge_adapters=true"]):
        assert not problems(load_simulation("small", [*dropped, *changes]))
    assert not problems(load_simulation("small", [*lora, "colocation.sleep=discard"]))


def test_a_run_with_adapters_trains_faster() -> None:
    plain = ["trainer.step_s=null", "model=Qwen3-4B", "seeds=1", "trainer.kind=megatron"]
    plain += ["weights.update_s=null", "gpus=8", "cluster.rollout_gpus=4"]
    full = simulate(load_simulation("small", plain))
    lora = simulate(load_simulation("small", [*plain, "trainer.lora_rank=16"]))
    assert lora.step_s < full.step_s
