"""`areal-lab calibrate`: known costs are recovered, and errors are those of held-out points."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from areal_lab.cli import app as cli
from areal_lab.control.events import PauseRequested, ResumeRequested
from areal_lab.runlog.incidents import pauses
from areal_lab.runlog.read_run import read_run
from simulator.assembly.build import problems
from simulator.assembly.simulate import simulate
from simulator.calibrate.engine import fit_decode, fit_prefill
from simulator.calibrate.fit import EnginePoint, fit_training, group_points, is_held_out
from simulator.calibrate.fit_run import calibrate_from
from simulator.calibrate.replay import replay
from simulator.calibrate.report import configuration, draw_fit, draw_replay, to_yaml
from simulator.config.load import load_simulation
from simulator.costs.coefficients import smooth_max
from simulator.workload.recorded_run import TrainingPoint
from tests.simulator.calibrate import recordings
from tests.simulator.calibrate.recordings import known, record


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [str(one) for one in arguments])


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "synchronous", known())


def steps_of(
    batches: Sequence[int], contexts: Sequence[int], *, knee: float, noise: float = 0.0
) -> list[EnginePoint]:
    """One step each, of known cost."""
    generator = np.random.default_rng(3)
    return [
        EnginePoint(
            seconds=(smooth_max(0.08, 0.03 * batch, knee) + 3e-6 * batch * context)
            * (1 + noise * generator.standard_normal()),
            steps=1,
            sequences=batch,
            context_tokens=batch * context,
            place=place,
        )
        for place, (batch, context) in enumerate(
            ((batch, context) for batch in batches for context in contexts), 1
        )
    ]


# --- fits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("knee", [1.0, 4.0])
def test_known_decode_costs_are_recovered(knee: float) -> None:
    fit = fit_decode(steps_of((1, 2, 4, 8, 16), (50, 400, 3000), knee=knee), "steps")
    assert fit.settings["rollout.decode_step_s"] == pytest.approx(0.08, rel=1e-3)
    assert fit.settings["rollout.decode_sequence_s"] == pytest.approx(0.03, rel=1e-3)
    assert fit.settings["rollout.decode_context_token_s"] == pytest.approx(3e-6, rel=1e-2)
    assert fit.settings["rollout.decode_knee"] == knee
    assert fit.held_out_error < 1e-4
    assert fit.bias == pytest.approx(0, abs=1e-4)


def test_the_held_out_error_is_that_of_the_noise() -> None:
    fit = fit_decode(
        steps_of((1, 2, 3, 4, 6, 8, 12, 16), range(50, 1000, 50), knee=1, noise=0.05), ""
    )
    # The mean of |N(0, 0.05)| is 0.04.
    assert fit.held_out_error == pytest.approx(0.04, abs=0.012)
    assert fit.note == "batches of 1 to 16, contexts of 50 to 950 tokens"


def test_held_out_points_change_no_coefficient() -> None:
    points = steps_of((1, 2, 4, 8, 16), (50, 400, 3000), knee=1)
    held_out = [point for point in points if is_held_out(point.place)]
    assert 0.2 < len(held_out) / len(points) < 0.35
    slower = [
        EnginePoint(
            seconds=point.seconds * (2 if point in held_out else 1),
            steps=1,
            sequences=point.sequences,
            context_tokens=point.context_tokens,
            place=point.place,
        )
        for point in points
    ]
    assert fit_decode(slower, "steps").settings == fit_decode(points, "steps").settings
    assert fit_decode(slower, "steps").held_out_error == pytest.approx(0.5, abs=1e-3)


def test_a_quarter_is_held_out_of_any_periodic_pattern() -> None:
    chosen = [place for place in range(1, 401) if is_held_out(place)]
    assert chosen[:5] == [2, 5, 10, 13, 18]
    assert len(chosen) == pytest.approx(100, abs=1)
    for period in (2, 3, 4, 5, 8):
        for phase in range(period):
            share = sum(place % period == phase for place in chosen) / len(chosen)
            assert share == pytest.approx(1 / period, rel=0.35)


def test_training_steps_are_a_constant_plus_a_time_per_token() -> None:
    points = [
        TrainingPoint(
            step=step, tokens=tokens, samples=8, seconds=2 + 0.01 * (tokens + 80), export_s=0
        )
        for step, tokens in enumerate((100, 300, 150, 400, 250, 500, 320, 90), 2)
    ]
    fit = fit_training(points, prompt_tokens=10.0)
    assert fit.settings == pytest.approx({"trainer.step_s": 2.0, "trainer.token_s": 0.01})
    alike = [
        TrainingPoint(step=n, tokens=100, samples=8, seconds=3.0, export_s=0) for n in range(2, 8)
    ]
    assert fit_training(alike, 0.0).settings == {"trainer.step_s": 3.0, "trainer.token_s": 0.0}
    assert "too similar" in fit_training(alike, 0.0).note


# --- from a run ----------------------------------------------------------------------------------


def test_a_run_yields_the_costs_that_it_was_simulated_with(synchronous: Path) -> None:
    found = calibrate_from(synchronous)
    assert [part.name for part in found.parts] == ["decode", "prefill", "training"]
    settings = found.settings
    assert settings["rollout.decode_step_s"] == pytest.approx(recordings.STEP_S, rel=1e-3)
    assert settings["rollout.decode_sequence_s"] == pytest.approx(recordings.SEQUENCE_S, rel=1e-3)
    assert settings["trainer.step_s"] == pytest.approx(recordings.TRAIN_S, rel=1e-3)
    assert settings["trainer.token_s"] == pytest.approx(recordings.TRAIN_TOKEN_S, rel=1e-3)
    assert settings["weights.export_s"] == pytest.approx(0.2)
    assert settings["weights.load_s"] == pytest.approx(0.3)
    assert settings["workload.prompt_tokens"] == 20
    assert settings["schedule.name"] == "synchronous"
    assert (settings["cluster.gpu"], settings["cluster.gpus"]) == ("CPU core", 2)
    assert all(part.held_out_error < 1e-3 for part in found.parts)


def test_prefills_are_the_time_of_a_pass_beyond_its_decode_step(synchronous: Path) -> None:
    (prefill,) = [part for part in calibrate_from(synchronous).parts if part.name == "prefill"]
    assert prefill.note == "passes of 20 to 40 new tokens"
    at = prefill.settings
    assert at["rollout.prefill_pass_s"] == pytest.approx(recordings.PASS_S, rel=1e-3)
    # All prompts have one length: their attention pairs are included in the tokens.
    assert at["rollout.prefill_pair_s"] == 0
    a_token_s = recordings.PROMPT_TOKEN_S + 21 / 2 * recordings.PAIR_S
    assert at["rollout.prefill_token_s"] == pytest.approx(a_token_s, rel=1e-3)


def test_the_time_of_equal_prefills_is_attributed_to_their_tokens() -> None:
    decode = fit_decode(steps_of((1, 2, 4, 8, 16), (50, 400), knee=1), "steps")
    points = [
        EnginePoint(
            seconds=0.08 + 0.03 + 3e-6 * 100 + 0.2,
            steps=1,
            sequences=1,
            context_tokens=100,
            prompt_tokens=100,
            prompt_pairs=5050,
            place=place,
        )
        for place in range(1, 8)
    ]
    prefill = fit_prefill(points, decode)
    assert prefill is not None
    assert prefill.settings["rollout.prefill_pass_s"] == 0
    assert prefill.settings["rollout.prefill_token_s"] == pytest.approx(0.002, rel=1e-3)
    assert "too similar to separate the time per pass" in prefill.note
    assert fit_prefill(points[:2], decode) is None


def test_the_written_file_simulates_like_the_calibration(synchronous: Path, tmp_path: Path) -> None:
    found = calibrate_from(synchronous, ["schedule.name=asynchronous", "eta=2", "workload.steps=9"])
    path = tmp_path / "synchronous.yaml"
    path.write_text(to_yaml(found))
    config = load_simulation(path)
    assert config.schedule.eta == 2
    assert problems(config) == []
    assert config.calibration.source == "fitted to the run synchronous (12 steps, synchronous)"
    direct = configuration(found)
    assert simulate(config).step_s == pytest.approx(simulate(direct).step_s, rel=1e-4)


def test_prompt_lengths_of_an_asynchronous_run_come_from_before_its_first_interruption(
    tmp_path: Path,
) -> None:
    config = known("schedule.name=asynchronous", "schedule.eta=.inf", "workload.prompt_tokens=31")
    found = calibrate_from(record(tmp_path / "unbounded", config))
    assert found.settings["workload.prompt_tokens"] == 31
    path = tmp_path / "unbounded.yaml"
    path.write_text(to_yaml(found))
    assert load_simulation(path).schedule.eta == float("inf")


def test_client_side_records_suffice_with_a_note_about_their_error(tmp_path: Path) -> None:
    config = known("workload.steps=40", "schedule.max_concurrent_prompts=2")
    folder = record(tmp_path / "client", config, counted=False)
    found = calibrate_from(folder, ["workload.prompt_tokens=20"])
    (decode, _) = found.parts
    assert any("no counts of the engine's steps" in note for note in found.notes)
    assert found.settings["rollout.prefill_pass_s"] == 0
    assert decode.held_out_error < 0.1
    # The whole run is predicted, although the time per sequence cannot be separated.
    gaps = {row.name: row.gap for row in replay(configuration(found), found.run).rows}  # type: ignore[arg-type]
    assert abs(gaps["step time"]) < 0.1


# --- replay --------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["synchronous", "asynchronous"])
def test_a_simulation_replays_itself_exactly(schedule: str, tmp_path: Path) -> None:
    config = known(f"schedule.name={schedule}", "schedule.eta=1")
    run = read_run(record(tmp_path / schedule, config, counted=False))
    found = replay(config, run)
    assert found.predicted_steps_s == pytest.approx(found.measured_steps_s, rel=1e-9)
    gaps = {row.name: row.gap for row in found.rows}
    assert gaps["step time"] == pytest.approx(0, abs=1e-9)
    assert gaps["trainer idle"] == pytest.approx(0, abs=1e-6)


def test_a_pause_by_hand_is_in_no_cost_and_a_replay_refuses_it(tmp_path: Path) -> None:
    asked = ((30.0, PauseRequested()), (630.0, ResumeRequested()))
    folder = record(tmp_path / "run", known(), counted=False, requests=asked)
    paused, alone = (
        calibrate_from(one) for one in (folder, record(tmp_path / "alone", known(), counted=False))
    )
    run = read_run(folder)
    assert run.log.end_s > 600
    assert pauses(run.log) == [(30.0, 630.0)]
    # Ten minutes would be in the decode steps of the groups that were running.
    assert len(group_points(run)) < len(list(run.log.groups))
    costs = [configuration(found).rollout for found in (paused, alone)]
    for name in ("decode_step_s", "decode_sequence_s"):
        assert getattr(costs[0], name) == pytest.approx(getattr(costs[1], name), rel=0.2)
    with pytest.raises(ValueError, match="was paused by hand, or its eta was changed"):
        replay(configuration(paused), run)


def test_a_synchronous_fit_predicts_the_asynchronous_run(synchronous: Path, tmp_path: Path) -> None:
    config = known("schedule.name=asynchronous", "schedule.eta=2")
    run = read_run(record(tmp_path / "asynchronous", config, counted=False))
    costs = configuration(calibrate_from(synchronous))
    rows = {row.name: row for row in replay(costs, run).rows}
    assert abs(rows["step time"].gap) < 0.01
    assert abs(rows["trainer idle"].gap) < 0.01
    # Doubled costs do not predict it.
    costs.rollout.decode_step_s = 2 * recordings.STEP_S
    slower = {row.name: row for row in replay(costs, run).rows}
    assert slower["step time"].gap > 0.1


def test_a_replay_keeps_the_given_settings(synchronous: Path) -> None:
    run = read_run(synchronous)
    config = known("workload.steps=5", "workload.warmup_steps=1")
    found = replay(config, run, own=["workload.steps"])
    assert found.config.workload.steps == 5
    assert found.config.workload.answers.kind == "recorded"


def test_narrow_pictures_have_panels_above_one_another(synchronous: Path) -> None:
    found = calibrate_from(synchronous)
    picture = draw_fit(found.parts, width=7)
    assert picture.get_figwidth() == 7
    assert "Held-out error" in picture.alt
    places = [axes.get_subplotspec().rowspan.start for axes in picture.axes]
    assert places == [0, 0, 1, 1]
    upper, lower = draw_replay(
        replay(configuration(found), read_run(synchronous)), width=7, title="mine"
    ).axes
    assert upper.get_position().y0 > lower.get_position().y0
    with pytest.raises(ValueError, match="there is no fitted part to draw"):
        draw_fit([])


def test_fits_and_replays_can_be_drawn(synchronous: Path) -> None:
    found = calibrate_from(synchronous)
    assert len(draw_fit(found.parts).axes) == 3
    left, right = draw_replay(replay(configuration(found), read_run(synchronous))).axes
    assert left.get_xlabel() == "training step"
    assert [text.get_text() for text in right.get_yticklabels()][:2] == [
        "trainer\nmeasured",
        "trainer\npredicted",
    ]


# --- the command ---------------------------------------------------------------------------------


def test_the_command_writes_a_file_for_simulate_and_replays(
    synchronous: Path, tmp_path: Path
) -> None:
    out, picture = tmp_path / "mine.yaml", tmp_path / "fit.png"
    result = call("calibrate", synchronous, "--out", out, "--plot", picture)
    assert result.exit_code == 0, result.stderr
    assert "held out: training steps 2, 5, 10" in result.stdout
    assert picture.stat().st_size > 10_000
    result = call("simulate", out, "--against", synchronous)
    assert result.exit_code == 0, result.stderr
    assert "replayed with the costs of mine" in result.stdout
    told = json.loads(call("simulate", out, "--against", synchronous, "--json").stdout)
    rows = {row["name"]: row for row in told["rows"]}
    assert rows["step time"]["unit"] == "s"
    assert rows["trainer idle"]["unit"] == "share"
    assert len(told["steps"]["measured_s"]) == 12


def test_json_contains_errors_and_held_out_places(synchronous: Path, tmp_path: Path) -> None:
    result = call("calibrate", synchronous, "--json", "--out", tmp_path / "a.yaml", "seeds=3")
    told = json.loads(result.stdout)
    assert told["settings"]["seeds"] == 3
    decode = told["parts"][0]
    assert decode["held_out_places"] == [2, 5, 10]
    assert decode["held_out"] > 0
    assert {"error", "held_out_error", "held_out_bias", "points"} <= decode.keys()


CSV = "batch,context,ms\n" + "".join(f"{n},{100 * n},{50 + 10 * n}\n" for n in range(1, 12))


def test_a_table_of_steps_gives_decode_costs(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text("# measured by hand\n" + CSV.replace("batch", " Batch "))
    result = call("calibrate", path)
    assert result.exit_code == 0, result.stderr
    assert "held out: rows 2, 5, 10" in result.stdout
    config = load_simulation(tmp_path / "steps.yaml")
    assert config.rollout.decode_step_s is not None
    assert config.name == "steps"


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "steps.csv is empty; it needs the columns batch, context, ms"),
        ("batch,context,ms\n", "has a header but no rows"),
        (
            "n,length,ms\n1,2,3\n",
            "has no column batch and no context; its columns are n, length, ms",
        ),
        (CSV.replace("60\n", "nan\n"), "line 2: '1,100,nan', but batch must be >= 1"),
        (CSV.replace("60\n", "fast\n"), "line 2: '1,100,fast' is not a number"),
        ("batch,context,ms\n1,2\n", "line 2: '1,2' has 2 cells, but needs 3 to contain"),
        (CSV.replace("1,100", "0,100"), "but batch must be >= 1"),
        (
            "batch,context,ms\n1,1,1\n2,1,1\n3,1,1\n",
            "2 to fit and 1 held out, but needs at least 4",
        ),
    ],
)
def test_an_unusable_table_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    result = call("calibrate", path)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "steps.yaml").exists()


def test_folders_that_are_not_runs_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "nowhere", "nowhere does not exist"),
        (tmp_path / "empty", "empty is not a run folder: it has no events.jsonl"),
        (tmp_path / "none.csv", "none.csv does not exist"),
    ):
        for words in (("calibrate", path), ("simulate", "--preset", "small", "--against", path)):
            result = call(*words)
            assert result.exit_code == 2
            assert message in result.stderr
            assert len(result.stderr.splitlines()) == 1


def test_a_run_that_is_too_short_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = record(tmp_path / "short", known("workload.steps=4", "workload.warmup_steps=1"))
    result = call("calibrate", folder)
    assert result.exit_code == 2
    assert "4 finished training steps, but at least 6 are needed" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_damaged_log_is_refused_in_one_line(synchronous: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    folder.mkdir()
    lines = (synchronous / "events.jsonl").read_text().splitlines()
    (folder / "events.jsonl").write_text("\n".join([*lines[:5], "{broken", *lines[5:]]))
    result = call("calibrate", folder)
    assert result.exit_code == 2
    assert "line 6 of the log is not JSON" in result.stderr


def test_an_unknown_model_can_be_set(synchronous: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "events.jsonl").write_bytes((synchronous / "events.jsonl").read_bytes())
    result = call("calibrate", folder)
    assert "has no config.yaml that names its model; set it: model=NAME" in result.stderr
    assert call("calibrate", folder, "model=Qwen2.5-0.5B").exit_code == 0


def test_recorded_lengths_need_the_number_of_samples_of_the_run(synchronous: Path) -> None:
    config = known("workload.answers.kind=recorded", f"workload.answers.trace={synchronous}")
    assert simulate(config).columns["sequences"].tolist() == [12.0] * 12
    config.workload.samples_per_prompt = 5
    assert list(map(str, problems(config))) == [
        "workload.samples_per_prompt is 5, but the recorded run has 3 responses per prompt; "
        "set it to 3"
    ]
    config.workload.answers.trace = ""
    assert "set it to a run folder" in str(problems(config)[0])
