"""The linear recurrence: equal to a loop, however long, in both directions, with any holes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional.advantages import recurrence
from areal_lab.functional.advantages.recurrence import linear_recurrence, next_in_sequence
from areal_lab.functional.segments import Segments, packed_sequences, sequence_edges
from tests.reference import returns as reference

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def draw(*shape, seed=0):
    """Factors, some of them exactly 0 and 1, and inputs."""
    generator = torch.Generator().manual_seed(seed)
    factors = torch.rand(shape, generator=generator, dtype=torch.double) * 1.2 - 0.1
    factors = factors.clamp(0, 1)
    return factors, torch.randn(shape, generator=generator, dtype=torch.double)


def loop(factors, inputs, mask=None, **keywords):
    rows = [x.tolist() for x in (factors, inputs)]
    expected = reference.linear_recurrence(
        *rows, None if mask is None else mask.tolist(), **keywords
    )
    return torch.tensor(expected, dtype=torch.double)


# Below a block, whole blocks, one more, and enough for a second level of blocks.
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 128, 1000, 5000])
@pytest.mark.parametrize("reverse", [True, False])
def test_one_sequence_equals_the_loop(tokens, reverse):
    factors, inputs = draw(tokens)
    mask = inputs.abs() > 0.3
    ours = linear_recurrence(factors, inputs, reverse=reverse)
    torch.testing.assert_close(ours, loop(factors, inputs, reverse=reverse), **EXACT)
    ours = linear_recurrence(
        factors, inputs, mask, beyond=torch.tensor(3.0, dtype=torch.double), reverse=reverse
    )
    expected = loop(factors, inputs, mask, beyond=3.0, reverse=reverse)
    torch.testing.assert_close(ours, expected, **EXACT)


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 65, 1000])
@pytest.mark.parametrize("reverse", [True, False])
def test_doubling_equals_the_loop(tokens, reverse):
    """What other devices and compiled code run."""
    factors, inputs = draw(2, tokens)
    ours = recurrence._double(factors, inputs, reverse)
    expected = [loop(*row, reverse=reverse) for row in zip(factors, inputs, strict=True)]
    torch.testing.assert_close(ours, torch.stack(expected), **EXACT)


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=8)


@settings(max_examples=30)
@given(lengths, st.booleans(), st.booleans(), st.integers(0, 9))
def test_ragged_sequences_equal_the_loop_padded_and_packed(lengths, reverse, beyond, seed):
    width = max(1, *lengths)
    factors, inputs = draw(len(lengths), width, seed=seed)
    exists = torch.arange(width) < torch.tensor(lengths)[:, None]
    mask = exists & (inputs > -0.5)
    numbers = inputs.sum(1) if beyond else None
    expected = []
    for i, length in enumerate(lengths):
        row = (factors[i, :length], inputs[i, :length], mask[i, :length])
        after = numbers[i].item() if beyond else 0.0
        expected.append(loop(*row, beyond=after, reverse=reverse))

    missing = torch.where(exists, 0.0, torch.nan)
    padded = linear_recurrence(
        factors + missing, inputs + missing, mask, beyond=numbers, reverse=reverse
    )
    sequences = packed_sequences(torch.tensor([0, *lengths]).cumsum(0), sum(lengths))
    packed = linear_recurrence(
        factors[exists],
        inputs[exists],
        mask[exists],
        beyond=numbers,
        sequences=sequences,
        reverse=reverse,
    )
    torch.testing.assert_close(packed, torch.cat(expected), **EXACT)
    torch.testing.assert_close(padded[exists], torch.cat(expected), **EXACT)


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("tokens", [5, 200])
def test_first_and_second_derivatives_equal_those_of_a_loop(tokens, reverse):
    """Also across blocks, where finite differences would take long."""

    def step_by_step(factors, inputs):
        y, out = torch.zeros((), dtype=torch.double), [None] * tokens
        for t in reversed(range(tokens)) if reverse else range(tokens):
            y = factors[t] * y + inputs[t]
            out[t] = y
        return torch.stack(out)

    gradients = []
    for function in (step_by_step, lambda a, b: linear_recurrence(a, b, reverse=reverse)):
        leaves = [x.requires_grad_() for x in draw(tokens)]
        first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        gradients.append([*first, *second])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-10)


def test_gradients_run_the_other_way():
    """dL/db of the reverse recurrence is the forward recurrence of dL/dy."""
    factors, inputs = draw(100)
    inputs.requires_grad_()
    weights = torch.linspace(-1, 1, 100, dtype=torch.double)
    (gradient,) = torch.autograd.grad((weights * linear_recurrence(factors, inputs)).sum(), inputs)
    earlier = torch.cat([factors.new_zeros(1), factors[:-1]])
    torch.testing.assert_close(gradient, linear_recurrence(earlier, weights, reverse=False))


def test_only_what_wants_a_gradient_gets_one():
    factors, inputs = draw(100)
    linear_recurrence(factors.requires_grad_(), inputs).sum().backward()
    assert factors.grad is not None
    assert inputs.grad is None


@pytest.mark.parametrize("dims", [(0, 0), (None, 0), (0, None), (1, 0)])
def test_vmap_over_any_input_and_axis(dims):
    factors, inputs = draw(3, 100)
    first = factors[0] if dims[0] is None else factors.movedim(0, dims[0])
    second = inputs[0] if dims[1] is None else inputs
    ours = torch.func.vmap(linear_recurrence, in_dims=dims)(first, second)
    expected = linear_recurrence(
        factors[:1].expand(3, -1) if dims[0] is None else factors,
        inputs[:1].expand(3, -1) if dims[1] is None else inputs,
    )
    torch.testing.assert_close(ours, expected, **EXACT)


@settings(max_examples=20)
@given(st.integers(1, 300), st.integers(0, 5))
def test_cutting_a_sequence_and_handing_on_what_lies_beyond_changes_nothing(tokens, seed):
    factors, inputs = draw(tokens, seed=seed)
    whole = linear_recurrence(factors, inputs)
    at = tokens // 3
    late = linear_recurrence(factors[at:], inputs[at:])
    early = linear_recurrence(factors[:at], inputs[:at], beyond=late[0])
    torch.testing.assert_close(torch.cat([early, late]), whole, **EXACT)


def test_a_factor_of_zero_starts_anew_and_one_number_is_for_all():
    inputs = torch.tensor([1.0, 2.0, 4.0, 8.0])
    halves = linear_recurrence(torch.tensor([0.5, 0.0, 0.5, 0.5]), inputs)
    assert halves.tolist() == [2.0, 2.0, 8.0, 8.0]
    assert linear_recurrence(0.5, inputs).tolist() == [4.0, 6.0, 8.0, 8.0]
    assert linear_recurrence(1.0, inputs, reverse=False).tolist() == [1.0, 3.0, 7.0, 15.0]


def test_masked_steps_may_hold_anything():
    factors, inputs = draw(90)
    mask = inputs > 0
    usual = linear_recurrence(factors, inputs, mask)
    for junk in (torch.nan, torch.inf, -torch.inf):
        bad_factors = torch.where(mask, factors, junk).requires_grad_()
        bad_inputs = torch.where(mask, inputs, junk).requires_grad_()
        ours = linear_recurrence(bad_factors, bad_inputs, mask)
        assert torch.equal(ours, usual)
        ours.sum().backward()
        for gradient in (bad_factors.grad, bad_inputs.grad):
            assert gradient.isfinite().all()
            assert (gradient[~mask] == 0).all()


def test_what_lies_beyond_other_sequences_may_be_anything_where_a_sequence_is_empty():
    """An empty sequence has no token, so what lies beyond it goes nowhere."""
    sequences = packed_sequences(torch.tensor([0, 2, 2, 3]), 3)
    beyond = torch.tensor([1.0, torch.nan, 2.0])
    ours = linear_recurrence(0.5, torch.zeros(3), beyond=beyond, sequences=sequences)
    assert ours.tolist() == [0.25, 0.5, 1.0]


def test_long_float32_sequences_keep_their_digits():
    """Sums of a hundred thousand terms: within float32's resolution of the float64 result."""
    factors, inputs = draw(100_000)
    factors = 0.9 + 0.1 * factors
    exact = linear_recurrence(factors, inputs)
    ours = linear_recurrence(factors.float(), inputs.float())
    torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factors", [1.0, torch.ones(300, dtype=torch.bfloat16)])
def test_bfloat16_is_added_up_in_float32(factors):
    """Beyond 256 a bfloat16 cannot count."""
    ones = torch.ones(300, dtype=torch.bfloat16)
    ours = linear_recurrence(factors, ones, reverse=False)
    assert ours.dtype == torch.float32
    assert ours.tolist() == list(range(1, 301))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4)])
def test_nothing_gives_nothing(shape):
    empty = torch.zeros(shape, requires_grad=True)
    ours = linear_recurrence(empty, empty, torch.ones(shape, dtype=torch.bool))
    assert ours.shape == shape
    ours.sum().backward()
    assert next_in_sequence(empty).shape == shape


def test_neighbors_and_edges_of_packed_sequences():
    sequences = packed_sequences(torch.tensor([0, 2, 2, 5]), 5)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])
    beyond = torch.tensor([10.0, 20.0, 30.0])
    assert next_in_sequence(values, sequences=sequences).tolist() == [2, 0, 4, 5, 0]
    following = next_in_sequence(values, beyond=beyond, sequences=sequences)
    assert following.tolist() == [2, 10, 4, 5, 30]
    assert sequence_edges(values, sequences, last=True).tolist() == [0, 1, 0, 0, 1]
    assert sequence_edges(values, sequences, last=False).tolist() == [1, 0, 1, 0, 0]
    assert sequence_edges(values, last=True).tolist() == [0, 0, 0, 0, 1]


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factors": torch.ones(2)}, r"factors has shape \(2,\) and inputs \(3,\)"),
        ({"mask": torch.ones(3)}, "mask has dtype torch.float32"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, r"inputs has shape \(3,\) and mask \(2,\)"),
        ({"beyond": torch.ones(2)}, r"beyond has shape \(2,\), but must be \(\): one per seq"),
        (
            {"sequences": Segments(torch.zeros(2, dtype=torch.long), 1)},
            r"sequences.ids has shape \(2,\)",
        ),
        ({"sequences": Segments(torch.zeros(3), 1)}, "sequences.ids has dtype torch.float32"),
        (
            {
                "sequences": Segments(torch.zeros(3, dtype=torch.long), 2),
                "beyond": torch.ones(3),
            },
            r"beyond has shape \(3,\), but must be \(2,\)",
        ),
    ],
)
def test_bad_inputs_are_refused(change, message):
    inputs = {"factors": torch.ones(3), "inputs": torch.ones(3)}
    with pytest.raises(ValueError, match=message):
        linear_recurrence(**{**inputs, **change})


@pytest.mark.usefixtures("unchecked_shapes")
def test_integers_are_refused():
    whole = torch.arange(3)
    with pytest.raises(ValueError, match=r"inputs has dtype torch.int64.*pass \.float\(\)"):
        linear_recurrence(0.9, whole)
    with pytest.raises(ValueError, match=r"factors has dtype torch\.int64"):
        linear_recurrence(whole, whole.double())
