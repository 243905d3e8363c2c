"""Bands, intervals and panels of losses: what is drawn, and in which color."""

from __future__ import annotations

import pytest

from areal_lab.runlog.intervals import MeanInterval
from areal_lab.runlog.seeds import RewardCurve
from areal_lab.widgets.seed_charts import final_reward_rows, gradient_panels, reward_bands
from tests.widgets.chart_rows import rows_of

LOSSES = ["PPO", "yours", "other"]
CURVE = RewardCurve((1, 2), (0.4, 0.5), (0.3, 0.45), (0.5, 0.55), 3)


def scales(chart, channel):
    """The scale of a channel in each layer that has one."""
    found = []

    def look(part):
        if isinstance(part, dict):
            encoded = part.get("encoding", {}).get(channel, {})
            if "scale" in encoded:
                found.append(encoded["scale"])
            for value in part.values():
                look(value)
        elif isinstance(part, list):
            for value in part:
                look(value)

    look(chart.to_dict())
    return found


def test_bands_have_the_interval_of_each_step() -> None:
    first, second = rows_of(reward_bands({"yours": CURVE}, losses=LOSSES))[0]
    assert first == {"loss": "yours", "step": 1, "reward": 0.4, "low": 0.3, "high": 0.5}
    assert second["step"] == 2


def test_a_loss_has_its_color_whatever_else_is_drawn() -> None:
    alone = scales(reward_bands({"yours": CURVE}, losses=LOSSES), "color")
    both = scales(reward_bands({"PPO": CURVE, "yours": CURVE}, losses=LOSSES), "color")
    rows = final_reward_rows({"yours": MeanInterval(0.5, 3, 0.1)}, losses=LOSSES)
    assert {str(scale) for scale in [*alone, *both, *scales(rows, "color")]} == {str(alone[0])}
    assert alone[0]["domain"] == LOSSES
    assert len(set(alone[0]["range"])) == 3


def test_only_what_is_drawn_is_in_the_legend() -> None:
    text = str(reward_bands({"yours": CURVE}, losses=LOSSES).to_dict())
    assert "'values': ['yours']" in text


def test_a_final_reward_has_its_interval_and_its_numbers() -> None:
    rewards = {"PPO": MeanInterval(0.62, 3, 0.05), "yours": MeanInterval(0.4, 1, None)}
    drawn = rows_of(final_reward_rows(rewards, losses=LOSSES, start=0.36))
    ppo, yours = drawn[0]
    assert (ppo["low"], ppo["high"]) == pytest.approx((0.57, 0.67))
    assert ppo["words"] == "0.620 ± 0.050"
    assert (yours["low"], yours["high"], yours["words"]) == (0.4, 0.4, "0.400")
    assert [{"mean": 0.36}] in drawn
    assert [{"mean": 0.36}] not in rows_of(final_reward_rows(rewards, losses=LOSSES))


def test_panels_have_a_value_for_each_lag() -> None:
    charts = gradient_panels({"PPO": [1.0, 0.7]}, {"PPO": [1.0, 2.0]}, losses=LOSSES)
    (cosines,), (variances,) = map(rows_of, charts)
    assert [row["value"] for row in cosines] == [1.0, 0.7]
    assert [(row["lag"], row["value"]) for row in variances] == [(0, 1.0), (1, 2.0)]


@pytest.mark.parametrize(
    "draw",
    [
        lambda: reward_bands({"typo": CURVE}, losses=LOSSES),
        lambda: final_reward_rows({"typo": MeanInterval(0.5, 1, None)}, losses=LOSSES),
        lambda: gradient_panels({"typo": [1.0]}, {"typo": [1.0]}, losses=LOSSES),
    ],
)
def test_a_loss_that_is_not_listed_has_no_color(draw) -> None:
    with pytest.raises(ValueError, match="'typo' is not one of the losses: PPO, yours, other"):
        draw()
