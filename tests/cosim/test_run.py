"""Whole runs: the same bytes each time, the log's schedule, the versions that it says."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from areal_lab.models.locate import INCLUDED_MODELS
from areal_lab.runlog.lags import total, trained_batches
from areal_lab.runlog.read_run import read_run
from areal_lab.runlog.replay import check_replay
from cosim.along import train_actions
from cosim.load import load_cosim
from cosim.run import run_cosim
from tests.cosim.small import SORTING, Learned, metrics, run, written


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> Learned:
    return Learned(monkeypatch)


@pytest.mark.parametrize("mode", ["along", "live"])
def test_two_runs_write_the_same_bytes(tmp_path: Path, mode: str) -> None:
    first, second = (run(tmp_path, *SORTING, f"mode={mode}") for _ in range(2))
    assert first.folder != second.folder
    assert written(first) == written(second)
    another = run(tmp_path, *SORTING, f"mode={mode}", "seed=2")
    assert metrics(another) != metrics(first)


@pytest.mark.parametrize("mode", ["along", "live"])
def test_its_log_replays_and_its_folder_is_read_as_any_run(tmp_path: Path, mode: str) -> None:
    done = run(tmp_path, *SORTING, f"mode={mode}")
    assert check_replay(done.log).agrees
    assert done.log.header.mode == "cosim"
    assert done.summary["status"] == "complete"
    assert len(done.steps) == len(done.batches) == 6
    assert list(done.steps["held_out_reward"].notna()) == [False, False, True] * 2
    assert done.summary["reward_before"]["n"] == 8
    assert done.summary["interruptions"] > 0
    assert done.summary["multi_version_share"] > 0.05
    rewards = [r for group in done.log.groups for r in group.rewards if not math.isnan(r)]
    assert 0 < sum(rewards) < len(rewards)
    for line in metrics(done):
        assert line["drift"] > 0
        assert not line.keys() & {"peak_rss_bytes", "trainer_s", "trainer_tflop_per_s"}
        assert line["simulated_hours"] == pytest.approx(line["time_s"] / 3600)
    assert (done.folder / "model" / "config.json").is_file()


@pytest.mark.parametrize("mode", ["along", "live"])
def test_eta_0_equals_the_synchronous_schedule_sample_by_sample(
    tmp_path: Path, learned: Learned, mode: str
) -> None:
    eta_0 = run(tmp_path, *SORTING, f"mode={mode}", "eta=0")
    samples = learned.take()
    synchronous = run(tmp_path, *SORTING, f"mode={mode}", "rollout.schedule=synchronous")
    assert learned.take() == samples
    assert metrics(eta_0) == metrics(synchronous)
    assert {segment.version for t in samples[3] for segment in t.segments} == {3}


@pytest.mark.parametrize("mode", ["along", "live"])
@pytest.mark.parametrize("schedule", ["eta=0", "rollout.schedule=partial_rollout"])
def test_fresh_tokens_have_equal_proximal_and_behavior_log_probs(
    tmp_path: Path, mode: str, schedule: str
) -> None:
    done = run(tmp_path, *SORTING, f"mode={mode}", schedule)
    # A step whose fresh samples all have equal rewards learns nothing from them.
    fresh = [line for line in metrics(done) if line["sampler_gap_tokens"]]
    assert len(fresh) >= 5
    assert max(line["sampler_gap_max"] for line in fresh) < 1e-5
    assert (done.summary["lag"]["token"]["mean"] > 0) == (schedule != "eta=0")


@pytest.mark.parametrize("mode", ["along", "live"])
def test_behavior_log_probs_are_those_of_the_version_that_a_token_carries(
    tmp_path: Path, learned: Learned, mode: str
) -> None:
    done = run(tmp_path, *SORTING, f"mode={mode}", "save_every_steps=1")
    folders = {0: INCLUDED_MODELS["Sorter-102K"]}
    folders |= {n: done.folder / "checkpoints" / f"step-{n:05d}" for n in range(1, 7)}
    models = {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for version, folder in folders.items()
    }
    trained = [t for step in learned.take() for t in step]
    assert len({version for t in trained for version in t.versions}) >= 4
    for t in trained:
        tokens, start = torch.tensor([*t.prompt_tokens, *t.response_tokens]), len(t.prompt_tokens)
        with torch.no_grad():
            under = {v: models[v](tokens[None]).logits[0].log_softmax(-1) for v in {*t.versions}}
        own = [
            float(under[version][at - 1, tokens[at]])
            for at, version in enumerate(t.versions, start=start)
        ]
        assert list(t.behavior_logprobs) == pytest.approx(own, abs=1e-5)


def test_every_real_token_has_the_version_of_the_simulated_ones(
    tmp_path: Path, learned: Learned
) -> None:
    done = run(tmp_path, *SORTING, "mode=live")
    each = done.summary["tokens_per_token"]
    groups = {record.group: record for record in done.log.groups}
    trained = learned.take()
    for train, step in zip(train_actions(done.log), trained, strict=True):
        assert [t.group for t in step] == [g for g in train.groups for _ in range(4)]
        for t in step:
            record = groups[t.group]
            simulated = [v for v, n in record.segments[t.sample] for _ in range(n)]
            assert len(simulated) == each * t.generated_tokens
            assert list(t.versions) == simulated[each - 1 :: each]
            assert record.rewards[t.sample] == t.reward
            assert record.finish_reasons[t.sample] == t.finish_reason
    several = [len(t.segments) for step in trained for t in step]
    assert Counter(several)[1] < len(several)


@pytest.mark.parametrize("schedule", ["asynchronous", "bounded_drift"])
def test_along_its_own_log_a_live_run_is_repeated(
    tmp_path: Path, learned: Learned, schedule: str
) -> None:
    live = run(tmp_path, *SORTING, "mode=live", f"rollout.schedule={schedule}")
    samples = learned.take()
    each = live.summary["tokens_per_token"]
    settings = ["mode=along", f"log={live.folder}", f"tokens_per_token={each}"]
    along = read_run(run_cosim(load_cosim(live.folder / "config.yaml", settings)).folder)
    repeated = learned.take()
    for one, other in zip(samples, repeated, strict=True):
        for a, b in zip(one, other, strict=True):
            assert (a.group, a.sample, a.response_tokens) == (b.group, b.sample, b.response_tokens)
            assert a.versions == b.versions
            assert a.behavior_logprobs == pytest.approx(b.behavior_logprobs, abs=1e-4)
    for one, other in zip(metrics(live), metrics(along), strict=True):
        assert other == pytest.approx(one, abs=1e-3)
    assert [r.event for r in along.log.events] == [r.event for r in live.log.events]
    assert along.log.header.limits == live.log.header.limits


def test_the_schedule_along_a_log_is_the_same_for_every_objective_and_seed(tmp_path: Path) -> None:
    runs = [
        run(tmp_path, f"objective={objective}", f"seed={seed}")
        for objective, seed in (("decoupled", 1), ("naive", 1), ("decoupled", 2))
    ]
    assert len({written(one)["metrics.jsonl"] for one in runs}) == 3
    logs = [[r for r in one.log.records if hasattr(r, "event")] for one in runs]
    assert logs[0] == logs[1] == logs[2]
    lags = [total(b.token_lags for b in trained_batches(one.log)) for one in runs]
    assert lags[0] == lags[1] == lags[2]
    assert runs[0].summary["objective"] == "decoupled"
    assert runs[1].summary["objective"] == "naive"


def test_a_log_is_followed_as_far_as_asked(tmp_path: Path) -> None:
    whole = run(tmp_path, "total_train_steps=5")
    part = run(tmp_path, "total_train_steps=3", f"log={whole.folder / 'events.jsonl'}")
    assert metrics(part) == metrics(whole)[:3]
    assert part.summary["status"] == "complete"
    assert check_replay(part.log).agrees
    assert (part.folder / "model").resolve().name == "step-00003"
    again = run(tmp_path, "total_train_steps=5", f"log={whole.folder}")
    assert again.log == whole.log
    assert written(again)["metrics.jsonl"] == written(whole)["metrics.jsonl"]


def test_a_recorded_run_is_followed_with_its_lags(tmp_path: Path) -> None:
    recorded = read_run(recorded_run())
    limits, steps = recorded.log.header.limits, 3
    samples = len(next(recorded.log.groups).segments)
    sizes = (f"dataset.batch_size={limits['batch_groups']}", f"gconfig.n_samples={samples}")
    config = load_cosim(
        "cosim",
        [
            *(f"run_dir={tmp_path}", f"log={recorded.source}", f"total_train_steps={steps}"),
            *(*sizes, "actor.ppo_n_minibatches=1", "evaluation.max_problems=4"),
        ],
    )
    done = read_run(run_cosim(config).folder)
    assert done.config["rollout"]["max_head_offpolicyness"] == limits["eta"]
    for mine, theirs in zip(done.batches, recorded.batches[:steps], strict=True):
        assert mine.groups == theirs.groups
        assert mine.token_lags == theirs.token_lags
    assert recorded.log.header.mode == "train"


def recorded_run() -> Path:
    from tools.record_responses import ETAS, INTO

    return INTO / f"haiku-eta{max(ETAS):g}"


def test_metrics_have_rewards_of_both_kinds_and_what_staleness_does(tmp_path: Path) -> None:
    done = run(tmp_path, "eta=0", "actor.ppo_n_minibatches=1")
    for line in metrics(done):
        # One minibatch of fresh tokens: the policy has not moved when it learns.
        assert line["drift"] < 1e-5
        assert line["lag_token_max"] == 0
    stale = run(tmp_path, "eta=2", "actor.ppo_n_minibatches=1")
    assert metrics(stale)[-1]["drift"] > 1e-3
    assert metrics(stale)[-1]["lag_token_max"] >= 2
    after = metrics(stale)[-1]["held_out_reward"]
    assert after == stale.summary["reward_after"]["mean"]
    times = json.loads((stale.folder / "env.json").read_text())
    assert times["cpu_s"] > 0
