"""summary.json: what it counts."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from areal_lab.control.coordinator import Limits
from areal_lab.control.events import EtaRequested, Interrupt, PauseRequested, ResumeRequested
from areal_lab.control.schedule import asynchronous, partial_rollout, synchronous
from areal_lab.pipeline.console import speed_text, summary_table
from areal_lab.runlog.activity import PAUSED_BY_HAND
from areal_lab.runlog.chrome_trace import chrome_trace
from areal_lab.runlog.file import read_log_file
from areal_lab.runlog.incidents import COUNTED
from areal_lab.runlog.records import Log, MetricRecord, RunHeader
from areal_lab.runlog.replay import check_replay, limits_to_fields
from areal_lab.runlog.summary import build_summary, counted
from tests.pipeline.fake_run import HELD_OUT_S, FakeRun


def fake_log(tmp_path, limits: Limits, **knobs: Any) -> Log:
    FakeRun(tmp_path, limits, **knobs).run()
    return read_log_file(tmp_path / "events.jsonl")


CONTRACT = {
    "reward_before",
    "reward_after",
    "wall_s",
    "steps",
    "trained_samples",
    "trained_tokens",
    "eta",
    "schedule",
    "backend",
    "lag",
    "interruptions",
    "pauses",
    "paused_s",
    "eta_changes",
    "save_wait_s",
    "recoveries",
    "restarted_groups",
    "multi_version_share",
    *COUNTED,
    "dropped",
}


def test_a_summary_keeps_the_output_contract(tmp_path):
    limits = Limits(batch_groups=4, max_in_flight=8, train_steps=3, schedule=asynchronous(2))
    log = fake_log(tmp_path, limits, samples=3)
    summary = build_summary(
        log,
        reward_before=[0.0, 1.0],
        reward_after=[1.0, 1.0, 1.0],
        wall_s=60.0,
        backend="embedded",
        peak_bytes={"trainer": 5},
        more={"seed": 1},
    )
    assert summary.keys() >= CONTRACT
    assert summary["status"] == "complete"
    assert summary["reward_before"]["mean"] == 0.5
    assert summary["reward_after"]["n"] == 3
    assert summary["steps"] == 3
    assert summary["trained_samples"] == 3 * 4 * 3
    assert summary["trained_tokens"] == summary["generated_tokens"] > 0
    assert summary["training_s"] == pytest.approx(log.end_s - 2 * HELD_OUT_S)
    assert summary["tokens_per_s"] == summary["trained_tokens"] / summary["training_s"]
    assert summary["interruptions"] == sum(isinstance(r.action, Interrupt) for r in log.actions) > 0
    assert 0 < summary["multi_version_share"] < 1
    assert summary["lag"]["tail"]["mean"] < summary["lag"]["head"]["mean"]
    assert summary["lag"]["token"]["max"] == summary["lag"]["head"]["max"]
    assert summary["dropped"] == summary["filtered"] == summary["version_mismatches"] == 0
    assert set(summary["processes"]) == {"trainer", "engine 0", "rewards"}
    assert summary["peak_bytes"] == {"trainer": 5}
    assert summary["seed"] == 1
    for use in summary["processes"].values():
        assert use["busy_share"] + use["idle_share"] == pytest.approx(1)
    json.dumps(summary, allow_nan=False)


def test_a_synchronous_run_has_no_lag_and_no_interruption(tmp_path):
    limits = Limits(batch_groups=2, max_in_flight=8, train_steps=2, schedule=synchronous())
    summary = build_summary(
        fake_log(tmp_path, limits), reward_before=None, reward_after=[], wall_s=1.0, backend="x"
    )
    assert summary["lag"]["head"] == summary["lag"]["token"] == {"mean": 0.0, "max": 0}
    assert summary["interruptions"] == summary["multi_version_share"] == 0
    assert summary["reward_before"] is summary["reward_after"] is None


def test_an_infinite_eta_is_the_string_inf():
    limits = Limits(batch_groups=2, max_in_flight=8, schedule=partial_rollout())
    header = RunHeader(
        mode="train", started_at=0.0, limits=limits_to_fields(limits), processes=("trainer",)
    )
    peaks = tuple(
        MetricRecord(process="engine 0", name="peak_rss_bytes", t_s=1.0, value=value)
        for value in (3.0, 9.0, 4.0)
    )
    summary = build_summary(
        Log(header, peaks), reward_before=None, reward_after=None, wall_s=1.0, backend="x"
    )
    assert summary["eta"] == "inf"
    assert summary["status"] == "incomplete"
    assert summary["steps"] == summary["tokens_per_s"] == 0
    assert summary["peak_bytes"] == {"engine 0": 9}
    json.dumps(summary, allow_nan=False)


ASKED = (
    (2.0, PauseRequested()),
    (3.5, PauseRequested()),
    (9.0, ResumeRequested()),
    (10.0, EtaRequested(0)),
    (12.0, EtaRequested(math.inf)),
    (13.0, PauseRequested()),
    (14.0, ResumeRequested()),
)


def test_what_was_asked_by_hand_is_counted_and_shown(tmp_path):
    limits = Limits(batch_groups=4, max_in_flight=8, train_steps=6, schedule=asynchronous(2))
    (tmp_path / "left alone").mkdir()
    alone = fake_log(tmp_path / "left alone", limits)
    log = fake_log(tmp_path, limits, requests=ASKED)
    summary, before = (
        build_summary(one, reward_before=None, reward_after=None, wall_s=1.0, backend="x")
        for one in (log, alone)
    )
    assert check_replay(log).agrees, check_replay(log).difference
    assert (summary["pauses"], summary["paused_s"]) == (2, 8.0)
    assert summary["eta_changes"] == [[HELD_OUT_S + 10.0, 0], [HELD_OUT_S + 12.0, "inf"]]
    assert summary["eta"] == 2
    by_hand = sum(r.action == Interrupt(by_hand=True) for r in log.actions)
    assert by_hand > 0
    all_interrupts = sum(isinstance(r.action, Interrupt) for r in log.actions)
    assert summary["interruptions"] == all_interrupts - by_hand
    assert summary["trained_samples"] == before["trained_samples"]
    assert summary["status"] == "complete"
    for use in summary["processes"].values():
        assert use["busy_share"] + use["idle_share"] == pytest.approx(1)
    # The step that ran when the first pause was requested ended within it.
    assert summary["processes"]["engine 0"]["idle_s"][PAUSED_BY_HAND] == pytest.approx(8.0, abs=1)
    assert 0 < summary["processes"]["trainer"]["idle_s"][PAUSED_BY_HAND] <= 8.0
    text = as_text(summary)
    assert "paused by hand    twice, 8 s in total" in text
    assert "eta 2, then 0, then inf;" in text
    assert "by hand" not in as_text(before)
    json.dumps(summary, allow_nan=False)


def test_incidents_are_shown_when_there_were_some(tmp_path):
    limits = Limits(batch_groups=4, max_in_flight=8, train_steps=2, schedule=asynchronous(1))
    summary = build_summary(
        fake_log(tmp_path, limits), reward_before=None, reward_after=None, wall_s=1.0, backend="x"
    )

    def shown(**counts: int) -> str:
        return as_text({**summary, **counts})

    assert "lost" not in shown()
    text = shown(
        engine_losses=2,
        engine_restarts=1,
        resubmitted_samples=7,
        kept_tokens=1234,
        version_mismatches=1,
    )
    assert (
        "2 lost, 1 came back; 7 samples resubmitted to other engines, keeping 1,234 tokens" in text
    )
    assert "tokens discarded" not in text
    assert "; 56 tokens discarded" in shown(engine_losses=1, discarded_tokens=56)
    assert "version mismatches    1; tokens of unknown" in text


@pytest.mark.parametrize(
    ("counts", "row"),
    [
        ({}, "version mismatches    0\n"),  # two steps: the engines had three versions
        ({"interruptions": 3, "steps": 0}, "version mismatches    0\n"),
        ({"interruptions": 0, "steps": 1}, "version mismatches    0\n"),
        ({"interruptions": 0, "steps": 0}, ""),
        (
            {"interruptions": 0, "steps": 0, "version_mismatches": 2},
            "2; tokens of unknown",
        ),
    ],
)
def test_mismatches_are_shown_wherever_versions_changed(
    tmp_path: Path, counts: dict[str, int], row: str
) -> None:
    limits = Limits(batch_groups=4, max_in_flight=8, train_steps=2, schedule=asynchronous(1))
    summary = build_summary(
        fake_log(tmp_path, limits), reward_before=None, reward_after=None, wall_s=1.0, backend="x"
    )
    text = as_text({**summary, **counts})
    assert ("version mismatches" in text) is bool(row)
    assert row in text


def as_text(summary: dict[str, Any]) -> str:
    """The table at the end of a run as a terminal has it, without spaces at the end of lines."""
    console = Console(width=200, record=True, file=StringIO())
    console.print(summary_table(summary))
    return "".join(f"{line.rstrip()}\n" for line in console.export_text().splitlines())


def test_the_speed_of_the_trainer_is_in_summary_table_and_trace() -> None:
    limits = Limits(batch_groups=2, max_in_flight=8, schedule=partial_rollout())
    header = RunHeader(
        mode="train", started_at=0.0, limits=limits_to_fields(limits), processes=("trainer",)
    )
    steps = {
        "trainer_tokens_per_s": (10.0, 2000.0, 3000.0),
        "trainer_tflop_per_s": (1.0, 300.0, 400.0),
        "mfu": (0.001, 0.303, 0.404),
        "gpu_peak_allocated_bytes": (2.0 * 2**30, 60.0 * 2**30, 50.0 * 2**30),
        "gpu_peak_reserved_bytes": (3.0 * 2**30, 64.0 * 2**30, 64.0 * 2**30),
    }
    records = tuple(
        MetricRecord(process="trainer", name=name, t_s=float(step), value=value)
        for name, values in steps.items()
        for step, value in enumerate(values)
    )
    log = Log(header, records)
    speed = counted(log)["trainer_speed"]
    assert speed == {
        "trainer_tokens_per_s": 2000.0,
        "trainer_tflop_per_s": 300.0,
        "mfu": 0.303,
        "gpu_peak_allocated_bytes": 60.0 * 2**30,
        "gpu_peak_reserved_bytes": 64.0 * 2**30,
    }
    assert speed_text(speed) == (
        "2,000 tokens/s, 300 TFLOP/s, MFU 30.3% per process; GPU memory up to 60.0 GiB "
        "(64.0 GiB with free blocks)"
    )
    on_cpu = {"trainer_tokens_per_s": 1755.4, "trainer_tflop_per_s": 0.000815}
    assert speed_text(on_cpu) == "1,755 tokens/s, 0.815 GFLOP/s per process"
    counters = [event for event in chrome_trace(log)["traceEvents"] if event["ph"] == "C"]
    assert [event["args"]["value"] for event in counters if event["name"] == "mfu"] == [
        *(0.001, 0.303, 0.404)
    ]
