"""No setting is given in vain without a word: the tables name all settings and tell the truth."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner

from areal_lab.cli import app as cli
from areal_lab.cli.doctor import explain_config
from areal_lab.config.load import load_config
from areal_lab.config.offline import KINDS, load_offline
from areal_lab.config.problem import ConfigError
from areal_lab.config.record import given_settings, settings, value_of
from areal_lab.config.schema import DatasetConfig, SourceName, TrainConfig
from areal_lab.config.shipped import offline_configs, recipes, training_configs
from areal_lab.data import jsonl, sources
from areal_lab.data.images import EncodedImage
from areal_lab.offline.start import resolve_offline
from areal_lab.resolve.check import check_settings
from areal_lab.resolve.notes import notes
from areal_lab.resolve.placement import place_run
from areal_lab.resolve.resolved import check
from areal_lab.resolve.unread import ENVIRONMENT, EVAL, GATEWAY, OFFLINE, SOURCES, TRAIN
from cosim.load import READ as COSIM
from cosim.load import load_cosim, resolve_cosim

TABLES = {
    **{"train": TRAIN, "eval": EVAL, "gateway": GATEWAY, "environment": ENVIRONMENT},
    **{"cosim": COSIM, **{name: OFFLINE[kind] for name, kind in KINDS.items()}},
}


def refused(config: TrainConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_settings(config)
    return str(caught.value)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_names_every_setting_and_no_other(name: str) -> None:
    table = TABLES[name]
    assert not table.unnamed(), "say when they are read, or that they always are"
    if name in KINDS:  # one table for three kinds, whose settings differ
        return
    known = [one.name for one in settings(table.record)]
    for condition in table.conditions:
        for one in condition.names:
            assert any(each.startswith(one) for each in known), f"{one} is no setting"


def test_a_path_that_nothing_reads_is_refused_by_train_and_doctor() -> None:
    config = load_config("tiny", ["dataset.path=/data/train.jsonl"])
    message = refused(config)
    assert message.startswith("dataset.path is '/data/train.jsonl', but has no effect with dataset")
    assert "set dataset.type=jsonl or gsm8k" in message
    _, (finding,) = explain_config(config)
    assert finding.detail == message
    result = CliRunner().invoke(cli.app, ["train", "tiny", "dataset.path=/data/train.jsonl"])
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")


def test_what_names_data_models_or_losses_is_refused_if_nothing_reads_it() -> None:
    for given in (
        "dataset.eval_path=x.jsonl",
        "dataset.tasks={leg_counting: {}}",
        "dataset.prompt_template='Q: {prompt}'",
        "dataset.answer_field=gold",
        "dataset.image_field=picture",
        "ref.path=Adder-75K",
        "critic.path=Adder-75K",
    ):
        name = given.partition("=")[0]
        assert refused(load_config("tiny", [given])).startswith(f"{name} is "), given
    only_teacher = ["teacher.path=Adder-75K", "actor.loss=gspo"]
    assert "actor.loss is {'name': 'gspo'}" in refused(
        load_config(["tiny", "distill"], only_teacher)
    )


def test_the_rest_is_told_once_by_reason() -> None:
    config = load_config(
        "tiny",
        [
            *("rollout.max_lag=3", "rollout.on_late=drop", "alarms.off=[drift]"),
            *("alarms.drift=0.5", "stats_logger.wandb.project=p", "scheduler.slurm_jobs=per_host"),
            *("cluster.lease_s=20", "evaluation.remeasure=1", "dataset.size=9"),
        ],
    )
    told = notes(place_run(config))
    assert any(line.startswith("rollout.max_lag, rollout.on_late has no eff") for line in told)
    for name in (
        *("alarms.drift", "stats_logger.wandb.project", "scheduler.slurm_jobs"),
        *("cluster.lease_s", "evaluation.remeasure", "dataset.size"),
    ):
        assert sum(name in line for line in told) == 1, name
    lines, found = explain_config(config)
    assert not found
    assert {f"note: {line}" for line in told} <= set(lines)


def test_only_what_the_user_gave_is_told(tmp_path: Path) -> None:
    for name in (*training_configs(), *recipes()):
        config = load_config(name)
        assert not list(given_settings(config)), "a shipped file is not the user's"
        copy = tmp_path / f"{name}.yaml"
        copy.write_text((training_configs() | recipes())[name].read_text())
        mine = load_config(["tiny", copy] if name in recipes() else copy)
        if name not in ("distill",):  # which needs a teacher
            assert not list(TRAIN.refusals(mine)), name
            assert not list(TRAIN.notes(mine)), name
    # The shipped file has digits, operations and few_shot, which this type does not read.
    own = load_config("tiny", ["dataset.type=jsonl", "dataset.path=x.jsonl"])
    assert [one.name for one in given_settings(own)] == ["dataset.type", "dataset.path"]
    assert not [line for line in notes(place_run(own)) if "no effect" in line]
    assert load_config(copy, files_are_given=False) == load_config(copy)


def test_all_settings_of_the_defaults_may_be_written_out(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    file = tmp_path / "all.yaml"
    file.write_text(OmegaConf.to_yaml(TrainConfig().model_dump()))
    assert not list(given_settings(load_config(file)))


def test_problems_of_a_program_replace_those_of_the_settings(tmp_path: Path) -> None:
    config = load_config("tiny", ["dataset.path=x.jsonl", f"run_dir={tmp_path}"])
    problems = sources.load_problems(load_config("tiny").dataset, seed=1)
    check(config, problems)


class Recorded(DatasetConfig):
    """Remembers which of its settings were read."""

    def __getattribute__(self, name: str) -> Any:
        if name in DatasetConfig.model_fields:
            _READ.add(name)
        return super().__getattribute__(name)


_READ: set[str] = set()


@pytest.mark.parametrize("source", get_args(SourceName))
def test_a_source_of_problems_reads_the_settings_that_the_table_says(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"question": "1", "answer": "2", "picture": "x.png"}
    monkeypatch.setattr(jsonl, "read_rows", lambda _: [("row 1", row)])
    monkeypatch.setattr(jsonl, "image_of_value", lambda *_: EncodedImage("", 1, 1, b""))
    monkeypatch.setattr(jsonl, "split_problems", lambda *_, **__: None)
    monkeypatch.setattr(sources, "benchmark_problems", lambda *_: [])
    monkeypatch.setattr(sources, "split_problems", lambda *_, **__: None)
    _READ.clear()
    config = Recorded(type=source, path="x.jsonl", eval_path="y.jsonl", image_field="picture")
    _READ.clear()
    try:
        sources.load_problems(config, seed=1)
    except ValueError:  # tasks and prompts that are empty, or a package that is not there
        pass
    # Other processes have the problems of the last two.
    read = _READ - {"type", "batch_size"}
    assert read == set(SOURCES[source]) or source in ("reasoning_gym", "environment")


def test_no_condition_calls_a_setting_unread_that_a_run_reads() -> None:
    """Whatever is given at random, what is told is not read by `limits_of` and the like."""
    from areal_lab.resolve.limits import limits_of

    rng = random.Random(0)
    readers: list[Callable[[TrainConfig], object]] = [
        limits_of,
        lambda config: config.rollout.scaling.rule(0.0),
    ]
    # `sticky` is in the limits of a run without a workflow, too, and acts as `least_loaded`.
    names = [one for one in settings(TrainConfig) if one.name.startswith("rollout.")]
    names = [one for one in names if one.name != "rollout.routing"]
    for _ in range(300):
        config = TrainConfig()
        for one in rng.sample(names, 8):
            for value in rng.sample(values_of(one), 1):
                try:
                    config = config.with_settings({one.name: value})
                except ConfigError:
                    continue
        try:
            before = [read(config) for read in readers]
        except ValueError:
            continue
        given = list(given_settings(config))
        for condition in TRAIN.conditions:
            for one in given:
                if condition.of(one) and not condition.read(config):
                    usual = config.with_settings({one.name: one.default})
                    assert [read(usual) for read in readers] == before, (one.name, config.rollout)


def values_of(setting: Any) -> list[Any]:
    """Some values of a setting."""
    if setting.choices:
        return list(setting.choices)
    if isinstance(setting.default, bool):
        return [not setting.default]
    if isinstance(setting.default, int | float):
        return [0, 1, 2, 0.5, 3, 8]
    return [setting.default]


def test_training_on_fixed_data_has_the_same(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{n}", "response": "1"}) + "\n" for n in range(400))
    )
    common = ["actor.path=Adder-75K", f"run_dir={tmp_path}"]
    with pytest.raises(ConfigError, match=r"^dataset\.path is '.*', but has no effect"):
        resolve_offline(load_offline("sft", "sft_adder", [*common, f"dataset.path={rows}"]))
    given = [
        "dataset.type=jsonl",
        f"dataset.path={rows}",
        "dataset.digits=[2,3]",
    ]
    told = resolve_offline(load_offline("sft", "sft_adder", [*common, *given])).notes
    assert [line.split()[0] for line in told] == ["dataset.digits"]
    for name in offline_configs():
        config = load_offline(name.partition("_")[0], name)
        assert not list(given_settings(config))


def test_evaluation_and_gateway_refuse_what_only_training_reads() -> None:
    for arguments, message in (
        (["eval", "Adder-75K", "tiny", "dataset.path=x"], "dataset.path is 'x', but has no effect"),
        (["eval", "Adder-75K", "tiny", "actor.path=x"], "beside MODEL, which names the model"),
        (["eval", "Adder-75K", "tiny", "gconfig.n_samples=4"], "use --samples"),
        (["eval", "Adder-75K", "tiny", "evaluation.temperature=0.5"], "use --temperature"),
        (["eval", "Adder-75K", "tiny", "gconfig.temperature=0.5"], "use --temperature 0.5"),
        (["gateway", "Adder-75K", "seed=4"], "use --seed"),
    ):
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 2, arguments
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    config = load_config("tiny", ["total_train_steps=9", "rollout.threads=1"])
    (note,) = EVAL.notes(config)
    assert note == "total_train_steps has no effect on areal-lab eval, which trains nothing"
    assert list(GATEWAY.notes(config)) == [
        "total_train_steps has no effect on areal-lab gateway, which serves one model and trains "
        "nothing"
    ]


def test_a_cosimulated_run_refuses_a_workflow_and_tells_of_processes() -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.workflow is .*samples one response to each"):
        resolve_cosim(load_cosim("tiny", ["rollout.workflow=multi_turn"]))
    config = load_cosim("tiny", ["rollout.port=5000", "reward.workers=3"])
    assert list(COSIM.notes(config)) == [
        "rollout.port, reward.workers has no effect on areal-lab cosim, which has one process"
    ]


def test_values_are_named_as_they_were_given() -> None:
    for name in ("ref.path", "dataset.path"):
        config = load_config("tiny", {name: "a\nb"})
        (problem,) = TRAIN.refusals(config)
        assert "\n" not in problem.message
        assert value_of(config, name) == "a\nb"
