"""Damaged checkpoints, foreign files and removed checkpoints: named, and nothing is removed."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from areal_lab.config.problem import ConfigError
from areal_lab.models.checkpoint_files import (
    FILE,
    checkpoint_fault,
    checkpoints_of,
    foreign_names,
    read_digests,
    step_of,
    write_digests,
)
from areal_lab.models.locate import (
    INCLUDED_MODELS,
    ModelNotFound,
    resolve_model_path,
    sound_model_path,
)
from areal_lab.pipeline.resume.checkpoints import (
    apply_retention,
    newest_checkpoint,
    saved_checkpoints,
)
from areal_lab.pipeline.resume.positions import set_aside, trained_steps
from areal_lab.pipeline.resume.recovery import find_recovery
from areal_lab.pipeline.resume.saved_run import GROUPS_FILE, RUN_FILE, saved_version
from areal_lab.runlog.folder import RunFolder
from areal_lab.runlog.token_files import read_samples
from tests.fuzz import damaged_bytes, damaged_json, mutations, one_line
from tests.pipeline.resume.saved import run_folder


def content(folder: Path) -> dict[str, bytes | str]:
    """Everything in a folder."""
    return {
        str(path.relative_to(folder)): path.readlink().as_posix()
        if path.is_symlink()
        else path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def flip(path: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def refused(run: Path) -> str:
    """The line with which a run does not continue; nothing in its folder changes."""
    before = content(run)
    with pytest.raises(ConfigError) as raised:
        find_recovery(run)
    assert content(run) == before
    assert one_line(raised.value)
    return str(raised.value)


# --- checkpoints ---------------------------------------------------------------------------------


def with_trajectories(folder: RunFolder) -> Path:
    """A run with samples and open groups, which has ended a step after its checkpoint."""
    for step in (1, 2, 3, 4):
        (folder.path / "trajectories" / f"step-{step:05d}.jsonl").write_text("{}\n")
    checkpoint = folder.checkpoint(3)
    groups = gzip.compress(json.dumps({"finished": [], "running": {}}).encode())
    (checkpoint / GROUPS_FILE).write_bytes(groups)
    write_digests(checkpoint, 3)
    return folder.path


@mutations
def test_every_flipped_bit_of_a_checkpoint_is_found(tmp_path: Path, count: int) -> None:
    """A sample of the bits, and with many mutations all but a few of run.json."""
    run = with_trajectories(run_folder(tmp_path))
    checkpoint = run / "checkpoints" / "step-00003"
    assert checkpoint_fault(checkpoint, 3) == ""
    listed = read_digests(checkpoint)
    kept = (checkpoint / FILE).rename(checkpoint.parent / "kept")
    os.mkfifo(checkpoint / FILE)
    assert "is a pipe, but must be a file" in checkpoint_fault(checkpoint, 3)
    kept.rename(checkpoint / FILE)
    assert listed is not None
    assert sorted(listed.files) == [
        *("config.json", GROUPS_FILE, "model.safetensors", RUN_FILE, "trainer/.metadata")
    ]
    rng, each = random.Random(1), max(40, count // 2)
    for name in (FILE, *listed.files):
        path, before = checkpoint / name, (checkpoint / name).read_bytes()
        bits = range(8 * len(before))
        for bit in rng.sample(bits, min(len(bits), each)):
            flip(path, bit)
            if fault := checkpoint_fault(checkpoint, 3):
                assert name in fault or name == FILE, fault
            else:  # white space, or the same number written in another way
                assert read_digests(checkpoint) == listed
            path.write_bytes(before)
    assert checkpoint_fault(checkpoint, 3) == ""


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize("version", [0, 2, 4, 11])
def test_another_version_in_run_json_removes_nothing(
    tmp_path: Path, version: int, digests: bool
) -> None:
    run = run_folder(tmp_path, digests=digests).path
    file = run / "checkpoints" / "step-00003" / RUN_FILE
    value = json.loads(file.read_text())
    value["frontier"] |= {"version": version, "open": []}
    file.write_text(json.dumps(value))
    said = refused(run)
    assert "step-00003 is damaged" in said
    assert "Remove or rename" in said
    assert "to continue from step-00002" in said


def test_a_missing_or_cut_file_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    run = run_folder(tmp_path).path
    checkpoint = run / "checkpoints" / "step-00003"
    for name in ("config.json", "model.safetensors", RUN_FILE, "trainer/.metadata"):
        before = (checkpoint / name).read_bytes()
        (checkpoint / name).unlink()
        assert f"is damaged: {name} is missing" in refused(run)
        (checkpoint / name).write_bytes(before[:-1])
        assert f"{name} has {len(before) - 1:,} bytes, but was saved with" in refused(run)
        (checkpoint / name).unlink()
        (checkpoint / name).mkdir()
        assert f"{name} is not a file" in refused(run)
        (checkpoint / name).rmdir()
        os.mkfifo(checkpoint / name)
        assert f"{name} is not a file" in refused(run)
        (checkpoint / name).unlink()
        (checkpoint / name).write_bytes(before)
    assert find_recovery(run).notes == ()
    (checkpoint / FILE).unlink()
    assert f"it has no {FILE}, but the checkpoints before it do" in refused(run)
    os.mkfifo(checkpoint / FILE)
    assert f"{FILE} cannot be read" in refused(run)


def test_renamed_checkpoints_are_named(tmp_path: Path) -> None:
    run = run_folder(tmp_path).path
    two, three, aside = (run / f"checkpoints/{name}" for name in ("step-00002", "step-00003", "x"))
    two.rename(aside)
    three.rename(two)
    aside.rename(three)
    said = "checkpoints/step-00002, checkpoints/step-00003 was not written by the run"
    assert said in refused(run)
    shutil.rmtree(run / "checkpoints/step-00001")
    assert said in refused(run)


def test_a_checkpoint_of_an_older_version_continues_with_a_note(tmp_path: Path) -> None:
    recovery = find_recovery(run_folder(tmp_path, digests=False).path)
    assert recovery.version == 3
    (note,) = recovery.notes
    assert note.startswith("note: step-00003 was saved by an older version")


def test_a_checkpoint_that_changes_before_the_cut_stops_the_cut(tmp_path: Path) -> None:
    run = with_trajectories(run_folder(tmp_path))
    recovery = find_recovery(run)
    flip(run / "checkpoints" / "step-00003" / "model.safetensors", 9)
    before = content(run)
    with pytest.raises(ValueError, match=r"step-00003 is damaged: model\.safetensors has other"):
        recovery.cut_back()
    assert content(run) == before


def test_no_checkpoint_is_removed_for_a_damaged_one(tmp_path: Path) -> None:
    folder, notes = run_folder(tmp_path), list[str]()
    flip(folder.checkpoint(3) / "model.safetensors", 0)
    apply_retention(folder, keep=1, note=notes.append)
    assert list(checkpoints_of(folder.path)) == [2, 3]
    assert (folder.checkpoint(2) / RUN_FILE).is_file()
    assert ["step-00003 is damaged" in note for note in notes] == [True]
    folder = run_folder(tmp_path / "of another run")
    shutil.copytree(folder.checkpoint(3), folder.checkpoint(99))
    (folder.checkpoint(99) / FILE).unlink()
    apply_retention(folder, keep=1, note=notes.append)
    assert list(checkpoints_of(folder.path)) == [3, 99]
    assert f"of another run: it has no {FILE}" in notes[-1]


def test_a_stripped_checkpoint_is_whole(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    for step in (4, 5):
        shutil.copytree(folder.checkpoint(3), folder.checkpoint(step))
        value = json.loads((folder.checkpoint(step) / RUN_FILE).read_text())
        value["frontier"]["version"] = step
        (folder.checkpoint(step) / RUN_FILE).write_text(json.dumps(value))
        write_digests(folder.checkpoint(step), step)
    apply_retention(folder, keep=0)
    names = {path.name for path in folder.checkpoint(3).iterdir()}
    assert names == {FILE, "config.json", "model.safetensors"}
    assert checkpoint_fault(folder.checkpoint(3), 3) == ""
    flip(folder.checkpoint(3) / "model.safetensors", 1)
    assert "model.safetensors" in checkpoint_fault(folder.checkpoint(3), 3)


def test_a_damaged_checkpoint_is_no_model(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    shutil.rmtree(folder.checkpoint(3))
    shutil.copytree(INCLUDED_MODELS["Adder-75K"], folder.checkpoint(3))
    write_digests(folder.checkpoint(3), 3)
    folder.point("model", folder.checkpoint(3))
    assert sound_model_path(folder.path / "model") == folder.checkpoint(3)
    weights = folder.checkpoint(3) / "model.safetensors"
    flip(weights, 8 * weights.stat().st_size - 3)
    with pytest.raises(ModelNotFound, match=r"step-00003 is damaged: model\.safetensors"):
        sound_model_path(folder.path / "model")


@pytest.mark.parametrize("name", ["", "model", "best"])
def test_a_model_whose_checkpoint_was_removed_is_named_with_its_link(
    tmp_path: Path, name: str
) -> None:
    folder = run_folder(tmp_path)
    folder.point("model", folder.checkpoint(3))
    folder.point("best", folder.checkpoint(2))
    shutil.rmtree(folder.path / "checkpoints")
    link, step = ("best", 2) if name == "best" else ("model", 3)
    with pytest.raises(
        ModelNotFound,
        match=rf"{link} is a link to checkpoints/step-0000{step}, which does not exist",
    ):
        resolve_model_path(folder.path / name)


# --- removed checkpoints -------------------------------------------------------------------------


def remove(run: Path, *kept: str) -> None:
    """Remove checkpoints and links, and all files of lines but these."""
    shutil.rmtree(run / "checkpoints")
    for name in ("metrics.jsonl", "events.jsonl", "held_out.jsonl"):
        if name not in kept:
            (run / name).unlink(missing_ok=True)


def test_a_run_whose_checkpoints_were_removed_is_not_started_over(tmp_path: Path) -> None:
    for number, (name, line, steps) in enumerate(
        (
            ("metrics.jsonl", '{"step": 4}', 4),
            ("held_out.jsonl", '{"version": 4, "reward": 0.5}', 4),
            ("events.jsonl", '{"kind":"event","event":{"type":"TrainStepDone","version":1}}', 1),
            ("trajectories/step-00003.jsonl", "{}", 2),
            ("model", "", 7),
        )
    ):
        run = run_folder(tmp_path / str(number)).path
        remove(run)
        assert find_recovery(run).checkpoint is None
        if line:
            (run / name).write_text(f"{line}\n")
        else:
            (run / name).symlink_to(f"checkpoints/step-{steps:05d}")
        assert f"has trained {steps} step" in refused(run)
        shutil.rmtree(run / "checkpoints", ignore_errors=True)
        (run / "checkpoints").mkdir()
        assert "no checkpoint to continue from" in refused(run)
    assert trained_steps(tmp_path / "nowhere") == 0


def test_a_run_on_a_read_only_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_folder(tmp_path).path
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere else
    assert f"{run} is not writable" in refused(run)


def test_restarts_before_the_first_checkpoint_keep_what_was_written(tmp_path: Path) -> None:
    run = run_folder(tmp_path).path
    shutil.rmtree(run / "checkpoints")
    metrics = (run / "metrics.jsonl").read_bytes()
    for number in (1, 2):
        (run / "metrics.jsonl").write_bytes(metrics)
        (run / "model").symlink_to("checkpoints/step-00003")
        aside = set_aside(run)
        assert aside == run / f"attempt-{number}"
        assert (aside / "metrics.jsonl").read_bytes() == metrics
        assert find_recovery(run).checkpoint is None


# --- foreign files -------------------------------------------------------------------------------

FOREIGN: list[Callable[[Path], object]] = [
    lambda run: shutil.copytree(
        run / "checkpoints/step-00003", run / "checkpoints/step-00003-copy"
    ),
    lambda run: shutil.copytree(run / "checkpoints/step-00003", run / "checkpoints/step-00099"),
    lambda run: (run / "checkpoints/step-99999").mkdir(),
    lambda run: (run / "checkpoints/step-abc").mkdir(),
    lambda run: (run / "checkpoints/step-").mkdir(),
    lambda run: (run / "checkpoints/step-3").mkdir(),
    lambda run: (run / "checkpoints/step-000003").mkdir(),
    lambda run: (run / "checkpoints/step-٠٠٠٠٤").mkdir(),
    lambda run: (run / "checkpoints/step-00004").write_text("a file"),
    lambda run: (run / "checkpoints/.step-00003.swp").write_text("an editor's"),
    lambda run: (run / "checkpoints/.DS_Store").write_text(""),
    lambda run: (run / "checkpoints/step-00005").symlink_to("nowhere"),
    lambda run: (run / "checkpoints/notes.txt").write_text(""),
    lambda run: (run / "trajectories/step-00003.jsonl.bak").write_text("{"),
    lambda run: (run / "trajectories/step-00003.jsonl~").write_text("{"),
    lambda run: (run / "trajectories/step-00003 (copy).jsonl").write_text("{"),
    lambda run: (run / "trajectories/step-abc.jsonl").write_text("{"),
    lambda run: (run / "trajectories/step-00004.jsonl").mkdir(),
    lambda run: (run / "trajectories/.step-00003.jsonl.swp").write_text("{"),
    lambda run: os.mkfifo(run / "trajectories/step-00005.jsonl"),
]


def test_foreign_files_are_ignored_and_named(tmp_path: Path) -> None:
    folder, notes = run_folder(tmp_path), list[str]()
    for make in FOREIGN:
        make(folder.path)
    copies = {"checkpoints/step-00099", "checkpoints/step-99999"}
    names = {*foreign_names(folder.path), *copies}
    assert len(names) == len(FOREIGN)
    recovery = find_recovery(folder.path)
    assert recovery.checkpoint == folder.checkpoint(3)
    (note,) = recovery.notes
    assert note.endswith("and 15 more was not written by the run and is ignored")
    recovery.cut_back()
    apply_retention(folder, keep=1, note=notes.append)
    assert list(saved_checkpoints(folder)) == [3]
    assert not notes
    assert {*foreign_names(folder.path), *copies} == names
    assert not read_samples(folder.path).rows
    for name in ("best", "model"):
        (folder.path / name).unlink(missing_ok=True)
        (folder.path / name).mkdir()
        (folder.path / name / "mine").touch()
        folder.point(name, folder.checkpoint(3))
        (before,) = folder.path.glob(f"{name}.before-*")
        assert (before / "mine").is_file()


def test_the_name_of_a_step_is_read_in_one_way() -> None:
    names = ("step-00012", "step-123456", "step-012345", "step-12", "step-00012x", "step-00012\n")
    assert [step_of(name) for name in names] == [12, 123456, None, None, None, None]
    assert step_of("step-00012.jsonl.gz", (".jsonl", ".jsonl.gz")) == 12
    assert step_of("step-00012.jsonl", (".npz",)) is None


# --- fuzzing -------------------------------------------------------------------------------------


@mutations
def test_no_damage_to_a_checkpoint_removes_anything(tmp_path: Path, count: int) -> None:
    rng = random.Random(33)
    runs = [
        with_trajectories(run_folder(tmp_path / "new")),
        run_folder(tmp_path / "old", digests=False).path,
    ]
    whole = [content(run) for run in runs]
    files = [path for path in (runs[0] / "checkpoints/step-00003").rglob("*") if path.is_file()]
    outcomes: Counter[str] = Counter()
    for number in range(count):
        run = runs[number % 2]
        # In a folder of an older version, only the damage of one file shows.
        file = rng.choice(sorted(files)) if run is runs[0] else run / OLD
        before = file.read_bytes()
        if file.name == RUN_FILE and number % 4 < 2:
            file.write_text(json.dumps(damaged_json(rng, json.loads(before))))
        else:
            file.write_bytes(damaged_bytes(rng, before))
        outcomes[_outcome(run, complete=number % 20 == 1)] += 1
        file.write_bytes(before)
    assert [content(run) for run in runs] == whole
    assert outcomes.keys() <= {"found", "harmless"}
    assert outcomes["found"] > outcomes["harmless"]


OLD = f"checkpoints/step-00003/{RUN_FILE}"


def _outcome(run: Path, *, complete: bool) -> str:
    """What becomes of a damaged checkpoint.

    Args:
        complete: also read the settings of the run, which takes most of the time.
    """
    try:
        newest = newest_checkpoint(run, RUN_FILE, saved_version)
        if complete:
            recovery = find_recovery(run)
            assert recovery.version == 3
            assert recovery.started((0,))
            assert recovery.in_words()
    except ConfigError as error:  # damage may change several settings, each of which is a reason
        messages = [problem.message for problem in error.problems]
        readable = all(one_line(ValueError(message), 20_000) for message in messages)
        return "found" if messages and readable else f"not in a line each: {messages}"
    assert newest.checkpoint == run / "checkpoints/step-00003"
    return "harmless"


# --- other files of the run ----------------------------------------------------------------------


def test_settings_that_were_cut_off_are_named_as_such_and_restored(tmp_path: Path) -> None:
    run = run_folder(tmp_path).path
    file, sound = run / "config.yaml", (run / "config.yaml").read_text()
    lines = sound.splitlines(keepends=True)
    cuts = ["", *(sound[: len(sound) * part // 5] for part in (1, 3, 4))]
    cuts += ["".join(lines[:count]) for count in (len(lines) // 4, len(lines) // 2)]
    for text in cuts:
        file.write_text(text)
        before = content(run)
        try:
            recovery = find_recovery(run)
        except ConfigError as error:
            (problem,) = error.problems
        else:  # what is missing has its default
            assert recovery.config.model_dump() == recovery.saved_settings.model_dump()
            continue
        assert content(run) == before
        assert problem.message.startswith(f"{file} is damaged: "), problem
        subprocess.run(problem.command, shell=True, check=True)
        assert find_recovery(run).config == find_recovery(run).saved_settings
    file.write_text(sound)
    assert not find_recovery(run).notes


def test_a_line_that_was_damaged_before_the_checkpoint_stops_the_cut(tmp_path: Path) -> None:
    run = run_folder(tmp_path).path
    metrics = (run / "metrics.jsonl").read_bytes()
    for damaged in (metrics[:3] + b"\0" + metrics[4:], b"x" + metrics[1:]):
        (run / "metrics.jsonl").write_bytes(damaged)
        recovery, before = find_recovery(run), content(run)
        with pytest.raises(ValueError, match=r"line 1 of .*metrics\.jsonl is not JSON") as raised:
            recovery.cut_back()
        assert one_line(raised.value)
        assert content(run) == before
