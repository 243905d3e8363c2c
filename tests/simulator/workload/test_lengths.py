"""Lengths of answers: means, caps, correlation, drift, and the traces that are shipped."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from areal_lab.config.problem import ConfigError
from areal_lab.runlog.lags import TrainedBatch
from areal_lab.runlog.records import TRAINER, SpanRecord
from simulator.assembly.build import problems
from simulator.assembly.unused import ignored_settings
from simulator.config.load import load_simulation
from simulator.config.schema import LengthConfig
from simulator.report.to_json import cost_parts
from simulator.workload.histogram import Histogram
from simulator.workload.lengths import (
    TAILS,
    ConstantLengths,
    LogNormalLengths,
    clipped_mean,
    lengths_from,
    sigma_from,
    sigma_of_truncated,
)
from simulator.workload.recorded_run import EXPORT, training_points
from simulator.workload.trace_lengths import TraceLengths, load_histogram, read_histogram, traces

# Means of the published files, before they were binned.
PUBLISHED_MEANS = {
    "azure_2023_conversation": 211.12594,
    "deepseek_r1": 1527.42490,
    "deepseek_r1_client35": 2604.03819,
    "deepseek_r1_client66": 8461.46039,
    "mooncake_conversation": 342.61890,
}


def rng(seed: int = 1) -> np.random.Generator:
    return np.random.default_rng(seed)


def lognormal(**changes: Any) -> LogNormalLengths:
    made = lengths_from(LengthConfig(**changes))
    assert isinstance(made, LogNormalLengths)
    return made


def traced(**changes: Any) -> TraceLengths:
    changes = {"kind": "trace", "trace": "deepseek_r1_client66", **changes}
    made = lengths_from(LengthConfig(**changes))
    assert isinstance(made, TraceLengths)
    return made


def ln_correlation(tokens: np.ndarray) -> float:
    """Between two different samples of one group."""
    ln_tokens = np.log(tokens)
    return float(np.corrcoef(ln_tokens[:, ::2].ravel(), ln_tokens[:, 1::2].ravel())[0, 1])


# --- log-normal ----------------------------------------------------------------------------------


@given(
    st.floats(0.01, 4.0),
    st.integers(2, 100_000),
    st.floats(0.001, 0.999),
)
def test_mu_is_solved_for_the_mean_after_the_cap(sigma: float, cap: int, share: float) -> None:
    wanted = 1 + share * (cap - 1)
    lengths = LogNormalLengths(wanted_mean_tokens=wanted, sigma=sigma, max_tokens=cap)
    assert lengths.mean_tokens() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("sigma", [0.1, 0.684, 2.0])
def test_the_closed_form_of_the_mean_is_the_integral(sigma: float) -> None:
    lengths = LogNormalLengths(wanted_mean_tokens=9277, sigma=sigma, max_tokens=27648)
    scores = np.linspace(-10, 10, 400_001)
    density = np.exp(-(scores**2) / 2) / math.sqrt(2 * math.pi)
    tokens = np.clip(np.exp(lengths.mu + sigma * scores), 1, 27648)
    assert float(tokens @ density) * (scores[1] - scores[0]) == pytest.approx(9277, rel=1e-7)


def test_draws_have_the_wanted_mean_and_the_spike_at_the_cap() -> None:
    lengths = lognormal(group_correlation=0.0)
    tokens = lengths.draw(rng(), 62_500, 16)
    standard_error = tokens.std() / math.sqrt(tokens.size)
    assert tokens.mean() == pytest.approx(9277, abs=4 * standard_error)
    assert (tokens == 27648).mean() == pytest.approx(lengths.capped_share(), rel=0.02)
    assert tokens.min() >= 1
    assert tokens.max() == 27648
    assert tokens.dtype == np.int64


def test_short_responses_keep_their_mean_too() -> None:
    lengths = lognormal(mean_tokens=1.5, sigma=2.0, max_tokens=4, group_correlation=0.0)
    tokens = lengths.draw(rng(), 62_500, 16)
    assert set(np.unique(tokens)) == {1, 2, 3, 4}
    assert tokens.mean() == pytest.approx(1.5, abs=0.005)


def test_about_three_percent_of_the_papers_default_responses_are_cut_off() -> None:
    # The paper's caption of Table 1's setting leaves under 5 % truncated for its 7B model.
    assert lognormal().capped_share() == pytest.approx(0.029, abs=0.001)


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.9])
def test_responses_of_one_group_have_the_wanted_correlation(correlation: float) -> None:
    # With a distant cap, because the spike at the cap lowers the correlation.
    lengths = lognormal(group_correlation=correlation, max_tokens=10**7)
    tokens = lengths.draw(rng(), 40_000, 4)
    assert ln_correlation(tokens) == pytest.approx(correlation, abs=0.01)
    between_groups = np.corrcoef(np.log(tokens[:-1, 0]), np.log(tokens[1:, 0]))[0, 1]
    assert abs(between_groups) < 0.02


def test_correlation_does_not_change_the_distribution_of_a_response() -> None:
    apart = np.sort(lognormal(group_correlation=0.0).draw(rng(1), 50_000, 2).ravel())
    together = np.sort(lognormal(group_correlation=0.8).draw(rng(2), 50_000, 2).ravel())
    quantiles = (np.array([0.05, 0.25, 0.5, 0.75, 0.95]) * apart.size).astype(int)
    assert together[quantiles] == pytest.approx(apart[quantiles], rel=0.02)


def test_full_correlation_gives_a_group_one_length_up_to_rounding() -> None:
    tokens = lognormal(group_correlation=1.0).draw(rng(), 100, 16)
    assert (np.ptp(tokens, axis=1) <= 1).all()
    assert len(np.unique(tokens[:, 0])) > 50


# --- drift ---------------------------------------------------------------------------------------


def test_drift_multiplies_the_mean_if_the_cap_is_far() -> None:
    for lengths in (
        lognormal(drift_per_step=0.01, max_tokens=10**8),
        traced(drift_per_step=0.01, max_tokens=10**8),
    ):
        assert lengths.mean_tokens(50) == pytest.approx(9277 * 1.01**50, rel=1e-6)
        tokens = lengths.draw(rng(), 40_000, 4, step=50)
        assert tokens.mean() == pytest.approx(9277 * 1.01**50, rel=0.01)


def test_responses_that_grow_forever_end_at_the_cap() -> None:
    for lengths in (lognormal(drift_per_step=0.5), traced(drift_per_step=0.5)):
        assert (lengths.draw(rng(), 10, 10, step=100_000) == 27648).all()
        assert lengths.capped_share(100_000) == 1.0
        assert lengths.mean_tokens(100) == pytest.approx(27648)


def test_responses_that_shrink_forever_keep_one_token() -> None:
    for lengths in (
        lognormal(drift_per_step=-0.5),
        traced(drift_per_step=-0.5),
        ConstantLengths(tokens=100, max_tokens=200, drift_per_step=-0.5),
    ):
        assert (lengths.draw(rng(), 10, 10, step=100_000) == 1).all()


def test_drift_shifts_the_same_draws() -> None:
    lengths = lognormal(drift_per_step=0.01)
    early, late = (lengths.draw(rng(3), 100, 8, step=step) for step in (0, 10))
    assert (late >= early - 1).all()
    assert late.mean() > early.mean()


# --- constant ------------------------------------------------------------------------------------


def test_constant_lengths_are_constant() -> None:
    lengths = lengths_from(LengthConfig(kind="constant", mean_tokens=500, max_tokens=500))
    assert (lengths.draw(rng(), 4, 3) == 500).all()
    assert lengths.capped_share() == 0
    grown = ConstantLengths(tokens=400, max_tokens=500, drift_per_step=0.1)
    assert grown.draw(rng(), 1, 1, step=1)[0, 0] == 440
    assert grown.draw(rng(), 1, 1, step=9)[0, 0] == 500
    assert grown.capped_share(9) == 1


# --- traces --------------------------------------------------------------------------------------


def test_shipped_traces_keep_the_published_means() -> None:
    assert list(traces()) == sorted(PUBLISHED_MEANS)
    for name, mean in PUBLISHED_MEANS.items():
        histogram = load_histogram(name)
        assert histogram.mean == pytest.approx(mean, rel=1e-6)
        assert len(histogram.weight) <= 400
        assert "License: " in histogram.source
        assert "Source: " in histogram.source


def test_a_trace_keeps_its_own_mean_and_its_quantiles() -> None:
    lengths = traced(mean_tokens=0, max_tokens=32768, group_correlation=0.5)
    tokens = lengths.draw(rng(), 50_000, 4)
    assert lengths.mean_tokens() == pytest.approx(PUBLISHED_MEANS["deepseek_r1_client66"], rel=1e-6)
    # ServeGen's client 66, before binning.
    for share, expected in ((0.5, 7099), (0.9, 16453), (0.99, 22952)):
        assert np.quantile(tokens, share) == pytest.approx(expected, rel=0.02)


@given(st.sampled_from(sorted(PUBLISHED_MEANS)), st.integers(2, 40_000), st.floats(0.01, 0.99))
def test_a_trace_is_scaled_to_the_wanted_mean(name: str, cap: int, part: float) -> None:
    wanted = 1 + part * (cap - 1)
    lengths = traced(trace=name, mean_tokens=wanted, max_tokens=cap)
    assert lengths.mean_tokens() == pytest.approx(wanted, rel=1e-9)


def test_scaled_draws_have_that_mean_and_respect_the_cap() -> None:
    lengths = traced(mean_tokens=14_000, group_correlation=0.0)
    tokens = lengths.draw(rng(), 62_500, 8)
    assert tokens.mean() == pytest.approx(14_000, rel=0.003)
    assert tokens.max() == 27648
    assert (tokens == 27648).mean() == pytest.approx(lengths.capped_share(), rel=0.03)


def test_ranks_inside_a_group_are_correlated() -> None:
    tokens = traced(group_correlation=0.6).draw(rng(), 40_000, 4)
    ranks = np.argsort(np.argsort(tokens.ravel())).reshape(tokens.shape)
    # Rank correlation of a Gaussian copula: 6/pi asin(rho/2).
    expected = 6 / math.pi * math.asin(0.3)
    assert np.corrcoef(ranks[:, 0], ranks[:, 1])[0, 1] == pytest.approx(expected, abs=0.02)


def test_lengths_spread_over_their_bins_and_not_beyond() -> None:
    histogram = Histogram(
        from_tokens=np.array([10.0, 100.0]),
        to_tokens=np.array([20.0, 140.0]),
        mean_tokens=np.array([15.0, 110.0]),
        weight=np.array([1.0, 1.0]),
    )
    lengths = TraceLengths(histogram, wanted_mean_tokens=0, max_tokens=1000)
    tokens = lengths.draw(rng(), 10_000, 4)
    assert set(np.unique(tokens)) == {*range(10, 21), *range(100, 121)}
    assert tokens[tokens > 50].mean() == pytest.approx(110, abs=0.2)


@pytest.mark.parametrize(
    "text",
    [
        "10\n20\n20\n30\n",
        "output_tokens\n10\n20\n20\n30\n",
        "10,1\n20,2\n30,1\n",
        "\ufeffid,weight,GeneratedTokens\na,1,10\nb,2,20\n\n# remark\nc,1,30\n",
    ],
)
def test_a_users_file_may_have_a_header_weights_and_comments(text: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text)
    histogram = read_histogram(path)
    assert histogram.mean_tokens.tolist() == [10, 20, 30]
    assert histogram.weight.tolist() == [1, 2, 1]
    tokens = traced(trace=str(path), mean_tokens=0).draw(rng(), 100, 10)
    assert set(np.unique(tokens)) == {10, 20, 30}


# --- refused input -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean_tokens": 27648.0}, r"mean_tokens is 27648.0, .* between 1 and .* \(27648\)"),
        ({"mean_tokens": 1.0}, "between 1 and"),
        ({"mean_tokens": math.nan}, "mean_tokens is nan"),
        ({"sigma": 0.0}, "sigma is 0.0, .* kind: constant"),
        ({"sigma": math.nan}, "sigma is nan"),
        ({"max_tokens": 0}, "max_tokens is 0, but must be an integer >= 1"),
        ({"group_correlation": 1.1}, "group_correlation is 1.1, but must be a number from 0 to 1"),
        ({"group_correlation": math.nan}, "group_correlation is nan"),
        ({"drift_per_step": -1.0}, "drift_per_step is -1.0, but must be a finite number > -1"),
        ({"kind": "log-normal"}, "'log-normal', .*; did you mean 'lognormal'"),
        ({"kind": "constant", "mean_tokens": 27649.0}, r"from 1 to max_tokens \(27648\)"),
        (
            {"kind": "trace", "trace": "deepseek_r1", "mean_tokens": -5.0},
            "mean_tokens is -5.0, but must be a finite number >= 0",
        ),
        ({"kind": "trace"}, "no trace is given; known names are azure"),
        ({"kind": "trace", "trace": "deepseek_r1_client6"}, "did you mean 'deepseek_r1_client66'"),
        ({"kind": "trace", "trace": "nowhere/own.csv"}, "nowhere/own.csv does not exist"),
    ],
)
def test_an_impossible_value_is_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        lengths_from(LengthConfig(**changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "own.csv is empty"),
        ("# only a remark\n", "own.csv is empty"),
        ("tokens,weight\n", "has a header but no lengths"),
        ("tokens\n12\nmany\n", "own.csv, line 3: expected 1 number, got 'many'"),
        ("tokens\nnan\n", "line 2: 'nan', but lengths must be >= 1"),
        ("tokens\n-3\n", "line 2: '-3', but lengths must be >= 1"),
        ("tokens\n0\n", "line 2: '0', but lengths must be >= 1 .* leave such rows out"),
        ("tokens,weight\n12,-1\n", "line 2: '12,-1', but"),
        ("tokens,weight\n12\n", "line 2: expected 2 numbers, got '12'"),
        ("tokens,weight\n12,0\n", "weights must be >= 0, and not all 0"),
        ("time,prompt\n1,2\n", "has the columns time, prompt; name the one .* 'tokens'"),
        ("1,2,3\n", "3 columns and no header"),
        ("from_tokens,to_tokens,mean_tokens,weight\n5,9,10,1\n", "bins must ascend"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_histogram(str(path))
    assert "\n" not in str(caught.value)


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


def test_changing_turns_on_shared_devices_is_not_training() -> None:
    def span(name: str, start_s: float, end_s: float, cause: str = "") -> SpanRecord:
        return SpanRecord(process=TRAINER, name=name, t_s=start_s, end_s=end_s, cause=cause)

    spans = [
        span("engines release memory", 10.0, 12.0, cause="engines release memory"),
        span("onload", 12.0, 15.0),
        span("forward/backward", 15.0, 21.0),
        span("optimizer", 21.0, 22.0),
        # Half a second in which the engines had not loaded the version before.
        span(EXPORT, 22.5, 23.5),
        span("offload", 23.5, 27.5),
    ]
    batch = TrainedBatch(
        version=1, begun_s=10.0, done_s=27.5, groups=(0,), token_lags=Counter({0: 40})
    )
    run: Any = SimpleNamespace(log=SimpleNamespace(spans=spans), batches=[batch])
    (point,) = training_points(run)
    assert (point.seconds, point.export_s) == (7.0, 1.0)
