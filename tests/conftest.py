"""Global test setup: shape checks, few threads, no access to a model hub."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

# Read by torch and tokenizers when they are loaded, so these come before everything else.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

from tests.warm import children_from_a_warm_interpreter

# Every call of these modules is checked against the shapes in its annotations, in tests only.
install_import_hook(["areal_lab.functional", "areal_lab.data.batch"], "beartype.beartype")

# No deadline: the time of an example depends on the machine more than on the code.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True)
settings.load_profile("repeat" if os.environ.get("CI") else "explore")

# Imported modules and collected tests are permanent: collecting garbage would find none.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that start processes first: at the end, one worker would run them alone."""
    long = ("pipeline", "resume", "training")
    items.sort(key=lambda item: item.path.parent.name not in long)


def pytest_collection_finish() -> None:
    """Enable the garbage collector, without the modules and tests loaded so far."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def warm_interpreter() -> Iterator[None]:
    """Fork trainers and embedded engines from an interpreter with their imports."""
    with children_from_a_warm_interpreter():
        yield
