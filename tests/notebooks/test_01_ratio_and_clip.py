"""Notebook 1: a stale token that PPO drops before the first step; retellings as switches."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from areal_lab.functional import loss_surface
from areal_lab.widgets.ratio_plane import TokenRatios

NAME = "01_ratio_and_clip"
TESTS = Path(__file__).parents[1] / "functional" / "losses" / "test_retellings.py"


@pytest.fixture(scope="module")
def names(notebook):
    return notebook(NAME)[1]


def pushes_at(ratio, weight):
    app = importlib.import_module(f"notebooks.{NAME}").app
    return app.run(defs={"token": TokenRatios(ratio, weight)})[1]["pushes"]


def test_the_surprise_is_there_at_first(names):
    """The token has not moved, and PPO has no gradient for it; decoupled PPO has all of it."""
    assert names["token"] == TokenRatios(1.0, 1.5)
    assert names["pushes"]["PPO"] == 0.0
    assert names["pushes"]["decoupled PPO"] == pytest.approx(1.5)


def test_decoupled_is_ppo_at_weight_one(names):
    at_one = {
        "ratios": torch.linspace(0.3, 3.0, 50, dtype=torch.double),
        "weights": torch.ones(1, dtype=torch.double),
        "advantages": torch.tensor([1.0, -1.0], dtype=torch.double),
    }
    losses = names["losses"]
    plain, decoupled = (loss_surface(losses[name], **at_one) for name in ("PPO", "decoupled PPO"))
    assert torch.equal(plain.value, decoupled.value)
    assert torch.equal(plain.gradient, decoupled.gradient)


def test_a_token_beyond_the_clip_has_no_gradient_but_that_of_cispo_and_sapo():
    pushes = pushes_at(1.5, 1.0)
    assert pushes["PPO"] == pushes["decoupled PPO"] == pushes["GSPO"] == 0.0
    assert pushes["CISPO"] == pytest.approx(1.2)
    assert 0 < pushes["SAPO"] < 1.5


def test_the_fields_are_those_of_the_losses(names):
    fields = names["fields"]
    assert set(fields) == set(names["losses"])
    assert (fields["CISPO"] != 0).all()
    beyond = names["field_ratios"] > 1.2
    assert (fields["decoupled PPO"][beyond] == 0).all()
    assert (fields["decoupled PPO"][~beyond] != 0).all()


def test_each_retelling_has_a_picture_an_answer_and_a_test(names):
    answers, text = names["answers"], TESTS.read_text()
    assert set(answers) == set(names["pictures"]) == set(names["told"].value)
    for key, picture in names["pictures"].items():
        assert picture() is not None
        named = [word for word in answers[key].split("`") if word.startswith("test_")]
        assert named, key
        assert all(f"def {test}(" in text for test in named)


def test_one_retelling_is_switched_on_at_first(names):
    assert [key for key, on in names["told"].value.items() if on] == ["product"]
