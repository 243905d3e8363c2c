"""`areal-lab simulate`, called as by a user."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from areal_lab.cli import app as cli
from areal_lab.cli.plan import Lines
from areal_lab.config.load import settings
from areal_lab.runlog.records import Log
from simulator.config.schema import SimulationConfig
from simulator.report.measured_errors import AGENTS, Kind, measured_errors
from tools.pages.simulator import PAGE, own_file, page


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["simulate", *arguments])


def test_a_preset_prints_a_report() -> None:
    result = call("--preset", "small")
    assert result.exit_code == 0
    assert result.stdout.startswith("small\nQwen2.5-0.5B on 4 H100")
    assert result.stderr == ""


def test_json_is_one_object_and_nothing_else() -> None:
    result = call("--preset", "small", "--json", "--seeds", "2", "eta=2")
    found = json.loads(result.stdout)
    assert {"step_s", "tokens_per_s", "utilisation", "idle", "lag", "cost"} <= found.keys()
    assert found["model_error"]["kind"] == "dense, disaggregated"
    assert found["step_s"]["low"] <= found["step_s"]["seeds_low"]
    assert found["seeds"] == [1, 2]
    assert found["config"]["schedule"]["eta"] == 2


def test_an_eta_without_effect_is_among_the_warnings() -> None:
    result = call("--preset", "small", "schedule.name=synchronous", "--json", "seeds=2", "eta=4")
    assert any(
        line.startswith("schedule.eta is 4, but has no effect")
        for line in json.loads(result.stdout)["warnings"]
    )
    both = call("--compare", "small", "small schedule.name=synchronous eta=4")
    assert "schedule.eta is 4, but has no effect" in both.stdout


def test_the_same_call_gives_the_same_output() -> None:
    first, second = (call("--preset", "small", "--json").stdout for _ in range(2))
    assert first == second


def test_your_own_file_with_overrides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(own_file(PAGE.read_text()))
    result = call(str(path), "steps=10", "warmup_steps=2", "--json", "seeds=2")
    found = json.loads(result.stdout)
    assert found["name"] == "mine"
    assert found["steps"] == 10
    # As measured: a step takes 150 s, and an update of the weights 12 s.
    assert found["parts"]["train_s"]["mean"] == pytest.approx(150)
    assert found["parts"]["update_s"]["mean"] == pytest.approx(12)


def test_two_are_compared_side_by_side() -> None:
    result = call("--compare", "small", "small schedule.name=synchronous", "--json")
    found = json.loads(result.stdout)
    assert found["a"]["name"] == "small"
    assert found["b"]["name"] == "small schedule.name=synchronous"
    speed = found["ratio"]["tokens_per_s"]
    assert speed["low"] < speed["seeds_low"] < speed["seeds_high"] < 1
    assert found["ratio"]["undecided"] is (speed["low"] <= 1 <= speed["high"])
    assert found["ratio"]["model_error"]["of"] == "gain"
    shown = " ".join(call("--compare", "small", "small schedule.name=synchronous").stdout.split())
    assert "times as fast as B" in shown
    assert ("Undecided:" in shown) is found["ratio"]["undecided"]
    assert " ".join(found["ratio"]["model_error"]["says"]) in shown


def test_a_kind_that_was_never_compared_is_said_to_be() -> None:
    text = " ".join(call("--preset", "small", "workload.turns=3", "seeds=2").stdout.split())
    errors = measured_errors()
    known = errors.step(Kind(mixture=False, colocated=False, parts=(AGENTS,)))
    never = f"No measured run of this kind (dense, disaggregated, {AGENTS}) was ever compared"
    assert (never in text) is (len(known.of_kind) == 0)
    assert f"by the error of what these rows do not have: {AGENTS} (" in text
    assert ("Never compared with a measured run: agents" in text) is (AGENTS not in errors.parts())


def test_trace_gantt_and_plots_are_written(tmp_path: Path) -> None:
    files = {name: tmp_path / "deep" / name for name in ("trace.json", "gantt.png", "plots")}
    result = call(
        *("--preset", "small", "--seeds", "1"),
        *("--trace", str(files["trace.json"]), "--gantt", str(files["gantt.png"])),
        *("--plots", str(files["plots"])),
    )
    assert result.exit_code == 0
    assert result.stderr.count("written: ") == 5
    trace = json.loads(files["trace.json"].read_text())
    assert {"engine 0", "engine 1", "trainer"} <= {
        event["args"].get("name") for event in trace["traceEvents"] if event["ph"] == "M"
    }
    assert files["gantt.png"].read_bytes().startswith(b"\x89PNG")


def test_a_comparison_writes_two_traces_and_two_gantts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, tuple[str, float]] = {}

    def draw(_: Log, *, zoom_s: float, title: str) -> tuple[str, float]:
        return title, zoom_s

    def save(picture: tuple[str, float], path: Path) -> Path:
        drawn[path.name] = picture
        return path

    monkeypatch.setattr("areal_lab.plots.timeline.draw_timeline", draw)
    monkeypatch.setattr("areal_lab.plots.style.save_picture", save)
    result = call(
        *("--compare", "small", "small eta=0", "--seeds", "1"),
        *("--trace", str(tmp_path / "t.json"), "--gantt", str(tmp_path / "g.png")),
    )
    assert result.exit_code == 0
    assert {name: title for name, (title, _) in drawn.items()} == {
        "g-a.png": "A: small, simulated",
        "g-b.png": "B: small eta=0, simulated",
    }
    assert len({zoom_s for _, zoom_s in drawn.values()}) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t-a.json", "t-b.json"]
    ends = [
        max(event.get("ts", 0) for event in json.loads(path.read_text())["traceEvents"])
        for path in sorted(tmp_path.iterdir())
    ]
    assert ends[0] < ends[1]  # the synchronous one takes longer


def test_a_long_run_is_traced_at_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_lab.cli.simulate._LOGGED_GROUPS", 20)
    result = call("--preset", "small", "--trace", str(tmp_path / "trace.json"))
    assert "trace and gantt of small show the first 5 of 12 steps, of seed 1" in result.stderr


def test_presets_are_listed() -> None:
    lines = call("--list-presets").stdout.splitlines()
    assert lines[0].startswith("small ")
    assert any(line.startswith("table_1_32b_colocated ") for line in lines)


def test_help_lists_every_setting() -> None:
    text = call("--help").stdout
    for setting in settings(SimulationConfig):
        assert re.search(rf"^  {re.escape(setting.name)} = ", text, re.MULTILINE), setting.name
    assert "schedule.eta: eta, max_staleness" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: nothing to simulate; give a FILE.yaml, or --preset NAME"),
        (["--preset", "table_8"], "error: unknown preset 'table_8'; did you mean 'table_7'"),
        (["nowhere.yaml"], "error: nowhere.yaml does not exist"),
        (["small", "--preset", "table_7"], "error: 'small' and 'table_7' are two simulations"),
        (["small", "--compare", "small", "table_7"], "error: --compare takes both simulations"),
        (
            ["--compare", "small", "small 'eta=0"],
            'error: "small \'eta=0" has an unclosed quotation',
        ),
        (["small", "etta=1"], "error: unknown setting 'etta' in the overrides; did you mean"),
        (["small", "cluster.gpu=H1000"], "error: cluster.gpu: unknown GPU 'H1000'; did you"),
        (["small", "workload.prompts_per_batch=0"], "error: workload.prompts_per_batch is 0, but"),
        (["small", "workload.answers.mean_tokens=nan"], "error: workload.answers.mean_tokens is "),
        (["small", "workload.answers.mean_tokens=601"], "error: workload.answers.mean_tokens is "),
        (["small", "rollout_gpus=4"], "error: cluster.rollout_gpus is 4, but must be from 1 to 3"),
        (["small", "model=Qwen2.5-72B", "rollout.tensor_parallel=1"], "error: rollout"),
    ],
)
def test_mistakes_end_with_2_and_a_line_each(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stdout == ""
    assert all(line.startswith("error: ") for line in result.stderr.splitlines())


def test_several_mistakes_have_a_line_each() -> None:
    result = call("small", "gpus=0", "seeds=0")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("command", "path", "message"),
    [
        ("simulate small --trace", "folder", "--trace is folder, which is a folder; name a file"),
        ("simulate small --trace", "file/a.json", "--trace is file/a.json, but "),
        ("simulate small --gantt", "folder", "--gantt is folder, which is a folder; name a file"),
        ("simulate small --gantt", "a.txt", "--gantt is a.txt, but a picture must end with one of"),
        ("simulate small --plots", "file", "--plots is file, which is a file; name a folder"),
        (
            "plan question.yaml --plot",
            "x.txt",
            "--plot is x.txt, but a picture must end with one of",
        ),
        ("plan question.yaml --plot", "folder", "--plot is folder, which is a folder"),
        ("calibrate steps.csv --out", "folder", "--out is folder, which is a folder"),
        (
            "calibrate steps.csv --plot",
            "x.txt",
            "--plot is x.txt, but a picture must end with one of",
        ),
    ],
)
def test_a_wrong_output_path_is_refused_before_anything_is_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file").touch()
    Path("question.yaml").write_text("simulation: small\n")
    Path("steps.csv").write_text("batch,context,ms\n1,100,60\n")
    result = CliRunner().invoke(cli.app, [*command.split(), path])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_picture_without_a_suffix_becomes_a_png(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = call("small", "--seeds", "1", "--gantt", "picture")
    assert "written: picture.png\n" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["picture.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["small", "--trace", "t.json"], "--trace would have no effect with --against"),
        (["small", "--seeds", "3", "--gantt", "a.png"], "--seeds and --gantt would have no effect"),
        (["--compare", "small", "table_7"], "--against takes one file or preset, but --compare"),
    ],
)
def test_options_without_effect_are_refused(arguments: list[str], message: str) -> None:
    result = call(*arguments, "--against", "run")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")


def test_a_plan_without_a_possible_candidate_ends_with_2_and_names_the_limit() -> None:
    file = str(Path(__file__).parents[2] / "configs" / "plan_example.yaml")
    result = CliRunner().invoke(cli.app, ["plan", file, "limits.gpus=4", "--workers", "1"])
    assert result.exit_code == 2
    assert "over the limits, 0 impossible, 0 possible" in result.stdout
    error = result.stderr.splitlines()[-1]
    assert error.startswith(
        "error: no candidate is possible: 576 by limits.gpus = 4 (e.g. 32 GPUs)"
    )


def test_simulating_loads_neither_torch_nor_pandas_nor_matplotlib() -> None:
    script = (
        "import sys, areal_lab.cli.app as cli\n"
        "sys.argv = ['areal-lab', 'simulate', 'small', '--json', '--seeds', '1']\n"
        "try:\n    cli.main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print(sorted({'torch', 'pandas', 'matplotlib'} & set(sys.modules)), file=sys.stderr)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stderr.splitlines()[-1] == "[]"


def test_the_page_shows_the_current_output() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tools.pages"


def test_a_search_tells_after_two_seconds_and_then_every_15_what_is_best_so_far() -> None:
    text, clock = StringIO(), iter((0.0, 0.0, 1.0, 2.5, 3.0, 17.0, 18.0))
    lines = Lines(Console(file=text, width=120), lambda: ", best 4 H100", lambda: next(clock))
    lines.stage("screening", 100)
    for _ in range(5):
        lines.advance(10)
    assert text.getvalue().splitlines() == [
        "screening: 100",
        "screening: 20 of 100, 8.0/s, 10 s left, best 4 H100",
        "screening: 50 of 100, 2.8/s, 18 s left, best 4 H100",
    ]
