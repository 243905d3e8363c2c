"""Fitted response lengths: from numbers, tables, traces and runs; told as settings and YAML."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import simulator
from areal_lab.runlog.records import GroupRecord
from simulator.calibrate.fit_run import calibrate_from
from simulator.calibrate.length_fit import LengthFit
from simulator.calibrate.lengths import fit_lengths, within_prompts
from simulator.config.load import load_simulation
from simulator.workload.lengths import LogNormalLengths, lengths_from
from simulator.workload.trace_lengths import load_histogram, traces
from tests.simulator.calibrate import recordings

RECORDED = Path(__file__).parents[3] / "reproductions" / "recorded" / "synchronous"
SHARES = np.array([0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99])


def drawn(
    groups: int, samples: int, *, mean: float = 90, sigma: float = 0.7, cap: int = 200, **more: Any
) -> list[list[int]]:
    model = LogNormalLengths(wanted_mean_tokens=mean, sigma=sigma, max_tokens=cap, **more)
    tokens: list[list[int]] = model.draw(np.random.default_rng(1), groups, samples).tolist()
    return tokens


# --- the fit -------------------------------------------------------------------------------------


def test_lengths_are_recovered_with_their_spike_and_correlation() -> None:
    assert fit_lengths(drawn(400, 6), max_tokens=200).sigma == pytest.approx(0.7, rel=0.05)
    # A cap that is never reached: others lower the correlation.
    fit = fit_lengths(drawn(400, 6, cap=5000, group_correlation=0.5), max_tokens=5000)
    assert fit.kind == "lognormal"
    assert fit.sigma == pytest.approx(0.7, rel=0.05)
    assert fit.mean_tokens == pytest.approx(90, rel=0.05)
    assert fit.distance < 0.03
    assert fit.within_prompts is not None
    assert fit.within_prompts.correlation == pytest.approx(0.5, abs=0.1)
    assert fit.within_prompts.sigma == pytest.approx(0.7 * math.sqrt(0.5), rel=0.1)


@pytest.mark.parametrize("cap", [60, 100, 200, 10_000])
def test_sigma_does_not_depend_on_where_lengths_were_cut_off(cap: int) -> None:
    whole = np.array(drawn(4000, 1, sigma=0.9, cap=10_000)).ravel()
    fit = fit_lengths(np.minimum(whole, cap), max_tokens=cap)
    assert fit.capped_share == pytest.approx((whole >= cap).mean())
    assert fit.sigma == pytest.approx(0.9, rel=0.06)
    if cap == 60:  # half are cut off; what is left hides most of the spread
        assert fit.capped_share > 0.45
        assert np.log(np.minimum(whole, cap)).std() < 0.7 * fit.sigma
        assert any("log-normal form" in note for note in fit.notes)


def test_a_cut_distribution_that_is_extrapolated_gives_the_uncut_mean() -> None:
    whole = np.array(drawn(4000, 1, sigma=0.6, cap=100_000)).ravel()
    fit = fit_lengths(np.minimum(whole, 150), max_tokens=150)
    wanted = fit.settings(max_tokens=100_000)["workload.answers.mean_tokens"]
    assert wanted == pytest.approx(whole.mean(), rel=0.03)
    assert fit.mean_tokens < 0.95 * whole.mean()


def test_equal_lengths_are_a_constant() -> None:
    fit = fit_lengths([[7, 7], [7, 7]], max_tokens=9)
    assert fit.settings() == {
        "workload.answers.kind": "constant",
        "workload.answers.mean_tokens": 7.0,
        "workload.answers.max_tokens": 9,
    }
    assert fit.distance == 0
    assert fit.families == ("trace", "constant")
    assert fit_lengths([5]).kind == "constant"
    assert fit_lengths([1, 1, 1]).kind == "constant"


def test_a_cap_that_is_not_given_is_seen_by_its_spike() -> None:
    tokens = np.array(drawn(2000, 1, mean=2000, cap=6000)).ravel()
    capped = np.minimum(tokens, 3000)
    seen = fit_lengths(capped)
    assert seen.capped_share == pytest.approx((tokens >= 3000).mean())
    assert seen.sigma == pytest.approx(fit_lengths(capped, max_tokens=3000).sigma)
    assert "taken for the cap" in seen.notes[0]
    open_end = fit_lengths(tokens[tokens < 3000])
    assert open_end.capped_share == 0
    assert "none is visible" in open_end.notes[0]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 12), min_size=30, max_size=60))
def test_short_lengths_that_repeat_by_nature_are_no_cap(tokens: list[int]) -> None:
    longest = max(tokens)
    fit = fit_lengths([*tokens, *range(1, longest + 1)])
    if fit.capped_share > 0:
        below = sum(0.9 * longest <= one < longest for one in tokens) + (longest > 9)
        assert tokens.count(longest) + 1 > 5 * below / max(1, 0.1 * longest)


@pytest.mark.parametrize("name", list(traces()))
def test_the_distance_is_the_largest_difference_of_the_distribution_functions(name: str) -> None:
    fit = fit_lengths(name)
    observed, fitted = fit.quantiles(SHARES), fit.model()
    gaps = np.abs(fitted.share_up_to(np.round(observed)) - SHARES)
    assert gaps.max() <= fit.distance + 0.01
    assert fit.distance == pytest.approx(fit.distances["lognormal"])
    assert fit.distances["trace"] == pytest.approx(0, abs=1e-3)
    assert fit.distances["constant"] > fit.distance
    # By simulation: an independent way to the same number.
    tokens = np.sort(fit.sample(200_000, kind="trace").ravel())
    places = np.unique(tokens)
    shares = np.searchsorted(tokens, places, side="right") / len(tokens)
    assert np.abs(shares - fitted.share_up_to(places)).max() == pytest.approx(
        fit.distance, abs=0.01
    )


def test_math_like_responses_have_the_spread_that_is_the_default() -> None:
    fit = fit_lengths("deepseek_r1_client66")
    assert fit.sigma == pytest.approx(0.684, rel=0.01)
    assert fit.answers == 41_230
    # A close fit of the middle, and a tail that ends far too late.
    assert fit.distance < 0.05
    assert fit.capped_share < 2e-4
    assert fit.model().capped_share() > 50 * fit.capped_share


def test_held_out_responses_of_a_run_decide_its_distance() -> None:
    fit = fit_lengths(RECORDED)
    assert fit == calibrate_from(RECORDED).lengths or _same(fit, calibrate_from(RECORDED).lengths)
    assert fit.held_out_answers == 16
    assert fit.max_tokens == 42
    assert fit_lengths(RECORDED / "events.jsonl.gz").sigma == fit.sigma


def _same(one: LengthFit, other: LengthFit | None) -> bool:
    """Whether two fits are equal; histograms are compared by identity."""
    assert other is not None
    return (one.settings(), one.distance, one.within_prompts) == (
        other.settings(),
        other.distance,
        other.within_prompts,
    )


def test_a_short_run_holds_nothing_out(tmp_path: Path) -> None:
    folder = recordings.record(
        tmp_path / "short", recordings.known("workload.steps=2", "workload.warmup_steps=0")
    )
    fit = fit_lengths(folder)
    assert fit.held_out_answers == 0
    assert fit.answers == 2 * 4 * 3
    assert fit.settings("recorded") == {
        "workload.answers.kind": "recorded",
        "workload.answers.trace": str(folder),
        "workload.answers.max_tokens": fit.max_tokens,
    }


# --- within a prompt -----------------------------------------------------------------------------


def test_responses_that_are_equal_only_within_groups_are_fully_correlated() -> None:
    alike = within_prompts([[10, 10], [500, 500], [90, 90]])
    assert alike is not None
    assert (alike.correlation, alike.sigma) == (1.0, 0.0)
    apart = within_prompts([[10, 500], [500, 10], [10, 500]])
    assert apart is not None
    assert apart.correlation == 0


def test_the_interval_of_the_correlation_has_the_true_one_nineteen_times_out_of_twenty() -> None:
    model = LogNormalLengths(
        wanted_mean_tokens=90, sigma=0.7, max_tokens=10**5, group_correlation=0.5
    )
    hits = 0
    for seed in range(40):
        found = within_prompts(model.draw(np.random.default_rng(seed), 150, 6).tolist())
        assert found is not None
        low, high = found.interval
        hits += low < 0.5 < high
        assert high - low < 0.25
    assert 34 <= hits <= 40


@pytest.mark.parametrize("groups", [[], [[5], [6]], [[5, 6]], [[5, 5], [5, 5]]])
def test_too_few_groups_say_nothing_of_the_correlation(groups: list[list[int]]) -> None:
    assert within_prompts(groups) is None


def test_groups_of_different_sizes_are_all_used() -> None:
    even = drawn(600, 8, mean=900, cap=100_000, group_correlation=0.6)
    uneven = [group[: 1 + n % 8] for n, group in enumerate(even)]
    found = within_prompts(uneven)
    assert found is not None
    assert found.correlation == pytest.approx(0.6, abs=0.06)


# --- what it says --------------------------------------------------------------------------------


def test_samples_have_the_fitted_distribution_and_correlation() -> None:
    fit = fit_lengths(drawn(400, 6, mean=900, cap=4000, group_correlation=0.5), max_tokens=4000)
    assert fit.within_prompts is not None
    again = fit_lengths(fit.sample(2000, 6).tolist(), max_tokens=4000)
    assert again.sigma == pytest.approx(fit.sigma, rel=0.03)
    assert again.mean_tokens == pytest.approx(fit.mean_tokens, rel=0.05)
    assert again.within_prompts is not None
    assert again.within_prompts.correlation == pytest.approx(
        fit.within_prompts.correlation, abs=0.05
    )
    assert (fit.sample(5, 2, seed=3) == fit.sample(5, 2, seed=3)).all()


@settings(max_examples=40)
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50))
def test_quantiles_of_the_observed_lengths_are_lengths(tokens: list[int]) -> None:
    fit = fit_lengths(tokens)
    found = fit.quantiles([0.0, 0.3, 0.5, 1.0])
    assert set(found) <= set(tokens)
    assert (found[0], found[-1]) == (min(tokens), max(tokens))
    assert (np.diff(found) >= 0).all()
    exact = np.quantile(tokens, 0.3, method="inverted_cdf")
    assert found[1] == exact or math.isclose(0.3 * len(tokens), round(0.3 * len(tokens)))


def test_another_cap_cuts_and_does_not_scale() -> None:
    fit = fit_lengths("deepseek_r1_client66")
    for kind in ("trace", "lognormal"):
        cut = fit.model(kind, max_tokens=8000)
        assert cut.quantiles(np.array([0.2]))[0] == pytest.approx(
            fit.quantiles([0.2], kind)[0], rel=1e-3
        )
        assert cut.quantiles(np.array([0.9]))[0] == 8000
        assert fit.settings(kind, max_tokens=8000)["workload.answers.max_tokens"] == 8000


def test_a_constant_has_the_mean_of_the_lengths_after_the_cap() -> None:
    fit = fit_lengths([10, 20, 90, 100], max_tokens=100)
    assert fit.model("constant").mean_tokens() == 55
    assert fit.model("constant", max_tokens=30).mean_tokens() == 22
    assert fit.settings("constant", max_tokens=30)["workload.answers.mean_tokens"] == 22
    assert fit.model("constant", max_tokens=500).mean_tokens() == 55


def test_a_trace_says_nothing_beyond_its_cap() -> None:
    fit = fit_lengths([10, 20, 30, 30, 30], max_tokens=30)
    with pytest.raises(ValueError, match=r"60.00% of the lengths were cut off at 30: how long"):
        fit.model("trace", max_tokens=31)
    assert fit.model("lognormal", max_tokens=40).mean_tokens() > fit.mean_tokens
    open_end = fit_lengths([10, 20, 30], max_tokens=50)
    assert open_end.model("trace", max_tokens=100).quantiles(np.array([1.0]))[0] == 30


# --- round trip ----------------------------------------------------------------------------------


def simulated(path: Path) -> tuple[np.ndarray, Any]:
    """Lengths that a simulation of a file generates, as its log has them, and its distribution."""
    config = load_simulation(
        path, ["steps=6", "warmup_steps=1", "seeds=1", "gpus=8", "rollout_gpus=4"]
    )
    records: list[Any] = []
    simulator.simulate(config, log=records.append)
    groups = [record for record in records if isinstance(record, GroupRecord)]
    tokens = [sum(part for _, part in sample) for group in groups for sample in group.segments]
    return np.array(tokens), lengths_from(config.workload.answers)


@pytest.mark.parametrize("kind", ["lognormal", "trace", "constant"])
def test_exported_settings_give_the_same_distribution_in_a_simulation(
    kind: Any, tmp_path: Path
) -> None:
    given = drawn(300, 16, mean=400, sigma=0.5, cap=1000, group_correlation=0.0)
    fit = fit_lengths(given, max_tokens=1000).save(tmp_path / "own lengths.csv")
    file = tmp_path / "own.yaml"
    file.write_text(fit.to_yaml(kind) + "  prompts_per_batch: 100\n", encoding="utf-8")
    tokens, lengths = simulated(file)
    assert len(tokens) > 5000
    assert lengths.mean_tokens() == pytest.approx(fit.model(kind).mean_tokens(), rel=1e-5)
    assert lengths.capped_share() == pytest.approx(fit.model(kind).capped_share(), rel=1e-3)
    assert lengths.quantiles(SHARES) == pytest.approx(fit.quantiles(SHARES, kind), rel=1e-4)
    places = np.unique(tokens)
    shares = np.searchsorted(np.sort(tokens), places, side="right") / len(tokens)
    expected = fit.model(kind).share_up_to(places)
    assert np.abs(shares - expected).max() < 0.03


def test_a_saved_histogram_is_read_back_exactly(tmp_path: Path) -> None:
    for source in ("deepseek_r1", [3, 1, 3, 900.5]):
        fit = fit_lengths(source)
        saved = fit.save(tmp_path / "again.csv")
        again = load_histogram(saved.observed.trace)
        for name in ("from_tokens", "to_tokens", "mean_tokens", "weight"):
            assert (getattr(again, name) == getattr(fit.observed.histogram, name)).all()
        assert fit_lengths(tmp_path / "again.csv").sigma == fit.sigma


def test_a_temporary_file_is_removed_when_python_ends() -> None:
    script = "import simulator; print(simulator.fit_lengths([1, 2, 3]).save().observed.trace)"
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    path = Path(ended.stdout.strip())
    assert path.name == "lengths.csv"
    assert not path.parent.exists()


def test_the_block_can_be_read_by_a_person() -> None:
    fit = fit_lengths("deepseek_r1_client66")
    assert fit.to_yaml("trace").splitlines() == [
        "# Lengths of 41,230 responses: deepseek_r1_client66.",
        "# Log-normal: 8,461 tokens on average, sigma 0.683, Kolmogorov-Smirnov distance 0.045 "
        "from them.",
        "# Cap: 32,768 tokens, which 0.01% of them reached, and 1.05% in the log-normal.",
        "workload:",
        "  answers:",
        '    kind: "trace"',
        '    trace: "deepseek_r1_client66"',
        "    mean_tokens: 0.0",
        "    max_tokens: 32768",
    ]


def test_recorded_lengths_are_exported_prompt_by_prompt(tmp_path: Path) -> None:
    fit = fit_lengths(RECORDED)
    file = tmp_path / "own.yaml"
    file.write_text(fit.to_yaml("recorded"), encoding="utf-8")
    answers = load_simulation(file).workload.answers
    assert (answers.kind, answers.trace, answers.max_tokens) == ("recorded", str(RECORDED), 42)
    with pytest.raises(ValueError, match="3 lengths is no run"):
        fit_lengths([1, 2, 3]).settings("recorded")


# --- sources -------------------------------------------------------------------------------------

TABLE = "tokens;prompt_id\n10;a\n20;a\n30;b\n40;b\n"


def test_every_source_of_the_same_lengths_gives_the_same_fit(tmp_path: Path) -> None:
    file = tmp_path / "own.csv"
    file.write_text(TABLE, encoding="utf-8")
    fits = [
        fit_lengths([[10, 20], [30, 40]]),
        fit_lengths(np.array([[10, 20], [30, 40]])),
        fit_lengths(TABLE),
        fit_lengths(TABLE.encode("utf-8-sig")),
        fit_lengths(file),
        fit_lengths(str(file)),
    ]
    assert len({(fit.sigma, fit.mean_tokens, fit.within_prompts) for fit in fits}) == 1
    flat = fit_lengths([10, 20, 30, 40])
    assert flat.sigma == fits[0].sigma
    assert flat.within_prompts is None
    assert "default correlation within a prompt, 0.3" in flat.notes[-1]
    assert fit_lengths("10\n20\n30\n40\n").sigma == flat.sigma
    assert fit_lengths("10,20\n").answers == 20  # one row: a length and its weight


def test_a_column_is_found_by_the_name_that_is_asked_for() -> None:
    text = 'id,prompt,n_out,text\n1,x,10,hello\n2,x,20,"two\nlines, and a ""quote"""\n3,y,30,z\n'
    fit = fit_lengths(text, column="N out", prompt_column="prompt")
    assert fit.observed.histogram.mean_tokens.tolist() == [10, 20, 30]
    assert [list(group) for group in fit.observed.groups] == [[10, 20], [30]]
    with pytest.raises(ValueError, match=r"has no column 'nout2'; did you mean 'n_out'\?"):
        fit_lengths(text, column="nout2")
    with pytest.raises(ValueError, match="has the columns id, prompt, n_out, text; name the one"):
        fit_lengths(text)


@settings(max_examples=30)
@given(st.text(max_size=200))
def test_any_text_is_lengths_or_one_line_that_says_why_not(text: str) -> None:
    try:
        said = fit_lengths(text.encode()).summary[0]
    except ValueError as error:
        said = str(error)
    assert said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ([], {}, "there are no lengths"),
        ([[]], {}, "there are no lengths"),
        ([5, 0], {}, "length 1 is 0, but must be a number of at least 1 token; leave such"),
        ([5, math.nan], {}, "length 1 is nan, but"),
        ([5, "6"], {}, "length 1 is '6', but"),
        ([[5], [True]], {}, "length 1 is True, but"),
        ([5, 9], {"max_tokens": 8}, "max_tokens is 8, but a response has 9 tokens; it is the cap"),
        ([5, 9], {"column": "tokens"}, "only a table has columns"),
        ("deepseek_r1_client6", {}, "did you mean 'deepseek_r1_client66'"),
        ("deepseek_r1", {"column": "x"}, "a shipped trace has no columns"),
        ("nowhere.csv", {}, "nowhere.csv does not exist"),
        (Path("nowhere/run"), {}, "nowhere/run does not exist"),
        (RECORDED, {"column": "x"}, "a run has no columns"),
        ("tokens\n10\nmany\n-1\n", {}, r"line 3: expected 1 number, got 'many' \(2 of 3 rows are"),
        ("tokens,weight\n1,2\n", {"prompt_column": "tokens"}, "has weights, so that its rows are"),
        ("5\n6\n", {"column": "n"}, "has no column 'n': its first row has numbers and no names"),
        ("a,b\n", {"column": "a"}, "has a header but no lengths"),
        (b"\xff\xfe\x00", {"name": "own.csv"}, "own.csv is not UTF-8 text"),
        (b"tokens\n", {"name": "own.csv"}, "own.csv has a header but no lengths"),
        ("tokens\n" + '"unclosed\n' * 3, {}, "expected 1 number, got 'unclosed"),
    ],
)
def test_what_is_no_length_is_refused_in_one_line(
    source: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        fit_lengths(source, **options)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_exported_is_refused() -> None:
    fit = fit_lengths([1, 2, 3])
    with pytest.raises(ValueError, match="write it first"):
        fit.to_yaml("trace")
    with pytest.raises(ValueError, match=r"must end in \.csv"):
        fit.save("lengths.txt")
    with pytest.raises(ValueError, match="kind is 'gamma', but must be one of lognormal, trace"):
        fit.model("gamma")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_tokens is 0"):
        fit.settings(max_tokens=0)
