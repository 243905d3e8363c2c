"""FLOPs of a step, MFU, and the trace of a profiled step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from areal_lab.config.gpus import gpu_name, peak_flops_per_s, read_gpus
from areal_lab.data.batch import PackedBatch
from areal_lab.training.learner import make_learner
from areal_lab.training.lora import add_lora, target_modules
from areal_lab.training.minibatch import pack_parts
from areal_lab.training.model import forward_cost, load_policy, load_value_model
from areal_lab.training.process.serve import train
from areal_lab.training.step import train_batch
from areal_lab.training.throughput import (
    ModelFlops,
    StepMeter,
    model_flops,
    tflop,
    total_flops,
)
from areal_lab.training.timeline import Timeline, record_profile
from simulator.catalogue.gpu import GPUS
from tests.training.tiny import (
    SHAPE,
    VOCABULARY,
    learner_for,
    random_batch,
    save_model,
    settings_for,
)

CPU = torch.device("cpu")


def packed_batch(folder: Path) -> PackedBatch:
    trajectories = random_batch().trajectories
    cost = forward_cost(load_policy(folder))
    (packed,) = pack_parts(
        trajectories, list(range(len(trajectories))), cost=cost, max_tokens=10_000
    )
    return packed


def attended_pairs(packed: PackedBatch) -> int:
    """Slow: token `i` attends to token `j` exactly when `j <= i < subtree_end[j]`."""
    ends = packed.subtree_end.tolist()
    return sum(j <= i < end for j, end in enumerate(ends) for i in range(len(ends)))


def norms(model: Any) -> int:
    """Weights that multiply element by element, which torch's counter of products leaves out."""
    return sum(p.numel() for p in model.get_decoder().parameters() if p.dim() == 1)


def counted_by_torch(policy: Any, packed: PackedBatch, *, backward: bool) -> int:
    """FLOPs of the decoder's matrix products; torch does not see those of the output layer."""
    with FlopCounterMode(display=False) as counter:
        logprobs = policy(packed).logprobs
        if backward:
            logprobs.sum().backward()
    return sum(
        count
        for name, count in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(name) and "bmm" not in str(name)
    )


def matrix_flops(flops: ModelFlops, packed: PackedBatch, model: Any, total: float) -> float:
    """`total` of one forward pass, without attention, output layer and norms."""
    return total - (
        attended_pairs(packed) * flops.cost.attention_flops_per_pair
        + len(packed.targets) * 2 * VOCABULARY * SHAPE["hidden_size"]
        + 2 * len(packed.tokens) * norms(model)
    )


@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_those_that_torch_counts(tmp_path: Path, tied: bool) -> None:
    folder = save_model(tmp_path / "model", tied=tied)
    packed, learner = packed_batch(folder), learner_for(folder)
    flops, policy = learner.policy.flops, learner.policy
    assert flops is not None
    forward = matrix_flops(flops, packed, learner.model, flops.forward(packed))
    with torch.no_grad():
        assert counted_by_torch(policy, packed, backward=False) == forward
    assert flops.training(packed) == 3 * flops.forward(packed)
    assert counted_by_torch(policy, packed, backward=True) == 3 * forward


def test_frozen_weights_have_no_gradient_to_compute(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    model = load_policy(folder)
    add_lora(model, rank=2, alpha=2, targets=target_modules(model, ["all-linear"]), merged=True)
    packed, learner = packed_batch(folder), make_learner(model, settings_for(folder))
    flops, policy = learner.policy.flops, learner.policy
    assert flops is not None
    assert 0 < flops.trained_share < 0.3
    assert not flops.output_trained
    frozen = flops.forward(packed) - (
        flops.trained_share * len(packed.tokens) * flops.cost.linear_flops_per_token
        + attended_pairs(packed) * flops.cost.attention_flops_per_pair
    )
    assert flops.training(packed) == pytest.approx(3 * flops.forward(packed) - frozen)
    ratio = counted_by_torch(policy, packed, backward=True)
    ratio /= counted_by_torch(policy, packed, backward=False)
    # Nothing before the first layer is trained, so that it needs no gradient of its input;
    # merged adapters take a product more.
    assert 1.7 < ratio < 2.2


def test_models_of_values_have_no_output_layer_and_mixtures_of_experts_no_flops(
    tmp_path: Path,
) -> None:
    folder = save_model(tmp_path / "model")
    values = model_flops(load_value_model(folder))
    assert values is not None
    assert values.output_flops_per_prediction == 0
    model = load_policy(folder)
    model.config.num_experts_per_tok = 2
    assert model_flops(model) is None
    assert tflop(None, [packed_batch(folder)], training=True) == {}
    assert total_flops(()) is None


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_step_counts_every_pass_once(tmp_path: Path, minibatches: int) -> None:
    folder = save_model(tmp_path / "model")
    learner = learner_for(folder, ppo_n_minibatches=minibatches, max_tokens_per_mb=1000)
    outcome = train_batch(learner, random_batch())
    work = {one.name: one.args["tflop"] for one in outcome.spans if "tflop" in one.args}
    trained = sum(s.args["tflop"] for s in outcome.spans if s.name == "forward/backward")
    again = work["proximal log-probs"]
    assert (again > 0) == (minibatches > 1)
    speed = outcome.measured["trainer_tflop_per_s"] * outcome.measured["trainer_s"]
    assert speed == pytest.approx(trained + again)
    tokens = outcome.measured["trainer_tokens_per_s"] * outcome.measured["trainer_s"]
    assert tokens == pytest.approx(outcome.metrics["packed_tokens"])
    assert outcome.measured.keys() == {
        *("peak_rss_bytes", "trainer_s", "trainer_tokens_per_s", "trainer_tflop_per_s")
    }, "a CPU has no MFU"


def test_a_reference_and_a_teacher_add_a_forward_pass_each(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")

    def work(**actor: Any) -> float:
        outcome = train_batch(learner_for(folder, entropy_coeff=0.1, **actor), random_batch())
        return sum(one.args.get("tflop", 0.0) for one in outcome.spans)

    alone = work()
    assert work(kl_loss_coef=0.1) == pytest.approx(4 / 3 * alone)
    teacher = {"more": {"teacher.path": str(folder)}}
    assert work(kl_loss_coef=0.1, **teacher) == pytest.approx(5 / 3 * alone)


def test_several_processes_share_the_work_of_all() -> None:
    meter = StepMeter(CPU)
    found = meter.metrics(tokens=40, flops=8e12, peaks=[None, None], processes=4)
    assert found["trainer_tokens_per_s"] == pytest.approx(10 / found["trainer_s"])
    assert found["trainer_tflop_per_s"] == pytest.approx(2 / found["trainer_s"])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100-80"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("h100 pcie", "H100-PCIe"),
        ("NVIDIA Tomorrow", None),
        ("CPU core", None),
    ],
)
def test_gpus_have_the_peak_of_the_one_table(text: str, name: str | None) -> None:
    assert gpu_name(text) == name
    peak = None if name is None else GPUS[name].flops_per_s
    assert peak_flops_per_s(text) == peak
    assert GPUS.keys() == read_gpus()["gpus"].keys()


@pytest.mark.parametrize("idle_at", [0, 1])
def test_spans_are_times_of_a_device_that_runs_behind(
    monkeypatch: pytest.MonkeyPatch, idle_at: int
) -> None:
    """The host queues a mark each second; the device reaches it later, except when it is idle."""
    queued_s = iter([100.0, 101.0, 102.0, 103.0])
    reached_s = iter([(100.0, 105.0, 105.0, 109.0), (100.5, 101.0, 104.0, 104.5)][idle_at])
    waits: list[float] = []

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_s = next(reached_s)

        def synchronize(self) -> None:
            waits.append(self.at_s)

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at_s - self.at_s)

    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(Event=Event))
    monkeypatch.setattr("areal_lab.training.timeline.time.time", lambda: next(queued_s))
    timeline = Timeline(torch.device("cuda"))
    for name in ("a", "b"):
        with timeline.span(name, tokens=1.0):
            pass
    assert not waits
    a, b = timeline.finish()
    expected = [(100.0, 105.0, 105.0, 109.0), (100.5, 101.0, 104.0, 104.5)][idle_at]
    assert (a.start_s, a.end_s, b.start_s, b.end_s) == pytest.approx(expected)
    assert waits == [expected[-1]]
    assert a.args == {"tokens": 1.0}


def test_a_profile_names_spans_and_operations() -> None:
    def work() -> int:
        timeline = Timeline(CPU, profiled=True)
        with timeline.span("forward/backward", tokens=3):
            torch.ones(8, 8) @ torch.ones(8, 8)
        return len(timeline.finish())

    result, trace = record_profile(work, CPU)
    assert result == 1
    names = {event.get("name") for event in json.loads(gzip.decompress(trace))["traceEvents"]}
    assert {"forward/backward", "aten::mm"} <= names


def test_only_asked_steps_are_profiled(tmp_path: Path) -> None:
    learner = learner_for(save_model(tmp_path / "model"), profile_steps=[5])
    request = random_batch()
    assert request.version == 3
    first = train(learner, request, 3)
    assert first.profile == b""
    second = train(learner, random_batch(version=4), 4)
    names = {e.get("name") for e in json.loads(gzip.decompress(second.profile))["traceEvents"]}
    assert {one.name for one in second.spans} - names == {"write profile"}
