"""Complete runs with real processes on a tiny model, which support the project's claims."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

import areal_lab
from areal_lab.control import events as ev
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.requests import RunningRequests
from areal_lab.engines.protocol import Generated, GenerateRequest
from areal_lab.host.process_groups import SHARED_MEMORY
from areal_lab.host.processes import ChildDied
from areal_lab.pipeline.report import format_run
from areal_lab.pipeline.rollout.groups import EndedSamples
from areal_lab.pipeline.state import RunState
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.read_run import read_run
from areal_lab.runlog.records import ActionRecord, EventRecord
from areal_lab.runlog.replay import check_replay
from areal_lab.shell.step_report import StepReport
from tests.pipeline.kept_keys import keep_keys
from tests.pipeline.rewards import even_digits
from tests.pipeline.tiny_run import (
    checkpoints,
    do_run,
    long_tail,
    metrics,
    rescored_difference,
    tiny_config,
    trained_samples,
)
from tests.runlog.test_summary import CONTRACT
from tests.warm import ForkedPopen

STEPS = 6


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """An asynchronous run in which long responses are interrupted; every version is saved."""
    config = tiny_config(
        tmp_path_factory.mktemp("interrupted"),
        f"total_train_steps={STEPS}",
        "eta=3",
        "save_every_steps=1",
        "rollout.max_concurrent_rollouts=8",
    )
    result = do_run(config, response_tokens=long_tail, reward_fn=even_digits)
    return result.folder, result.summary


def test_every_admitted_sample_is_trained_once(
    interrupted: tuple[Path, dict[str, Any]],
) -> None:
    folder, summary = interrupted
    seen = [(s["group"], s["sample"]) for step in trained_samples(folder) for s in step]
    assert len(seen) == len(set(seen)) == STEPS * 3 * 4
    assert summary["trained_samples"] == len(seen)
    assert summary["steps"] == STEPS
    assert summary["status"] == "complete"
    assert summary["version_mismatches"] == 0
    assert summary["dropped"] == 0


def test_interruptions_leave_trajectories_of_several_versions(
    interrupted: tuple[Path, dict[str, Any]],
) -> None:
    folder, summary = interrupted
    parts = [len(s["parts"]) for step in trained_samples(folder) for s in step]
    assert max(parts) >= 2
    assert summary["interruptions"] >= 1
    share = sum(count > 1 for count in parts) / len(parts)
    assert summary["multi_version_share"] == pytest.approx(share)
    assert summary["lag"]["head"]["max"] >= summary["lag"]["tail"]["max"]
    assert summary["recomputed_tokens"] > 0
    assert summary["engine_version"] == installed_version("areal_lab")


def check_ledger(folder: Path, summary: dict[str, Any]) -> None:
    """Tokens and parts of the lag sum exactly: at each step, at the end, and from the log."""
    lines = metrics(folder)
    names = ("trained", "waiting", "dropped", "generated_twice")
    for line in lines:
        parts = [line[f"ledger_{name}_tokens"] for name in names]
        assert line["ledger_generated_tokens"] == sum(parts)
        both = line["lag_before_queue_mean"] + line["lag_in_queue_mean"]
        assert both == pytest.approx(line["lag_head_mean"])
    trained = [line["trained_tokens"] for line in lines]
    assert [line["ledger_trained_tokens"] for line in lines] == np.cumsum(trained).tolist()
    ledger, lag = summary["ledger"], summary["lag"]
    assert ledger["generated"] == sum(
        (
            ledger["trained"],
            ledger["waiting"],
            ledger["generated_twice"],
            *ledger["dropped"].values(),
        )
    )
    assert (ledger["trained"], ledger["waiting"]) == (summary["trained_tokens"], 0)
    both = lag["before_queue"]["mean"] + lag["in_queue"]["mean"]
    assert both == pytest.approx(lag["head"]["mean"])
    frame = read_run(folder).steps
    for name in ("before_queue", "in_queue", "offered"):
        assert frame[f"lag_{name}_mean"].tolist() == [line[f"lag_{name}_mean"] for line in lines]


def test_every_token_and_every_version_of_lag_is_accounted_for(
    interrupted: tuple[Path, dict[str, Any]],
) -> None:
    folder, summary = interrupted
    check_ledger(folder, summary)
    assert summary["ledger"]["generated"] == summary["generated_tokens"]
    assert summary["lag"]["before_queue"]["max"] > 0
    told = format_run(folder)
    assert re.search(r"head, before the queue +\d\.\d\d +\d", told)
    assert re.search(r"trained on +[\d,]+ +100\.0%", told)


def test_a_sample_that_ended_makes_room_for_the_next_group(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        f"total_train_steps={STEPS}",
        "eta=3",
        "rollout.max_concurrent_rollouts=2",
        "rollout.slots=samples",
    )
    result = do_run(config, response_tokens=long_tail, reward_fn=even_digits)
    check_ledger(result.folder, result.summary)
    log = read_run(result.folder).log
    assert check_replay(log).agrees
    samples, slots = 4, 8
    running: dict[int, int] = {}
    most_groups, ended = 0, 0
    for record in log.records:
        match record:
            case EventRecord(event=ev.SamplesEnded(group, count)):
                running[group] -= count
                ended += count
            case EventRecord(event=ev.GroupFinished(group=group)):
                assert running.pop(group) == 0, "its samples ended before it was scored"
            case ActionRecord(action=ev.StartGroup(group=group)):
                running[group] = samples
            case _:
                pass
        assert sum(running.values()) <= slots
        most_groups = max(most_groups, len(running))
    assert most_groups > 2, "others start while the longest sample of a group runs"
    assert ended == result.summary["trained_samples"] == STEPS * 3 * samples


def test_no_more_samples_run_than_there_are_slots_when_engines_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: set[str] = set()
    most = []
    generate, end = RunningRequests.generate, EndedSamples.add_request

    async def counted(
        self: RunningRequests, requests: Sequence[GenerateRequest]
    ) -> list[Generated]:
        names = {one.request_id for one in requests if one.request_id.startswith("train-")}
        running.update(names)
        most.append(len(running))
        try:
            return await generate(self, requests)
        finally:
            running.difference_update(names)

    def ended(self: EndedSamples, name: str) -> None:
        running.discard(name)
        end(self, name)

    monkeypatch.setattr(RunningRequests, "generate", counted)
    monkeypatch.setattr(EndedSamples, "add_request", ended)
    state, killed = RunState(), list[int]()

    def kill(report: StepReport) -> None:
        """Each engine once."""
        assert state.performer is not None
        for number, server in state.performer.servers.alive.items():
            if number not in killed and len(killed) < report.step:
                killed.append(number)
                assert server.child is not None
                os.kill(server.child.pid, signal.SIGKILL)

    config = tiny_config(
        tmp_path,
        f"total_train_steps={STEPS}",
        "eta=3",
        "rollout.engines=2",
        "rollout.max_engine_restarts=2",
        "rollout.max_concurrent_rollouts=4",
        "rollout.slots=samples",
    )
    result = do_run(
        config, response_tokens=long_tail, reward_fn=even_digits, state=state, on_step=kill
    )
    assert sorted(killed) == [0, 1]
    assert result.summary["engine_losses"] >= 1
    assert result.summary["trained_samples"] == STEPS * 3 * 4
    assert max(most) <= 4 * 4
    check_ledger(result.folder, result.summary)
    assert check_replay(read_run(result.folder).log).agrees


@pytest.mark.parametrize(("on_late", "reason"), [("drop", "lag above 1"), ("recycle", ev.RECYCLED)])
def test_the_tokens_of_dropped_groups_are_accounted_for(
    tmp_path: Path, on_late: str, reason: str
) -> None:
    """Also those of groups that were dropped while they ran, which have no record."""
    config = tiny_config(
        tmp_path,
        "total_train_steps=5",
        "eta=4",
        "rollout.batch_order=bounded_lag",
        "rollout.max_lag=1",
        f"rollout.on_late={on_late}",
        "rollout.max_concurrent_rollouts=12",
    )
    result = do_run(config, response_tokens=long_tail, reward_fn=even_digits)
    check_ledger(result.folder, result.summary)
    ledger, dropped = result.summary["ledger"], result.summary["dropped_by_reason"]
    assert ledger["dropped"][reason] > 0
    assert reason in dropped
    log = read_run(result.folder).log
    assert check_replay(log).agrees
    actions = [record.action for record in log.actions]
    drops = Counter(a.group for a in actions if isinstance(a, ev.Drop) and a.reason == reason)
    starts = Counter(a.group for a in actions if isinstance(a, ev.StartGroup))
    trained = [group for a in actions if isinstance(a, ev.Train) for group in a.groups]
    assert len(trained) == len(set(trained)) == 15
    if on_late == "drop":
        assert not drops.keys() & trained
        assert set(starts.values()) == {1}
    else:  # no other prompt takes the place of one that was recycled
        assert sorted(trained) == list(range(15))
        assert all(starts[group] == 1 + drops[group] for group in trained)
        assert reason not in read_run(result.folder).groups["reason"].loc[trained].tolist()
    # Groups that ended have records; running ones do not.
    assert ledger["generated"] >= result.summary["generated_tokens"]


def test_each_segment_is_reproduced_by_the_checkpoint_of_its_version(
    interrupted: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = interrupted
    models = checkpoints(folder)
    rescored = [
        rescored_difference(models, sample)
        for step in trained_samples(folder)
        for sample in step
        if len(sample["parts"]) > 1
    ]
    assert max(right for right, _ in rescored) < 1e-4
    # The test needs adjacent versions to give different log-probs.
    assert max(wrong for _, wrong in rescored) > 1e-3


def test_sampler_and_trainer_agree_on_fresh_tokens(
    interrupted: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = interrupted
    first = metrics(folder)[0]
    assert first["lag_token_max"] == 0
    # |log pi_theta - log pi_behav| < 1e-4 is a ratio of 1 to 1e-4.
    assert first["sampler_gap_max"] < 1e-4


def test_the_run_is_read_back_as_frames_and_columns(
    interrupted: tuple[Path, dict[str, Any]],
) -> None:
    folder, summary = interrupted
    run = areal_lab.read_run(folder)
    samples, tokens = run.samples, run.tokens
    assert len(samples) == summary["trained_samples"]
    assert len(tokens) == summary["trained_tokens"] == samples["tokens"].sum()
    assert tokens["lag"].mean() == pytest.approx(summary["lag"]["token"]["mean"])
    written = [sample for step in trained_samples(folder) for sample in step]
    for row, sample in enumerate(written):
        assert tokens["ids"][tokens.of(row)].tolist() == [
            token for part in sample["parts"] for token in part["tokens"]
        ]
        assert "".join(tokens.texts(row)) == sample["completion"] == samples["completion"][row]
    # The log and the trainer count lags separately.
    assert list(run.steps.index) == [line["step"] for line in run.metrics]
    for name in ("lag_token_mean", "lag_head_mean", "lag_tail_max"):
        assert list(run.steps[name]) == pytest.approx([line[name] for line in run.metrics])
    assert (run.groups["outcome"] == "trained").sum() == STEPS * 3


def test_training_fields_are_recorded_if_asked(
    interrupted: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, _ = interrupted
    assert not [*folder.glob("trajectories/*.npz")]
    config = tiny_config(
        tmp_path,
        "token_fields=true",
        "total_train_steps=3",
        "actor.ppo_n_minibatches=3",
        "actor.behav_imp_weight_cap=1.01",
        "rollout.max_concurrent_rollouts=6",
    )
    run = areal_lab.read_run(do_run(config, reward_fn=even_digits).folder)
    tokens, samples = run.tokens, run.samples
    trained = np.isfinite(tokens["entropy"])
    assert (trained == (samples["advantage"].to_numpy()[tokens["sample"]] != 0)).all()
    # The metrics are means over the same tokens, before they were rounded.
    step = samples["step"].to_numpy()[tokens["sample"]]
    for line in run.metrics:
        own = trained & (step == line["step"])
        for name, metric in {
            "entropy": "entropy",
            "ratio": "ratio_mean",
            "behavior_weight": "behavior_weight_mean",
            "clipped": "clip_fraction",
        }.items():
            assert tokens[name][own].mean() == pytest.approx(line[metric], rel=1e-3), name
    ratio = np.exp(tokens["logprobs"] - tokens["proximal_logprobs"])[trained]
    assert ratio == pytest.approx(tokens["ratio"][trained], rel=1e-3)
    assert np.ptp(ratio) > 0
    weight = np.exp(tokens["proximal_logprobs"] - tokens["behavior_logprobs"])[trained]
    assert np.minimum(weight, 1.01) == pytest.approx(tokens["behavior_weight"][trained], rel=1e-3)
    assert "token fields" in set(run.spans["name"])


def test_the_run_folder_holds_what_is_promised(
    interrupted: tuple[Path, dict[str, Any]],
) -> None:
    folder, summary = interrupted
    assert json.loads((folder / "summary.json").read_text()) == summary
    for name in ("reward_before", "reward_after"):
        assert set(summary[name]) == {"mean", "n", "ci95"}
        assert summary[name]["n"] == 4
    assert len(metrics(folder)) == STEPS
    assert (folder / "model").resolve() == (folder / "checkpoints" / f"step-{STEPS:05d}").resolve()
    AutoModelForCausalLM.from_pretrained(folder / "model")


def test_adapters_are_merged_for_engines_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer sends weights to the engine; so it has its key, too, which nothing else tells."""
    keys = keep_keys(monkeypatch)
    config = tiny_config(
        tmp_path,
        "total_train_steps=4",
        "save_every_steps=1",
        "rollout.transfer=http_tensor",
        "actor.use_lora=true",
        "actor.lora_rank=4",
        "actor.optimizer.lr=5e-3",
    )
    result = do_run(config, response_tokens=long_tail, reward_fn=even_digits, on_step=keys.look)
    assert result.summary["status"] == "complete"
    assert result.summary["version_mismatches"] == 0
    assert len(keys.made) == 1
    assert keys.command_lines > 4
    keys.assert_not_in(result.folder)
    models = checkpoints(result.folder)
    samples = [sample for step in trained_samples(result.folder) for sample in step]
    rescored = [rescored_difference(models, sample) for sample in samples]
    assert max(right for right, _ in rescored) < 1e-4
    assert max(wrong for _, wrong in rescored) > 1e-3
    adapter = json.loads((result.folder / "model" / "adapter" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["base_model_name_or_path"]) == (4, config.actor.path)
    log = (result.folder / "logs" / "trainer.log").read_text()
    told = re.search(r"ready: ([\d,]+) parameters, ([\d,]+) of them trained", log)
    assert told is not None
    assert int(told[2].replace(",", "")) < int(told[1].replace(",", "")) / 4


@pytest.mark.slow
def test_eta_zero_trains_what_the_synchronous_schedule_trains(tmp_path: Path) -> None:
    folders = [
        do_run(
            tiny_config(tmp_path, "total_train_steps=3", f"rollout.schedule={schedule}", "eta=0"),
            reward_fn=even_digits,
        ).folder
        for schedule in ("synchronous", "asynchronous")
    ]
    samples = [
        [[(s["group"], s["sample"], s["parts"][0]["tokens"]) for s in step] for step in steps]
        for steps in map(trained_samples, folders)
    ]
    assert samples[0] == samples[1]
    for name in ("loss", "grad_norm"):
        values = [[line[name] for line in metrics(folder)] for folder in folders]
        assert values[0] == pytest.approx(values[1], rel=1e-4, abs=1e-6)
    assert min(values[0]) > 0.01  # every step moved the weights, so equal losses mean something


def test_responses_end_at_stop_strings_of_several_tokens(tmp_path: Path) -> None:
    stops = [f"{first}{second}" for first in "12" for second in "0123456789"]
    config = tiny_config(
        tmp_path,
        f"gconfig.stop={json.dumps(stops)}",
        "gconfig.max_new_tokens=40",
        "total_train_steps=2",
    )
    codec = TextCodec.load(config.actor.path)
    samples = [
        sample
        for step in trained_samples(do_run(config, reward_fn=even_digits).folder)
        for sample in step
    ]
    texts = [
        codec.decode_all([token for part in sample["parts"] for token in part["tokens"]])
        for sample in samples
    ]
    stopped = [any(stop in text for stop in stops) for text in texts]
    assert sum(stopped) > 3
    assert not [text for text in texts if any(stop in text[:-1] for stop in stops)]
    for sample, text, has_one in zip(samples, texts, stopped, strict=True):
        ended = has_one or text.endswith("<end>")
        assert sample["finish_reason"] == ("stop" if ended else "length")


@pytest.mark.parametrize("victim", ["engine 0", "trainer"])
def test_the_death_of_a_process_ends_the_run_with_its_name(
    tmp_path: Path, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine may come back once: it does, with the weights of the day, and dies again."""
    keys = keep_keys(monkeypatch)
    state = RunState()
    killed: set[int] = set()

    def kill(report: StepReport) -> None:
        del report
        assert state.performer is not None
        # The step that runs when an engine is lost still ends, and another may be getting ready.
        engines = [server.child for server in state.performer.servers.alive.values()]
        children = engines if victim == "engine 0" else state.children[:1]
        for child in children:
            assert child is not None
            assert child.name == victim
            if child.pid in killed:
                continue
            killed.add(child.pid)
            os.kill(child.pid, signal.SIGKILL)

    with pytest.raises(ChildDied, match=f"{victim} .*SIGKILL") as ended:
        do_run(
            tiny_config(tmp_path, "total_train_steps=50", "rollout.max_engine_restarts=1"),
            on_step=kill,
            state=state,
            reward_fn=even_digits,
        )
    assert all(child.process.returncode is not None for child in state.children)
    assert not [key for key in keys.made if key in str(ended.value)]
    (folder,) = (tmp_path / "runs").iterdir()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert victim in summary["error"]
    assert summary.keys() >= CONTRACT
    assert summary["backend"] == "embedded"
    assert summary["engine_version"] == installed_version("areal_lab")
    assert summary["reward_before"]["n"] == 4
    assert summary["reward_after"] is None
    # A step has its line of metrics just before the log has its end.
    assert summary["steps"] <= len(metrics(folder)) <= summary["steps"] + 1
    assert summary["interruptions"] >= 0
    assert 0 <= summary["multi_version_share"] <= 1
    lives = 2 if victim == "engine 0" else 1
    assert len(killed) == lives
    assert len(set(keys.made)) == lives, "an engine that comes back has another key"
    keys.assert_not_in(folder)
    assert summary["engine_losses"] == (lives if lives > 1 else 0)
    assert summary["engine_restarts"] == lives - 1
    assert summary["version_mismatches"] == 0
    assert len(metrics(folder)) >= lives
    seen = [(s["group"], s["sample"]) for step in trained_samples(folder) for s in step]
    assert len(seen) == len(set(seen))


def test_an_error_of_the_run_is_not_hidden_by_that_of_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: object) -> None:
        raise OSError("no engine starts here")

    write = RunFolder.write_json

    def full(folder: RunFolder, name: str, value: Any) -> None:
        if name == "summary.json":
            raise OSError("no space left")
        write(folder, name, value)

    monkeypatch.setattr("areal_lab.pipeline.run.start_run", fail)
    config = tiny_config(tmp_path)
    with pytest.raises(OSError, match="no engine starts here"):
        do_run(config)
    (folder,) = (tmp_path / "runs").iterdir()
    assert json.loads((folder / "summary.json").read_text())["backend"] == "embedded"
    monkeypatch.setattr(RunFolder, "write_json", full)
    with pytest.raises(OSError, match="no engine starts here"):
        do_run(config)


def test_children_and_shared_memory_go_when_the_pipeline_is_killed(tmp_path: Path) -> None:
    process = start_command(tmp_path, "total_train_steps=10000")
    wait_for_steps(process, 1)
    children = children_of(process.pid)
    roots = list(SHARED_MEMORY.glob(f"areal_lab-{process.pid}-*"))
    assert len(children) >= 4  # the trainer, an engine, a reward worker, the warm interpreter
    process.kill()
    process.communicate()
    for child in children:
        assert ends_within(child, 15.0), f"process {child} outlived the pipeline"
    assert not any(root.exists() for root in roots)


def start_command(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    """`areal-lab train` on the tiny model, in a separate process."""
    config = tiny_config(folder, *overrides)
    path = folder / "config.yaml"
    path.write_text(OmegaConf.to_yaml(config.model_dump()))
    return ForkedPopen(
        [sys.executable, "-m", "areal_lab.cli.app", "train", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_steps(process: subprocess.Popen[str], steps: int) -> None:
    """Read the progress until this many steps are reported."""
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        steps -= "] step " in line
        if steps == 0:
            return
    pytest.fail("the command ended early:\n" + "".join(seen))


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children (Linux)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def ends_within(pid: int, seconds: float) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
