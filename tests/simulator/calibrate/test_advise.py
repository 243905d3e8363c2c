"""Advice from an imported log: what is asked, assumed and fitted, and what is predicted from it."""

from __future__ import annotations

import shlex

import pytest

from simulator.assembly.simulate import replicate
from simulator.calibrate import advise as advising
from simulator.calibrate import observed
from simulator.calibrate.advise import advise
from simulator.calibrate.observed import fit_step, observe
from simulator.config.load import load_simulation
from simulator.report.step_parts import seconds_of

TRUE = {
    "model": "Qwen2.5-1.5B",
    "cluster.gpus": 8,
    "cluster.gpu": "H100",
    "cluster.placement": "colocated",
    "schedule.name": "synchronous",
    "workload.prompts_per_batch": 16,
    "workload.samples_per_prompt": 4,
    "workload.minibatches": 2,
    "workload.prompt_tokens": 200,
    "workload.answers.mean_tokens": 900,
    "workload.answers.max_tokens": 4096,
    "workload.answers.truncated_share": 0.03,
    "workload.steps": 6,
    "workload.warmup_steps": 2,
    "trainer.kind": "fsdp2",
    "trainer.proximal_logprobs": True,
    "trainer.time_factor": 1.3,
    "rollout.time_factor": 1.7,
    "rollout.engine": "vllm-0.8",
    "colocation.other_s": 5.0,
    "seeds": 2,
}
"""A run whose log is made below."""


def log_of(settings):
    """The log that a framework would write of a simulated run, as `areal-lab import` prints it."""
    run = replicate(load_simulation(None, settings), processes=1)
    parts = [seconds_of(one) for one in run.results]
    mean = {name: sum(one[name] for one in parts) / len(parts) for name in parts[0]}
    step = {
        "step_time_s": mean["step"],
        "generation_s": mean["generation"],
        "old_logprob_s": mean["log-probs"],
        "training_s": mean["update"],
        "response_length_mean": settings["workload.answers.mean_tokens"],
        "truncated_fraction": settings["workload.answers.truncated_share"],
        "prompt_length_mean": settings["workload.prompt_tokens"],
    }
    start = {**step, "step_time_s": 100 * mean["step"], "training_s": 100 * mean["update"]}
    return {
        "framework": "verl",
        "model": "Qwen/Qwen2.5-1.5B",
        "gpus": 8,
        "prompts_per_step": 16,
        "samples_per_prompt": 4,
        "minibatches": 2,
        "max_response": 4096,
        "engine": "vllm",
        "engine_tp": 1,
        "steps": [{"step": 1, **start}, *({"step": n, **step} for n in (2, 3, 4))],
    }


@pytest.fixture(scope="module")
def logged():
    return log_of(TRUE)


@pytest.fixture(scope="module")
def advice(logged):
    return advise(logged, ["gpu=H100"])


def test_fits_recover_the_numbers_of_the_logged_run(advice):
    fitted = advice.fit.fitted
    assert fitted["trainer.time_factor"] == pytest.approx(1.3, rel=0.01)
    assert fitted["rollout.time_factor"] == pytest.approx(1.7, rel=0.01)
    assert fitted["colocation.other_s"] == pytest.approx(5.0, rel=0.05)
    simulated = advice.fit.simulated()
    assert simulated["step"] == pytest.approx(advice.observed.step_s, rel=2e-3)


def test_an_option_is_what_simulate_gives_with_the_settings_of_its_command(advice):
    for option in advice.options:
        words = shlex.split(advice.command(option))
        assert words[:2] == ["areal-lab", "simulate"]
        by_hand = replicate(load_simulation(None, words[2:]), processes=1)
        gains = advice.fit.run.ratios(by_hand, lambda result: result.step_s)
        assert option.gain["mean"] == pytest.approx(sum(gains) / len(gains), rel=1e-12)
        assert option.step_s["mean"] == pytest.approx(
            advice.observed.step_s / option.gain["mean"], rel=1e-12
        )
        assert option.step_s["low"] < option.step_s["mean"] < option.step_s["high"]


def test_every_schedule_is_an_option_the_fastest_first(advice):
    names = {one.name for one in advice.options}
    assert names == {
        "one-step overlap",
        "asynchronous, eta 1",
        "asynchronous, eta 4",
        "asynchronous, eta 8",
    }
    gains = [one.gain["mean"] for one in advice.options]
    assert gains == sorted(gains, reverse=True)
    lags = {one.name: one.lag_mean for one in advice.options}
    assert lags["asynchronous, eta 8"] > lags["asynchronous, eta 1"]


def test_changes_gain_something_and_say_what_they_cost(advice):
    gains = [one.gain for one in advice.changes]
    assert gains == sorted(gains, reverse=True)
    assert all(one.gain > 1.01 and one.note for one in advice.changes)


def test_start_up_is_left_out(logged):
    assert observe(logged, ["gpu=H100"]).step_s == logged["steps"][1]["step_time_s"]
    marked = {**logged, "steps": [{**logged["steps"][0], "warm_up": True}, *logged["steps"][1:]]}
    assert observe(marked, ["gpu=H100"]).steps == 3


def test_a_slow_first_step_is_kept_if_there_are_only_two(logged):
    two = {**logged, "steps": logged["steps"][:2]}
    assert observe(two, ["gpu=H100"]).steps == 2


def test_everything_that_is_missing_is_asked_for_at_once():
    log = {"framework": "trl", "steps": [{"step": 1, "step_time_s": 10.0}]}
    with pytest.raises(ValueError, match="the log does not say") as told:
        observe(log)
    lines = str(told.value).splitlines()
    assert lines[0] == "the log does not say, so give:"
    names = [line.strip().partition("=")[0] for line in lines[1:]]
    assert names == [
        "model",
        "gpus",
        "workload.samples_per_prompt",
        "workload.prompts_per_batch",
        "workload.answers.mean_tokens",
        "workload.answers.max_tokens",
    ]


def test_a_log_without_step_times_is_refused():
    with pytest.raises(ValueError, match="no seconds per step"):
        observe({"framework": "trl", "steps": [{"step": 1, "reward_mean": 0.5}]})


def test_number_and_type_of_gpus_in_one_word(logged):
    observed = observe(logged, ["gpus=32xH800"])
    assert observed.settings["cluster.gpus"] == 32
    assert observed.settings["cluster.gpu"] == "H800"


def test_what_the_user_gives_replaces_the_log_and_is_no_assumption(logged):
    observed = observe(logged, ["gpu=H100", "trainer.kind=megatron", "rollout.tensor_parallel=2"])
    assert observed.settings["trainer.kind"] == "megatron"
    assert observed.settings["rollout.tensor_parallel"] == 2
    assert not any(line.startswith("trainer.kind") for line in observed.assumed)
    assert any(line.startswith("cluster.placement=colocated") for line in observed.assumed)


def test_a_large_truncated_share_does_not_give_the_spread(logged):
    steps = [{**one, "truncated_fraction": 0.7} for one in logged["steps"]]
    observed = observe({**logged, "steps": steps}, ["gpu=H100"])
    assert "workload.answers.truncated_share" not in observed.settings
    assert any("70% of the responses are cut off" in line for line in observed.assumed)


def test_the_longest_response_is_the_cap_only_where_some_are_truncated(logged):
    steps = [{**one, "response_length_max": 3000.0} for one in logged["steps"]]
    log = {**logged, "max_response": None, "steps": steps}
    assert observe(log, ["gpu=H100"]).settings["workload.answers.max_tokens"] == 3000
    steps = [{**one, "truncated_fraction": 0.0} for one in steps]
    with pytest.raises(ValueError, match=r"workload\.answers\.max_tokens=8192: the cap"):
        observe({**log, "steps": steps}, ["gpu=H100"])


def test_prompt_lengths_follow_from_the_tokens_of_a_step(logged):
    steps = [
        {**one, "prompt_length_mean": None, "tokens": 64 * (900 + 150)} for one in logged["steps"]
    ]
    log = {**logged, "steps": steps}
    assert observe(log, ["gpu=H100"]).settings["workload.prompt_tokens"] == 150
    steps = [{**one, "tokens": None} for one in steps]
    other = observe({**log, "steps": steps}, ["gpu=H100"])
    assert other.settings["workload.prompt_tokens"] == 256
    assert any("prompt lengths are not logged" in line for line in other.assumed)


def test_an_asynchronous_log_needs_its_split_and_is_compared_with_synchronous(logged):
    steps = [{**one, "generation_s": None, "wait_for_batch_s": 3.0} for one in logged["steps"]]
    log = {**logged, "mode": "fully async", "steps": steps}
    with pytest.raises(ValueError, match="rollout_gpus=8: the GPUs that generate"):
        observe(log, ["gpu=H100"])
    found = advise(log, ["gpu=H100", "rollout_gpus=4"], seeds=2)
    assert set(found.fit.fitted) == {"trainer.time_factor"}
    assert {one.name for one in found.options} >= {
        "synchronous, colocated",
        "asynchronous, eta 4",
    }


def test_a_fit_far_from_one_asks_to_check_the_settings(logged):
    steps = [{**one, "training_s": 8 * one["training_s"]} for one in logged["steps"]]
    for one in steps:
        one["step_time_s"] += 7 / 8 * one["training_s"]
    fit = fit_step(observe({**logged, "steps": steps}, ["gpu=H100"]))
    assert any("far from 1, so check the type of GPU" in line for line in fit.lines)


def test_advice_is_json_with_a_command_for_each_option(advice):
    found = advice.to_json()
    assert [one["command"] for one in found["options"]] == [
        advice.command(one) for one in advice.options
    ]
    parts = found["parts_s"]
    assert sum(parts.values()) == pytest.approx(found["step_s"])


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("best", range(6))
def test_the_walk_over_splits_finds_the_fastest_and_its_rivals(start, best):
    """As a simulation of all splits, if the seconds fall and then rise."""
    seconds = [10 + 4 * abs(at - best) ** 1.5 if at != best + 1 else 10.5 for at in range(6)]
    tried = []

    def of(at):
        tried.append(at)
        return seconds[at]

    rival = [best + 1] if best < 5 else []
    assert advising._fastest(of, 6, start) == [best, *rival]
    assert len(tried) == len(set(tried)) <= abs(start - best) + 3


def test_few_simulations_are_needed_for_the_fit_and_the_splits(logged, monkeypatch):
    """A part is nearly proportional to its factor, and the best splits are near each other."""
    counted = []

    def counting(of):
        return lambda *given, **named: counted.append(of) or of(*given, **named)

    for module in (advising, observed):
        monkeypatch.setattr(module, "replicate", counting(module.replicate))
    found = advise(logged, ["gpu=H100"])
    assert len(counted) <= 40  # of 4 schedules, where the whole search takes 56
    # All splits of the best option, each with all seeds: none is faster.
    best = found.options[0]
    splits = advising._splits(found.fit.config)
    runs = {
        split: replicate(
            advising._config(found.fit, {**best.settings, "cluster.rollout_gpus": split}),
            processes=1,
        ).step_s.mean
        for split in splits
    }
    assert runs[best.settings["cluster.rollout_gpus"]] == min(runs.values())
