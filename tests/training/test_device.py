"""A step on a device that is not the CPU: nothing mixes, and the host hardly waits; what engines
get is on the CPU."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.warm import run_forked

MODELS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", {}),
    ("llama", {"entropy_coeff": 0.01, "gradient_checkpointing": "selective"}),
    ("qwen3", {"use_lora": True, "kl_loss_coef": 0.1, "gradient_checkpointing": True}),
    ("llama", {"advantage": "gae", "kl_ctl": 0.1, "kl_loss_coef": 0.1}),
    ("llama", {"advantage": "gae", "share_body": True}),
]
"""In float32: the pretended device has no autocast."""


class Received:
    """A sender that keeps what it is given to send."""

    tensors: dict[str, Any]

    def send(self, active: Any) -> None:
        self.tensors = dict(active.tensors)

    def close(self) -> None:
        self.tensors = {}


def check_spans(outcome: Any, learner: Any, began_s: float, ended_s: float) -> None:
    """Check the calls for the spans of a step on the pretended device, and its metrics."""
    from tests.training import pretend

    spans, measured = outcome.spans, outcome.measured
    computed = [one for one in spans if one.name != "advantages and packing"]
    assert {
        "record": 2 * len(computed),
        "range_push": len(spans),
        "range_pop": len(spans),
        "synchronize": 1,
        "reset_peak_memory_stats": 1,
    } == pretend.CALLS
    assert not any("synchronize" in wait for wait in pretend.WAITS), "the step has waited before"
    assert sorted(pretend.RANGES) == sorted(one.name for one in spans)
    # The device is 1 s behind at every event, which the clocks' relation removes.
    for one in spans:
        assert began_s - 1e-3 <= one.start_s <= one.end_s <= ended_s + 1e-3, one
    passes = int(outcome.metrics["micro_batches"]) * (1 + hasattr(learner.critic, "optimizer"))
    assert sum(one.name.endswith("forward/backward") for one in spans) == passes
    work = sum(one.args.get("tflop", 0.0) for one in spans)
    speed = work / measured["trainer_s"]
    assert measured["trainer_tflop_per_s"] == pytest.approx(speed)
    assert measured["mfu"] == pytest.approx(speed * 1e12 / 989e12), "an H100"
    assert measured["gpu_peak_allocated_bytes"] == 3 << 30
    assert measured["gpu_peak_reserved_bytes"] == 4 << 30


def main(folder: Path) -> None:
    """Compare the pretend device with the CPU; in a process of its own, for its registration."""
    from tests.training import pretend

    device = pretend.register()
    import torch

    from areal_lab.engines.weights.push import Pusher
    from areal_lab.training.attention import tree_layout
    from areal_lab.training.learner import Learner, make_learner
    from areal_lab.training.lora import add_lora, merged_tensors, target_modules
    from areal_lab.training.minibatch import on_device
    from areal_lab.training.model import load_policy
    from areal_lab.training.process.output import export
    from areal_lab.training.step import train_batch
    from tests.training.test_attention import packed_trees
    from tests.training.tiny import random_batch, save_model, settings_for

    def learner_on(where: str, path: Path, **actor: Any) -> Learner:
        settings = dataclasses.replace(settings_for(path, **actor), device=where)
        kept = settings.actor.gradient_checkpointing
        model = load_policy(path, device="cpu", gradient_checkpointing=kept)
        if settings.actor.use_lora:
            torch.manual_seed(0)
            targets = target_modules(model, settings.actor.target_modules)
            add_lora(model, rank=2, alpha=2, targets=targets, merged=True)
        return make_learner(model.to(where), settings)  # type: ignore[arg-type]  # untyped

    packed = packed_trees(1, rows=40, longest=60)
    on_host = tree_layout(packed, asked="flex").block_mask
    with pretend.PretendMode():
        there = on_device(packed, device)
        layouts = [tree_layout(there, asked=asked) for asked in ("sdpa", "flex")]
        assert not pretend.WAITS, "masks are made without waiting"
        mask = layouts[1].block_mask
        assert mask is not None
        assert on_host is not None
        for name in ("kv_indices", "full_kv_indices", "q_indices", "full_q_indices"):
            assert torch.equal(getattr(mask, name).inner, getattr(on_host, name)), name

    for number, (kind, changes) in enumerate(MODELS):
        path = save_model(folder / str(number), kind=kind)
        memory: dict[str, Any] = {"rollout.transfer": "distributed"}
        if number:  # another one of the same vocabulary
            memory["teacher.path"] = str(folder / "0")
        memory["critic.share_body"] = changes.pop("share_body", False)
        actor: dict[str, Any] = {"ppo_n_minibatches": 2, "more": memory, **changes}
        on_cpu = learner_on("cpu", path, max_tokens_per_mb=30, **actor)
        received = Received()
        pusher = Pusher(received, timeout_s=1.0)
        before = export(on_cpu, 0, Pusher(Received(), timeout_s=1.0))
        expected = train_batch(on_cpu, random_batch())
        waits, micro_batches = [], []
        for max_tokens in (1000, 30):
            with pretend.PretendMode():
                learner = learner_on(str(device), path, max_tokens_per_mb=max_tokens, **actor)
                assert export(learner, 0, pusher) == before
                pretend.WAITS.clear()
                pretend.CALLS.clear()
                pretend.RANGES.clear()
                began_s = time.time()
                outcome = train_batch(learner, random_batch())
                ended_s = time.time()
                waits.append(dict(pretend.WAITS))
                check_spans(outcome, learner, began_s, ended_s)
                export(learner, 1, pusher)
                pusher.push(1, [], flush_cache=True)
            micro_batches.append(outcome.metrics["micro_batches"])
            inside = [p.data for p in learner.model.parameters()]
            assert all(isinstance(p, pretend.PretendTensor) for p in inside)
        merged = merged_tensors(on_cpu.model)
        assert received.tensors.keys() == merged.keys()
        for name, tensor in merged.items():
            assert received.tensors[name].device.type == "cpu"
            torch.testing.assert_close(received.tensors[name], tensor, msg=name)
        steps = outcome.metrics["optimizer_steps"]
        assert micro_batches[1] > micro_batches[0] == steps == 2
        assert sum(waits[0].values()) == sum(waits[1].values()), "a wait in a micro-batch"
        # A critic waits once a step too, and once a batch for its values and for the reference.
        extra = steps + 3 if learner.critic else 0
        assert sum(waits[1].values()) <= steps + 1 + extra, waits[1]
        for name, value in expected.metrics.items():
            assert outcome.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


def test_a_step_on_a_device_mixes_nothing_and_waits_once(tmp_path: Path) -> None:
    ended = run_forked(
        [sys.executable, "-m", "tests.training.test_device", str(tmp_path)],
        cwd=Path(__file__).parents[2],
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
