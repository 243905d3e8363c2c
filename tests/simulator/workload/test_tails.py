"""Spreads of lengths: by name, and from the mean and the truncated share of a training log."""

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from areal_lab.config.problem import ConfigError
from simulator.assembly.check import problems
from simulator.assembly.unused import ignored_settings
from simulator.config.load import load_simulation
from simulator.config.schema import LengthConfig
from simulator.report.provenance import cost_parts
from simulator.workload.lengths import lengths_from
from simulator.workload.lognormal import LogNormalLengths, clipped_mean
from simulator.workload.tails import TAILS, sigma_from, sigma_of_truncated
from simulator.workload.traces import load_histogram

TRACES = {
    "math": "deepseek_r1_client66",
    "reasoning": "deepseek_r1_client35",
    "service": "deepseek_r1",
    "conversation": "mooncake_conversation",
}


@pytest.mark.parametrize("tail", TRACES)
def test_a_named_tail_has_the_spread_of_its_trace(tail: str) -> None:
    histogram = load_histogram(TRACES[tail])
    weights = histogram.weight / histogram.weight.sum()
    ln_tokens = np.log(histogram.mean_tokens)
    mean = float(weights @ ln_tokens)
    spread = math.sqrt(float(weights @ (ln_tokens - mean) ** 2))
    assert TAILS[tail].sigma == pytest.approx(spread, abs=0.001)


def test_the_spread_of_deepscaler_follows_from_its_mean_and_truncated_share() -> None:
    """3,500 tokens, 4.2 % cut off at 8K (DeepScaleR, 2025-02-10; rllm issue 33)."""
    assert sigma_of_truncated(3500, 8192, 0.042) == pytest.approx(
        TAILS["deepscaler"].sigma, abs=0.001
    )


def test_the_defaults_follow_from_their_own_truncated_share() -> None:
    share = lengths_from(LengthConfig()).capped_share()
    found = LengthConfig(truncated_share=share)
    assert sigma_from(found) == pytest.approx(0.684, abs=1e-6)


@given(
    st.floats(0.02, 4.0),
    st.sampled_from([64, 4096, 27648, 100_000]),
    st.floats(0.001, 0.9),
)
def test_mean_and_truncated_share_are_both_met(sigma: float, cap: int, share: float) -> None:
    """Whatever a log-normal has, its spread is found again."""
    z = NormalDist().inv_cdf(1 - share)
    mean = clipped_mean(math.log(cap) - sigma * z, sigma, cap)
    assume(1.5 < mean < 0.999 * cap)
    found = sigma_of_truncated(mean, cap, share)
    lengths = LogNormalLengths(wanted_mean_tokens=mean, sigma=found, max_tokens=cap)
    assert lengths.mean_tokens() == pytest.approx(mean, rel=1e-6)
    assert lengths.capped_share() == pytest.approx(share, rel=1e-5)


def test_draws_have_the_truncated_share() -> None:
    config = LengthConfig(mean_tokens=3500, max_tokens=8192, truncated_share=0.25)
    tokens = lengths_from(config).draw(np.random.default_rng(1), 50_000, 4)
    assert (tokens == 8192).mean() == pytest.approx(0.25, abs=0.01)
    assert tokens.mean() == pytest.approx(3500, rel=0.01)


def test_an_impossible_share_is_refused_with_its_bound() -> None:
    with pytest.raises(ConfigError, match=r"truncated_share is 0\.5, but .* must be below 0\.122"):
        sigma_of_truncated(1000, 8192, 0.5)
    config = load_simulation(
        None, {"workload.answers.mean_tokens": 1000, "workload.answers.truncated_share": 0.5}
    )
    (problem,) = problems(config)
    assert problem.setting == "workload.answers.truncated_share"
    with pytest.raises(ConfigError, match="mean_tokens is 9000"):
        sigma_of_truncated(9000, 8192, 0.1)
    for share in (0, 1, 1.2):
        with pytest.raises(ConfigError, match="truncated_share"):
            LengthConfig(truncated_share=share)


def test_a_heavier_tail_has_longer_steps_for_the_same_mean() -> None:
    longest = {
        tail: lengths_from(LengthConfig(tail=tail, mean_tokens=4000, max_tokens=10**6)).draw(
            np.random.default_rng(1), 512, 16
        )
        for tail in ("math", "service")
    }
    assert longest["service"].max() > 1.5 * longest["math"].max()


def test_what_is_overridden_is_named() -> None:
    def ignored(**settings: object) -> list[str]:
        values = {f"workload.answers.{name}": value for name, value in settings.items()}
        return list(ignored_settings(load_simulation(None, values)))

    assert not ignored(tail="service")
    assert not ignored(truncated_share=0.1)
    assert ignored(tail="service", truncated_share=0.1)[0].startswith("workload.answers.tail is")
    assert ignored(sigma=0.5, truncated_share=0.1)[0].startswith("workload.answers.sigma is 0.5")
    assert ignored(sigma=0.5, tail="math")[0].startswith("workload.answers.sigma is 0.5")
    assert ignored(kind="constant", tail="math")[0].endswith("use kind: lognormal")


def test_the_report_names_the_source_of_a_tail() -> None:
    config = load_simulation(None, {"workload.answers.tail": "service"})
    (part,) = [part for part in cost_parts(config) if part.name == "lengths"]
    assert "1,383,686 responses" in part.source
