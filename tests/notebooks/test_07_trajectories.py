"""Notebook 7: the claim of its default state, the texts it shows, and what its controls do."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import marimo as mo
import numpy as np
import pytest

from areal_lab.widgets.token_colors import token_colors
from benchmarks.large_run import RECORDED

NAME = "07_trajectories"


@pytest.fixture(scope="module")
def defs(notebook: Callable[[str], Any]) -> Mapping[str, Any]:
    return notebook(NAME)[1]


def with_run(folder: Path | str) -> Mapping[str, Any]:
    """The notebook after the path of a folder was typed."""
    folders = {"eta 4": RECORDED}
    _, defs = importlib.import_module(f"notebooks.{NAME}").app.run(
        defs={
            "folders": folders,
            "picked": mo.ui.dropdown(list(folders), value="eta 4"),
            "typed": mo.ui.text(value=str(folder)),
            "again": mo.ui.button(label="Read again"),
        }
    )
    return defs


def test_the_surprise_old_tokens_are_dropped_by_standard_ppo_and_not_by_decoupled_ppo(
    defs: Mapping[str, Any],
) -> None:
    oldest, by_lag, tokens = defs["oldest"], defs["by_lag"], defs["run"].tokens
    assert oldest.name == 4
    assert oldest["standard_ppo"] > 0.15
    assert oldest["decoupled_ppo"] < 0.01
    # Age moves tokens away from their sampler, step by step, and does nothing to what is dropped.
    assert (np.diff(by_lag["standard_ppo"]) > 0).all()
    assert (np.diff(by_lag["weight_change"]) > 0).all()
    # The trainer's own flags say the same, token by token.
    for lag, row in by_lag.iterrows():
        dropped = tokens["clipped"][tokens["lag"] == lag]
        assert row["decoupled_ppo"] == pytest.approx(np.nanmean(dropped), abs=2e-3)


def test_what_there_is_to_try_is_true(defs: Mapping[str, Any]) -> None:
    tokens = defs["run"].tokens
    weight, ratio, entropy = (
        token_colors(tokens, quantity) for quantity in ("weight", "ratio", "entropy")
    )
    trained = weight.codes > 0
    neutral = weight.labels.index("0.95 to 1.05")
    assert (ratio.codes[trained] == neutral).mean() > 0.85
    assert (weight.codes[trained] == neutral).mean() < 0.5
    certain = entropy.codes == entropy.labels.index("entropy < 0.1 nats")
    assert (tokens["lag"][certain] > 1).sum() > 100
    assert (weight.codes[certain] == neutral).mean() > 0.97


def test_the_strip_has_the_selected_groups_with_the_text_of_every_token(
    defs: Mapping[str, Any],
) -> None:
    run, strip, shown = defs["run"], defs["strip"], defs["shown"]
    assert len(strip.rows) == len(shown) == 6 * 4
    assert set(run.samples["group"][shown]) == set(defs["table"].value["group"])
    for codes, row in zip(strip.rows, shown, strict=True):
        own = run.tokens.of(row)
        assert (codes == defs["colors"].codes[own]).all()
    assert strip._texts[0].split("\x1f") == run.tokens.labels(shown[0])


def test_the_text_below_is_that_of_the_group_with_the_most_versions(
    notebook: Callable[[str], Any], defs: Mapping[str, Any]
) -> None:
    outputs, _ = notebook(NAME)
    page = " ".join(output.text for output in outputs if hasattr(output, "text"))
    selected = defs["groups"].set_index("group").loc[list(defs["table"].value["group"])]
    assert selected["versions"][defs["focus"]] == selected["versions"].max() > 1
    members = defs["run"].samples[defs["run"].samples["group"] == defs["focus"]]
    for sample in members.itertuples():
        assert f"group {sample.group}, sample {sample.sample}, step {sample.step}" in page


def test_groups_that_differ_come_first(defs: Mapping[str, Any]) -> None:
    assert defs["groups"]["reward_std"].is_monotonic_decreasing
    assert defs["groups"]["about"].iloc[0] != defs["groups"]["about"].iloc[1]


def test_both_runs_begin_alike_and_part_with_the_first_update(defs: Mapping[str, Any]) -> None:
    pairs = defs["pairs"]
    assert len(pairs) == len(defs["run"].samples)
    before_any_update = pairs["group_first"] < 2
    same = pairs["same_tokens"] / pairs[["tokens_first", "tokens_second"]].min(axis=1)
    assert (same[before_any_update] == 1).all()
    assert same[pairs["group_first"] >= 10].mean() < 0.3


def test_runs_of_the_reader_do_not_change_what_is_compared_at_first(
    defs: Mapping[str, Any],
) -> None:
    folders = {**defs["folders"], "mine": RECORDED}
    _, more = importlib.import_module(f"notebooks.{NAME}").app.run(
        defs={name: defs[name] for name in ("again", "picked", "typed")} | {"folders": folders}
    )
    assert more["second"].source == defs["second"].source != defs["run"].source


def test_a_wider_clip_range_drops_fewer(defs: Mapping[str, Any]) -> None:
    _, wider = importlib.import_module(f"notebooks.{NAME}").app.run(
        defs={"epsilon": mo.ui.slider(0.05, 0.5, 0.05, 0.5)}
    )
    assert (wider["by_lag"]["standard_ppo"] <= defs["by_lag"]["standard_ppo"]).all()
    assert wider["oldest"]["standard_ppo"] < 0.5 * defs["oldest"]["standard_ppo"]


def test_another_run_without_staleness_has_weights_of_one() -> None:
    fresh = with_run(RECORDED.with_name("haiku-eta0"))
    assert list(fresh["by_lag"].index) == [0]
    assert fresh["oldest"]["weight_change"] < 1e-4
    assert fresh["oldest"]["standard_ppo"] == fresh["oldest"]["decoupled_ppo"]


def test_a_run_without_training_fields_shows_its_tokens(tmp_path: Path) -> None:
    for file in [*RECORDED.glob("*.*"), *RECORDED.glob("trajectories/*.gz")]:
        copy = tmp_path / file.relative_to(RECORDED)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(file.read_bytes())
    plain = with_run(tmp_path)
    assert plain["quantity"].value == "lag"
    assert "by_lag" not in plain
    assert len(plain["strip"].rows) == 24


def test_a_folder_that_is_no_run_is_an_error_on_the_page_and_no_crash(tmp_path: Path) -> None:
    broken = with_run(tmp_path / "nothing")
    assert broken["run"] is None
    assert "strip" not in broken
    logs = RECORDED.parents[2] / "reproductions" / "recorded" / "asynchronous"
    assert "strip" not in with_run(logs)
