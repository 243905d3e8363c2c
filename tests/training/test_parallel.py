"""Several ranks train, export and save as one process does, and none waits for a lost one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config, Qwen2ForCausalLM

from areal_lab.config.schema import ActorConfig
from areal_lab.host.memory import peak_rss_bytes
from areal_lab.host.pipes import socket_pair
from areal_lab.host.processes import ChildDied, RunningProcess, start_child
from areal_lab.models.folder import ModelShape
from areal_lab.models.locate import resolve_model_path
from areal_lab.resolve.memory import Trained, trainer_memory
from areal_lab.training.forward import PackedPolicy
from areal_lab.training.minibatch import deal_groups
from areal_lab.training.parallel import shard_policy
from areal_lab.training.process.client import TrainerProcess, TrainingError
from areal_lab.training.protocol import SaveRequest
from areal_lab.training.step import train_batch
from tests.training.parallel_checks import RANKS, prepare
from tests.training.test_step import own_loss
from tests.training.tiny import learner_for, random_batch, save_model, settings_for
from tests.warm import ForkedPopen


@pytest.mark.slow
def test_ranks_equal_one_process(tmp_path: Path) -> None:
    prepare(tmp_path)
    ranks = [
        ForkedPopen(
            [sys.executable, "-m", "tests.training.parallel_checks", str(tmp_path), str(rank)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[2],
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    told = [rank.communicate(timeout=300)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * RANKS, "\n".join(t[-2000:] for t in told)


QWEN: dict[str, dict[str, Any]] = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
             "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
           "num_attention_heads": 28, "num_key_value_heads": 4},
    "32B": {"hidden_size": 5120, "intermediate_size": 27648, "num_hidden_layers": 64,
            "num_attention_heads": 40, "num_key_value_heads": 8},
}  # fmt: skip


@pytest.mark.parametrize(("copies", "shards"), [(1, 64), (8, 8)])
@pytest.mark.parametrize("size", QWEN)
def test_64_ranks_hold_what_the_estimate_says(size: str, copies: int, shards: int) -> None:
    """In one process: a group that only pretends to communicate, parameters without memory."""
    shape = QWEN[size]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    try:
        axes = {"shards": 64} if copies == 1 else {"copies": copies, "shards": shards}
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        with torch.device("meta"):
            model: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=152064, **shape))
        parameters = sum(p.numel() for p in model.parameters())
        policy = PackedPolicy(model)
        shard_policy(policy, mesh=mesh)
        here = 4 * sum(p.to_local().numel() for p in policy.parameters())  # type: ignore[attr-defined]
    finally:
        dist.destroy_process_group()
    width = shape["hidden_size"] // shape["num_attention_heads"]
    parts = trainer_memory(
        ModelShape(
            kind="qwen2",
            head_width=width,
            layers=shape["num_hidden_layers"],
            hidden=shape["hidden_size"],
            intermediate=shape["intermediate_size"],
            query_width=shape["hidden_size"],
            kv_width=shape["num_key_value_heads"] * width,
            vocab=152064,
            head_norms=False,
            dense=True,
            context_tokens=32768,
        ),
        Trained(parameters=parameters, shards=shards),
        ActorConfig(gradient_checkpointing=True),
        number_bytes=2,
        tokens=8192,
    )
    estimated = {part.name: part.bytes for part in parts}
    for name, copies_of_weights in (("weights", 1), ("gradients", 1), ("AdamW moments", 2)):
        assert estimated[name] == pytest.approx(copies_of_weights * here, rel=0.05)


@given(
    tokens=st.dictionaries(st.integers(0, 99), st.integers(1, 500), max_size=20),
    ranks=st.integers(1, 8),
)
def test_no_rank_has_more_than_the_mean_and_a_group(tokens: dict[int, int], ranks: int) -> None:
    rank_of = deal_groups(tokens, ranks)
    assert rank_of.keys() == tokens.keys()
    loads = [sum(tokens[g] for g, rank in rank_of.items() if rank == r) for r in range(ranks)]
    assert max(loads) <= sum(loads) / ranks + max(tokens.values(), default=0)


@pytest.mark.slow
def test_two_processes_train_smollm2_as_one_does(tmp_path: Path) -> None:
    """9 query heads and 3 of keys and values: not divisible by 2, so its layers are sharded."""
    model = resolve_model_path("SmolLM2-135M-Instruct")
    batch = dataclasses.replace(random_batch(groups=2, samples=2), version=0)
    here = train_batch(learner_for(model), batch).metrics

    async def work(trainer: TrainerProcess) -> None:
        found = (await trainer.train(batch)).metrics
        for name in ("loss", "grad_norm", "entropy", "drift_max"):
            assert found[name] == pytest.approx(here[name], rel=1e-4, abs=1e-4), name
        assert sum(peak_rss_bytes(child.pid) for child in trainer.children) < 8e9

    with_two(model, tmp_path, work)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, with a vocabulary that two processes divide."""
    return save_model(tmp_path_factory.mktemp("tiny") / "model", vocab_size=98)


def with_two(
    folder: Path,
    tmp_path: Path,
    work: Callable[[TrainerProcess], Awaitable[None]],
    divided: Mapping[str, int] = MappingProxyType({}),
    **actor: Any,
) -> None:
    """Run `work` with a trainer of two processes, and see that nothing is left of them."""

    async def run() -> None:
        settings = settings_for(folder, weights_root=tmp_path / "weights", **actor)
        settings = dataclasses.replace(settings, ranks=2, **divided)
        trainer = await TrainerProcess.start(settings, log_path=tmp_path / "trainer.log")
        try:
            await work(trainer)
        finally:
            await trainer.stop()
        for child in trainer.children:
            with pytest.raises(ProcessLookupError):
                os.killpg(child.pid, 0)

    asyncio.run(asyncio.wait_for(run(), 120))


def test_two_processes_train_export_and_save_and_one_that_is_killed_ends_them(
    folder: Path, tmp_path: Path
) -> None:
    async def work(trainer: TrainerProcess) -> None:
        result = await trainer.train(dataclasses.replace(random_batch(), version=0))
        here = train_batch(learner_for(folder), dataclasses.replace(random_batch(), version=0))
        for name in ("loss", "grad_norm", "entropy", "trained_tokens", "ratio_mean"):
            assert result.metrics[name] == pytest.approx(here.metrics[name], abs=1e-5), name
        exported = load_file((await trainer.export()).weights.path / "model.safetensors")  # type: ignore[union-attr]
        await trainer.save(SaveRequest(tmp_path / "saved", state=True))
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        assert all(torch.equal(exported[name], saved[name]) for name in exported)
        os.kill(trainer.children[1].pid, signal.SIGKILL)
        with pytest.raises(ChildDied, match=r"trainer rank 1 .* was killed by SIGKILL"):
            await trainer.train(dataclasses.replace(random_batch(), version=1))

    with_two(folder, tmp_path, work)


def broken_on_rank_1(*tensors: Any, token_count: int) -> Any:
    """Fails where the parameters' group says that this is the second process."""
    if torch.distributed.get_rank() == 1:
        raise ZeroDivisionError("only here")
    return own_loss(*tensors, token_count=token_count)


def test_a_rank_that_fails_ends_the_others_with_its_error(folder: Path, tmp_path: Path) -> None:
    async def work(trainer: TrainerProcess) -> None:
        with pytest.raises(TrainingError, match="trainer rank 1: ZeroDivisionError: only here"):
            await trainer.train(dataclasses.replace(random_batch(), version=0))

    broken = f"{__name__}:broken_on_rank_1"
    with_two(folder, tmp_path, work, {"context": 2}, loss_fn=broken)


def test_a_rank_that_hangs_ends_the_others_at_the_timeout(folder: Path, tmp_path: Path) -> None:
    async def work(trainer: TrainerProcess) -> None:
        os.kill(trainer.children[1].pid, signal.SIGSTOP)
        with pytest.raises(TrainingError, match=r"waited 10 s for .*collective_timeout_s"):
            await trainer.train(dataclasses.replace(random_batch(), version=0))

    with_two(folder, tmp_path, work, {"tensor": 2}, collective_timeout_s=10.0)


def test_ranks_start_at_the_same_time_and_one_that_cannot_ends_the_others(
    folder: Path, tmp_path: Path
) -> None:
    """Rank 0 has started when rank 1 fails, and rank 2 is about to."""

    async def run() -> None:
        begun = [asyncio.Event() for _ in range(3)]
        there = asyncio.Event()
        started: list[tuple[RunningProcess, Connection]] = []
        ended: list[int] = []

        async def start_rank(
            rank: int, settings: object, *, pipes: int, environment: Mapping[str, str]
        ) -> tuple[RunningProcess, list[Connection]]:
            del settings, pipes, environment
            begun[rank].set()
            try:
                match rank:
                    case 0:
                        child = await start_child(
                            "sleeper", "tests.cluster.sleeper", [], log_path=tmp_path / "log"
                        )
                        ours, theirs = socket_pair()
                        theirs.close()
                        started.append((child, ours))
                        there.set()
                        return child, [ours]
                    case 1:
                        await there.wait()
                        await begun[2].wait()
                        raise LookupError("no room for rank 1")
                    case _:
                        await asyncio.Event().wait()
                        raise AssertionError
            finally:
                ended.append(rank)

        settings = settings_for(folder, weights_root=tmp_path / "weights")
        settings = dataclasses.replace(settings, ranks=3)
        with pytest.raises(LookupError, match="no room for rank 1"):
            await TrainerProcess.start(settings, log_path=tmp_path, start_rank=start_rank)
        assert ended == [0, 1, 2]
        ((child, pipe),) = started
        assert not child.running
        assert pipe.closed

    asyncio.run(asyncio.wait_for(run(), 60))
