"""A recorded run as frames and columns, also while it is being written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import areal_lab
import simulator
from areal_lab import extras
from areal_lab.control.ledger import mean_lag
from areal_lab.control.limits import Limits
from areal_lab.control.schedule import asynchronous
from areal_lab.runlog.compare import distinct_parts, groups_by_contrast, paired_samples
from areal_lab.runlog.folder import RunFolder, SampleText
from areal_lab.runlog.lags import trained_batches
from areal_lab.runlog.read_run import RecordedRun, find_runs, read_run
from tests.pipeline.fake_run import write_fake_run
from tests.training.tiny import random_batch

STEPS = 6


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    limits = Limits(batch_groups=2, max_in_flight=6, train_steps=STEPS, schedule=asynchronous(2))
    return write_fake_run(tmp_path_factory.mktemp("fake") / "run", limits)


def write_step(
    folder: Path, step: int, seed: int = 0, *, hundred: int | None = None, **batch: int
) -> None:
    """A file of random tokens; a seed has its prompts, `hundred` (the step) starts the groups."""
    (folder / "trajectories").mkdir(exist_ok=True, parents=True)
    trajectories = [
        replace(trajectory, group=100 * (hundred or step) + trajectory.group)
        for trajectory in random_batch(seed, version=max(2, step - 1), **batch).trajectories
    ]
    texts = []
    for one in trajectories:
        length = len(one.response_tokens)
        texts.append(SampleText(str(one.prompt_tokens), "x" * length, (1,) * length))
    RunFolder(folder).write_trajectories(step, trajectories, texts, special={})


def test_it_is_one_reader_under_three_names() -> None:
    assert areal_lab.read_run is simulator.read_run is read_run


def test_steps_have_lags_of_the_log_and_all_metrics(fake: Path) -> None:
    run = read_run(fake)
    steps = run.steps
    assert list(steps.index) == list(range(1, STEPS + 1))
    for batch, line in zip(trained_batches(run.log), run.metrics, strict=True):
        row = steps.loc[batch.version]
        assert row["lag_token_mean"] == pytest.approx(mean_lag(batch.token_lags))
        assert row["lag_token_max"] == max(batch.token_lags)
        assert row["done_s"] - row["begun_s"] == batch.done_s - batch.begun_s
        assert row["reward_mean"] == line["reward_mean"]
    assert set(run.metrics[0]) <= set(steps.columns)
    assert list(steps["step"]) == list(steps.index)
    assert steps.sort_values("step").equals(steps), "no name is ambiguous"


def test_a_run_is_shown_in_two_lines(fake: Path) -> None:
    run = read_run(fake)
    assert repr(run).splitlines() == [
        run.title,
        f"{fake}: .steps, .groups, .samples, .spans (frames); .tokens (columns)",
    ]


def test_every_group_has_an_outcome(fake: Path) -> None:
    run = read_run(fake)
    groups = run.groups
    assert dict(groups["outcome"].value_counts()) == {"trained": 2 * STEPS} | {
        outcome: count
        for outcome, count in groups["outcome"].value_counts().items()
        if outcome in ("finished", "running", "dropped")
    }
    for batch in run.batches:
        assert set(groups.index[groups["step"] == batch.version]) == set(batch.groups)
    finished = groups.dropna(subset="end_s")
    assert (finished["started_s"] <= finished["generated_s"]).all()
    assert (finished["generated_s"] <= finished["end_s"]).all()


def test_a_step_that_runs_at_the_end_is_training_and_its_groups_wait_or_run(
    fake: Path, tmp_path: Path
) -> None:
    lines = (fake / "events.jsonl").read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if '"type":"TrainStepDone"' in line)
    (tmp_path / "events.jsonl").write_text("".join(lines[:last]))
    run = read_run(tmp_path)
    outcomes = dict(run.groups["outcome"].value_counts())
    assert outcomes["training"] == 2
    assert outcomes["trained"] == 2 * (STEPS - 1) == len(run.samples) // 8


def test_dropped_and_filtered_groups_say_why(tmp_path: Path) -> None:
    header = {"kind": "run", "mode": "train", "started_at": 0, "limits": {}, "processes": []}
    group = {"kind": "group", "engine": 0, "t_s": 1, "generated_s": 2, "end_s": 3}
    one = {"rewards": [1.0, "nan"], "segments": [[[0, 4]], []], "finish_reasons": ["stop", "stop"]}
    lines = [
        {**header, "schema": 1},
        {"kind": "action", "t_s": 1, "type": "StartGroup", "group": 0, "engine": 0, "version": 0},
        {"kind": "action", "t_s": 1, "type": "StartGroup", "group": 1, "engine": 0, "version": 0},
        {**group, **one, "group": 0},
        {"kind": "event", "t_s": 3, "type": "GroupFiltered", "group": 0, "reason": "reward error"},
        {"kind": "action", "t_s": 4, "type": "Drop", "group": 1, "reason": "too old"},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    groups = read_run(tmp_path).groups
    assert list(groups["outcome"]) == ["filtered", "dropped"]
    assert list(groups["reason"]) == ["reward error", "too old"]
    assert groups.loc[0, "reward_mean"] == 1.0
    assert pd.isna(groups.loc[1, "end_s"])


def test_spans_have_a_column_for_each_argument(fake: Path) -> None:
    run = read_run(fake)
    spans = run.spans
    assert len(spans) == sum(1 for _ in run.log.spans)
    steps = spans[spans["name"] == "forward/backward"]
    assert (steps["tokens"] == 2048.0).all()
    assert spans.loc[spans["name"] == "decode", "tokens"].isna().all()
    assert (spans["seconds"] == spans["end_s"] - spans["start_s"]).all()


def test_samples_come_from_the_log_where_there_are_no_trajectories(fake: Path) -> None:
    run = read_run(fake)
    samples = run.samples
    assert len(samples) == sum(batch.samples for batch in run.batches)
    assert samples["tokens"].sum() == sum(batch.tokens for batch in run.batches)
    assert samples["tokens"] @ samples["lag_mean"] == pytest.approx(
        sum(lag * n for batch in run.batches for lag, n in batch.token_lags.items())
    )
    assert len(run.tokens) == 0


def test_a_log_without_steps_has_frames_with_columns(fake: Path, tmp_path: Path) -> None:
    header = (fake / "events.jsonl").read_text().splitlines(keepends=True)[0]
    (tmp_path / "events.jsonl").write_text(header)
    run = read_run(tmp_path)
    assert [len(frame) for frame in (run.steps, run.groups, run.spans, run.samples)] == [0] * 4
    assert "outcome" in run.groups
    assert "seconds" in run.spans
    assert {"step", "reward", "lag_mean"} <= set(run.samples)
    assert "done_s" in run.steps


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=4))
def test_a_run_read_piece_by_piece_is_the_run_read_at_once(
    fake: Path, tmp_path_factory: pytest.TempPathFactory, shares: list[float]
) -> None:
    growing = tmp_path_factory.mktemp("growing")
    files = {name: (fake / name).read_bytes() for name in ("events.jsonl", "metrics.jsonl")}
    header = files["events.jsonl"].index(b"\n")
    run: RecordedRun | None = None
    for share in [*sorted(shares), 1.0]:
        for name, content in files.items():
            length = max(header, int(share * len(content)))
            (growing / name).write_bytes(content[:length])
        run = read_run(growing) if run is None else run.refresh()
        now = read_run(growing)
        assert run.log.records == now.log.records
        assert run.metrics == now.metrics
    assert run is not None
    assert run.log == read_run(fake).log
    assert run.refresh() is run


def test_refresh_reads_only_what_was_appended(fake: Path, tmp_path: Path) -> None:
    content = (fake / "events.jsonl").read_bytes()
    half = content.index(b"\n", len(content) // 2) + 1
    log = tmp_path / "events.jsonl"
    log.write_bytes(content[:half])
    write_step(tmp_path, 1)
    run = read_run(tmp_path)
    assert len(run.samples) == 16
    # Whoever read the beginning again would fail.
    log.write_bytes(b"#" * half + content[half:])
    old = tmp_path / "trajectories" / "step-00001.jsonl"
    old.write_bytes(b"#" * old.stat().st_size)
    write_step(tmp_path, 2)
    newer = run.refresh()
    assert newer.log.records == read_run(fake).log.records
    assert len(newer.samples) == 32
    assert len(run.samples) == 16
    assert newer.refresh() is newer


def test_a_replaced_log_is_reported(fake: Path, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    log.write_bytes((fake / "events.jsonl").read_bytes())
    run = read_run(tmp_path)
    log.write_text(log.read_text().splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match="it was replaced; read the run again"):
        run.refresh()


def test_a_compressed_log_is_complete() -> None:
    recorded = Path(__file__).parents[2] / "reproductions" / "recorded" / "asynchronous"
    run = read_run(recorded)
    assert len(run.steps) == 9
    assert run.config["gconfig"]["n_samples"] == run.settings["gconfig.n_samples"] == 2
    assert run.refresh() is run


def test_frames_without_pandas_say_what_to_install(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda _: None)
    with pytest.raises(extras.MissingExtra, match=r"RecordedRun.steps needs .*pandas.*notebooks"):
        _ = read_run(fake).steps


def test_reading_samples_and_tokens_loads_no_torch(tmp_path: Path, fake: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes((fake / "events.jsonl").read_bytes())
    write_step(tmp_path, 1)
    code = (
        "import sys, areal_lab; run = areal_lab.read_run(sys.argv[1]); "
        "print(len(run.tokens), len(run.samples), {'torch', 'tokenizers'} & set(sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert ended.stdout.split()[1:] == ["16", "set()"]


def test_runs_are_found_with_the_newest_first(fake: Path, tmp_path: Path) -> None:
    for age, name in enumerate(["new", "old", "older"]):
        (tmp_path / name).mkdir()
        log = tmp_path / name / ("events.jsonl.gz" if name == "old" else "events.jsonl")
        log.write_bytes(b"")
        os.utime(log, (1000 - age, 1000 - age))
    (tmp_path / "no run").mkdir()
    assert [run.name for run in find_runs(tmp_path)] == ["new", "old", "older"]
    assert find_runs(tmp_path / "missing") == []
    assert find_runs(fake.parent) == [fake]


def test_groups_whose_samples_differ_come_first(fake: Path, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_bytes((fake / "events.jsonl").read_bytes())
    write_step(tmp_path, 3, groups=3, samples=4, equal_groups=2)
    run = read_run(tmp_path)
    groups = groups_by_contrast(run)
    assert groups.index[0] == 312
    assert list(groups["reward_std"]) == [0.5, 0.0, 0.0]
    assert groups["distinct"].iloc[1] >= groups["distinct"].iloc[2]
    samples = run.samples[run.samples["group"] == 312]
    row = groups.loc[312]
    assert row["tokens"] == samples["tokens"].sum()
    assert row["distinct"] == samples["completion"].nunique()
    assert row["versions"] == samples["versions"].max()
    assert row["lag_mean"] == pytest.approx(run.tokens.mean("lag")[samples.index].mean())
    assert row["lag_mean"] > 0
    # A log without trajectories has no texts, but rewards.
    assert len(groups_by_contrast(read_run(fake))) == 2 * STEPS


# --- two runs ------------------------------------------------------------------------------------


def test_samples_of_the_same_prompts_are_paired_in_the_order_of_their_groups(
    fake: Path, tmp_path: Path
) -> None:
    runs = []
    # The first run trains on its groups in another order than it started them.
    for name, steps in {"a": [(1, 30), (2, 20), (1, 10)], "b": [(3, 1), (1, 2), (1, 3)]}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "events.jsonl").write_bytes((fake / "events.jsonl").read_bytes())
        for step, (seed, hundred) in enumerate(steps, start=1):
            write_step(folder, step, seed, hundred=hundred, groups=1, samples=2)
        runs.append(read_run(folder))
    pairs = paired_samples(*runs)
    assert list(zip(pairs["step_first"], pairs["step_second"], strict=True)) == [
        *[(1, 3)] * 2,
        *[(3, 2)] * 2,
    ]
    assert list(pairs["occurrence"]) == [1, 1, 0, 0]
    assert (pairs["reward_first"] + pairs["reward_change"] == pairs["reward_second"]).all()
    assert (pairs["same_tokens"] == pairs["tokens_first"]).all()
    first, second = (run.samples for run in runs)
    assert list(first.loc[pairs["row_first"], "prompt"]) == list(pairs["prompt"])
    assert list(second.loc[pairs["row_second"], "prompt"]) == list(pairs["prompt"])


def test_same_tokens_end_where_the_responses_differ(fake: Path, tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "events.jsonl").write_bytes((fake / "events.jsonl").read_bytes())
        write_step(folder, 1, 5, groups=2, samples=2)
        runs.append(folder)
    file = runs[1] / "trajectories" / "step-00001.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines[1]["samples"][1]["parts"][0]["tokens"][-1] += 1
    changed = len(lines[1]["samples"][1]["parts"][0]["tokens"]) - 1
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    pairs = paired_samples(*map(read_run, runs))
    assert list(pairs["same_tokens"] == pairs["tokens_first"]) == [True, True, True, False]
    assert pairs["same_tokens"].iloc[-1] == changed


def test_runs_without_prompts_cannot_be_paired(fake: Path) -> None:
    run = read_run(fake)
    with pytest.raises(ValueError, match="has no trajectories"):
        paired_samples(run, run)
    assert np.isfinite(run.samples["reward"]).all()


def test_runs_without_a_common_prompt_cannot_be_paired(fake: Path, tmp_path: Path) -> None:
    runs = []
    for name, seed in {"a": 5, "b": 6}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "events.jsonl").write_bytes((fake / "events.jsonl").read_bytes())
        write_step(folder, 1, seed, groups=2, samples=2)
        runs.append(read_run(folder))
    with pytest.raises(ValueError, match=r"have no prompt in common.*the same problems"):
        paired_samples(*runs)


def test_runs_are_compared_by_settings_and_results(fake: Path, tmp_path: Path) -> None:
    folders = [tmp_path / one / "run" for one in ("a", "b")]
    for folder, seed in zip(folders, (1, 2), strict=True):
        shutil.copytree(fake, folder)
        (folder / "config.yaml").write_text(f"experiment_name: sums\nseed: {seed}\n")
    lines = (fake / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folders[1] / "metrics.jsonl").write_text("".join(lines[:-1]))
    found = areal_lab.compare(*folders)
    assert found.names == ("a/run", "b/run")
    assert found.settings == {"seed": (1, 2)}
    metrics = read_run(fake).metrics
    rewards = [line["reward_mean"] for line in metrics]
    last, shorter = (sum(some[-10:]) / len(some[-10:]) for some in (rewards, rewards[:-1]))
    assert found.results["steps"] == (STEPS, STEPS - 1)
    assert found.results["reward_mean, last 10 steps"] == pytest.approx((last, shorter))
    assert found.results[f"reward_mean, by step {STEPS - 1}"] == pytest.approx((shorter, shorter))
    text = str(found).splitlines()
    assert text[0].split() == ["a/run", "b/run"]
    assert text[-1].split() == ["seed", "=", "1", "2"]
    frame = found.frame()
    assert frame.loc[("settings", "seed"), "b/run"] == 2
    assert areal_lab.compare(fake, fake).settings == {}
    with pytest.raises(ValueError, match="got 1 to compare"):
        areal_lab.compare(fake)


@pytest.mark.parametrize(
    ("texts", "parts"),
    [
        (
            ["1 + 1 = 2\n3 + 4 =", "1 + 1 = 2\n3 + 5 =", "1 + 1 = 2\n7 + 5 ="],
            ["3 + 4", "3 + 5", "7 + 5"],
        ),
        (["<|user|>\nA cat.<|end|>", "<|user|>\nRain.<|end|>"], ["A cat.", "Rain."]),
        (["a", "a b"], ["a", "b"]),
        (["same", "same"], ["same", "same"]),
        ([], []),
    ],
)
def test_what_all_prompts_share_is_left_out(texts: list[str], parts: list[str]) -> None:
    assert distinct_parts(texts) == parts


@given(st.lists(st.text("ab <|>\n", min_size=1, max_size=12), max_size=4))
def test_different_prompts_have_different_parts(texts: list[str]) -> None:
    parts = distinct_parts(texts)
    assert all(part in text for part, text in zip(parts, texts, strict=True))
    blank = {" ".join(text.split()) for text in texts}
    if len(blank) == len(texts) and all("<" not in text for text in texts):
        assert len(set(parts)) == len(texts)
