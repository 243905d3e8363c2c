"""Log-probs and entropy, from hidden states in chunks and from logits."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from areal_lab import logit_tiles
from areal_lab.functional.logprobs.cutoff import in_turn, min_p, top_k, top_p
from areal_lab.functional.logprobs.tiles import VocabularyPart, tile_shape
from areal_lab.functional.logprobs.token_logprobs import (
    logprobs_and_entropy,
    logprobs_and_entropy_from_logits,
    squared_probs,
    squared_probs_from_logits,
)
from tests.reference import formulas
from tests.reference import logprobs as reference

TOKENS, HIDDEN, VOCAB = 7, 4, 11
SOME = 3 * VOCAB * 8
"""Bytes of the logits of three tokens."""


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.double, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.double, requires_grad=True)
    return hidden, weight, torch.randint(VOCAB, (TOKENS,))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100, None])
@pytest.mark.parametrize("cache_bytes", [0, SOME, 1 << 20])
def test_equals_the_reference(inputs, temperature, chunk_tokens, cache_bytes):
    hidden, weight, targets = inputs
    result = logprobs_and_entropy(
        hidden,
        weight,
        targets,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        cache_bytes=cache_bytes,
    )
    logits = (hidden @ weight.T).tolist()
    expected = [
        formulas.logprob_and_entropy(z, y, temperature)
        for z, y in zip(logits, targets.tolist(), strict=True)
    ]
    torch.testing.assert_close(torch.stack(result, 1), torch.tensor(expected, dtype=torch.double))


def test_from_logits_equals_from_hidden_states(inputs):
    hidden, weight, targets = inputs
    for one, other in zip(
        logprobs_and_entropy(hidden, weight, targets, temperature=0.7, chunk_tokens=2),
        logprobs_and_entropy_from_logits(hidden @ weight.T, targets, temperature=0.7),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("used", ["both", "logprobs", "entropy"])
@pytest.mark.parametrize("cache_bytes", [0, SOME])
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_first_and_second_derivatives_are_right(inputs, used, cache_bytes, check):
    hidden, weight, targets = inputs

    def function(hidden, weight):
        result = logprobs_and_entropy(
            hidden, weight, targets, temperature=0.7, chunk_tokens=3, cache_bytes=cache_bytes
        )
        return tuple(result) if used == "both" else getattr(result, used)

    assert check(function, (hidden, weight), fast_mode=True)


def test_third_derivatives_are_right(inputs):
    _, weight, targets = inputs

    def third(function):
        start = torch.linspace(-1, 1, TOKENS * HIDDEN, dtype=torch.double).view(TOKENS, HIDDEN)
        value = start.requires_grad_()
        derivative = sum(output.square().sum() for output in function(value))
        for _ in range(3):
            (derivative,) = torch.autograd.grad(derivative.sum(), value, create_graph=True)
        return derivative

    ours = third(lambda h: logprobs_and_entropy(h, weight, targets, chunk_tokens=3))
    plain = third(lambda h: logprobs_and_entropy_from_logits(h @ weight.T, targets))
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_only_what_asks_for_a_gradient_gets_one(inputs, frozen):
    hidden, weight, targets = inputs
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    result = logprobs_and_entropy(hidden, weight, targets, chunk_tokens=3)
    (result.logprobs.sum() + result.entropy.sum()).backward()
    assert (hidden.grad is None) == (frozen == "hidden")
    assert (weight.grad is None) == (frozen == "weight")


def test_chunks_and_kept_logits_change_nothing(inputs):
    hidden, weight, targets = inputs
    gradients = []
    for chunk_tokens in (1, 2, 100):
        for cache_bytes in (0, SOME, 1 << 20):
            result = logprobs_and_entropy(
                hidden, weight, targets, chunk_tokens=chunk_tokens, cache_bytes=cache_bytes
            )
            loss = (result.logprobs * torch.arange(TOKENS)).sum() + result.entropy.square().sum()
            gradients.append(torch.autograd.grad(loss, (hidden, weight)))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])


def test_kept_logits_serve_several_backward_passes(inputs):
    hidden, weight, targets = inputs
    result = logprobs_and_entropy(hidden, weight, targets, cache_bytes=SOME)
    first, again = (
        torch.autograd.grad(result.logprobs.sum(), (hidden, weight), retain_graph=True)
        for _ in range(2)
    )
    torch.testing.assert_close(first, again, rtol=0, atol=0)


@pytest.mark.parametrize("argnums", [0, (0, 1)], ids=["hidden", "hidden and weight"])
@pytest.mark.parametrize("keep", [None, top_p(0.8)], ids=["all", "top-p"])
def test_samples_that_share_weights_map_to_a_loop(inputs, argnums, keep):
    weight = inputs[1].detach()
    hidden = torch.randn(3, TOKENS, HIDDEN, dtype=torch.double)
    targets = (hidden @ weight.T).argmax(2)

    def total(hidden, weight, targets):
        result = logprobs_and_entropy(
            hidden, weight, targets, keep=keep, chunk_tokens=2, cache_bytes=SOME
        )
        return (result.logprobs * torch.arange(TOKENS)).sum() + result.entropy.square().sum()

    gradient = torch.func.grad(total, argnums=argnums)
    ours = torch.vmap(gradient, in_dims=(0, None, 0))(hidden, weight, targets)
    rows = [gradient(hidden[i], weight, targets[i]) for i in range(3)]
    expected = (
        torch.stack(rows) if argnums == 0 else tuple(map(torch.stack, zip(*rows, strict=True)))
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("tokens", "vocab", "entries"), [(2048, 32768, 1 << 22), (1, 9, 4), (100, 3, 50), (5, 7, 1)]
)
def test_tiles_fit_and_use_what_is_allowed(tokens, vocab, entries):
    rows, columns = tile_shape(tokens, vocab, entries)
    assert 1 <= rows <= tokens
    assert 1 <= columns <= vocab
    assert entries / 2 <= rows * columns <= entries


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.entries = max(self.entries, tensor.numel())
        return result


def test_no_tensor_of_all_logits_ever_exists():
    tokens, hidden_size, vocab, chunk = 64, 4, 512, 8
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    with LargestTensor() as seen:
        result = logprobs_and_entropy(
            hidden,
            weight,
            torch.zeros(tokens, dtype=torch.long),
            chunk_tokens=chunk,
            cache_bytes=4 * chunk * vocab,
        )
        (result.logprobs.sum() + result.entropy.sum()).backward()
    assert seen.entries == chunk * vocab


@pytest.mark.parametrize("asked", [True, False])
def test_logits_are_kept_only_for_a_gradient(asked):
    hidden, weight = torch.randn(64, 4, requires_grad=asked), torch.randn(512, 4)
    with LargestTensor() as seen, torch.set_grad_enabled(asked):
        logprobs_and_entropy(hidden, weight, torch.zeros(64, dtype=torch.long), chunk_tokens=8)
    assert seen.entries == (64 if asked else 8) * 512


def test_by_default_half_as_much_is_kept_as_the_weight_takes(monkeypatch):
    for name in ("_CACHE_BYTES", "_TILE_AND_CACHE_BYTES"):
        monkeypatch.setattr(logit_tiles, name, 0)
    hidden, weight = torch.randn(64, 64, requires_grad=True), torch.randn(512, 64)
    with LargestTensor() as seen:
        logprobs_and_entropy(hidden, weight, torch.zeros(64, dtype=torch.long), chunk_tokens=1)
    assert seen.entries == weight.numel() // 2


def test_what_a_small_tile_leaves_is_kept_too(monkeypatch):
    kept, tile = 20 * 512 * 4, 8 * 512 * 4
    monkeypatch.setattr(logit_tiles, "_CACHE_BYTES", 0)
    monkeypatch.setattr(logit_tiles, "_TILE_AND_CACHE_BYTES", kept + tile)
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(512, 4)
    with LargestTensor() as seen:
        logprobs_and_entropy(hidden, weight, torch.zeros(64, dtype=torch.long), chunk_tokens=8)
    assert seen.entries * 4 == kept


def test_large_logits_stay_finite():
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.0]])
    result = logprobs_and_entropy(hidden, weight, torch.tensor([0, 0]))
    torch.testing.assert_close(result.logprobs, torch.tensor([0.0, -2e4]))
    torch.testing.assert_close(result.entropy, torch.zeros(2))
    (result.logprobs.sum() + result.entropy.sum()).backward()
    assert hidden.grad.isfinite().all()


def test_bfloat16_products_have_a_float32_softmax():
    torch.manual_seed(1)
    hidden = torch.randn(20, 16).bfloat16().requires_grad_()
    weight = torch.randn(50, 16).bfloat16().requires_grad_()
    targets = torch.randint(50, (20,))
    chunked = logprobs_and_entropy(hidden, weight, targets, chunk_tokens=6)
    whole = logprobs_and_entropy_from_logits(hidden @ weight.T, targets)
    assert chunked.logprobs.dtype == torch.float32
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-5)
    assert not torch.equal(chunked.logprobs, chunked.logprobs.bfloat16().float())
    ours = torch.autograd.grad(chunked.logprobs.sum(), (hidden, weight))
    plain = torch.autograd.grad(whole.logprobs.sum(), (hidden, weight))
    torch.testing.assert_close(ours, plain, rtol=0.02, atol=0.05)  # bfloat16 has 8 bits


def test_no_tokens_give_no_log_probs():
    hidden = torch.zeros(0, 4, requires_grad=True)
    result = logprobs_and_entropy(hidden, torch.zeros(5, 4), torch.zeros(0, dtype=torch.long))
    assert result.logprobs.shape == result.entropy.shape == (0,)
    result.logprobs.sum().backward()
    assert hidden.grad.shape == (0, 4)


def test_impossible_tokens_add_nothing_to_the_entropy():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    result = logprobs_and_entropy_from_logits(logits, torch.tensor([1]))
    torch.testing.assert_close(result.entropy, torch.tensor([2.0]).log())
    (result.entropy.sum() + result.logprobs.sum()).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5, 0.0]]))


def test_from_logits_takes_padded_batches():
    logits, targets = torch.randn(2, 3, 5), torch.randint(5, (2, 3))
    padded = logprobs_and_entropy_from_logits(logits, targets)
    flat = logprobs_and_entropy_from_logits(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(padded.logprobs.flatten(), flat.logprobs)
    torch.testing.assert_close(padded.entropy.flatten(), flat.entropy)


RULES = {
    "top-k": (top_k(3), lambda z: reference.keep_top_k(z, 3)),
    "more than there are": (top_k(50), lambda z: reference.keep_top_k(z, 50)),
    "top-p": (top_p(0.7), lambda z: reference.keep_top_p(z, 0.7)),
    "top-p of all": (top_p(1.0), lambda z: [True] * len(z)),
    "min-p": (min_p(0.2), lambda z: reference.keep_min_p(z, 0.2)),
    "in turn": (
        in_turn(top_k(4), top_p(0.8)),
        lambda z: reference.keep_in_turn(
            z, [lambda x: reference.keep_top_k(x, 4), lambda x: reference.keep_top_p(x, 0.8)]
        ),
    ),
}


@pytest.mark.parametrize(("rule", "slow"), RULES.values(), ids=RULES)
@pytest.mark.parametrize("chunk_tokens", [2, None])
def test_rules_equal_the_reference(inputs, rule, slow, chunk_tokens):
    hidden, weight, targets = inputs
    logits = hidden @ weight.T
    expected = []
    for z, y in zip(logits.tolist(), targets.tolist(), strict=True):
        kept = slow([x / 0.7 for x in z])
        expected.append(reference.restricted_logprob_and_entropy(z, y, 0.7, kept))
    expected = torch.tensor(expected, dtype=torch.double)
    assert expected.isfinite().all() == (
        rule in {RULES[x][0] for x in ("more than there are", "top-p of all")}
    )
    ours = logprobs_and_entropy(
        hidden, weight, targets, temperature=0.7, keep=rule, chunk_tokens=chunk_tokens
    )
    torch.testing.assert_close(torch.stack(ours, 1), expected)
    whole = logprobs_and_entropy_from_logits(logits, targets, temperature=0.7, keep=rule)
    torch.testing.assert_close(torch.stack(whole, 1), expected)


def test_equally_likely_tokens_are_kept_together():
    logits = torch.tensor([2.0, 1.0, 1.0, 0.0])
    assert top_k(2)(logits) == 1.0
    assert top_p(0.6)(logits) == 1.0
    assert in_turn(top_k(2), top_p(0.99))(logits) == 1.0


def test_top_p_keeps_the_token_that_crosses_it():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert top_p(0.49)(logits) == logits[0]
    assert top_p(0.51)(logits) == logits[1]
    assert top_p(0.81)(logits) == logits[2]
    assert top_p(1e-9)(logits) == logits[0]


def test_rules_in_turn_renormalize_in_between():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the first two, 0.4 is 57 %: alone it reaches a half, which it does not of all four.
    assert in_turn(top_k(2), top_p(0.5))(logits) == logits[0]
    assert torch.maximum(top_k(2)(logits), top_p(0.5)(logits)) == logits[1]


@pytest.fixture(params=["hidden states", "logits"])
def restricted(request, inputs):
    """Log-probs and entropy under a mask, and gradients of hidden and weight."""
    hidden, weight, targets = inputs

    def function(mask, *, cotangent=1.0, cache_bytes=SOME):
        if request.param == "logits":
            result = logprobs_and_entropy_from_logits(hidden @ weight.T, targets, keep=mask)
        else:
            result = logprobs_and_entropy(
                hidden, weight, targets, keep=mask, chunk_tokens=3, cache_bytes=cache_bytes
            )
        loss = (cotangent * result.logprobs).sum() + result.entropy.sum()
        return result, torch.autograd.grad(loss, (hidden, weight))

    return function


def test_a_mask_equals_the_reference(inputs, restricted):
    hidden, weight, targets = inputs
    mask = (torch.rand(TOKENS, VOCAB) > 0.4).scatter(1, targets[:, None], value=True)
    expected = [
        reference.restricted_logprob_and_entropy(z, y, 1.0, kept)
        for z, y, kept in zip(
            (hidden @ weight.T).tolist(), targets.tolist(), mask.tolist(), strict=True
        )
    ]
    result, _ = restricted(mask)
    torch.testing.assert_close(torch.stack(result, 1), torch.tensor(expected, dtype=torch.double))


@pytest.mark.parametrize("cotangent", [1.0, torch.nan, -torch.inf])
def test_a_target_that_was_not_kept_has_no_gradient(inputs, restricted, cotangent):
    hidden, weight, targets = inputs
    mask = torch.ones(TOKENS, VOCAB, dtype=torch.bool).scatter(1, targets[:, None], value=False)
    mask[0] = True
    from_above = torch.ones(TOKENS).index_fill(0, torch.arange(1, TOKENS), cotangent)
    result, gradients = restricted(mask, cotangent=from_above)
    assert (result.logprobs[1:] == -torch.inf).all()
    assert result.logprobs[0].isfinite()
    entropy_alone = logprobs_and_entropy(hidden, weight, targets, keep=mask)
    expected = torch.autograd.grad(
        entropy_alone.logprobs[0] + entropy_alone.entropy.sum(), (hidden, weight)
    )
    torch.testing.assert_close(gradients, expected)


def test_a_mask_that_keeps_nothing(restricted):
    mask = torch.ones(TOKENS, VOCAB, dtype=torch.bool)
    mask[2] = False
    result, (to_hidden, to_weight) = restricted(mask)
    assert result.logprobs[2] == -torch.inf
    assert result.entropy[2] == 0
    assert (to_hidden[2] == 0).all()
    assert to_weight.isfinite().all()


def test_a_mask_of_everything_changes_nothing(inputs, restricted):
    hidden, weight, targets = inputs
    result, gradients = restricted(torch.ones(TOKENS, VOCAB, dtype=torch.bool))
    plain = logprobs_and_entropy(hidden, weight, targets)
    torch.testing.assert_close(result, plain)
    expected = torch.autograd.grad(plain.logprobs.sum() + plain.entropy.sum(), (hidden, weight))
    torch.testing.assert_close(gradients, expected)


def test_a_rule_keeps_the_same_tokens_when_logits_are_made_again():
    """Another tiling gives other last bits, and `top_k(1)` has the target on its edge."""
    torch.manual_seed(0)
    hidden = torch.randn(300, 257, requires_grad=True)
    weight = torch.randn(513, 257, requires_grad=True)
    targets = (hidden @ weight.T).argmax(1)
    result = logprobs_and_entropy(
        hidden, weight, targets, keep=top_k(1), chunk_tokens=7, cache_bytes=0
    )
    assert (result.logprobs == 0).all()
    assert (result.entropy == 0).all()
    gradients = torch.autograd.grad(result.logprobs.sum(), (hidden, weight))
    for gradient in gradients:
        assert (gradient.abs() < 0.01).all()  # the only possible token is certain


def test_first_and_second_derivatives_under_a_rule(inputs):
    hidden, weight, targets = inputs
    targets = (hidden @ weight.T).argmax(1)

    def function(hidden, weight):
        return tuple(
            logprobs_and_entropy(
                hidden, weight, targets, keep=top_p(0.8), chunk_tokens=3, cache_bytes=SOME
            )
        )

    assert torch.autograd.gradcheck(function, (hidden, weight), fast_mode=True)
    assert torch.autograd.gradgradcheck(function, (hidden, weight), fast_mode=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: top_k(0), "k is 0"),
        (lambda: top_p(0.0), "p is 0.0.*leave the rule out"),
        (lambda: top_p(1.1), "p is 1.1"),
        (lambda: min_p(float("nan")), "p is nan"),
    ],
)
def test_bad_rules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 3, 4)}, r"hidden has shape \(2, 3, 4\).*flatten"),
        ({"weight": torch.zeros(5, 3)}, r"weight \(5, 3\)"),
        ({"weight": torch.zeros(5, 4).double()}, r"weight torch.float64.*weight.to"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"targets has shape \(3,\)"),
        ({"targets": torch.zeros(2)}, "targets has dtype torch.float32"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"cache_bytes": -1}, "cache_bytes is -1"),
        ({"keep": torch.ones(2, 4) > 0}, r"keep is a torch.bool tensor of shape \(2, 4\)"),
        ({"keep": torch.ones(2, 5)}, "keep is a torch.float32.*True = the sampler kept"),
    ],
)
def test_bad_inputs_are_refused(change, message):
    inputs = {
        "hidden": torch.zeros(2, 4),
        "weight": torch.zeros(5, 4),
        "targets": torch.zeros(2, dtype=torch.long),
    }
    with pytest.raises(ValueError, match=message):
        logprobs_and_entropy(**{**inputs, **change})


def both_functions(inputs):
    """From hidden states and from logits, as functions of the targets."""
    hidden, weight, _ = inputs
    return [
        lambda targets: logprobs_and_entropy(hidden, weight, targets, chunk_tokens=3),
        lambda targets: logprobs_and_entropy_from_logits(hidden @ weight.T, targets),
    ]


@pytest.mark.parametrize("target", [-100, -1, VOCAB])
def test_targets_outside_the_vocabulary_are_refused(inputs, target):
    targets = inputs[2].clone()
    targets[3] = target
    for function in both_functions(inputs):
        message = rf"targets has an entry {target}, but must be in 0 \.\. {VOCAB - 1}; give pad"
        with pytest.raises(ValueError, match=message):
            function(targets)


@pytest.mark.usefixtures("unchecked_shapes")
def test_they_are_refused_under_vmap_too(inputs):
    """There the values cannot be looked at; compiled, see `test_compile`."""
    targets = inputs[2].expand(2, -1).clone()
    targets[1, 3] = -1
    for function in both_functions(inputs):
        with pytest.raises(RuntimeError, match="index -1 is out of bounds"):
            torch.func.vmap(function)(targets)


def test_tensors_without_values_pass_the_check_of_targets(inputs):
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = [torch.empty_like(x) for x in inputs]
        for function in both_functions(fake):
            assert function(fake[2]).logprobs.shape == (TOKENS,)


# --- sums of squared probabilities


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, None])
def test_squared_probs_equal_the_reference(inputs, temperature, chunk_tokens):
    hidden, weight, _ = inputs
    logits = hidden @ weight.T
    kept = torch.rand(logits.shape, generator=torch.Generator().manual_seed(0)) > 0.4
    kept[0] = False
    for keep, mask in ((None, torch.ones_like(kept)), (kept, kept)):
        rows = zip(logits.tolist(), mask.tolist(), strict=True)
        expected = [reference.squared_probs(z, temperature, chosen) for z, chosen in rows]
        keywords = {"temperature": temperature, "keep": keep}
        ours = squared_probs(hidden, weight, chunk_tokens=chunk_tokens, **keywords)
        assert ours.tolist() == pytest.approx(expected, rel=1e-12)
        again = squared_probs_from_logits(logits, **keywords)
        assert again.tolist() == pytest.approx(expected, rel=1e-12)
        assert not ours.requires_grad


def test_squared_probs_by_hand():
    """A certain token 1, all equal 1 / V, a rule that keeps two equal ones 1 / 2."""
    logits = torch.tensor([[1e4, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    assert squared_probs_from_logits(logits).tolist() == [1.0, 0.25]
    two = torch.tensor([[3.0, 3.0, 0.0, 0.0]])
    assert squared_probs_from_logits(two, keep=top_k(2)).tolist() == [0.5]
    assert squared_probs(two.new_zeros(0, 3), two.new_zeros(4, 3)).shape == (0,)
    half = squared_probs(torch.zeros(2, 3).bfloat16(), torch.zeros(4, 3).bfloat16())
    assert half.dtype == torch.float32


def test_the_energy_of_the_token_baseline_is_the_norm_of_a_gradient(inputs):
    """1 - 2 pi(y) + sum of pi squared is |d log pi(y) / d logits|^2."""
    hidden, weight, targets = inputs
    logits = (hidden @ weight.T).detach().requires_grad_()
    logprobs, _ = logprobs_and_entropy_from_logits(logits, targets)
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    energy = 1 - 2 * logprobs.exp() + squared_probs(hidden, weight, chunk_tokens=2)
    torch.testing.assert_close(energy, gradient.square().sum(1))


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_inputs_of_squared_probs_are_refused():
    hidden, weight = torch.zeros(2, 4), torch.zeros(5, 4)
    for keywords, message in [
        ({"weight": torch.zeros(5, 3)}, r"weight \(5, 3\)"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
        ({"keep": torch.ones(2, 4) > 0}, "keep is a torch.bool tensor of shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            squared_probs(**{"hidden": hidden, "weight": weight, **keywords})


def in_parts(
    hidden: Tensor, weight: Tensor, targets: Tensor, parts: int, **options: Any
) -> list[tuple[Tensor, ...]]:
    """Log-prob, entropy and gradients from each of several threads that have a part of the
    vocabulary, as the processes of a trainer have."""
    step = weight.shape[0] // parts
    barrier, shared = threading.Barrier(parts, timeout=30), [hidden] * parts

    def meet(rank: int, tensor: Tensor) -> list[Tensor]:
        shared[rank] = tensor
        barrier.wait()
        everyone = list(shared)
        barrier.wait()
        return everyone

    def compute(rank: int) -> tuple[Tensor, ...]:
        h = hidden.detach().clone().requires_grad_()
        w = weight.detach()[rank * step : (rank + 1) * step].clone().requires_grad_()
        part = VocabularyPart(
            first=rank * step,
            vocabulary=weight.shape[0],
            gather=lambda tensor: torch.stack(meet(rank, tensor)),
            add_up=lambda tensor: tensor.copy_(sum(meet(rank, tensor.clone()))),
        )
        scored = logprobs_and_entropy(h, w, targets, part=part, **options)
        (scored.logprobs.cos().sum() + (scored.entropy**2).sum()).backward()
        assert h.grad is not None
        assert w.grad is not None
        return scored.logprobs.detach(), scored.entropy.detach(), h.grad, w.grad

    with ThreadPoolExecutor(parts) as pool:
        return list(pool.map(compute, range(parts)))


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("cache_bytes", [0, None])
def test_parts_of_the_vocabulary_give_what_the_whole_one_gives(
    parts: int, cache_bytes: int | None
) -> None:
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(9, 5, generator=draw, dtype=torch.float64).mul_(3).requires_grad_()
    weight = torch.randn(12, 5, generator=draw, dtype=torch.float64).requires_grad_()
    targets = torch.randint(12, (9,), generator=draw)
    options: dict[str, Any] = {"temperature": 0.7, "chunk_tokens": 2, "cache_bytes": cache_bytes}
    whole = logprobs_and_entropy(hidden, weight, targets, **options)
    (whole.logprobs.cos().sum() + (whole.entropy**2).sum()).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    for rank, found in enumerate(in_parts(hidden, weight, targets, parts, **options)):
        rows = weight.grad.chunk(parts)[rank]
        for got, expected in zip(found, (*whole, hidden.grad, rows), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_a_part_of_the_vocabulary_knows_the_tokens_of_the_others_and_no_rule() -> None:
    part = VocabularyPart(
        first=0, vocabulary=6, gather=lambda tensor: tensor[None], add_up=lambda tensor: tensor
    )
    hidden, weight = torch.randn(2, 4), torch.randn(3, 4)
    logprobs_and_entropy(hidden, weight, torch.tensor([0, 5]), part=part)
    with pytest.raises(ValueError, match="targets"):
        logprobs_and_entropy(hidden, weight, torch.tensor([0, 6]), part=part)
    with pytest.raises(ValueError, match="keep needs the logits of the whole vocabulary"):
        logprobs_and_entropy(hidden, weight, torch.tensor([0, 5]), part=part, keep=top_p(0.9))
