"""Run folders of strangers: read within bounds, in one line of error, and nothing else is written.

A folder is what a real run wrote, changed at random or on purpose; everything that reads a run is
called with it.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from areal_lab.cli.app import app
from areal_lab.cli.calibrate import run_step_table
from areal_lab.control.events import PauseRequested, TrainStepDone
from areal_lab.host import foreign
from areal_lab.live.attach import attach_run, live_runs
from areal_lab.live.mailbox import ask, open_mailbox
from areal_lab.live.presence import new_presence, write_presence
from areal_lab.live.watch_view import Watched, view
from areal_lab.pipeline.report import export_trace, format_run
from areal_lab.plots.style import new_figure, save_picture
from areal_lab.plots.timeline import draw_timeline
from areal_lab.runlog import token_columns
from areal_lab.runlog.compare import groups_by_contrast, paired_samples
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.read_run import find_runs, read_run
from areal_lab.runlog.records import EventRecord
from areal_lab.runlog.token_columns import clipped_by_lag
from areal_lab.runlog.trained_samples import oldest_first, story, trained_samples
from areal_lab.widgets.figure import svg
from areal_lab.widgets.lags import lag_rows
from areal_lab.widgets.run_charts import idle_chart, lag_chart, recent_lags, reward_chart
from areal_lab.widgets.timeline import timeline_rows
from areal_lab.widgets.token_colors import heads_of, quantities, token_colors, token_text
from tests.fuzz import damaged_bytes, damaged_json, mutations, refused

RECORDED: Final = Path(__file__).parents[2] / "notebooks" / "data" / "haiku-eta4"
LINES: Final = (
    "events.jsonl",
    "metrics.jsonl",
    "held_out.jsonl",
    "alarms.jsonl",
    *(("requests.jsonl", "replies.jsonl", "trajectories/step-00001.jsonl")),
)
VALUES: Final = ("summary.json", "process.json")
OTHERS: Final = ("config.yaml", "trajectories/step-00001.npz")
ALARM: Final = {
    **{"kind": "begun", "time_s": 3.0, "name": "drift", "since_step": 1, "raised_step": 2},
    **{"metric": "drift", "value": 0.3, "bound": 0.2, "what": "x", "cause": "y", "remedy": "z"},
}


def copied(folder: Path) -> Path:
    """The first steps of a recorded run, not compressed, with all files that a run may have."""
    (folder / "trajectories").mkdir(parents=True)
    lines = gzip.decompress((RECORDED / "events.jsonl.gz").read_bytes()).splitlines(keepends=True)
    records = read_log_file(RECORDED / "events.jsonl.gz").records
    done = [
        number
        for number, one in enumerate(records, start=2)
        if isinstance(one, EventRecord) and isinstance(one.event, TrainStepDone)
    ]
    (folder / "events.jsonl").write_bytes(b"".join(lines[: done[0]]))
    metrics = gzip.decompress((RECORDED / "metrics.jsonl.gz").read_bytes()).splitlines(True)
    (folder / "metrics.jsonl").write_bytes(b"".join(metrics[:2]))
    step = folder / "trajectories" / "step-00001.jsonl"
    step.write_bytes(gzip.decompress((RECORDED / "trajectories" / f"{step.name}.gz").read_bytes()))
    for name in ("trajectories/step-00001.npz", "summary.json"):
        (folder / name).write_bytes((RECORDED / name).read_bytes())
    (folder / "config.yaml").write_text("alarms:\n  steps: 3\n  off: [ratio]\neta: 4\n")
    held_out = [
        {"version": v, "reward": 0.5, "ci95": 0.1, "problems": 4, "pass_at": {"1": 0.5}}
        for v in (0, 1, 2)
    ]
    for name, values in {
        "held_out.jsonl": held_out,
        "alarms.jsonl": [ALARM],
        "requests.jsonl": [{"id": "a", "key": "k", "at_s": 1.0, "from": "me", "ask": "pause"}],
        "replies.jsonl": [{"id": "a", "done": True, "text": "paused"}],
    }.items():
        (folder / name).write_text("".join(json.dumps(one) + "\n" for one in values))
    write_presence(folder, new_presence(os.getpid(), "training"))
    return folder


def views(run: Path, other: Path) -> Iterator[Callable[[], object]]:
    """Everything that reads a run, but pictures, which take a second."""
    yield lambda: format_run(run)
    yield lambda: export_trace(run, run / "trace.json")
    yield lambda: read_run(run).refresh()
    yield lambda: [read_run(run).steps, read_run(run).groups, read_run(run).spans]
    yield lambda: groups_by_contrast(read_run(run))
    yield lambda: paired_samples(read_run(run), read_run(other))
    yield lambda: _texts(run)
    yield lambda: _watched(run)
    yield lambda: [str(attach_run(run).snapshot()), attach_run(run).asked(), attach_run(run).alive]
    yield lambda: [live_runs(run.parent), find_runs(run.parent)]
    yield lambda: _charts(run)


def _watched(run: Path) -> None:
    watched = Watched(run)
    console = Console(file=io.StringIO(), width=100)
    console.print(view(*watched.look(), watched.folder, 100))


def _texts(run: Path) -> None:
    read = read_run(run)
    for quantity in quantities(read.tokens):
        colors = token_colors(read.tokens, quantity)
    rows = list(range(len(read.tokens.starts) - 1))  # none if their file is not one
    token_text(read.tokens, rows, colors, heads=heads_of(read.samples)[: len(rows)])
    if "logprobs" in read.tokens:
        clipped_by_lag(read.tokens)


def _charts(run: Path) -> None:
    log = read_run(run).log
    samples = oldest_first(trained_samples(log))
    lag_rows(samples, eta=4.0)
    for sample in samples[:2]:
        story(sample)
    for draw in (lag_chart, reward_chart):
        draw(log).to_dict()
    idle_chart(log).to_dict()
    recent_lags(log)
    timeline_rows(log, cells=50)


@mutations
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of values like 1e308 and inf
def test_a_damaged_run_is_read_or_refused_in_one_line(tmp_path: Path, count: int) -> None:
    run, other = copied(tmp_path / "runs" / "run"), copied(tmp_path / "other")
    rng = random.Random(count)
    content = {name: (run / name).read_bytes() for name in (*LINES, *VALUES, *OTHERS)}
    for number in range(count):
        name = rng.choice([*LINES, LINES[0], *VALUES, *OTHERS])
        (run / name).write_bytes(_damaged(rng, name, content[name]))
        every = list(views(run, other))
        # Charts take ten times as long as the others.
        at = len(every) - 1 if number % 100 == 0 else rng.randrange(len(every) - 1)
        try:
            refused(every[at])
        except BaseException as error:
            error.add_note(f"mutation {number}, view {at}: {(run / name).read_bytes()[:5000]!r}")
            raise
        (run / name).write_bytes(content[name])
    (run / "trace.json").unlink(missing_ok=True)
    left = {path.name for path in run.iterdir()}
    assert left == {name.split("/")[0] for name in content}


def _damaged(rng: random.Random, name: str, content: bytes) -> bytes:
    if name in OTHERS or rng.randrange(4) == 0:
        return damaged_bytes(rng, content)
    if name in VALUES:
        return _json(damaged_json(rng, json.loads(content)))
    lines = content.splitlines()
    at = rng.randrange(len(lines))
    match rng.randrange(8):
        case 0:
            del lines[at]
        case 1:
            lines.insert(rng.randrange(len(lines)), lines[at])
        case _:
            lines[at] = _json(damaged_json(rng, json.loads(lines[at])))
    return b"".join(line + b"\n" for line in lines)


def _write(file: Path, lines: list[Any]) -> None:
    file.write_text("".join(json.dumps(one, separators=(",", ":")) + "\n" for one in lines))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    run, mine = copied(tmp_path / "run"), tmp_path / "mine"
    mine.write_text("my file")
    written = ("trace.json", "reward.png", "timeline.png", "staleness.png", "simulation.yaml")
    asked = ("requests.jsonl", "replies.jsonl")
    for name in (*written, ".trace.json.tmp", *asked):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(mine)
    export_trace(run, run / "trace.json")
    for name in written[1:4]:
        save_picture(new_figure(3, 1), run / name)
    run_step_table(_table(run), ["model=Qwen2.5-1.5B", "cluster.gpu=H100"], out=run / written[-1])
    with pytest.raises(OSError, match="symbolic links"):
        ask(run, "key", PauseRequested(), timeout_s=0, alive=lambda: True)
    with pytest.raises(OSError, match="symbolic links"):
        open_mailbox(run)
    assert mine.read_text() == "my file"
    assert not any((run / name).is_symlink() for name in written)


def _table(run: Path) -> Path:
    table = run / "steps.csv"
    table.write_text("seconds,tokens,sequences\n10,200000,256\n20,400000,512\n40,800000,1024\n")
    return table


def test_what_is_no_file_or_too_large_is_refused_and_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(tmp_path / "run")
    for name in (*LINES, *VALUES, *OTHERS):
        file = run / name
        content = file.read_bytes()
        for replace in (_with_pipe, _with_folder, _with_device, _with_nul):
            replace(file)
            for call in (lambda: format_run(run), lambda: _texts(run), lambda: _watched(run)):
                refused(call)
        file.write_bytes(content)
    run = copied(tmp_path / "bomb")
    monkeypatch.setattr(foreign, "UNPACKED_BYTES", 10_000)
    for name in ("events.jsonl", "metrics.jsonl", "trajectories/step-00001.jsonl"):
        file = run / name
        packed = file.with_name(f"{file.name}.gz")
        packed.write_bytes(gzip.compress(b"{}\n" * 10_000))
        kept = file.read_bytes()
        file.unlink()
        found = refused(lambda: read_run(run).samples)
        assert "unpacks to more than 10,000 bytes" in found
        packed.unlink()
        file.write_bytes(kept)


def _with_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _with_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _with_device(file: Path) -> None:
    file.rmdir()
    file.symlink_to("/dev/zero")


def _with_nul(file: Path) -> None:
    file.unlink()
    file.write_bytes(b"\0" * 100)


def test_arrays_of_token_fields_are_as_large_as_they_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(tmp_path / "run")
    file = run / "trajectories" / "step-00001.npz"
    with zipfile.ZipFile(file) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    named = np.lib.format.magic(1, 0)
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000,), }\n"
    claims = named + len(header).to_bytes(2, "little") + header + b"\0" * 8
    for entropy, message in (
        (claims, "step-00001.npz cannot be read"),
        (_npy(np.array(["x"])), "not a list of numbers"),
        (_npy(np.zeros((2, 2))), "not a list of numbers"),
        (b"x", "cannot be read"),
        (_npy(np.zeros(10**6)), "at most 100 of 1,000,000 bytes"),
    ):
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in {**members, "entropy.npy": entropy}.items():
                archive.writestr(name, content)
        monkeypatch.setattr(token_columns, "UNPACKED_BYTES", 10**6)
        assert message in refused(lambda: read_run(run).tokens)


def _npy(values: Any) -> bytes:
    written = io.BytesIO()
    np.save(written, values)
    return written.getvalue()


def test_numbers_that_no_run_has_do_not_fill_the_memory(tmp_path: Path) -> None:
    run = copied(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    for line in lines:
        if line["kind"] == "group":
            line["segments"] = [[[0, 2**53]] for _ in line["segments"]]
    _write(run / "events.jsonl", lines)
    assert "trained tokens, but at most" in refused(lambda: trained_samples(read_run(run).log))
    lines[0]["limits"]["schedule"] = "x\n  replayed: all 9 actions follow from the 9 events"
    _write(run / "events.jsonl", lines)
    assert "\n  replayed: all 9" not in format_run(run)
    lines[0]["limits"]["max_in_flight"] = 2**60
    _write(run / "events.jsonl", lines)
    assert "at most 1,048,576" in format_run(run)
    assert "at most 1,048,576" in str(attach_run(run).snapshot())


def test_names_that_no_terminal_shows_are_written_out(tmp_path: Path) -> None:
    run = copied(tmp_path / "a\u202e\udcff")
    found = CliRunner().invoke(app, ["trace", str(run)])
    assert found.exit_code == 0
    assert "a\\u202e\\udcff/trace.json" in found.output
    table = _table(run).rename(run / "b\udcff.csv")
    run_step_table(table, ["model=Qwen2.5-1.5B", "cluster.gpu=H100"], out=run / "s.yaml")
    assert "3 steps of b\\udcff.csv" in (run / "s.yaml").read_text()
    table.write_text("x" * 100_000 + "\n1\n")
    assert len(refused(lambda: run_step_table(table, [], out=run / "s.yaml"))) < 1000


def test_pictures_show_any_name_as_it_is(tmp_path: Path) -> None:
    run = copied(tmp_path / "run $\\frac$ ${}$ \x01")
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines[0]["processes"].append("engine $\\undefined$ \x02 \ud800" + "x" * 100_000)
    lines[0]["limits"]["schedule"] = "<b>$x$</b>" * 10_000
    lines.append({"kind": "span", "process": "$", "name": "$$\x03", "t_s": 1.0, "end_s": 9.0})
    _write(run / "events.jsonl", lines)
    picture = draw_timeline(read_run(run).log, width=5, title="$\\undefined$ \x01<b>")
    save_picture(picture, run / "timeline.png")
    assert "\\undefined" in svg(picture)
    assert "<b>" not in svg(picture)
    format_run(run)
