"""Which checkpoints stay, and what of them."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from areal_lab.pipeline.resume.retention import Retention, apply_retention, retention
from areal_lab.pipeline.resume.saved_run import is_resumable
from areal_lab.runlog.folder import RunFolder

VERSIONS = st.sets(st.integers(0, 50), max_size=12)


@given(VERSIONS, st.dictionaries(st.integers(0, 50), st.floats(0, 1)), st.integers(0, 5))
def test_the_newest_and_the_best_stay(
    saved: set[int], rewards: dict[int, float], keep: int
) -> None:
    decided = retention(saved, rewards, keep=keep)
    left = saved - set(decided.remove)
    newest = sorted(saved)[-keep:]
    assert set(newest) <= left
    measured = saved & rewards.keys()
    assert (decided.best is None) == (not measured)
    if decided.best is not None:
        assert rewards[decided.best] == max(rewards[version] for version in measured)
        assert decided.best in left
    assert len(left) <= len(newest) + 1
    assert not set(sorted(saved)[-2:]) & set(decided.strip)
    assert set(decided.strip) <= left
    # Once applied, there is nothing left to remove.
    assert retention(left, rewards, keep=keep).remove == ()


def test_the_earliest_of_equally_good_ones_is_the_best() -> None:
    rewards = {1: 0.5, 2: 0.75, 3: 0.75, 4: 0.25}
    assert retention([4, 3, 2, 1], rewards, keep=1) == Retention(remove=(1, 3), strip=(2,), best=2)


def test_checkpoints_are_removed_stripped_and_linked(tmp_path: Path) -> None:
    for version in range(1, 6):
        checkpoint = tmp_path / "checkpoints" / f"step-{version:05d}"
        (checkpoint / "trainer").mkdir(parents=True)
        for name in ("model.safetensors", "run.json", "groups.json.gz"):
            (checkpoint / name).touch()
    metrics = [{"step": step, "held_out_reward": reward} for step, reward in [(2, 0.5), (4, 0.25)]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    apply_retention(RunFolder(tmp_path), keep=3)
    left = {path.name: path for path in sorted((tmp_path / "checkpoints").iterdir())}
    assert list(left) == ["step-00002", "step-00003", "step-00004", "step-00005"]
    assert [is_resumable(path) for path in left.values()] == [False, False, True, True]
    assert [path.name for path in left["step-00003"].iterdir()] == ["model.safetensors"]
    assert (tmp_path / "best").resolve() == left["step-00002"].resolve()
