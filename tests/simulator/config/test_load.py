"""Presets and files of simulations."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from areal_lab.cli import app as cli
from areal_lab.config.dump import description
from areal_lab.config.problem import ConfigError
from areal_lab.config.record import Record, settings
from simulator.assembly.build import problems
from simulator.assembly.simulate import simulate
from simulator.config.load import ALIASES, load_simulation, preset_path, presets
from simulator.config.schema import ClusterConfig, SimulationConfig
from simulator.plan.schema import PlanConfig
from simulator.workload.lengths import LogNormalLengths, lengths_from

OF_THE_PAPER = [name for name in presets() if name.startswith(("figure_", "table_"))]
# Table 1 of the paper (arXiv:2505.24298): GPUs and steps.
TABLE_1 = {"1.5b": (128, 250), "7b": (192, 250), "14b": (256, 80), "32b": (384, 60)}


def test_without_anything_it_is_the_defaults() -> None:
    assert load_simulation() == SimulationConfig()


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("cluster: {gpu: H100, gpus: 16}\nschedule.eta: 2\ntrainer: {step_s: 150}\n")
    config = load_simulation(path, ["gpus=32", "eta=inf", "weights.update_s=null"])
    assert (config.cluster.gpu, config.cluster.gpus) == ("H100", 32)
    assert config.schedule.eta == math.inf
    assert config.trainer.step_s == 150.0
    assert config.weights.update_s is None
    assert config.name == "mine"


@pytest.mark.parametrize("record", [SimulationConfig, PlanConfig])
def test_every_setting_is_documented_and_bounded(record: type[Record]) -> None:
    start = record()
    for setting in settings(record):
        assert description(setting), setting.name
        assert start.with_settings({setting.name: setting.default}) == start
        if type(setting.default) in (int, float):
            with pytest.raises(ConfigError, match=setting.name):
                start.with_settings({setting.name: math.nan})


def test_gpus_generate_and_train_side_by_side_or_in_turn() -> None:
    cluster = ClusterConfig(gpus=8, rollout_gpus=6, gpu="H100", rollout_gpu="H20")
    assert (cluster.generating_gpus, cluster.training_gpus) == (6, 2)
    assert (cluster.colocated, cluster.generating_gpu) == (False, "H20")
    cluster = ClusterConfig(gpus=8, rollout_gpus=6, gpu="H100", placement="colocated")
    assert (cluster.generating_gpus, cluster.training_gpus) == (8, 8)
    assert (cluster.colocated, cluster.generating_gpu) == (True, "H100")


def test_a_name_of_its_own_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: ours\n")
    assert load_simulation(path).name == "ours"


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_other_spellings_set_the_same(alias: str) -> None:
    (setting,) = [one for one in settings(SimulationConfig) if one.name == ALIASES[alias]]
    value = setting.choices[-1] if setting.choices else "H200" if setting.is_text else "7"
    assert load_simulation(None, [f"{alias}={value}"]) == load_simulation(
        None, [f"{ALIASES[alias]}={value}"]
    )


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        ("table_8", [], "unknown preset 'table_8'; did you mean 'table_7'"),
        ("table_1_7b", [], "did you mean table_1_7b_asynchronous, table_1_7b_colocated, "),
        ("nowhere.yaml", [], "nowhere.yaml does not exist"),
        (
            "small",
            ["schedule.etta=1"],
            "unknown setting 'schedule.etta' in the overrides; did you mean 'schedule.eta'?",
        ),
        ("small", ["sigma=1"], "did you mean 'workload.answers.sigma'?"),
        ("small", ["schedule=synchronous"], "'schedule' in the overrides is a group of settings"),
        ("small", ["trainer.step_s=fast"], "trainer.step_s is 'fast', but must be a number > "),
        ("small", ["gpus=2.5"], "cluster.gpus is 2.5, but must be an integer from 1 to 200,000"),
        (
            "small",
            ["trainer.step_s=150 s"],
            "trainer.step_s is '150 s', but must be a number > 0 and <= 31,536,000, in "
            "seconds, or null; write 150, without a unit",
        ),
        ("small", ["seeds=3x"], "seeds is '3x', but must be an integer from 1 to 10,000; write 3,"),
        ("small", ["foo=1"], "unknown setting 'foo' in the overrides; --help lists all of them"),
        (".", [], ". is a folder, but must be a YAML file, or the name of a preset"),
        ("/", [], "/ is a folder, but must be a YAML file"),
        ("small", ["eta=1", "eta"], "override 'eta' is not of the form a.b=c"),
    ],
)
def test_mistakes_are_described_in_one_line(
    source: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_simulation(source, overrides)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine.yaml is empty, but must hold at least one setting (`a: b`)"),
        ("# steps: 3\n", "mine.yaml is empty"),
        (
            'model: "???"\n',
            "model in mine.yaml is '???', which marks a missing value; set one",
        ),
        (
            "model: ${foo}\n",
            "model in mine.yaml is '${foo}', which refers to a setting that does not exist; write",
        ),
    ],
)
def test_a_file_without_its_values_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        load_simulation("mine.yaml")
    assert "\n" not in str(caught.value)


def test_a_preset_wins_over_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("small", "folder.yaml"):
        Path(name).mkdir()
    assert load_simulation("small").name == "small"
    with pytest.raises(ValueError, match=r"^folder\.yaml is a folder, but must be a YAML file$"):
        load_simulation("folder.yaml")


def test_small_comes_first_and_every_preset_says_what_it_is() -> None:
    listed = presets()
    assert next(iter(listed)) == "small"
    assert len(OF_THE_PAPER) == 29
    assert all(20 < len(title) < 90 for title in listed.values())
    assert preset_path("Table 7").name == "table_7.yaml"


@pytest.mark.parametrize("name", presets())
def test_every_preset_can_be_simulated(name: str) -> None:
    config = load_simulation(name)
    assert problems(config) == []
    assert config.name == name
    text = preset_path(name).read_text()
    assert max(map(len, text.splitlines())) <= 100
    if name in OF_THE_PAPER:
        assert "assumed" in text
        assert "arXiv:2505.24298" in text


@pytest.mark.parametrize("model", TABLE_1)
def test_table_1_has_the_paper_s_gpus_steps_and_split(model: str) -> None:
    gpus, steps = TABLE_1[model]
    for mode in ("asynchronous", "one_step_overlap", "synchronous", "colocated"):
        config = load_simulation(f"table_1_{model}_{mode}")
        assert (config.cluster.gpus, config.workload.steps) == (gpus, steps)
        assert config.workload.prompts_per_batch * config.workload.samples_per_prompt == 8192
        assert config.workload.answers.max_tokens == 27648
        assert config.model == f"R1-Distill-Qwen-{model.upper()}"
    asynchronous = load_simulation(f"table_1_{model}_asynchronous")
    assert asynchronous.cluster.rollout_gpus == 3 * gpus // 4
    assert asynchronous.schedule.eta == 4
    overlap = load_simulation(f"table_1_{model}_one_step_overlap")
    assert overlap.schedule.name == "one_step_overlap"
    assert overlap.cluster == asynchronous.cluster
    colocated = load_simulation(f"table_1_{model}_colocated")
    assert (colocated.cluster.placement, colocated.schedule.name) == ("colocated", "synchronous")


@pytest.mark.parametrize("name", ["table_7", "figure_4_7b_16k", "figure_4_32b_32k"])
def test_other_contexts_cut_the_answers_of_table_1(name: str) -> None:
    """Means in these files are those of the same log-normal under another cap."""
    answers = load_simulation(name).workload.answers
    table_1 = lengths_from(load_simulation("table_1_1.5b_asynchronous").workload.answers)
    here = lengths_from(answers)
    assert isinstance(table_1, LogNormalLengths)
    assert isinstance(here, LogNormalLengths)
    assert here.mu == pytest.approx(table_1.mu, abs=1e-3)
    assert here.sigma == table_1.sigma


BRIEF = (
    "workload.prompts_per_batch=16",
    "workload.steps=3",
    "workload.warmup_steps=1",
    "schedule.max_concurrent_prompts=32",
    "seeds=1",
)


@pytest.mark.parametrize("name", presets())
def test_every_preset_runs(name: str) -> None:
    result = simulate(load_simulation(name, BRIEF))
    assert math.isfinite(result.step_s)
    assert result.step_s > 0
    assert result.tokens_per_s > 0


def test_what_a_preset_simulates_is_on_the_screen() -> None:
    arguments = ["simulate", "--preset", "figure_6b_7b", *BRIEF]
    shown = CliRunner().invoke(cli.app, arguments)
    assert shown.exit_code == 0, shown.stderr
    for said in ("R1-Distill-Qwen-7B on 32 H800", "24 generate", "8 train", "eta inf"):
        assert said in shown.stdout


def test_two_presets_stand_side_by_side() -> None:
    names = ["table_1_7b_synchronous", "table_1_7b_asynchronous"]
    shown = CliRunner().invoke(cli.app, ["simulate", "--compare", *names, *BRIEF])
    assert shown.exit_code == 0, shown.stderr
    for said in (*names, "step time", "throughput"):
        assert said in shown.stdout
