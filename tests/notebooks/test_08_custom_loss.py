"""Notebook 8: what slips in a loss cost, what checks see of them, and a button that trains."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

from areal_lab.config.load import load_config
from areal_lab.training.objective.typed_loss import EXAMPLES, read_loss

NAME = "08_custom_loss"


def run(**defs):
    return importlib.import_module(f"notebooks.{NAME}").app.run(defs=defs)[1]


@pytest.fixture(scope="module")
def names(notebook):
    return notebook(NAME)[1]


@pytest.fixture(scope="module")
def no_ratio():
    return run(editor=SimpleNamespace(value=EXAMPLES["no ratio"]))


def test_the_surprise_is_there_at_first(names):
    """Without half of its gradient PPO learns as before; without the ratio it does not."""
    assert names["shown"].value == ["PPO", "clip from above", "no ratio"]
    harmless, harmful = (names["differences"][name] for name in ("clip from above", "no ratio"))
    assert abs(harmless.mean) < 0.05
    assert harmful.mean + harmful.ci95 < -0.1
    assert names["final"]["PPO"].mean > names["recorded"].start_reward().mean + 0.2
    assert names["final"]["PPO"].n >= 5


def test_it_is_the_bad_responses_that_a_ratio_is_needed_for(names):
    difference = names["differences"]["no ratio, good only"]
    assert abs(difference.mean) < 0.08


def test_the_default_has_no_push_on_bad_tokens_where_ppo_has_one(names):
    line, pushes = names["line"], names["pushes"]
    strip = (line > 0.81) & (line < 1.19)
    assert (pushes["yours"][strip, 1] == 0).all()
    assert (pushes["PPO"][strip, 1] < -0.8).all()
    assert pushes["yours"][strip, 0] == pytest.approx(pushes["PPO"][strip, 0])
    fields = names["fields"]
    assert set(fields) == {
        f"{name}: a {kind} token, A = {sign}1"
        for name in ("yours", "PPO")
        for kind, sign in (("good", "+"), ("bad", "\N{MINUS SIGN}"))
    }


def test_no_ratio_pushes_the_same_wherever_a_token_is(no_ratio):
    assert no_ratio["pushes"]["yours"][:, 0] == pytest.approx(1.0)
    assert no_ratio["pushes"]["yours"][:, 1] == pytest.approx(-1.0)


def test_the_check_of_single_samples_is_passed_by_the_wrong_one(names, no_ratio):
    assert names["cosines"]["no ratio"][4] > 0.9
    assert names["cosines"]["PPO"][4] < 0.8
    assert no_ratio["cosines"]["yours"] == no_ratio["cosines"]["no ratio"]
    fast = run(kept=SimpleNamespace(value=0.8))
    assert fast["cosines"]["PPO"][4] < names["cosines"]["PPO"][4]


def test_a_loss_that_cannot_train_is_told_and_stops_what_needs_it():
    names = run(editor=SimpleNamespace(value="def my_loss(logprobs):\n    return logprobs"))
    assert names["typed"].problem.startswith("my_loss cannot be called as a policy loss")
    assert "losses" not in names
    assert "data-disabled='true'" in names["train"].text


def test_a_loss_that_forgets_the_mask_is_told(names):
    text = EXAMPLES["no ratio"].replace("token_mean(value, mask)", "value.mean()")
    assert "Masked tokens" in names["verdict"](read_loss(text))
    assert "Masked tokens" not in names["verdict"](names["typed"])


def test_nothing_trains_unasked(names):
    assert names["get_trained"]() is None
    assert "data-disabled='false'" in names["train"].text
    assert "comparison" not in names


def test_the_button_trains_yours_and_ppo(tmp_path):
    few = ["total_train_steps=2", "evaluation.max_problems=4", "dataset.batch_size=4"]
    names = run(
        train=SimpleNamespace(value=True),
        seeds=SimpleNamespace(value=1),
        config=load_config("tiny", [f"run_dir={tmp_path}", *few]),
    )
    results = names["comparison"].results
    assert names["failures"](results) == ""
    assert [(one.loss, one.seed, one.status) for one in results.runs] == [
        ("PPO", 1, "complete"),
        ("yours", 1, "complete"),
    ]
    assert all(len(one.rewards) == 2 for one in results.runs)


def test_the_config_asks_for_the_ppo_that_is_drawn(names):
    actor = names["config"].actor
    assert not actor.use_decoupled_loss
    assert actor.loss_fn == ""
    assert (actor.eps_clip, actor.ppo_n_minibatches) == (0.2, 1)


def test_each_thing_to_try_can_be_typed():
    changed = EXAMPLES["no ratio"].replace("* advantages", "* advantages.clamp(max=0)")
    assert changed != EXAMPLES["no ratio"]
    assert read_loss(changed).problem == ""
