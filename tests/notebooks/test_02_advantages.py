"""Notebook 2: what estimators make of rewards, and of easy and hard prompts."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

NAME = "02_advantages"
A, B, C, D = range(4)


@pytest.fixture(scope="module")
def names(notebook):
    return notebook(NAME)[1]


def squares(table):
    return np.square(table).sum(1)


def after(rewards, names):
    app = importlib.import_module(f"notebooks.{NAME}").app
    return app.run(defs={"before": names["rewards"], "rewards": rewards})[1]


def test_the_surprise_is_there_at_first(names):
    """GRPO pushes on the prompt solved once as on the one solved four times; Dr. GRPO less."""
    tables = names["tables"]
    assert squares(tables["GRPO"])[:3] == pytest.approx([7.0, 7.0, 7.0], rel=1e-4)
    hard, half, *_ = squares(tables["Dr. GRPO"])
    assert (hard, half) == pytest.approx((0.875, 2.0))


def test_a_solved_prompt_teaches_nothing_but_in_what_looks_at_the_batch(names):
    pushed = {name for name, table in names["tables"].items() if (table[D] != 0).any()}
    assert pushed == {"REINFORCE++", "REINFORCE++, baseline"}
    assert (names["tables"]["REINFORCE++"][D] > 1).all()


def test_the_last_click_changed_one_prompt_or_all(names):
    """At first, the last response of D has just become right."""
    changed = {
        name: (table != names["earlier_tables"][name]).any(1).tolist()
        for name, table in names["tables"].items()
    }
    assert changed["GRPO"] == changed["Dr. GRPO"] == changed["RLOO"] == [False, False, False, True]
    for name in ("LitePPO", "GPG", "REINFORCE++", "REINFORCE++, baseline"):
        assert changed[name] == [True, True, True, True], name


@pytest.mark.parametrize("name", ["RLOO", "GRPO", "Dr. GRPO", "LitePPO", "MaxRL", "GPG"])
def test_advantages_of_a_group_sum_to_zero(names, name):
    assert names["tables"][name].sum(1) == pytest.approx(0, abs=1e-9)


def test_rloo_is_dr_grpo_times_a_constant(names):
    assert names["tables"]["RLOO"] == pytest.approx(8 / 7 * names["tables"]["Dr. GRPO"])


def test_a_click_changes_the_tables(names):
    rewards = [[1] * 8, *names["rewards"][1:]]
    found = after(rewards, names)
    assert (found["tables"]["GRPO"][A] == 0).all()
    # Nobody touched B, which LitePPO pushes harder: the deviation of the batch fell.
    assert names["tables"]["LitePPO"][B, 0] == pytest.approx(1.02, abs=0.01)
    assert found["tables"]["LitePPO"][B, 0] == pytest.approx(1.36, abs=0.01)
    assert found["tables"]["GRPO"][B] == pytest.approx(names["tables"]["GRPO"][B])


def test_a_harder_neighbor_raises_the_push_on_what_is_solved(names):
    rewards = [*names["rewards"][:C], [1] * 6 + [0, 0], names["rewards"][D]]
    found = after(rewards, names)
    assert (found["tables"]["REINFORCE++"][D] > names["tables"]["REINFORCE++"][D] + 0.05).all()
    assert (found["tables"]["GRPO"][D] == 0).all()


def test_weights_of_prompts_are_as_said(names):
    curves = names["curves"]
    at = {name: curve.weight[10].item() for name, curve in curves.items()}
    assert names["rates"][10] == pytest.approx(0.1)
    assert at["Dr. GRPO"] == pytest.approx(7 / 8)
    assert at["GRPO"] == pytest.approx(2.18, abs=0.01)
    assert at["MaxRL"] == pytest.approx(5.22, abs=0.01)
    assert curves["GRPO"].weight[50] < at["GRPO"]
    assert curves["GRPO"].informative[10].item() == pytest.approx(0.57, abs=0.01)


def test_groups_of_two_know_nothing_of_difficulty(names):
    for name, curve in names["by_rate"](2).items():
        flat = curve.weight.numpy()
        assert flat == pytest.approx(flat[50], rel=0.1 if name == "LitePPO" else 1e-5), name


def test_a_sum_of_rewards_confuses_what_gdpo_tells_apart(names):
    summed, gdpo = (names["two_rewards"][name][A] for name in ("GRPO of the sum", "GDPO"))
    assert summed[0] == pytest.approx(summed[1])  # right and long; wrong and short
    assert gdpo[0] > gdpo[1] + 0.4
