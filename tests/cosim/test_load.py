"""Settings of co-simulated runs: from files and overrides, checked before anything is written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.resolve.limits import limits_of
from areal_lab.runlog.replay import limits_from_fields
from cosim.cluster import cluster_of, mean_response_tokens, system_of
from cosim.load import load_cosim, read_schedule, resolve_cosim
from cosim.run import run_cosim
from tests.cosim.small import run, small


def test_the_cluster_is_scaled_to_the_batch() -> None:
    config = load_cosim("cosim")
    cluster = cluster_of(config)
    # 64 x 8 responses of the preset's 512 x 16: a sixteenth of its 96 + 32 GPUs.
    assert (cluster.cluster.gpus, cluster.cluster.rollout_gpus) == (8, 6)
    assert cluster.workload.samples_per_prompt == 8
    assert mean_response_tokens(config) == pytest.approx(9277)
    eighth = load_cosim("cosim", {"simulator.scale": 0.125})
    assert cluster_of(eighth).cluster.gpus == 16
    colocated = load_cosim("cosim", ["preset=table_1_1.5b_colocated", "eta=0"])
    assert cluster_of(colocated).cluster.gpus == 8


def test_the_coordinator_has_the_limits_of_a_real_run_of_this_config() -> None:
    config = load_cosim("cosim", ["eta=2", "rollout.max_concurrent_rollouts=70"])
    assert system_of(config).limits == limits_of(config)
    assert system_of(config).limits.max_in_flight == 70
    assert system_of(load_cosim("cosim", ["eta=4"])).limits.max_in_flight == 128


def test_a_config_of_training_is_one_of_co_simulation() -> None:
    config = load_cosim("tiny", ["objective=decoupled"])
    plain = TrainConfig(**{n: getattr(config, n) for n in TrainConfig.model_fields})
    assert plain.actor.use_decoupled_loss
    assert plain.dataset.type == "arithmetic"
    assert not load_cosim("tiny").actor.use_decoupled_loss
    assert not load_cosim("cosim", ["objective=naive"]).actor.use_decoupled_loss


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective=decoupeld"], "one of decoupled, naive, or null; did you mean 'decoupled'?"),
        (["simulator.preset=table_1"], "unknown preset 'table_1'"),
        (["simulator.settings=[eta=4]"], "'eta=4', which has no effect: use eta"),
        (
            ["simulator.settings=[workload.minibatches=4]"],
            "which has no effect: use actor.ppo_n_minibatches",
        ),
        (["simulator.settings=[weights.backnd=nccl]"], "did you mean"),
        (["simulator.settings=[workload.turns=2]"], "simulator.settings=[workload.turns=1]"),
        (
            ["actor.ppo_n_minibatches=4", "simulator.settings=[schedule.require_batches=2]"],
            "a batch in 2 parts (schedule.require_batches), but a co-simulated step trains on a",
        ),
        (
            ["simulator.settings=[cluster.hybrid_gpus=8]"],
            "engines of a run do not join its training; use simulator.settings=[cluster.hybrid",
        ),
        (["preset=table_1_1.5b_colocated"], "the simulated cluster: schedule.name is"),
        (["actor.ppo_n_minibatches=65"], "a batch has only 64 groups"),
        (["rollout.batch_order=bounded_lag", "rollout.max_lag=0.5"], "max_lag"),
        (["mode=live", "log=somewhere"], "mode=live simulates its schedule"),
        (["mode=live", "evaluation.max_problems=0"], "tokens_per_token is 0, which takes the"),
        (["actor.path=Adder"], "Adder-102K"),
        (["eval_every_steps=-1"], "eval_every_steps is -1, but must be an integer >= 0"),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_written(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        run_cosim(load_cosim("cosim", [f"run_dir={tmp_path}", *overrides]))
    assert not any(tmp_path.iterdir())


def test_a_log_must_fit_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, "total_train_steps=2")
    with pytest.raises(ConfigError) as caught:
        read_schedule(
            small(tmp_path, f"log={done.folder}", "dataset.batch_size=5", "gconfig.n_samples=5")
        )
    assert [one.setting for one in caught.value.problems] == [
        "total_train_steps",
        "dataset.batch_size",
        "gconfig.n_samples",
    ]
    assert "at most 2" in str(caught.value)
    two = [f"log={done.folder}", "total_train_steps=2"]
    config = small(tmp_path, *two, "eta=7")
    read_schedule(config)
    assert config.rollout.max_head_offpolicyness == 2
    with pytest.raises(ValueError, match="nothing does not exist"):
        read_schedule(small(tmp_path, "log=nothing"))


@pytest.mark.parametrize(
    "given",
    [
        ["rollout.slots=samples", "rollout.routing=sticky", "rollout.max_concurrent_rollouts=3"],
        ["rollout.batch_order=bounded_lag", "rollout.max_lag=5"],
        ["rollout.batch_order=bounded_lag", "eta=inf", "rollout.max_lag=3", "rollout.drop_late=1"],
        ["rollout.batch_order=bounded_lag", "eta=0", "rollout.max_lag=0"],
        ["rollout.interruptible=false"],
        ["rollout.schedule=one_step_overlap"],
        ["rollout.schedule=partial_rollout"],
        [
            *("mode=live", "rollout.schedule=bounded_drift", "rollout.interruptible=false"),
            *("rollout.bounded_drift.min_eta=1", "rollout.bounded_drift.max_drift=0.05"),
            *("rollout.bounded_drift.max_weight_deviation=0.1", "eta=6"),
            "rollout.bounded_drift.min_effective_share=0.2",
        ],
    ],
)
def test_the_schedule_of_a_log_is_that_of_the_run(tmp_path: Path, given: list[str]) -> None:
    steps = "total_train_steps=1"
    done = run(tmp_path, steps, *given)
    logged = limits_from_fields(done.log.header.limits)
    # Neither the defaults nor contrary settings of the run have an effect.
    contrary = ["rollout.slots=samples", "rollout.batch_order=bounded_lag", "rollout.max_lag=9"]
    for others in ([], contrary):
        config = small(tmp_path, f"log={done.folder}", steps, *others)
        assert resolve_cosim(config).limits == logged


def test_the_shipped_configs_can_run() -> None:
    for name in ("cosim", "cosim_sorting"):
        resolved = resolve_cosim(load_cosim(name))
        assert len(resolved.problems.held_out) >= 1024
        assert resolved.model.is_dir()
