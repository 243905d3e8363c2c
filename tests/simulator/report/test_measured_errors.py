"""Errors of measured runs: which rows make the interval of a prediction, and what is said of it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.config.load import load_simulation
from simulator.report.measured_errors import (
    AGENTS,
    BROADCASTS,
    DRAFTS,
    EAGER,
    LARGEST,
    OTHER_GPUS,
    PARTS,
    STATES,
    Kind,
    MeasuredErrors,
    MeasuredRow,
    change_of,
    gpus_of,
    kind_of,
    known_lines,
    measured_errors,
    never_compared,
    number_record,
    step_record,
    undecided,
)
from simulator.stats.statistics import model_error
from tests.simulator.report.known_errors import DENSE, errors_of, row

COLOCATED = DENSE._replace(colocated=True)
MIXTURE = DENSE._replace(mixture=True)
BROADCAST = ("weights.backend=nccl", "weights.update_s=null", "weights.load_s=null")
AGENT = DENSE._replace(parts=(AGENTS,))
FITTED = ("trainer.mfu",)

KINDS = st.builds(
    Kind,
    st.booleans(),
    st.booleans(),
    st.sampled_from([(), (EAGER,), (AGENTS,), (STATES, DRAFTS)]),
)
ROWS = st.lists(
    st.builds(
        row,
        st.floats(-1, 1),
        group=st.sampled_from("abcdef"),
        gain=st.none() | st.floats(-1, 1),
        kind=KINDS,
        fitted=st.sampled_from([(), FITTED]),
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize(
    ("overrides", "kind", "gpus"),
    [
        ([], DENSE, ["H100"]),
        (["cluster.placement=colocated"], COLOCATED, ["H100"]),
        (["model=Qwen3-30B-A3B"], MIXTURE, ["H100"]),
        (
            ["workload.turns=2", "cluster.rollout_gpu=h20"],
            DENSE._replace(parts=(OTHER_GPUS, AGENTS)),
            ["H100", "H20"],
        ),
        (["rollout.cuda_graphs=false"], DENSE._replace(parts=(EAGER,)), ["H100"]),
        (
            ["model=Qwen3.5-9B", "rollout.speculative_tokens=3", "rollout.acceptance_length=2"],
            DENSE._replace(parts=(STATES, DRAFTS)),
            ["H100"],
        ),
        (["model=Qwen3-235B-A22B"], MIXTURE._replace(parts=(LARGEST,)), ["H100"]),
        (
            ["model=Qwen3-235B-A22B", *BROADCAST],
            MIXTURE._replace(parts=(LARGEST,)),
            ["H100"],
        ),
        (
            ["model=Qwen3-30B-A3B", *BROADCAST],
            MIXTURE._replace(parts=(BROADCASTS,)),
            ["H100"],
        ),
        (["model=Qwen3-30B-A3B", *BROADCAST, "weights.load_s=3"], MIXTURE, ["H100"]),
        (["workload.turns_most=4"], AGENT, ["H100"]),
    ],
)
def test_a_config_has_a_kind(overrides: list[str], kind: Kind, gpus: list[str]) -> None:
    config = load_simulation("small", overrides)
    assert kind_of(config) == kind
    assert gpus_of(config) == gpus


def test_three_groups_without_a_fit_make_the_interval_of_their_kind() -> None:
    own = [row(0.1, group=group, kind=COLOCATED) for group in "abc"]
    others = [row(0.5, group=group) for group in "abcd"]
    known = MeasuredErrors([*own, *others]).step(COLOCATED)
    assert known.alike
    assert len(known.used) == 3
    assert known.error.spread == pytest.approx(0.1)
    assert known.error.groups == 3


@pytest.mark.parametrize("fitted", [False, True])
def test_few_groups_or_fitted_ones_take_those_of_more_kinds(*, fitted: bool) -> None:
    """A prediction after a fit to a run of the same kind says little of one without a fit."""
    names = "abc" if fitted else "ab"
    own = [row(0.1, group=name, kind=COLOCATED, fitted=FITTED if fitted else ()) for name in names]
    others = [row(0.5, group=group) for group in "defg"]
    known = MeasuredErrors([*own, *others]).step(COLOCATED)
    assert not known.alike
    assert len(known.of_kind) == len(own)
    assert len(known.used) == len(own) + 4
    assert known.error.spread > 0.3
    (line, *rest) = known_lines("step", known)
    before = "but after the trainer's speed had been fitted" if fitted else "Only 2 measured runs"
    assert before in line
    assert "of this kind (dense, colocated) were compared, off by a factor of up to 1.11" in line
    assert bool(rest) is fitted


def test_a_kind_that_was_predicted_worse_than_the_others_keeps_its_error() -> None:
    others = [row(0.1, group=group) for group in "abcd"]
    known = MeasuredErrors([*others, row(1.2, group="e", kind=MIXTURE)]).step(MIXTURE)
    assert known.error.spread == pytest.approx(1.2)
    assert known.error.groups == 5
    assert (
        "Only 1 measured run of this kind (mixture of experts, disaggregated) was"
        in (known_lines("step", known)[0])
    )


def test_an_agent_takes_the_errors_of_runs_with_the_same_model_and_placement() -> None:
    own = [row(0.2, group=group) for group in "abc"]
    others = [row(0.9, group=group, kind=COLOCATED) for group in "abc"]
    known = MeasuredErrors([*own, *others]).step(AGENT)
    assert len(known.of_kind) == 0
    assert known.error.spread == pytest.approx(math.hypot(0.2, PARTS[AGENTS]))
    assert known.error.groups == 3
    line = known_lines("step", known)[0]
    assert line.startswith(f"No measured run of this kind (dense, disaggregated, {AGENTS}) was")


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_was_never_measured_widens_the_interval_and_is_named(name: str) -> None:
    errors = MeasuredErrors([row(0.2, group=group, gain=0.2, family=group) for group in "abc"])
    kind = DENSE._replace(parts=(name,))
    known = errors.step(kind)
    assert known.error.spread == pytest.approx(math.hypot(0.2, PARTS[name]))
    assert errors.gain(kind).error.spread == pytest.approx(math.hypot(0.2, PARTS[name] / 2))
    assert errors.step(DENSE).error.spread == pytest.approx(0.2)
    record = step_record(kind, ["A100-80"] if name == OTHER_GPUS else [], errors)
    never = "A100-80 GPUs" if name == OTHER_GPUS else name
    assert never in record["never_compared"]
    assert any("The interval is wider by the error of" in line for line in record["says"])


@pytest.mark.parametrize(("off", "widened"), [(0.5, True), (0.1, False)])
def test_three_groups_with_a_part_replace_its_assumed_error(off: float, *, widened: bool) -> None:
    """As they say: an error that was assumed too large shrinks, too."""
    kind = DENSE._replace(parts=(DRAFTS,))
    rows = [row(0.2, group=group) for group in "abc"]
    rows += [row(off, group=group, kind=kind) for group in "def"]
    known = MeasuredErrors(rows).step(kind)
    assert known.parts[DRAFTS] == pytest.approx(math.sqrt(0.25 - 0.04) if widened else 0)
    assert known.error.spread == pytest.approx(max(off, 0.2))
    assert MeasuredErrors(rows).step(DENSE).error.spread == pytest.approx(0.2)


@given(ROWS, KINDS)
def test_no_interval_is_narrower_than_that_of_the_own_rows(
    rows: list[MeasuredRow], kind: Kind
) -> None:
    errors = MeasuredErrors(rows)
    for known in (errors.step(kind), errors.gain(kind), errors.change(kind)):
        assert kind.parts or len(known.used) >= len(known.of_kind)  # else rows without parts
        if known.of_kind.each:
            own = model_error(known.of_kind.groups.values())
            assert known.error.spread >= own.spread
        assert 0 <= known.used.contained <= len(known.used)
        assert 1 <= known.used.median_factor <= known.used.largest_factor


@given(st.floats(0, 1), st.floats(0.01, 1))
def test_larger_errors_of_others_widen_the_interval(size: float, more: float) -> None:
    values = [1.0, 1.1, 0.95]
    small, large = (
        number_record(values, errors_of(one).step(DENSE).error) for one in (size, size + more)
    )
    assert small["low"] is not None is not large["low"]
    assert small["high"] is not None is not large["high"]
    assert large["low"] <= small["low"]
    assert large["high"] >= small["high"]
    assert {name: small[name] for name in ("seeds_low", "seeds_high", "mean")} == {
        name: large[name] for name in ("seeds_low", "seeds_high", "mean")
    }


def test_rows_of_the_own_group_do_not_help_to_contain_it() -> None:
    """Else a group of many rows would be contained by its own spread."""
    rows = [row(0.01, group=group) for group in "abc"] + [row(1.0, group="d", family="d")] * 5
    assert MeasuredErrors(rows).step(DENSE).used.contained == 3


def test_a_change_within_a_family_has_the_difference_of_its_errors() -> None:
    rows = [
        *(row(one, group="a") for one in (0.5, 0.6, 0.8)),
        *(row(one, group="b") for one in (-0.3, -0.3)),
        row(0.2, group="c", family="alone"),
        row(0.2, group="a", kind=COLOCATED),
    ]
    known = MeasuredErrors(rows).change(DENSE)
    values = sorted(round(abs(one.value), 6) for one in known.used.each)
    assert values == pytest.approx([0.0, 0.1, 0.2, 0.3])
    squares = [(0.01 + 0.04 + 0.09) / 3, 0.0]  # each group counts once
    assert known.error.spread == pytest.approx(math.sqrt(sum(squares) / 2))
    assert "pairs of measured runs" in known_lines("change", known)[0]


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ([], ["eta=0"], "gain"),
        (["schedule.name=synchronous"], ["eta=4"], "gain"),
        (["schedule.name=synchronous", "cluster.placement=colocated"], [], "gain"),
        ([], ["gpus=6"], "change"),
        (["eta=1"], ["eta=4"], "change"),
        ([], ["cluster.gpu=H200"], "both"),
        ([], ["cluster.rollout_gpu=H20"], "both"),
        ([], ["model=Qwen2.5-1.5B"], "both"),
        ([], ["workload.turns=2"], "both"),
        (["schedule.name=synchronous"], ["workload.turns=2"], "both"),
        (
            ["schedule.name=synchronous"],
            ["schedule.name=synchronous", "cluster.placement=colocated"],
            "both",
        ),
    ],
)
def test_the_ratio_of_two_runs_is_what_they_differ_in(
    first: list[str], second: list[str], what: str
) -> None:
    one, other = (load_simulation("small", overrides) for overrides in (first, second))
    errors = MeasuredErrors([row(0.3, group=name, gain=0.1, family="f") for name in "aabbcc"])
    for pair in ((one, other), (other, one)):
        found, known = change_of(*pair, errors)
        assert found == what
        parts = [PARTS[name] for config in (one, other) for name in kind_of(config).parts]
        expected = {"gain": 0.1, "change": 0.0, "both": math.hypot(0.3, 0.3, *parts)}[what]
        # H200 is one of the GPUs of most rows, H20 is not.
        assert known.error.spread == pytest.approx(expected)


def test_what_these_runs_have_and_no_measured_one_has_is_named() -> None:
    errors = MeasuredErrors([row(0.1), row(0.1, kind=COLOCATED)])
    mixtures = [Kind(mixture=True, colocated=colocated) for colocated in (False, True)]
    eager = COLOCATED._replace(parts=(OTHER_GPUS, EAGER))
    assert never_compared([DENSE, COLOCATED], ["H100"], errors) == []
    assert never_compared([DENSE, AGENT, AGENT], ["H100", "A100-80"], errors) == [
        AGENTS,
        "A100-80 GPUs",
    ]
    assert never_compared([*mixtures, eager], [], errors) == [
        "mixture of experts, disaggregated",
        "mixture of experts, colocated",
        EAGER,
    ]
    measured = MeasuredErrors([row(0.1, kind=AGENT), row(0.1, kind=eager)])
    assert never_compared([AGENT, eager], ["H100"], measured) == []


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_ratio_is_undecided_exactly_if_its_interval_contains_1(one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert undecided(low, high) is (low <= 1 <= high)
    assert not undecided(None, None)


def test_no_row_is_refused_with_the_command_that_makes_them() -> None:
    with pytest.raises(ValueError, match=r"run: python -m reproductions.measured_runs --save"):
        MeasuredErrors([])


def test_the_packaged_errors_give_intervals_of_every_kind() -> None:
    errors = measured_errors()
    for mixture in (False, True):
        for colocated in (False, True):
            for parts in ((), (AGENTS,)):
                kind = Kind(mixture=mixture, colocated=colocated, parts=parts)
                for known in (errors.step(kind), errors.gain(kind), errors.change(kind)):
                    assert 0 < known.error.spread < 3
                    assert known.error.groups >= 2
