"""Whether what is asked for fits the machine, and what is said about it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_lab.devices import share_of, visible_gpus
from areal_lab.engines.backends import BACKENDS
from areal_lab.engines.environments import Condition, Environment
from areal_lab.load import load_config
from areal_lab.placement import Machine, check_placement, explain


def machine(
    *, gpus: int = 0, build: str = "cpu", condition: Condition = Condition.READY
) -> Machine:
    engines = {
        name: Environment(
            backend=name,
            folder=Path("/engines") / name,
            condition=condition if BACKENDS[name].own_environment else Condition.READY,
            version="1.2",
            build="gpu" if build == "gpu" and BACKENDS[name].own_environment else "cpu",
        )
        for name in BACKENDS
    }
    return Machine(cores=2, gpus=tuple(map(str, range(gpus))), engines=engines)


@pytest.mark.parametrize(
    ("override", "where", "said"),
    [
        (
            "rollout.backend=sglang",
            machine(condition=Condition.MISSING),
            "engine is not installed (looked in /engines/sglang); run: areal-lab engine install",
        ),
        ("rollout.backend=vllm", machine(condition=Condition.HALF_MADE), "engine is half made"),
        ("rollout.backend=embedded:d1t2", machine(), "which embedded cannot do; write embedded:d1"),
        ("rollout.backend=sglang:d1t2", machine(), "but the CPU build is installed; write sgl"),
        ("rollout.backend=sglang:d2p2", machine(), "by pipeline, which is not available; write sg"),
        ("rollout.backend=sglang:d2c2", machine(), "by context, which is not available"),
        (
            "rollout.backend=sglang:d2t4",
            machine(gpus=4, build="gpu"),
            "sglang:d2t4 needs 8 GPU(s), but 4 are visible",
        ),
        ("allocation_mode=sglang:d1+megatron:d1", machine(), "trains with megatron, which is not"),
        ("allocation_mode=sglang:d1+archon:d1", machine(), "trains with archon, which is not"),
        ("allocation_mode=sglang:d1+fsdp:d2", machine(), "trains in 2 processes, but training"),
        ("allocation_mode=sglang:d1|fsdp:d1", machine(), "write + instead of |"),
        ("allocation_mode=sglang:d1+eval", machine(), "only evaluates"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(override: str, where: Machine, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)) as refusal:
        check_placement(load_config(None, [override]), where)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("condition", [Condition.OUTDATED, Condition.FOREIGN])
def test_an_environment_that_works_will_do(condition: Condition) -> None:
    config = load_config(None, ["rollout.backend=sglang:d2"])
    assert check_placement(config, machine(condition=condition)).servers == 2


def test_gpus_are_dealt_out_in_turn() -> None:
    config = load_config(None, ["allocation_mode=sglang.d2t2p1+d1"])
    told = explain(config, machine(gpus=4, build="gpu"))
    assert told[0] == "starts 2 x sglang 1.2 (GPU build) from /engines/sglang"
    assert told[1:3] == ["engine 0: GPU 0, 1", "engine 1: GPU 2, 3"]
    assert told[-1] == "allocation_mode sglang.d2t2p1+d1 is read as sglang:d2t2+fsdp:d1"


def test_more_engines_than_cores_are_remarked_on() -> None:
    told = explain(load_config(None, ["rollout.backend=vllm:d3"]), machine())
    assert told[1] == "engine 0: CPU, 2 core(s) shared"
    assert "3 engines share 2 core(s)" in told[-1]


def test_somebody_elses_servers_need_no_installation() -> None:
    config = load_config(
        None, ["rollout.backend=sglang", "rollout.addresses=['http://127.0.0.1:30000']"]
    )
    told = explain(config, machine(condition=Condition.MISSING))
    assert told[0] == "attaches to http://127.0.0.1:30000; starts no engine"


@pytest.mark.parametrize(
    ("files", "listed", "gpus"),
    [
        ((), None, ()),
        ((), "0,1", ()),
        (("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"), None, ("0", "1")),
        (("nvidia0", "nvidia1"), "1", ("1",)),
        (("nvidia0", "nvidia1"), "", ()),
        (("nvidia0", "nvidia1"), "1,-1,0", ("1",)),
        (("nvidia3",), None, ("0",)),
        (("nvidia0",), "GPU-8a2f", ("GPU-8a2f",)),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_see(
    tmp_path: Path, files: tuple[str, ...], listed: str | None, gpus: tuple[str, ...]
) -> None:
    for name in files:
        (tmp_path / name).touch()
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert visible_gpus(tmp_path, environment) == gpus


def test_where_gpus_are_few_engines_share_them() -> None:
    assert [share_of(index, 1, ("4", "5")) for index in range(3)] == [("4",), ("5",), ("4",)]
