"""The notebook of imported runs: its example, its claims, an upload, what it asks for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lab.foreign.record import QUANTITIES

NAME = "12_your_own_run"
SPECIMENS = Path(__file__).parents[1] / "foreign" / "specimens"


@pytest.fixture(scope="module")
def shown(notebook: Callable[[str], tuple[Any, Mapping[str, Any]]]) -> Mapping[str, Any]:
    return notebook(NAME)[1]


def run(**controls: Any) -> tuple[Any, Mapping[str, Any]]:
    ran: tuple[Any, Mapping[str, Any]] = importlib.import_module(f"notebooks.{NAME}").app.run(
        defs=controls
    )
    return ran


def uploaded(name: str) -> SimpleNamespace:
    content = (SPECIMENS / name).read_bytes()
    return SimpleNamespace(value=[1], name=lambda: name, contents=lambda: content)


def text(outputs: Any) -> str:
    found = " ".join(str(getattr(one, "text", "")) for one in outputs if one is not None)
    for _ in range(4):  # callouts hold HTML in an attribute
        found = unescape(found)
    return found


def test_the_example_is_read_as_verl_with_everything_that_advice_needs(
    shown: Mapping[str, Any],
) -> None:
    assert shown["imported"].framework == "verl"
    assert len(shown["imported"].steps) == 6
    assert shown["log"]["unread"] == 0
    fitted = shown["advice"].fit.fitted
    assert all(0.8 < fitted[f"{part}.time_factor"] < 1.5 for part in ("trainer", "rollout"))


def test_settings_and_missing_quantities_are_shown_in_words(
    notebook: Callable[[str], tuple[Any, Mapping[str, Any]]],
) -> None:
    said = text(notebook(NAME)[0])
    for words in ("8 responses per prompt", "up to 16,384 tokens", "2 GPUs per engine"):
        assert words in said
    assert "versions between sampling and training" in said
    # Commands have names of settings, such as `cluster.rollout_gpus`.
    raw = [name for name in QUANTITIES if name.endswith(("_s", "_mean", "_max"))]
    assert not [name for name in raw if name in said]


def test_a_setting_without_words_keeps_its_name() -> None:
    module = importlib.import_module(f"notebooks.{NAME}")
    assert module.setting_words({"other_thing": 3}) == ["other thing 3"]


def test_the_interval_of_a_schedule_is_below_its_number(
    notebook: Callable[[str], tuple[Any, Mapping[str, Any]]],
) -> None:
    charts = [one.to_dict(validate=False) for one in notebook(NAME)[0] if hasattr(one, "to_dict")]
    marks = [layer["mark"] for layer in charts[1]["layer"]]
    (number,) = [mark for mark in marks if mark["type"] == "text" and mark["align"] == "left"]
    (interval,) = [mark for mark in marks if mark.get("strokeWidth") == 3]
    assert interval["yOffset"] - number["dy"] > number["fontSize"] / 2 + interval["strokeWidth"]


def test_asynchrony_is_faster_than_the_example_and_a_larger_eta_adds_little(
    shown: Mapping[str, Any],
) -> None:
    gains = {one.name: one.gain["mean"] for one in shown["advice"].options}
    assert gains["asynchronous, eta 4"] > gains["asynchronous, eta 1"] > 1.2
    assert gains["asynchronous, eta 8"] / gains["asynchronous, eta 4"] < 1.1


def test_the_parts_are_shown_as_shares_too() -> None:
    outputs, _ = run(show=SimpleNamespace(value="share of the step"))
    charts = [one.to_dict(validate=False) for one in outputs if hasattr(one, "to_dict")]
    assert charts[0]["encoding"]["y"]["stack"] == "normalize"


def test_a_log_of_your_own_replaces_the_example() -> None:
    _, defs = run(upload=uploaded("slime_sync.txt"))
    assert defs["imported"].framework == "slime"
    assert "advice" not in defs


def test_what_the_log_does_not_say_is_asked_for() -> None:
    outputs, defs = run(upload=uploaded("trl_console.txt"))
    assert "advice" not in defs
    assert "workload.samples_per_prompt" in text(outputs)


def test_a_file_that_is_no_log_is_explained() -> None:
    given = SimpleNamespace(value=[1], name=lambda: "x.txt", contents=lambda: b"hello\n")
    outputs, defs = run(upload=given)
    assert "lines" not in defs
    assert "No line is a training step" in text(outputs)


def test_a_wrong_setting_is_one_message() -> None:
    outputs, defs = run(settings=SimpleNamespace(value="gpus=16xH100 trainer.knd=fsdp2"))
    assert "advice" not in defs
    assert "trainer.knd" in text(outputs)
