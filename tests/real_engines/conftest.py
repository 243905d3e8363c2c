"""One server per engine and session: slow to start, so shared, and announced while it is awaited.

Tests of engines with an environment of their own carry the marker `sglang`, so the default suite
runs those of the embedded engine only.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
import torch

from areal_lab.engines.launch import EngineProcess, launch_engine
from areal_lab.engines.protocol import PauseMode, WeightsFolder
from areal_lab.engines.weights import write_weights
from tests.real_engines.engines import ENGINES
from tests.real_engines.lab import BOUND_S, Lab, tiny_model

Announce: TypeAlias = Callable[[str], None]
READY_TIMEOUT_S = 240.0
EACH_ENGINE = [
    pytest.param(name, marks=() if name == "embedded" else pytest.mark.sglang) for name in ENGINES
]


@pytest.fixture(scope="session")
def announce(request: pytest.FixtureRequest) -> Announce:
    """Says something on the terminal at once, whatever is captured."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def say(text: str) -> None:
        with capture.global_and_fixture_disabled():
            sys.stderr.write(f"\n{text}")
            sys.stderr.flush()

    return say


async def start(
    name: str, weights: WeightsFolder, log_path: Path, announce: Announce
) -> EngineProcess:
    """Start a server of an engine, or fail with the last lines of its log."""
    announce(f"waiting for the {name} server (log: {log_path}) ... ")
    began_s = time.monotonic()
    engine = await launch_engine(
        name,
        index=0,
        weights=weights,
        port=0,
        threads=1,
        dtype="float32",
        max_running_requests=8,
        context_length=None,
        log_path=log_path,
        ready_timeout_s=READY_TIMEOUT_S,
        request_timeout_s=BOUND_S,
    )
    announce(f"{name} {engine.version} is ready after {time.monotonic() - began_s:.0f} s\n")
    return engine


@pytest.fixture(scope="session", params=EACH_ENGINE)
def engine_lab(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, announce: Announce
) -> Iterator[Lab]:
    """A running server of each engine in turn."""
    folder = tmp_path_factory.mktemp(f"real-{request.param}")
    models = {seed: tiny_model(seed) for seed in range(3)}
    with asyncio.Runner() as runner:
        weights = write_weights(models[0], folder / "first", 0, dtype=torch.float32)
        engine = runner.run(start(request.param, weights, folder / "engine.log", announce))
        yield Lab(
            facts=ENGINES[request.param],
            loop=runner.get_loop(),
            engine=engine,
            root=folder,
            models=models,
        )
        runner.run(engine.stop())


@pytest.fixture
def lab(engine_lab: Lab) -> Lab:
    """The server with version 0, not paused."""
    engine_lab.run(engine_lab.load(0, PauseMode.RETRACT))
    return engine_lab


@pytest.fixture
def sglang(lab: Lab) -> Lab:
    """The server, if it is SGLang; the trap is its own."""
    return lab
