"""Groups in groups, and a moving baseline for each player."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.advantages.agent import gigpo_advantages, rae_advantages
from areal_lab.functional.advantages.named import grpo_advantages
from tests.reference import advantages as reference

EPISODES = {
    "episode_rewards": torch.tensor([1.0, 0.0, 1.0, 0.5], dtype=torch.double),
    "episode_groups": torch.tensor([0, 0, 0, 1]),
    "step_returns": torch.tensor([0.9, 1.0, 0.0, 0.2, 0.8, 0.5, 0.5], dtype=torch.double),
    "step_groups": torch.tensor([10, 11, 10, 12, 10, 20, 20]),
    "step_episodes": torch.tensor([0, 0, 1, 1, 2, 3, 3]),
}


@pytest.mark.parametrize("weight", [0.0, 1.0, 0.3])
def test_gigpo_equals_the_reference(weight):
    ours = gigpo_advantages(**EPISODES, step_weight=weight)
    lists = [value.tolist() for value in EPISODES.values()]
    expected = reference.gigpo(*lists, weight=weight, eps=1e-6)
    torch.testing.assert_close(ours, torch.tensor(expected, dtype=torch.double))


def test_gigpo_without_steps_is_grpo_of_the_episode():
    ours = gigpo_advantages(**EPISODES, step_weight=0.0)
    episodes = grpo_advantages(EPISODES["episode_rewards"], EPISODES["episode_groups"])
    torch.testing.assert_close(ours, episodes[EPISODES["step_episodes"]])


def test_a_state_seen_once_adds_exactly_nothing():
    without = gigpo_advantages(**EPISODES, step_weight=0.0)
    ours = gigpo_advantages(**EPISODES, step_weight=5.0)
    assert (ours == without)[[1, 3, 5, 6]].all()  # 11 and 12 once, the others with equal returns
    assert (ours != without)[[0, 2, 4]].all()


@settings(max_examples=30)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.floats(-2, 2, width=32)), max_size=20),
    st.sampled_from([0.0, 0.5, 0.95]),
)
def test_rae_equals_one_update_after_another(samples, decay):
    rewards = [reward for _, reward in samples]
    agents = [agent for agent, _ in samples]
    before = [0.5, -0.25, 0.0]
    advantages, after = reference.rae(rewards, agents, before, decay)
    ours = rae_advantages(
        torch.tensor(rewards, dtype=torch.double),
        torch.tensor(agents, dtype=torch.long),
        torch.tensor(before, dtype=torch.double),
        decay=decay,
    )
    close = {"rtol": 1e-9, "atol": 1e-12}
    expected = torch.tensor(advantages, dtype=torch.double)
    torch.testing.assert_close(ours.advantages, expected, **close)
    torch.testing.assert_close(ours.baselines, torch.tensor(after, dtype=torch.double), **close)


def test_a_player_that_always_wins_gets_used_to_it():
    """b after n wins is 1 - 0.95^n; the other player's baseline is its own."""
    baselines = torch.zeros(2)
    rewards, players = torch.tensor([1.0, -1.0]), torch.tensor([0, 1])
    for n in range(1, 60):
        advantages, baselines = rae_advantages(rewards, players, baselines)
        won = 1 - 0.95**n
        torch.testing.assert_close(baselines, torch.tensor([won, -won]))
        before = 1 - 0.95 ** (n - 1)
        torch.testing.assert_close(advantages, torch.tensor([1 - before, before - 1]))


def test_only_rewards_get_a_gradient():
    rewards = torch.ones(2, requires_grad=True)
    baselines = torch.zeros(1, requires_grad=True)
    result = rae_advantages(rewards, torch.zeros(2).long(), baselines)
    assert not result.baselines.requires_grad
    result.advantages.sum().backward()
    assert rewards.grad is not None
    assert baselines.grad is None


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay": 1.0}, r"decay is 1.0, but must be in \[0, 1\)"),
        ({"decay": float("nan")}, "decay is nan"),
        ({"rewards": torch.tensor([float("inf"), 0.0])}, "rewards .* NaN or infinite"),
        ({"baselines": torch.tensor([float("nan")])}, "baselines .* NaN or infinite"),
        ({"agents": torch.zeros(3).long()}, r"agents has shape \(3,\) and rewards \(2,\)"),
        ({"agents": torch.zeros(2)}, "agents has dtype torch.float32"),
    ],
)
def test_rae_refuses_bad_inputs(change, message):
    inputs = {"rewards": torch.ones(2), "agents": torch.zeros(2).long()}
    with pytest.raises(ValueError, match=message):
        rae_advantages(**{**inputs, "baselines": torch.zeros(1), **change})


@pytest.mark.usefixtures("unchecked_shapes")
def test_gigpo_refuses_bad_inputs():
    with pytest.raises(ValueError, match="step_episodes has dtype"):
        gigpo_advantages(**{**EPISODES, "step_episodes": EPISODES["step_returns"]})
    with pytest.raises(ValueError, match=r"step_episodes has shape \(2,\) and step_returns \(7,\)"):
        gigpo_advantages(**{**EPISODES, "step_episodes": torch.zeros(2).long()})
