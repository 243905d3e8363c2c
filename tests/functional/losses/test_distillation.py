"""Distillation from sampled tokens, from distributions, and from a teacher's top k."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.functional import sequence_mean, token_mean
from areal_lab.functional.divergences.kl import full_kl
from areal_lab.functional.divergences.vocabulary import (
    forward_kl,
    generalized_jsd,
    log_distribution,
    reverse_kl,
)
from areal_lab.functional.losses.distillation import (
    distillation_advantages,
    distillation_loss,
    drop_tail,
    lump_tail,
    on_policy_distillation_loss,
    renormalize_tail,
    topk_distillation_loss,
)
from tests.reference import distillation as reference
from tests.reference import formulas
from tests.reference import kl as exact

GARBAGE = [float("nan"), float("inf"), -float("inf"), 1e300]
VOCAB, TOP = 7, 3

DIVERGENCES = {
    "forward": (forward_kl, lambda s, t: exact.kl(t, s)),
    "reverse": (reverse_kl, exact.kl),
    "jsd": (generalized_jsd, lambda s, t: reference.jensen_shannon(s, t, 0.5)),
    "jsd 0.1": (
        partial(generalized_jsd, beta=0.1),
        lambda s, t: reference.jensen_shannon(s, t, 0.1),
    ),
}


@pytest.fixture
def logits():
    """Student's, teacher's, and a mask over 2 x 4 positions."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 4, VOCAB, generator=generator, dtype=torch.double)
    return student, teacher, torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]]) > 0


@pytest.fixture
def tokens():
    """A, l_theta, l_old, l_T and a mask, 4 x 6."""
    generator = torch.Generator().manual_seed(0)

    def normal(scale):
        return scale * torch.randn(4, 6, generator=generator, dtype=torch.double)

    logprobs = -normal(1.0).abs()
    mask = torch.rand(4, 6, generator=generator) > 0.3
    return normal(1.0), logprobs, logprobs + normal(0.2), logprobs + normal(0.5), mask


def log_probs(rows):
    return torch.tensor(rows, dtype=torch.double).log_softmax(-1)


def top(teacher, k=TOP):
    """The teacher's k tokens and their log-probs, as an engine reports them."""
    logprobs, chosen = teacher.log_softmax(-1).topk(k)
    return chosen, logprobs


# --- whole distributions


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_divergences_equal_the_reference(logits, name, temperature):
    ours, slow = DIVERGENCES[name]
    student, teacher, mask = logits
    result = distillation_loss(student, teacher, mask, divergence=ours, temperature=temperature)
    expected = [
        [
            slow(
                formulas.softmax([z / temperature for z in s]),
                formulas.softmax([z / temperature for z in t]),
            )
            for s, t in zip(*rows, strict=True)
        ]
        for rows in zip(student.tolist(), teacher.tolist(), strict=True)
    ]
    masked = torch.where(mask, torch.tensor(expected, dtype=torch.double), 0.0)
    torch.testing.assert_close(result.divergence, masked)
    torch.testing.assert_close(result.loss, masked.sum() / mask.sum())
    by_sequence = distillation_loss(
        student, teacher, mask, divergence=ours, temperature=temperature, aggregate=sequence_mean
    )
    assert by_sequence.loss.item() == pytest.approx(formulas.sequence_mean(expected, mask.tolist()))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_student_that_is_the_teacher_has_neither_loss_nor_gradient(logits, name):
    student, _, mask = logits
    leaf = student.clone().requires_grad_()
    # A constant added to all logits is the same distribution.
    loss = distillation_loss(leaf, student + 3, mask, divergence=DIVERGENCES[name][0]).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(0.0, abs=1e-14)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-14)


def test_the_gradient_of_forward_kl_is_student_minus_teacher(logits):
    student, teacher, mask = logits
    leaf = student.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(distillation_loss(leaf, teacher, mask).loss, leaf)
    by_hand = (student.softmax(-1) - teacher.softmax(-1)) * mask[..., None] / mask.sum()
    torch.testing.assert_close(gradient, by_hand)


def test_reverse_kl_is_full_kl_with_the_teacher_as_reference(logits):
    student, teacher, mask = logits
    ours = distillation_loss(student, teacher, mask, divergence=reverse_kl)
    assert torch.equal(ours.divergence, full_kl(student, teacher, mask))


LOGITS = st.lists(st.floats(-8, 8), min_size=4, max_size=4)


@settings(max_examples=30)
@given(LOGITS, LOGITS, st.floats(0.01, 0.99))
def test_the_jsd_is_bounded_and_turns_over(student, teacher, beta):
    """At most the entropy of a coin with beta; swapping the two swaps beta and 1 - beta."""
    s, t = log_probs([student]), log_probs([teacher])
    value = generalized_jsd(s, t, beta=beta)
    coin = -beta * math.log(beta) - (1 - beta) * math.log1p(-beta)
    assert -1e-14 <= value.item() <= coin + 1e-14
    torch.testing.assert_close(value, generalized_jsd(t, s, beta=1 - beta), rtol=1e-9, atol=1e-14)


def test_the_jsd_tends_to_both_kls():
    s, t = log_probs([[0.3, -1.0, 0.8]]), log_probs([[1.0, 0.2, -0.5]])
    small = 1e-7
    near_forward = generalized_jsd(s, t, beta=small) / small
    near_reverse = generalized_jsd(s, t, beta=1 - small) / small
    torch.testing.assert_close(near_forward, forward_kl(s, t), rtol=1e-5, atol=0)
    torch.testing.assert_close(near_reverse, reverse_kl(s, t), rtol=1e-5, atol=0)


def test_tokens_that_cannot_be_drawn():
    """0 log 0 = 0; a KL is infinite where only the other is 0; the JSD never is."""
    never = -torch.inf
    one = log_probs([[0.0, 0.0, never, never]]).requires_grad_()
    other = log_probs([[0.0, never, 0.0, never]])
    assert forward_kl(one, other).item() == reverse_kl(one, other).item() == math.inf
    value = generalized_jsd(one, other)
    assert value.item() == pytest.approx(0.5 * math.log(2))
    value.sum().backward()
    assert one.grad.isfinite().all()
    assert forward_kl(one, one).item() == reverse_kl(one, one).item() == 0.0


def test_a_probability_that_underflows_meets_an_impossible_token():
    """exp(-200) is 0 in float32, and 0 times infinity would be NaN."""
    student = torch.tensor([[0.0, -200.0]])
    teacher = torch.tensor([[0.0, -torch.inf]])
    assert reverse_kl(student, teacher).item() == 0.0


def test_nan_logits_are_seen_where_they_are_not_masked(logits):
    student, teacher, mask = logits
    student[0, 0, 0] = math.nan
    for divergence, _ in DIVERGENCES.values():
        result = distillation_loss(student, teacher, mask, divergence=divergence)
        assert result.divergence[0, 0].isnan()
        assert result.divergence.isnan().sum() == 1


def test_half_precision_is_computed_in_float32(logits):
    student, teacher, mask = (x.bfloat16() if x.is_floating_point() else x for x in logits)
    ours = distillation_loss(student, teacher, mask)
    assert ours.loss.dtype == torch.float32
    torch.testing.assert_close(
        ours.loss, distillation_loss(student.float(), teacher.float(), mask).loss
    )


# --- the teacher's top k


@pytest.mark.parametrize("name", DIVERGENCES)
def test_lumped_and_renormalized_tails_equal_the_reference(logits, name):
    student, teacher, mask = logits
    ours, slow = DIVERGENCES[name]
    chosen, logprobs = top(teacher)
    for tail, by_hand in (
        (lump_tail, reference.lumped),
        (renormalize_tail, reference.renormalized),
    ):
        result = topk_distillation_loss(student, chosen, logprobs, mask, divergence=ours, tail=tail)
        for i, t in mask.nonzero().tolist():
            s, other = (formulas.softmax(z[i, t].tolist()) for z in (student, teacher))
            picked = chosen[i, t].tolist()
            expected = slow(by_hand(s, picked), by_hand(other, picked))
            assert result.divergence[i, t].item() == pytest.approx(expected, rel=1e-9)
        assert not result.divergence[~mask].any()


def test_a_dropped_tail_is_the_sum_over_the_k_tokens(logits):
    student, teacher, mask = logits
    chosen, logprobs = top(teacher)
    result = topk_distillation_loss(student, chosen, logprobs, mask, tail=drop_tail)
    s, t = student.log_softmax(-1).gather(-1, chosen), logprobs
    torch.testing.assert_close(
        result.divergence, torch.where(mask, (t.exp() * (t - s)).sum(-1), 0.0)
    )


@pytest.mark.parametrize("tail", [lump_tail, renormalize_tail, drop_tail])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_all_tokens_as_top_k_are_the_whole_vocabulary(logits, name, tail):
    student, teacher, mask = logits
    divergence = DIVERGENCES[name][0]
    ours = topk_distillation_loss(
        student, *top(teacher, VOCAB), mask, divergence=divergence, tail=tail
    )
    whole = distillation_loss(student, teacher, mask, divergence=divergence)
    torch.testing.assert_close(ours.divergence, whole.divergence)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_lumped_tail_never_exceeds_the_whole_and_grows_with_k(logits, name):
    """The data-processing inequality: telling fewer outcomes apart tells less."""
    student, teacher, mask = logits
    divergence = DIVERGENCES[name][0]
    by_k = [
        topk_distillation_loss(student, *top(teacher, k), mask, divergence=divergence).divergence
        for k in range(1, VOCAB + 1)
    ]
    for fewer, more in pairwise(by_k):
        assert (fewer <= more + 1e-12).all()
        assert (fewer >= 0).all()


def gradient_at_the_teacher(logits, tail):
    _, teacher, mask = logits
    leaf = teacher.clone().requires_grad_()
    loss = topk_distillation_loss(leaf, *top(teacher), mask, tail=tail).loss
    return torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("tail", [lump_tail, renormalize_tail])
def test_a_student_that_is_the_teacher_stays_there(logits, tail):
    gradient = gradient_at_the_teacher(logits, tail)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-14)


def test_a_dropped_tail_drives_the_student_past_its_teacher(logits):
    """It is least where the student puts nothing on the rest, hence pushes the rest down."""
    _, teacher, mask = logits
    gradient = gradient_at_the_teacher(logits, drop_tail)
    rest = torch.ones_like(teacher).scatter(-1, top(teacher)[0], 0.0)
    pushed_down = (gradient * rest).sum(-1)
    assert (pushed_down[mask] > 0.01).all()


def test_what_a_student_does_outside_the_k_matters_to_a_lumped_tail_only(logits):
    _, teacher, mask = logits
    chosen, logprobs = top(teacher)
    outside = torch.ones_like(teacher).scatter(-1, chosen, 0.0)
    moved = teacher + 5 * outside
    for tail, matters in ((lump_tail, True), (renormalize_tail, False)):
        result = topk_distillation_loss(moved, chosen, logprobs, mask, tail=tail)
        assert (result.loss.item() > 0.1) == matters


def test_rounded_log_probs_that_add_up_to_more_than_one_are_no_error(logits):
    student, teacher, mask = logits
    chosen, logprobs = top(teacher)
    heavy = logprobs - logprobs.logsumexp(-1, keepdim=True) + 1e-3
    leaf = student.clone().requires_grad_()
    loss = topk_distillation_loss(leaf, chosen, heavy, mask).loss
    assert loss.isfinite()
    assert torch.autograd.grad(loss, leaf)[0].isfinite().all()


@pytest.mark.parametrize("tail", [lump_tail, renormalize_tail, drop_tail])
@pytest.mark.parametrize("garbage", GARBAGE)
def test_masked_positions_do_not_matter_to_top_k(logits, tail, garbage):
    student, teacher, mask = logits
    chosen, logprobs = top(teacher)
    clean = topk_distillation_loss(student, chosen, logprobs, mask, tail=tail)
    keep = mask[..., None]
    leaf = torch.where(keep, student, garbage).requires_grad_()
    result = topk_distillation_loss(
        leaf, torch.where(keep, chosen, -1), torch.where(keep, logprobs, garbage), mask, tail=tail
    )
    assert torch.equal(result.loss, clean.loss)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_masked_logits_do_not_matter(logits, name, which, garbage):
    student, teacher, mask = logits
    inputs = [student, teacher]
    inputs[which] = torch.where(mask[..., None], inputs[which], garbage)
    leaf = inputs[0].clone().requires_grad_()
    divergence = DIVERGENCES[name][0]
    loss = distillation_loss(leaf, inputs[1], mask, divergence=divergence).loss
    assert torch.equal(loss, distillation_loss(student, teacher, mask, divergence=divergence).loss)
    (gradient,) = torch.autograd.grad(loss, leaf)
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()


def test_only_the_student_gets_a_gradient(logits):
    student, teacher, mask = logits
    leaves = [student.clone().requires_grad_(), teacher.clone().requires_grad_()]
    result = distillation_loss(*leaves, mask, divergence=generalized_jsd)
    chosen, logprobs = top(teacher)
    known = logprobs.clone().requires_grad_()
    of_top = topk_distillation_loss(leaves[0], chosen, known, mask, divergence=reverse_kl)
    (result.loss + of_top.loss).backward()
    assert leaves[0].grad is not None
    assert leaves[1].grad is None
    assert known.grad is None
    assert not result.divergence.requires_grad
    assert not of_top.divergence.requires_grad


# --- on the student's own tokens


@pytest.mark.parametrize("kappa", [1.0, 0.3])
@pytest.mark.parametrize("centered", [False, True])
def test_advantages_equal_the_reference(tokens, centered, kappa):
    given_, _, old, teacher, mask = tokens
    ours = distillation_advantages(
        given_,
        old,
        teacher,
        mask,
        coefficient=kappa,
        baseline=token_mean if centered else None,
    )
    slow = reference.advantages(
        *(x.tolist() for x in (given_, old, teacher, mask)), kappa=kappa, centered=centered
    )
    torch.testing.assert_close(ours, torch.tensor(slow, dtype=torch.double))


def test_a_baseline_keeps_the_mean_advantage(tokens):
    given_, _, old, teacher, mask = tokens
    ours = distillation_advantages(given_, old, teacher, mask, baseline=token_mean)
    torch.testing.assert_close(ours[mask].mean(), given_[mask].mean())


def test_the_on_policy_loss_equals_the_reference(tokens):
    _, logprobs, old, teacher, mask = tokens
    result = on_policy_distillation_loss(logprobs, old, teacher, mask, coefficient=0.5)
    slow = reference.on_policy_loss(
        *(x.tolist() for x in (logprobs, old, teacher, mask)), kappa=0.5
    )
    assert result.loss.item() == pytest.approx(slow, rel=1e-12)
    assert torch.equal(result.log_ratio, torch.where(mask, logprobs - teacher, 0.0))


def test_both_forms_have_one_gradient_on_the_first_step_of_a_batch(tokens):
    _, _, old, teacher, mask = tokens
    leaf = old.clone().requires_grad_()
    loss = on_policy_distillation_loss(leaf, old, teacher, mask).loss
    (of_loss,) = torch.autograd.grad(loss, leaf)
    advantages = distillation_advantages(torch.zeros_like(old), old, teacher, mask)
    ratio = torch.exp(leaf - old)
    (of_advantages,) = torch.autograd.grad(-token_mean(ratio * advantages, mask), leaf)
    torch.testing.assert_close(of_loss, of_advantages)


@pytest.mark.parametrize("drawn_from", ["theta", "old"])
def test_the_mean_gradient_of_the_on_policy_loss_is_that_of_the_reverse_kl(drawn_from):
    """Exact, over a vocabulary of four; also with tokens of an older policy."""
    theta = torch.tensor([0.5, -0.3, 1.0, 0.0], dtype=torch.double)
    teacher = torch.tensor([-0.4, 0.9, 0.1, 0.3], dtype=torch.double)
    old = theta if drawn_from == "theta" else theta.flip(0)
    leaf = theta.clone().requires_grad_()
    result = on_policy_distillation_loss(
        leaf.log_softmax(-1),
        old.log_softmax(-1),
        teacher.log_softmax(-1),
        torch.ones(4, dtype=torch.bool),
        aggregate=lambda values, mask, sequences: (old.softmax(-1) * values).sum(),  # noqa: ARG005
    )
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    p, q = formulas.softmax(theta.tolist()), formulas.softmax(teacher.tolist())
    assert result.loss.item() == pytest.approx(exact.kl(p, q))
    assert gradient.tolist() == pytest.approx(exact.reverse_kl_gradient(p, q), rel=1e-12)


def test_the_log_ratio_itself_as_a_loss_teaches_nothing():
    """kappa (l_theta - l_T) with the gradient of l_theta: 0 on average, whoever the teacher is."""
    logits = torch.tensor([0.5, -0.3, 1.0, 0.0], dtype=torch.double, requires_grad=True)
    logprobs = logits.log_softmax(-1)
    teacher = torch.tensor([-3.0, -0.2, -1.0, -4.0], dtype=torch.double)
    mean = (logprobs.exp().detach() * (logprobs - teacher)).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-15)


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", range(3))
def test_masked_tokens_do_not_matter_to_the_on_policy_loss(tokens, which, garbage):
    *inputs, mask = tokens[1:]
    clean = on_policy_distillation_loss(*inputs, mask)
    inputs[which] = torch.where(mask, inputs[which], garbage)
    leaf = inputs[0].clone().requires_grad_()
    result = on_policy_distillation_loss(leaf, *inputs[1:], mask)
    assert torch.equal(result.loss, clean.loss)
    assert torch.equal(result.log_ratio, clean.log_ratio)
    (gradient,) = torch.autograd.grad(result.loss, leaf)
    assert gradient.isfinite().all()
    assert not gradient[~mask].any()


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("which", range(3))
def test_masked_tokens_do_not_matter_to_the_advantages(tokens, which, garbage):
    advantages, _, old, teacher, mask = tokens
    inputs = [advantages, old, teacher]
    clean = distillation_advantages(*inputs, mask, baseline=token_mean)
    inputs[which] = torch.where(mask, inputs[which], garbage)
    ours = distillation_advantages(*inputs, mask, baseline=token_mean)
    assert torch.equal(ours, clean)


def test_which_inputs_get_a_gradient(tokens):
    leaves = [x.clone().requires_grad_() for x in tokens[:4]]
    advantages, logprobs, old, teacher = leaves
    mask = tokens[4]
    shaped = distillation_advantages(advantages, old, teacher, mask, baseline=token_mean)
    assert not shaped.requires_grad
    result = on_policy_distillation_loss(logprobs, old, teacher, mask)
    result.loss.backward()
    assert [x.grad is not None for x in leaves] == [False, True, False, False]
    assert not result.log_ratio.requires_grad


def test_empty_masks_give_zero(tokens, logits):
    _, logprobs, old, teacher, mask = tokens
    nothing = torch.zeros_like(mask)
    leaf = logprobs.clone().requires_grad_()
    loss = on_policy_distillation_loss(leaf, old, teacher, nothing).loss
    assert loss == 0
    assert not torch.autograd.grad(loss, leaf)[0].any()
    student, teacher, mask = logits
    leaf = student.clone().requires_grad_()
    nothing = torch.zeros_like(mask)
    for result in (
        distillation_loss(leaf, teacher, nothing),
        topk_distillation_loss(leaf, *top(teacher), nothing),
    ):
        assert result.loss == 0
        assert not torch.autograd.grad(result.loss, leaf)[0].any()


# --- bad input


@pytest.mark.parametrize("beta", [0.0, 1.0, -0.1, math.nan])
def test_jsd_weights_must_be_inside(beta):
    p = log_probs([[0.0, 0.0]])
    with pytest.raises(ValueError, match="beta is"):
        generalized_jsd(p, p, beta=beta)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_logits": torch.zeros(2, 3, 4)}, r"teacher_logits has shape \(2, 3, 4\)"),
        ({"mask": torch.ones(2, dtype=torch.bool)}, r"logits have shape .* mask \(2,\)"),
        ({"mask": torch.ones(2, 3)}, "mask has dtype"),
        ({"temperature": 0.0}, "temperature is 0.0"),
    ],
)
def test_bad_logits_are_refused(change, message):
    inputs = {
        "student_logits": torch.zeros(2, 3, 5),
        "teacher_logits": torch.zeros(2, 3, 5),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        distillation_loss(**{**inputs, **change})


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_tokens": torch.zeros(2, 3, 2)}, "teacher_tokens has dtype"),
        ({"teacher_logprobs": torch.zeros(2, 3)}, r"teacher_logprobs has shape \(2, 3\)"),
        (
            {
                "teacher_tokens": torch.zeros(6, 2, dtype=torch.long),
                "teacher_logprobs": torch.zeros(6, 2),
            },
            r"teacher_tokens has shape \(6, 2\) and mask \(2, 3\)",
        ),
        ({"temperature": math.inf}, "temperature is inf"),
    ],
)
def test_bad_top_k_is_refused(change, message):
    inputs = {
        "student_logits": torch.zeros(2, 3, 5),
        "teacher_tokens": torch.zeros(2, 3, 2, dtype=torch.long),
        "teacher_logprobs": torch.zeros(2, 3, 2),
        "mask": torch.ones(2, 3, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        topk_distillation_loss(**{**inputs, **change})


@pytest.mark.parametrize("teacher", [-1.0, -math.inf])
@pytest.mark.parametrize("old", [-2.0, -math.inf])
def test_a_token_that_the_student_cannot_draw_adds_nothing(old, teacher):
    """r log r goes to 0 with r, and so does its gradient."""
    student = torch.tensor([-0.5, -math.inf], requires_grad=True)
    olds, teachers = torch.tensor([-0.6, old]), torch.tensor([-0.4, teacher])
    result = on_policy_distillation_loss(student, olds, teachers, student < 0)
    (gradient,) = torch.autograd.grad(result.loss, student)
    # r log(pi / pi_T) of the first token, over two tokens; the gradient is the same.
    expected = math.exp(0.1) * -0.1 / 2
    assert result.loss.item() == pytest.approx(expected, rel=1e-5)
    assert gradient.tolist() == pytest.approx([expected, 0], rel=1e-5)


def test_advantages_where_neither_policy_can_draw_the_token_are_unchanged():
    never = torch.tensor([-math.inf])
    ones = torch.ones(1)
    assert distillation_advantages(ones, never, never, ones > 0).tolist() == [1.0]


@pytest.mark.usefixtures("unchecked_shapes")
def test_bad_tokens_are_refused():
    x, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"teacher_logprobs has shape \(2,\)"):
        distillation_advantages(x, x, torch.zeros(2), mask)
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(2, 1\)"):
        on_policy_distillation_loss(x, torch.zeros(2, 1), x, mask)
    with pytest.raises(ValueError, match="coefficient is nan"):
        distillation_advantages(x, x, x, mask, coefficient=math.nan)
    with pytest.raises(ValueError, match="coefficient is inf"):
        on_policy_distillation_loss(x, x, x, mask, coefficient=math.inf)


@pytest.mark.usefixtures("unchecked_shapes")
def test_logits_need_a_vocabulary():
    with pytest.raises(ValueError, match="logits have shape"):
        log_distribution(torch.zeros(()), torch.tensor(True))
