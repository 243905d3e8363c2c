"""Log-probs and entropy, from hidden states in chunks and from logits."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_lab.functional import logprobs_and_entropy, logprobs_and_entropy_from_logits
from tests.reference import formulas

TOKENS, HIDDEN, VOCAB = 7, 4, 11


@pytest.fixture
def inputs():
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.double, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.double, requires_grad=True)
    return hidden, weight, torch.randint(VOCAB, (TOKENS,))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100, None])
def test_equals_the_reference(inputs, temperature, chunk_tokens):
    hidden, weight, targets = inputs
    result = logprobs_and_entropy(
        hidden, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens
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
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_first_and_second_derivatives_are_right(inputs, used, check):
    hidden, weight, targets = inputs

    def function(hidden, weight):
        result = logprobs_and_entropy(hidden, weight, targets, temperature=0.7, chunk_tokens=3)
        return tuple(result) if used == "both" else getattr(result, used)

    assert check(function, (hidden, weight))


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


def test_chunks_change_nothing(inputs):
    hidden, weight, targets = inputs
    gradients = []
    for chunk_tokens in (1, 2, 100):
        result = logprobs_and_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
        loss = (result.logprobs * torch.arange(TOKENS)).sum() + result.entropy.square().sum()
        gradients.append(torch.autograd.grad(loss, (hidden, weight)))
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0])


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
            hidden, weight, torch.zeros(tokens, dtype=torch.long), chunk_tokens=chunk
        )
        (result.logprobs.sum() + result.entropy.sum()).backward()
    assert seen.entries == chunk * vocab


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
