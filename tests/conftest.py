"""Global test setup: shape checks, few threads, no access to a model hub."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

# Read by torch and tokenizers when they are loaded, so these come before everything else.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["MPLBACKEND"] = "Agg"
# Without a GPU, kernels run in Triton's interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

from tests.shards import files_of_this_shard
from tests.warm import children_from_a_warm_interpreter

# Every call of these modules is checked against the shapes in its annotations, in tests only.
install_import_hook(["areal_lab.functional", "areal_lab.data.batch"], "beartype.beartype")


class NotChecked:
    """Finds modules of kernels before the hook does: Triton compiles a function from its source and
    globals, and those of a checked function are the checker's.
    """

    modules = ("areal_lab.functional.logprobs.fused",)

    @classmethod
    def find_spec(cls, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, path, target) if name in cls.modules else None


sys.meta_path.insert(0, NotChecked)

# No deadline: the time of an example depends on the machine more than on the code.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeat", settings.get_profile("explore"), derandomize=True)
settings.load_profile("repeat" if os.environ.get("CI") else "explore")

# Imported modules and collected tests are permanent: collecting garbage would find none.
gc.disable()


def pytest_sessionstart() -> None:
    """Convert packaged models now: the first test that needs one would print that it converts.

    Simulations are plain, so that a test does not depend on how many came before it.
    """
    # Only now: what is imported before the hook above is not checked.
    from areal_lab.models.locate import PACKAGED_MODELS, ModelNotFound, resolve_model_path
    from simulator import fast

    fast.use(wanted=False)

    for name in PACKAGED_MODELS:
        with contextlib.suppress(ModelNotFound):  # the package is not installed
            resolve_model_path(name)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Do not import the files of another shard."""
    files = files_of_this_shard()
    is_test = files is not None and collection_path.name.startswith("test_")
    return True if is_test and collection_path.is_file() and collection_path not in files else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that start processes first: at the end, one worker would run them alone."""
    files = files_of_this_shard()
    if files is not None:  # a file that is named as an argument is collected in every shard
        items[:] = [item for item in items if item.path in files]
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
