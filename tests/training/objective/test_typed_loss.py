"""A loss from a text field: the examples, and what is wrong with the others, by line."""

from __future__ import annotations

import pytest
import torch

from areal_lab.config.functions import pickle_function, unpickle_function
from areal_lab.functional import anchored_at_behavior, loss_surface, ppo
from areal_lab.training.objective.typed_loss import EXAMPLES, read_loss

HEAD = "def my_loss(logprobs, proximal_logprobs, behavior_logprobs, advantages, mask):\n"
RATIOS = torch.linspace(0.5, 2.0, 31, dtype=torch.double)
BOTH = torch.tensor([1.0, -1.0], dtype=torch.double)
ONE = torch.ones(1, dtype=torch.double)


def surface(loss):
    return loss_surface(loss, ratios=RATIOS, weights=ONE, advantages=BOTH)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_can_be_trained_with(name: str) -> None:
    typed = read_loss(EXAMPLES[name])
    assert typed.problem == ""
    assert typed.name == "my_loss"
    assert typed.function is not None
    assert typed.check is not None
    assert len(typed.text.splitlines()) <= 5


def test_the_ppo_of_the_examples_is_that_of_the_library() -> None:
    typed = surface(read_loss(EXAMPLES["PPO"]).function)
    ours = surface(anchored_at_behavior(ppo))
    torch.testing.assert_close(typed.value, ours.value)
    torch.testing.assert_close(typed.gradient, ours.gradient)


def test_clipping_from_above_alone_drops_bad_tokens() -> None:
    """Half of the gradient is missing: of a bad token it has none until the ratio exceeds 1.2."""
    gradient = surface(read_loss(EXAMPLES["clip from above"]).function).gradient[:, 0]
    good, bad = gradient[:, 0], gradient[:, 1]
    inside = RATIOS < 1.199
    torch.testing.assert_close(good, surface(anchored_at_behavior(ppo)).gradient[:, 0, 0])
    assert (bad[inside] == 0).all()
    assert (bad[RATIOS > 1.201] > 0).all()


def test_a_function_reaches_another_process_with_what_it_uses() -> None:
    lines = (
        "    ratio = torch.exp(logprobs - behavior_logprobs).clamp(max=limit)",
        "    return PlainLoss(-token_mean(ratio * advantages, mask))",
    )
    typed = read_loss("limit = 1.5\n" + HEAD + "\n".join(lines))
    assert typed.function is not None
    sent = unpickle_function(pickle_function(typed.function))
    torch.testing.assert_close(surface(sent).gradient, surface(typed.function).gradient)


def test_a_loss_may_ask_for_facts_of_the_batch() -> None:
    text = HEAD.replace("mask)", "mask, token_count)")
    text += "    return PlainLoss(-(logprobs * advantages * mask).sum() / token_count)\n"
    assert read_loss(text).function is not None


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no function: begin with def my_loss(logprobs, "),
        ("ratio = 1.2", "no function: "),
        ("def my_loss(logprobs)\n    return 1", "line 1: expected ':'"),
        (f"{HEAD}return 1", "line 2: expected an indented block"),
        ("def my_loss(a, b):\n    return 1", "my_loss cannot be called as a policy loss: too many"),
        (f"{HEAD}    x = 1\n    return PlainLoss(rato)", "line 3: NameError: name 'rato' is not"),
        (f"import nowhere\n{HEAD}    pass", "line 1: ModuleNotFoundError: No module named"),
        (f"{HEAD}    return PlainLoss(logprobs * advantages)", "the loss has shape (4,), but must"),
        (f"{HEAD}    return logprobs.sum()", "loss returned a Tensor, but must return a HasLoss"),
        (
            f"{HEAD}    return PlainLoss(-token_mean(proximal_logprobs * advantages, mask))",
            "logprobs gets no gradient: nothing would be learned",
        ),
        (
            f"{HEAD}    return PlainLoss((logprobs / 0).sum())",
            "the gradient of logprobs is NaN or infinite",
        ),
        (
            f"{HEAD}    return PlainLoss((logprobs - advantages[:3]).sum())",
            "line 2: RuntimeError: ",
        ),
    ],
)
def test_what_is_wrong_is_one_line_that_says_where(text: str, problem: str) -> None:
    typed = read_loss(text)
    assert typed.problem.startswith(problem)
    assert "\n" not in typed.problem
    assert typed.function is None


def test_an_error_inside_a_function_of_the_text_names_the_line_there() -> None:
    helper = "def clip(x):\n    return x.clmap(0, 1)\n\n"
    text = f"{helper}{HEAD}    return PlainLoss(clip(logprobs).sum())\n"
    assert read_loss(text).problem.startswith("line 2: AttributeError: ")
