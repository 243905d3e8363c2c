"""A run folder goes back to a checkpoint, or stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_lab.pipeline.resume.positions import cut_back, positions


def written(folder: Path, steps: int) -> None:
    """What a run of `steps` steps has written."""
    for name in ("trajectories", "checkpoints"):
        (folder / name).mkdir(exist_ok=True)
    for step in range(1, steps + 1):
        for name in ("events.jsonl", "metrics.jsonl"):
            with (folder / name).open("a") as file:
                file.write(f'{{"step": {step}}}\n')
        (folder / "trajectories" / f"step-{step:05d}.jsonl").write_text("{}\n")
        (folder / "trajectories" / f"step-{step:05d}.npz").write_text("")
        (folder / "checkpoints" / f"step-{step:05d}").mkdir()


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_what_came_after_the_checkpoint_is_removed(tmp_path: Path) -> None:
    done, killed = tmp_path / "done", tmp_path / "killed"
    for folder in (done, killed):
        folder.mkdir()
        written(folder, 2)
    at = positions(killed)
    for step in (3, 4):
        with (killed / "events.jsonl").open("a") as file:
            file.write(f'{{"step": {step}}}\n')
        (killed / "trajectories" / f"step-{step:05d}.jsonl").write_text("{}\n")
    (killed / "alarms.jsonl").write_text("{}\n")
    (killed / "checkpoints" / ".step-00004.writing-x1").mkdir()
    (killed / "trajectories" / ".step-00005.jsonl.tmp").touch()
    (killed / "trajectories" / ".step-00005.jsonl.0123456789abcdef.tmp").touch()
    (killed / "checkpoints" / ".step-00001.removed-0123456789abcdef").mkdir()
    cut_back(killed, at, version=2)
    assert names(killed) == names(done)
    assert (killed / "events.jsonl").read_text() == (done / "events.jsonl").read_text()
    cut_back(killed, at, version=2)
    assert names(killed) == names(done)


def test_a_run_without_a_checkpoint_starts_over(tmp_path: Path) -> None:
    written(tmp_path, 3)
    cut_back(tmp_path, {}, version=0)
    kept = {f"checkpoints/step-0000{step}" for step in (1, 2, 3)}
    assert names(tmp_path) == {"trajectories", "checkpoints", *kept}


def test_a_file_that_lost_its_end_is_refused_before_anything_is_cut(tmp_path: Path) -> None:
    written(tmp_path, 3)
    at = positions(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    before = names(tmp_path)
    with pytest.raises(ValueError, match="its end was lost"):
        cut_back(tmp_path, at, version=1)
    assert names(tmp_path) == before


def test_a_file_that_was_replaced_is_refused_before_anything_is_cut(tmp_path: Path) -> None:
    written(tmp_path, 3)
    before = names(tmp_path)
    with pytest.raises(ValueError, match="no line break at byte 13"):
        cut_back(tmp_path, {"events.jsonl": 12, "metrics.jsonl": 13}, version=1)
    assert names(tmp_path) == before


def test_a_reader_that_has_the_file_open_reads_the_old_one(tmp_path: Path) -> None:
    written(tmp_path, 2)
    at = {"events.jsonl": 12, "metrics.jsonl": 12}
    with (tmp_path / "events.jsonl").open() as reader:
        reader.readline()
        cut_back(tmp_path, at, version=1)
        assert reader.readline() == '{"step": 2}\n'
    assert (tmp_path / "events.jsonl").read_text() == '{"step": 1}\n'
