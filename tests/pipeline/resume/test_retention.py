"""Which checkpoints stay, and what of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from areal_lab.config.schema import TrainConfig
from areal_lab.control.evaluation import Score, best_checkpoint
from areal_lab.pipeline.resume.checkpoints import (
    Retention,
    apply_retention,
    is_resumable,
    retention,
    saved_checkpoints,
)
from areal_lab.pipeline.resume.saved_run import RUN_FILE
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.held_out import HeldOutReward, append_held_out
from tests.pipeline.resume.saved import FRONTIER, saved_run

# So few versions that most of the saved ones have a score.
VERSIONS = st.sets(st.integers(0, 12), max_size=12)
SCORES = st.dictionaries(
    st.integers(0, 12), st.builds(Score, st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.booleans())
)


def model(checkpoint: Path) -> None:
    """A checkpoint with a model alone."""
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text("{}")


@given(VERSIONS, SCORES, st.integers(0, 5), VERSIONS, st.booleans())
@example({1, 2, 3, 4}, {1: Score(0.5), 2: Score(1.0, exact=False)}, 1, set(), False)
def test_the_newest_the_best_and_the_measured_ones_stay(
    saved: set[int], scores: dict[int, Score], keep: int, measuring: set[int], exact: bool
) -> None:
    decided = retention(saved, scores, keep=keep, measuring=measuring, exact=exact)
    left = saved - set(decided.remove)
    newest = sorted(saved)[-keep:]
    assert set(newest) <= left
    assert saved & measuring <= left
    assert decided.best == best_checkpoint(scores, saved, exact=exact)
    assert decided.best is None or decided.best in left
    exact_best = best_checkpoint(scores, saved, exact=True)
    assert exact_best is None or exact_best in left
    assert len(left - measuring) <= len(newest) + 2
    assert not set(sorted(saved)[-2:]) & set(decided.strip)
    assert set(decided.strip) <= left
    # Once applied, there is nothing left to remove.
    again = retention(left, scores, keep=keep, measuring=measuring, exact=exact)
    assert again.remove == ()
    # Once the measurement is over, its checkpoint falls under the ordinary rule.
    over = retention(left, scores, keep=keep, exact=exact)
    assert set(over.remove) == left - set(sorted(left)[-keep:]) - {over.best, exact_best}


def test_the_earliest_of_equally_good_ones_is_the_best() -> None:
    scores = {version: Score(one) for version, one in {1: 0.5, 2: 0.75, 3: 0.75, 4: 0.25}.items()}
    assert retention([4, 3, 2, 1], scores, keep=1) == Retention(remove=(1, 3), strip=(2,), best=2)


def test_a_better_checkpoint_replaces_the_best_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    kept = []
    for version, reward in enumerate([0.5, 0.25, 0.75, 0.25, 0.5], start=1):
        model(folder.checkpoint(version))
        append_held_out(tmp_path, HeldOutReward([reward, reward]).measured(version))
        best = apply_retention(folder, keep=1).best
        assert (tmp_path / "best").resolve() == folder.checkpoint(best or 0)
        kept.append((best, sorted(saved_checkpoints(folder))))
    assert kept == [(1, [1]), (1, [1, 2]), (3, [3]), (3, [3, 4]), (3, [3, 5])]


def test_a_link_to_a_checkpoint_that_is_gone_goes_too(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for version in (1, 2):
        model(folder.checkpoint(version))
        append_held_out(tmp_path, HeldOutReward([float(version)]).measured(version))
    assert apply_retention(folder, keep=0).best == 2
    shutil.rmtree(folder.checkpoint(2))
    assert apply_retention(folder, keep=0).best == 1
    assert (tmp_path / "best").resolve() == folder.checkpoint(1)
    shutil.rmtree(folder.checkpoint(1))
    assert apply_retention(folder, keep=0).best is None
    assert not (tmp_path / "best").is_symlink()


def test_checkpoints_are_removed_stripped_and_linked(tmp_path: Path) -> None:
    for version in range(1, 6):
        checkpoint = tmp_path / "checkpoints" / f"step-{version:05d}"
        (checkpoint / "trainer").mkdir(parents=True)
        (checkpoint / "model.safetensors").touch()
        (checkpoint / "groups.json.gz").touch()
        run = saved_run(TrainConfig(), frontier=replace(FRONTIER, version=version, open=()))
        (checkpoint / "run.json").write_bytes(run.to_json())
    metrics = [{"step": step, "held_out_reward": reward} for step, reward in [(2, 0.5), (4, 0.25)]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    apply_retention(RunFolder(tmp_path), keep=3)
    left = {path.name: path for path in sorted((tmp_path / "checkpoints").iterdir())}
    assert list(left) == ["step-00002", "step-00003", "step-00004", "step-00005"]
    assert [is_resumable(path, RUN_FILE) for path in left.values()] == [False, False, True, True]
    assert [path.name for path in left["step-00003"].iterdir()] == ["model.safetensors"]
    assert (tmp_path / "best").resolve() == left["step-00002"].resolve()
