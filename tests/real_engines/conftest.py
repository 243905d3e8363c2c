"""One server per engine and session: slow to start, so shared, and announced while it is awaited.

A test that takes `lab` runs once for each engine; `only` names those that it is about. All carry
the marker `sglang`, those of the embedded engine too: `make test-sglang` and `make test-vllm` run
them, and the default suite has quicker tests of the embedded engine in `tests/engines` and
`tests/pipeline`.
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

from areal_lab.engines.launch.backends import ServerOptions
from areal_lab.engines.launch.start import EngineProcess, PortTaken, launch_engine
from areal_lab.engines.protocol import WeightsFolder
from areal_lab.engines.weights.folder import write_weights
from areal_lab.host.processes import ChildDied
from tests.real_engines.engines import ENGINES
from tests.real_engines.lab import BOUND_S, CONTEXT, Lab, tiny_model

Announce: TypeAlias = Callable[[str], None]
READY_TIMEOUT_S = 300.0


EACH_ENGINE = {name: pytest.param(name, marks=pytest.mark.sglang) for name in ENGINES}


def only(*names: str) -> pytest.MarkDecorator:
    """Marks a test that is about these engines."""
    return pytest.mark.parametrize(
        "engine_lab", [EACH_ENGINE[name] for name in names], indirect=True
    )


@pytest.fixture(scope="session", autouse=True)
def warm_interpreter() -> None:
    """Every process here is started as a user's is, not as those of the default suite."""


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
    name: str,
    weights: WeightsFolder,
    log_path: Path,
    announce: Announce,
    *,
    tokenizer: Path | None = None,
    context_length: int = CONTEXT,
) -> EngineProcess:
    """Start a server of an engine, or fail with the last lines of its log and the fix."""
    announce(f"waiting for the {name} server (log: {log_path}) ... ")
    began_s = time.monotonic()
    try:
        engine = await launch_engine(
            name,
            ServerOptions(
                model=weights.path,
                version=str(weights.version),
                max_running_requests=8,
                context_length=context_length,
                lora=weights.adapter,
                tokenizer=tokenizer,
            ),
            log_path=log_path,
            ready_timeout_s=READY_TIMEOUT_S,
            request_timeout_s=BOUND_S,
        )
    except (ValueError, PortTaken, ChildDied, TimeoutError) as error:
        pytest.fail(
            f"the {name} server did not start: {error}\nThe whole log is {log_path}. "
            "`areal-lab doctor` says what this machine lacks; if the installation is broken, "
            f"`areal-lab engine install {name} --force` reinstalls it.",
            pytrace=False,
        )
    announce(f"{name} {engine.version} is ready after {time.monotonic() - began_s:.0f} s\n")
    return engine


@pytest.fixture(scope="session")
def labs(
    tmp_path_factory: pytest.TempPathFactory, announce: Announce
) -> Iterator[Callable[[str], Lab]]:
    """The running server of an engine, started when it is first asked for.

    All run to the end of the session: a parametrized fixture would start one again for each file,
    since pytest-xdist hands out whole files.
    """
    models = {seed: tiny_model(seed) for seed in range(3)}
    running: dict[str, Lab] = {}
    with asyncio.Runner() as runner:

        def lab_of(name: str) -> Lab:
            if name not in running:
                folder = tmp_path_factory.mktemp(f"real-{name}")
                weights = write_weights(models[0], folder / "first", 0, dtype=torch.float32)
                running[name] = Lab(
                    facts=ENGINES[name],
                    loop=runner.get_loop(),
                    engine=runner.run(start(name, weights, folder / "engine.log", announce)),
                    root=folder,
                    models=dict(models),
                )
            return running[name]

        yield lab_of
        for lab in running.values():
            runner.run(lab.engine.stop())


@pytest.fixture(scope="session", params=EACH_ENGINE.values())
def engine_lab(request: pytest.FixtureRequest, labs: Callable[[str], Lab]) -> Lab:
    """A running server of each engine in turn."""
    return labs(request.param)


@pytest.fixture
def lab(engine_lab: Lab) -> Lab:
    """The server with version 0, not paused, whatever a test before has left."""
    engine_lab.run(engine_lab.begin_again())
    return engine_lab
