"""Which version generates which real token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cosim.sampler import Row, cuts, kept_by_share, kept_by_tokens


def test_a_real_token_stays_if_all_of_its_share_was_generated() -> None:
    # 5 real tokens of 10 logged ones: after 6 of them, three stand for whole shares.
    assert kept_by_share(5, 6, 10) == 3
    assert kept_by_share(5, 5, 10) == 2
    assert kept_by_share(5, 1, 10) == 0
    assert kept_by_share(1, 9, 10) == 0


@given(st.integers(1, 50), st.integers(1, 5000), st.data())
def test_shares_and_a_constant_number_of_tokens_agree(
    real: int, each: int, data: st.DataObject
) -> None:
    until = data.draw(st.integers(1, real * each - 1)) if real * each > 1 else 0
    kept = kept_by_share(real, until, real * each)
    assert kept == kept_by_tokens(real, until, each) == until // each
    assert kept < real


def test_something_is_always_left_for_the_last_version() -> None:
    assert kept_by_tokens(3, 10_000, 10) == 2


def test_versions_end_where_the_log_says() -> None:
    assert cuts(((2, 10), (3, 5), (5, 1))) == [(2, 10), (3, 15), (5, 16)]
    assert cuts(((2, 10), (2, 5), (3, 1))) == [(2, 15), (3, 16)]


def test_a_row_is_cut_and_split_by_version() -> None:
    row = Row(7, 1, (4, 4), seed=3, tokens=[5, 6, 7], logprobs=[-0.5, -1.0, -2.0])
    row.versions, row.finish_reason = [0, 0, 1], "stop"
    assert [(part.version, part.tokens) for part in row.segments] == [(0, (5, 6)), (1, (7,))]
    with pytest.raises(ValueError, match="reward nan, but rewards must be finite"):
        row.trajectory()
    row.reward = 1.0
    assert row.trajectory().behavior_logprobs == (-0.5, -1.0, -2.0)
    row.cut(1)
    assert (row.tokens, row.logprobs, row.versions) == ([5], [-0.5], [0])
    with pytest.raises(AssertionError, match="has not ended"):
        row.trajectory()
    with pytest.raises(AssertionError):
        row.cut(1)  # nothing would be discarded
