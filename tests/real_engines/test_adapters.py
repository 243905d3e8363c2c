"""LoRA adapters in servers that support them: versions of tokens, and which adapters stay.

Version n is adapter n on the weights that the server was started with; a plain model with that
adapter merged says what its log-probs are.
"""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_lab.engines.client.engine_client import EngineError, EngineUnreachable, VersionMismatch
from areal_lab.engines.protocol import ALL_LINEAR, PauseMode, WeightsFolder
from areal_lab.engines.weights.folder import write_weights
from areal_lab.engines.weights.root import choose_weights_root, remove_weights_root
from areal_lab.training.lora import (
    add_lora,
    merged_tensors,
    target_modules,
    write_adapter_folder,
)
from areal_lab.training.process.client import TrainerProcess
from tests.real_engines.conftest import EACH_ENGINE, Announce, start
from tests.real_engines.engines import ENGINES
from tests.real_engines.lab import (
    LONG,
    Lab,
    request,
    tiny_model,
    tokens_of,
    versions_of,
)
from tests.training.tiny import random_batch, settings_for
from tests.training.updating import TRAIN_EVERY, assert_flat, update_often

RANK = 4
UPDATES = 1000
KIB_PER_UPDATE = 16.0
"""An adapter has 49."""
PROMPT = list(range(5, 45))


def write_version(
    lab: Lab, version: int, *, rank: int = RANK, targets: Sequence[str] = (ALL_LINEAR,)
) -> WeightsFolder:
    """An adapter that changes a lot, as a folder; the lab's model of its version has it merged."""
    torch.manual_seed(version)
    model: Any = copy.deepcopy(lab.models[0])
    add_lora(model, rank=rank, alpha=2 * rank, targets=target_modules(model, targets))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.normal_(std=0.1)
    lab.models[version] = copy.deepcopy(lab.models[0])
    lab.models[version].load_state_dict(merged_tensors(model), strict=False)
    lab.fresh += 1
    return write_adapter_folder(
        model, lab.root / f"adapters-{lab.fresh}", version, dtype=torch.float32
    )


@pytest.fixture(scope="module", params=[EACH_ENGINE["sglang"], EACH_ENGINE["vllm"]])
def adapter_lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, announce: Announce
) -> Iterator[Lab]:
    """A server that takes adapters; versions 1 to 3 are written."""
    folder = tmp_path_factory.mktemp(f"adapters-{request.param}")
    base = tiny_model(0)
    with asyncio.Runner() as runner:
        lab = Lab(
            facts=ENGINES[request.param],
            loop=runner.get_loop(),
            engine=None,  # type: ignore[arg-type]  # started below, for the shape of these adapters
            root=folder,
            models={0: base},
        )
        lab.written = {version: write_version(lab, version) for version in (1, 2, 3)}
        first = replace(
            write_weights(base, folder / "first", 0, dtype=torch.float32),
            adapter=lab.written[1].adapter,
        )
        lab.written[0] = first
        lab.engine = runner.run(start(request.param, first, folder / "engine.log", announce))
        yield lab
        runner.run(lab.engine.stop())


@pytest.fixture
def lab(adapter_lab: Lab) -> Lab:
    """The server with adapter 1, not paused."""

    async def begin_again() -> None:
        await adapter_lab.client.resume()
        await adapter_lab.load(1, PauseMode.ABORT)

    adapter_lab.run(begin_again())
    return adapter_lab


def test_log_probs_are_of_the_adapter_that_is_named(lab: Lab) -> None:
    """Also where the prompt is in the cache already, from the adapter before."""

    async def scenario() -> None:
        for version in (1, 2, 3, 1):
            await lab.load(version, PauseMode.ABORT)
            assert await lab.client.version() == version
            results = await lab.client.generate(
                [request(f"{version}-{index}", PROMPT, 20, seed=index) for index in range(4)]
            )
            for result in results:
                assert versions_of(result) == [version]
                assert lab.errors(version, PROMPT, result).max() < lab.facts.error * 3
                assert lab.errors(version % 3 + 1, PROMPT, result).max() > 0.1

    lab.run(scenario())


def test_running_responses_continue_under_the_next_adapter(lab: Lab) -> None:
    async def scenario() -> None:
        requests = [request(f"long-{index}", PROMPT, LONG, seed=index) for index in range(4)]
        async with lab.running(requests) as drawing:
            for version in (2, 3):
                await lab.client.pause(PauseMode.ABORT)
                await lab.load(version, PauseMode.ABORT)
                assert not drawing.done()
                await lab.client.resume()
                while not all(lab.client.received_tokens(one.request_id) > 5 for one in requests):
                    await lab.client.ready()
        for result in await drawing:
            assert versions_of(result) == [1, 2, 3]
            assert (len(tokens_of(result)), result.finish_reason) == (LONG, "length")
            assert result.retractions == 2
            start = 0
            for segment in result.segments:
                end = start + len(segment.tokens)
                errors = lab.errors(segment.version, PROMPT, result)[start:end]
                assert errors.max() < lab.facts.error * 10
                others = [
                    lab.errors(v, PROMPT, result)[start:end] for v in {1, 2, 3} - {segment.version}
                ]
                assert min(float(other.max()) for other in others) > 0.1
                start = end

    lab.run(scenario())


def test_requests_sent_while_adapters_change_use_the_new_one(lab: Lab) -> None:
    async def scenario() -> None:
        await lab.client.pause(PauseMode.ABORT)
        waiting = asyncio.create_task(
            lab.client.generate([request(name, PROMPT, 20) for name in ("one", "two")])
        )
        await lab.client.ready()
        await lab.client.abort(["two"])
        await lab.load(2, PauseMode.ABORT)
        assert not waiting.done()
        await lab.client.resume()
        one, two = await waiting
        assert (versions_of(one), len(tokens_of(one))) == ([2], 20)
        assert (two.segments, two.finish_reason) == ((), "abort")
        assert lab.errors(2, PROMPT, one).max() < lab.facts.error * 3

    lab.run(scenario())


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("gate_proj", "o_proj")])
def test_adapters_of_some_layers_are_served(lab: Lab, targets: tuple[str, ...]) -> None:
    """Those of SGLang that need others, too, are refused before: `Backend.lora_needs`."""

    async def scenario() -> None:
        await lab.client.load_weights(write_version(lab, 5, targets=targets), PauseMode.ABORT)
        (result,) = await lab.client.generate([request("some", PROMPT, 20)])
        assert lab.errors(5, PROMPT, result).max() < lab.facts.error * 3
        assert lab.errors(0, PROMPT, result).max() > 0.1

    lab.run(scenario())


def test_a_server_says_that_it_takes_adapters(lab: Lab) -> None:
    assert lab.run(lab.client.supports_adapters())


def test_old_adapters_go(lab: Lab) -> None:
    async def scenario() -> None:
        for turn in range(12):
            await lab.load(turn % 3 + 1, PauseMode.ABORT)
            await lab.client.generate([request(f"turn-{turn}", PROMPT, 3)])
        assert len(await adapters(lab)) == 2

    lab.run(scenario())


def test_an_adapter_that_is_refused_leaves_the_one_before(lab: Lab) -> None:
    async def scenario() -> None:
        damaged = write_version(lab, 7)
        file = damaged.path / "adapter_model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        too_large = write_version(lab, 8, rank=64)
        before = await adapters(lab)
        for weights, words in (
            (damaged, "is damaged"),
            (too_large, "did not load the adapter of version 8"),
        ):
            with pytest.raises(EngineError, match=words) as caught:
                await lab.client.load_weights(weights, PauseMode.ABORT)
            assert not isinstance(caught.value, VersionMismatch)
            (result,) = await lab.client.generate([request("after", PROMPT, 10)])
            assert versions_of(result) == [1]
            assert lab.errors(1, PROMPT, result).max() < lab.facts.error * 3
        assert await adapters(lab) == before

    lab.run(scenario())


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_other_pauses_are_refused_before_anything_happens(lab: Lab, mode: PauseMode) -> None:
    async def scenario() -> None:
        with pytest.raises(EngineError, match="and pause mode abort"):
            await lab.client.load_weights(lab.written[2], mode)
        (result,) = await lab.client.generate([request("after", PROMPT, 3)])
        assert versions_of(result) == [1]

    lab.run(scenario())


def test_a_server_that_has_lost_the_adapter_is_lost(lab: Lab) -> None:
    """As one does that was started again behind its address."""

    async def scenario() -> None:
        weights = write_version(lab, 9)
        await lab.client.load_weights(weights, PauseMode.ABORT)
        # SGLang loads an adapter that it has unloaded again by itself, if the folder is there.
        shutil.rmtree(weights.path)
        for name in await adapters(lab):
            await lab.client._connection.call(lab.client.api.unload_adapter(name))
        with pytest.raises(EngineUnreachable, match="it has lost the adapter"):
            await lab.client.generate([request("after", PROMPT, 3)])

    lab.run(scenario())


def test_a_thousand_adapters_leave_memory_as_it_was(
    lab: Lab, tmp_path: Path, announce: Announce
) -> None:
    async def scenario() -> None:
        root = choose_weights_root(tmp_path, 1 << 20)
        settings = settings_for(
            lab.written[0].path,
            weights_root=root,
            use_lora=True,
            lora_rank=RANK,
            more={"rollout.transfer": "adapter"},
        )
        trainer = await TrainerProcess.start(settings, log_path=tmp_path / "trainer.log")
        try:
            growths = await update_often(
                trainer,
                lab.client,
                {
                    "pipeline": os.getpid(),
                    "trainer": trainer.child.pid,
                    "engine": lab.engine.child.pid,
                },
                random_batch(groups=1, samples=2),
                since=0,
                updates=UPDATES,
                mode=PauseMode.ABORT,
            )
            (result,) = await lab.client.generate([request("after", PROMPT, 5)])
            assert versions_of(result) == [UPDATES // TRAIN_EVERY]
            assert len(await adapters(lab)) == 2
        finally:
            await trainer.stop()
            remove_weights_root(root)
        announce("".join(f"{growth}\n" for growth in growths))
        assert_flat(growths, kib_per_update=KIB_PER_UPDATE)

    lab.loop.run_until_complete(scenario())


async def adapters(lab: Lab) -> list[str]:
    """Names of the adapters that the server has."""
    answer = await lab.client._connection.call(lab.client.api.adapters)
    return sorted(lab.client.api.held_adapters(answer))
