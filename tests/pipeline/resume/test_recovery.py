"""How a run continues, and every reason why it cannot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from areal_lab.config.problem import ConfigError
from areal_lab.config.schema import TrainConfig
from areal_lab.control.coordinator import Coordinator
from areal_lab.control.events import STARTS_OVER, Finish, StartGroup
from areal_lab.live.presence import new_presence, write_presence
from areal_lab.models.checkpoint_files import write_digests
from areal_lab.pipeline.resume.changes import changed_settings
from areal_lab.pipeline.resume.recovery import check_data, check_given, find_recovery
from areal_lab.pipeline.resume.saved_run import RUN_FILE, read_saved_run
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import HeldOutReward, append_held_out, held_out_rewards
from tests.host.test_claim import continue_elsewhere
from tests.pipeline.resume.saved import FRONTIER, PROBLEMS, run_folder


def refusals(folder: RunFolder, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        find_recovery(folder.path, overrides)
    assert len(str(raised.value).splitlines()) == len(raised.value.problems)
    return [problem.setting for problem in raised.value.problems]


def test_a_run_continues_from_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (folder.path / "checkpoints" / ".step-00004.writing-a1b2").mkdir()
    before = {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    recovery = find_recovery(folder.path)
    assert before == {path: path.stat().st_mtime_ns for path in folder.path.rglob("*")}
    assert recovery.version == 3
    assert recovery.checkpoint == folder.checkpoint(3)
    assert recovery.before is not None
    assert recovery.before.problem_means == (0.25, 0.5)
    started = recovery.started((0, 1))
    assert started.open_groups == (25, 28)
    assert started.open_versions == (STARTS_OVER, STARTS_OVER)
    assert started.train_steps == 0
    starts = [a for a in Coordinator(recovery.limits).handle(started) if type(a) is StartGroup]
    assert [start.group for start in starts][:3] == [25, 28, 30]
    assert (
        "step 3 of 10: 0 groups are finished, 0 continue with 0 tokens, 2 start over"
        in recovery.in_words()
    )
    recovery.cut_back()
    assert [line["step"] for line in recovery.metrics()] == [1, 2, 3]
    assert (folder.path / "model").resolve() == folder.checkpoint(3)
    assert [path.name for path in sorted((folder.path / "checkpoints").iterdir())] == [
        *("step-00001", "step-00002", "step-00003")
    ]


def test_a_newest_checkpoint_without_a_state_is_not_removed_for_the_one_before(
    tmp_path: Path,
) -> None:
    folder = run_folder(tmp_path, digests=False)
    (folder.checkpoint(3) / RUN_FILE).unlink()
    with pytest.raises(ConfigError, match=r"step-00003 has a model and no state .* step-00002"):
        find_recovery(folder.path)
    folder.checkpoint(3).rename(tmp_path / "kept")
    assert find_recovery(folder.path).checkpoint == folder.checkpoint(2)


def test_a_run_that_has_not_trained_starts_over(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    shutil.rmtree(folder.path / "checkpoints")
    (folder.path / "metrics.jsonl").write_text('{"step": 0}\n')
    recovery = find_recovery(folder.path, ["seed=7", "total_train_steps=2"])
    assert (recovery.version, recovery.checkpoint, recovery.config.seed) == (0, None, 7)
    assert recovery.started((0,)).open_groups == ()
    recovery.cut_back()
    assert not (folder.path / "metrics.jsonl").exists()
    assert find_recovery(folder.path).config.seed == 7


def test_more_steps_and_other_engines_are_named_and_allowed(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    changes = ["total_train_steps=12", "rollout.engines=2", "plots=false", "eta=4"]
    recovery = find_recovery(folder.path, changes)
    assert recovery.notes == (
        "rollout.engines is 2 from step 4 on (was 1)",
        "total_train_steps is 12 from step 4 on (was 10)",
    )
    assert recovery.started((0,)).train_steps == 12
    assert recovery.limits.train_steps == 10
    recovery.cut_back()
    assert find_recovery(folder.path).config.total_train_steps == 12


def test_a_bound_that_was_changed_by_hand_stays(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    file = folder.checkpoint(3) / RUN_FILE
    saved = read_saved_run(folder.checkpoint(3))
    file.write_bytes(replace(saved, frontier=replace(FRONTIER, eta=1.0)).to_json())
    write_digests(folder.checkpoint(3), 3)
    assert find_recovery(folder.path).limits.schedule.eta == 1


def test_what_a_run_keeps_is_refused_all_at_once(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    changes = ["seed=2", "eta=2", "dataset.batch_size=4", "actor.optimizer.lr=1e-3"]
    assert sorted(refusals(folder, *changes)) == [
        "actor.optimizer.lr",
        "dataset.batch_size",
        "rollout.max_head_offpolicyness",
        "seed",
    ]
    assert refusals(folder, "total_train_steps=2") == ["total_train_steps"]
    assert refusals(folder, "total_train_steps=9") == ["total_train_steps"]
    assert refusals(folder, "actor.use_lora=true", "rollout.transfer=adapter") == [
        "actor.use_lora",
        "rollout.transfer",
    ]


def test_a_mapping_that_was_filled_or_emptied_is_one_change() -> None:
    empty, filled, other = (
        TrainConfig.model_validate({"dataset": {"tasks": tasks}})
        for tasks in ({}, {"chain_sum": {}}, {"chain_sum": {"size": 2}})
    )
    assert [*changed_settings(empty, filled)] == [("dataset.tasks", {}, {"chain_sum": {}})]
    assert [*changed_settings(filled, empty)] == [("dataset.tasks", {"chain_sum": {}}, {})]
    assert [*changed_settings(filled, other)] == [("dataset.tasks.chain_sum", {}, {"size": 2})]
    assert not [*changed_settings(filled, filled)]


def test_a_complete_run_continues_with_more_steps_only(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, steps=3)
    append_held_out(folder.path, HeldOutReward([0.5]).measured(3))
    # It was killed while it measured its last weights, so it measures them again.
    recovery = find_recovery(folder.path)
    assert Coordinator(recovery.limits).handle(recovery.started((0,)))[-1] == Finish("complete")
    recovery.cut_back()
    assert not (folder.path / "held_out.jsonl").exists()
    append_held_out(folder.path, HeldOutReward([0.5]).measured(3))
    append_held_out(folder.path, HeldOutReward([0.5]).measured(4))
    folder.write_json("summary.json", {"status": "complete"})
    assert refusals(folder) == ["total_train_steps"]
    find_recovery(folder.path, ["total_train_steps=5"]).cut_back()
    assert held_out_rewards(folder.path, []) == [(3, 0.5)]
    assert not (folder.path / "summary.json").exists()


def test_a_run_that_lives_is_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
        write_presence(folder.path, new_presence(other.pid, "training"))
        assert refusals(folder) == ["resume"]
        write_presence(folder.path, replace(new_presence(other.pid, "training"), ended=True))
        assert find_recovery(folder.path).version == 3
        assert other.stdin is not None
        other.stdin.close()


def test_a_process_that_cannot_be_seen_is_named(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    assert not find_recovery(folder.path).notes
    continue_elsewhere(folder.path)
    (note,) = find_recovery(folder.path).notes
    assert note.startswith("note: process 7 on host elsewhere had the run before and cannot be")


def test_what_is_no_run_or_has_no_state_is_refused(tmp_path: Path) -> None:
    assert refusals(RunFolder(tmp_path / "nowhere")) == ["resume"]
    assert refusals(run_folder(tmp_path, resumable=False)) == ["checkpoint.resumable"]
    folder = run_folder(tmp_path)
    (folder.checkpoint(3) / RUN_FILE).write_text("{")
    assert refusals(folder) == ["resume"]


def test_other_data_and_missing_functions_are_refused(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    recovery = find_recovery(folder.path)
    check_data(recovery, PROBLEMS)
    with pytest.raises(ConfigError, match="are not those"):
        check_data(recovery, replace(PROBLEMS, train=PROBLEMS.train[::-1]))
    check_given(recovery, ())
    assert recovery.saved is not None
    given = replace(recovery, saved=replace(recovery.saved, given=("reward_fn",)))
    check_given(given, ("reward_fn",))
    with pytest.raises(ConfigError, match=r"resume_run\(.*reward_fn=\.\.\.\)"):
        check_given(given, ("loss",))


def test_a_damaged_file_is_refused_before_anything_is_cut(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    metrics = folder.path / "metrics.jsonl"
    metrics.write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(ValueError, match="its end was lost"):
        find_recovery(folder.path).cut_back()
    assert folder.checkpoint(3).is_dir()
