"""Settings from YAML and overrides, and mistakes in them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from pydantic import Field

from areal_lab.config.dump import description, format_settings, headings, markdown_tables
from areal_lab.config.load import ALIASES, load_config, load_record
from areal_lab.config.problem import ConfigError
from areal_lab.config.record import Record, settings, shown_default, value_of
from areal_lab.config.schema import DatasetConfig, TrainConfig

CONFIGS = Path(__file__).parents[2] / "configs"


class Oven(Record):
    """What bakes."""

    degrees: float = 200.0
    """Celsius."""
    measured_s: float | None = None
    """Baking time; None is by the recipe."""


class Recipe(Record):
    """A cake."""

    name: str = "cake"
    """What it is called."""
    oven: Oven = Field(default_factory=Oven)
    second_oven: Oven = Field(default_factory=Oven)
    """Another one."""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_without_a_file_it_is_the_defaults() -> None:
    assert load_config() == TrainConfig()


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 5\ndataset: {batch_size: 2, few_shot: 3}\nactor.eps_clip: 0.3\n")
    config = load_config(path, ["dataset.few_shot=1", "seed=6", "seed=7"])
    assert config.seed == 7
    assert (config.dataset.batch_size, config.dataset.few_shot) == (2, 1)
    assert config.actor.eps_clip == 0.3
    assert isinstance(config.dataset, DatasetConfig)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("actor.optimizer.lr=1e-5", "actor.optimizer.lr", 1e-5),
        ("actor.optimizer.lr=3", "actor.optimizer.lr", 3.0),
        ("eta=inf", "rollout.max_head_offpolicyness", math.inf),
        ("eta=0.2", "rollout.max_head_offpolicyness", 0.2),
        ('gconfig.stop=["\\n", "a b"]', "gconfig.stop", ["\n", "a b"]),
        ("gconfig.stop=[]", "gconfig.stop", []),
        ("dataset.digits=[2, 1]", "dataset.digits", [2, 1]),
        ("plots=false", "plots", False),
        ("dataset.prompt_template=Q: {prompt}\nA:", "dataset.prompt_template", "Q: {prompt}\nA:"),
        ('dataset.prompt_template="Q\\n{prompt}"', "dataset.prompt_template", "Q\n{prompt}"),
        ("experiment_name=2024", "experiment_name", "2024"),
        ("dataset.path=", "dataset.path", ""),
        ("run_dir=a=b", "run_dir", "a=b"),
    ],
)
def test_values_are_yaml_and_text_is_literal(override: str, name: str, value: object) -> None:
    found = value_of(load_config(None, [override]), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_aliases_set_the_same_setting(alias: str, tmp_path: Path) -> None:
    (setting,) = [one for one in settings(TrainConfig) if one.name == ALIASES[alias]]
    value = setting.choices[-1] if setting.choices else "jsonl" if setting.is_text else "3"
    expected = load_config(None, [f"{ALIASES[alias]}={value}"])
    assert load_config(None, [f"{alias}={value}"]) == expected
    assert load_config(write(tmp_path, f"{alias}: {value}\n")) == expected


def test_the_older_name_of_on_late_is_a_truth(tmp_path: Path) -> None:
    for given, meant in ((True, "drop"), (False, "wait"), (1, "drop"), (0, "wait")):
        assert load_config({"rollout.drop_late": given}).rollout.on_late == meant
        line = f"rollout.drop_late: {str(given).lower()}"
        assert load_config(write(tmp_path, f"{line}\n")).rollout.on_late == meant
        assert load_config(None, [line.replace(": ", "=")]).rollout.on_late == meant
        # As in a checkpoint of an older version.
        saved = TrainConfig().model_dump()
        del saved["rollout"]["on_late"]
        saved["rollout"]["drop_late"] = given
        assert TrainConfig(**saved).rollout.on_late == meant
    with pytest.raises(ConfigError, match="must be one of wait, drop, recycle"):
        load_config(None, ["rollout.drop_late=later"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "rollout.max_head_ofpolicyness=3",
            "unknown setting 'rollout.max_head_ofpolicyness' in the overrides; "
            "did you mean 'rollout.max_head_offpolicyness'?",
        ),
        ("lr=1", "unknown setting 'lr' in the overrides; did you mean 'actor.optimizer.lr'?"),
        (
            "rollout.n_samples=1",
            "unknown setting 'rollout.n_samples' in the overrides; "
            "did you mean 'gconfig.n_samples'?",
        ),
        ("gconfig.n_sample=1", "did you mean 'gconfig.n_samples'?"),
        ("ETA=1", "did you mean 'eta'?"),
        ("xyzzy=1", "setting 'xyzzy' in the overrides; `areal-lab config` lists all of them"),
        ("seed.x=1", "unknown setting 'seed.x'"),
        ("actor=1", "'actor' in the overrides is a group of settings, such as 'actor."),
        ("actor.optimizer=1", "'actor.optimizer' in the overrides is a group of settings"),
        ("actor.optimizer.lr=fast", "actor.optimizer.lr is 'fast', but must be a finite number >"),
        ("total_train_steps=2.5", "total_train_steps is 2.5, but must be an integer >= 1"),
        (
            "dataset.digits=3",
            "dataset.digits is 3, but must be a list of integers; for example 'dataset.digits=",
        ),
        ("dataset.digits=[[1]]", "dataset.digits is [[1]], but must be a list of integers"),
        (
            "rollout.addresses=http://host:1",
            "rollout.addresses is 'http://host:1', but must be a list of strings; for example "
            """'rollout.addresses=["http://host:1"]'""",
        ),
        ("rollout.addresses=[[a]]", "rollout.addresses is [['a']], but must be a list of strings"),
        ("dataset.digits=[a]", "dataset.digits is ['a'], but must be a list of integers"),
        ("plots=maybe", "plots is 'maybe', but must be true or false"),
        ("seed=", "seed is None, but must be an integer"),
        ("seed=a: b: c", "the value in override 'seed=a: b: c' is not YAML"),
        ("seed", "override 'seed' is not of the form a.b=c"),
        ("=3", "override '=3' is not of the form a.b=c"),
    ],
)
def test_a_wrong_override_is_described_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        load_config(None, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rollout:\n  etta: 3\n", r"unknown setting 'rollout.etta' in .*run.yaml; did you mean"),
        ("seed: [1\nplots: true\n", r"run.yaml, line 2 is not YAML"),
        ("- seed\n", "run.yaml holds a list, but must hold settings"),
        ("eta: 1\nrollout: {max_staleness: 2}\n", r"sets .* twice: as 'eta' and 'rollout.max"),
        ("actor: 5\n", "'actor' in .*run.yaml is a group of settings"),
        ("actor: {optimizer: {lr: [1]}}\n", r"actor.optimizer.lr is \[1\], but must be"),
        ("run_dir: ${nowhere}\n", "nowhere"),
    ],
)
def test_a_wrong_file_is_described_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_config(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.yaml does not exist"):
        load_config(tmp_path / "nowhere.yaml")


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "# nothing\n")) == TrainConfig()


def test_a_file_may_refer_to_its_own_settings(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "experiment_name: mine\nrun_dir: runs/${experiment_name}"))
    assert config.run_dir == "runs/mine"


def test_the_demo_is_the_measured_recipe() -> None:
    config = load_config(CONFIGS / "arithmetic.yaml")
    assert config.dataset.operations == ["add"]
    assert (config.dataset.digits, config.dataset.carry) == ([2, 1], False)
    assert (config.total_train_steps, config.dataset.batch_size) == (30, 16)
    assert config.gconfig.n_samples == 8
    assert (config.gconfig.max_new_tokens, config.gconfig.stop) == (4, ["\n"])
    assert (config.actor.optimizer.lr, config.actor.optimizer.warmup_steps) == (1e-5, 5)
    assert config.actor.optimizer.lr_scheduler_type == "linear"
    assert config.rollout.max_head_offpolicyness == 2
    assert config.actor.use_decoupled_loss


def test_the_gsm8k_example_loads() -> None:
    config = load_config(CONFIGS / "gsm8k.yaml", ["dataset.path=mine.jsonl", "actor.path=model"])
    assert (config.dataset.type, config.dataset.path) == ("jsonl", "mine.jsonl")
    assert config.dataset.prompt_template.count("\n") == 2


def test_every_setting_is_documented() -> None:
    assert [one.name for one in settings(TrainConfig) if not description(one)] == []
    text = format_settings()
    assert "actor.optimizer.lr = 1e-05  (a finite number > 0)" in text
    assert "rollout.max_head_offpolicyness: eta" in text
    assert max(map(len, text.splitlines())) <= 100


def test_defaults_are_allowed() -> None:
    defaults = {setting.name: setting.default for setting in settings(TrainConfig)}
    assert TrainConfig().with_settings(defaults) == TrainConfig()


def test_no_number_may_be_nan() -> None:
    for setting in settings(TrainConfig):
        if type(setting.default) in (int, float):
            with pytest.raises(ConfigError, match=setting.name):
                TrainConfig().with_settings({setting.name: math.nan})


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "sed: 1\nactor: {optimizer: {lr: 0}}\nrun_dir: ${nowhere}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["dataset.batch_size=0", "plots", "gconfig.n_samples=1"])
    named = [problem.setting for problem in caught.value.problems]
    assert named == [
        *("sed", "plots", "run_dir", "actor.optimizer.lr", "dataset.batch_size"),
        "gconfig.n_samples",
    ]
    assert len(str(caught.value).splitlines()) == len(named)


# --- records other than a training run's ---------------------------------------------------------


def test_any_record_of_records_is_loaded_the_same_way(tmp_path: Path) -> None:
    path = write(tmp_path, "name: pie\nsecond_oven: {degrees: 180}\nheat: 150\n")
    recipe = load_record(Recipe(), path, ["oven.measured_s=90"], {"heat": "oven.degrees"})
    assert recipe == Recipe(
        name="pie", oven=Oven(degrees=150, measured_s=90), second_oven=Oven(degrees=180)
    )


def test_overrides_may_be_values_by_name_nested_or_dotted(tmp_path: Path) -> None:
    path = write(tmp_path, "seed: 5\ndataset: {batch_size: 2, few_shot: 3}\n")
    words = ["dataset.few_shot=1", "eta=inf", 'gconfig.stop=["\\n"]', "actor.eps_clip=0.3"]
    values = {
        "dataset": {"few_shot": 1},
        "eta": math.inf,
        "gconfig.stop": ["\n"],
        "actor": {"eps_clip": 0.3},
    }
    assert load_config(path, values) == load_config(path, words)
    assert load_config(path, {}) == load_config(path)
    with pytest.raises(ConfigError, match=r"unknown setting 'dataset.fewshot' in the overrides; "):
        load_config(path, {"dataset": {"fewshot": 1}})
    with pytest.raises(ConfigError, match=r"dataset.few_shot is -1, but must be"):
        load_config(path, {"dataset.few_shot": -1})


def test_text_is_literal_by_an_alias_too() -> None:
    assert load_record(Recipe(), None, ["called=2024"], {"called": "name"}).name == "2024"
    assert load_record(Recipe(), None, ["called=1: 2"], {"called": "name"}).name == "1: 2"


def test_a_setting_that_may_be_none_takes_null_and_numbers() -> None:
    assert load_record(Recipe(), None, ["oven.measured_s=null"]).oven.measured_s is None
    assert load_record(Recipe(), None, ["oven.measured_s=3"]).oven.measured_s == 3.0
    with pytest.raises(ValueError, match=r"measured_s is 'long', but must be a number, in seconds"):
        load_record(Recipe(), None, ["oven.measured_s=long"])


def test_aliases_of_another_record_are_unknown() -> None:
    with pytest.raises(ValueError, match=r"unknown setting 'eta' in the overrides"):
        load_record(Recipe(), None, ["eta=1"])
    with pytest.raises(ValueError, match=r"did you mean 'heat'\?"):
        load_record(Recipe(), None, ["haet=1"], {"heat": "oven.degrees"})


def test_settings_of_any_record_are_documented_from_its_module() -> None:
    found = {setting.name: setting for setting in settings(Recipe)}
    assert description(found["second_oven.degrees"]) == "Celsius."
    assert headings(Recipe) == {
        **{"": "A cake.", "oven.": "What bakes."},
        "second_oven.": "Another one.",
    }
    assert found["oven.measured_s"].allowed == "a number, in seconds, or null"
    text = format_settings(Recipe, {"heat": "oven.degrees"})
    assert "oven.measured_s = null  (a number, in seconds, or null)" in text
    assert "oven.degrees: heat" in text
    assert "Other names" not in format_settings(Recipe, {})
    assert "| `degrees` | `200.0` | a number | Celsius. |" in markdown_tables(Recipe, {})


def test_defaults_are_shown_as_in_yaml() -> None:
    shown = [shown_default(value) for value in (True, None, "", 1e-5, [1], "text")]
    assert shown == ["true", "null", '""', "1e-05", "[1]", "text"]
