"""Speculative decoding: the fit to published rounds, batches, limits, memory and refusals."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from simulator.assembly.build import problems
from simulator.assembly.simulate import simulate
from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.load import load_simulation
from simulator.costs.coefficients import DATA, read_table
from simulator.costs.decode import DecodeCost, decode_cost
from simulator.costs.engine_memory import cache_tokens
from simulator.costs.speculation import (
    CHAIN_ERROR,
    PASS_S,
    ROUND_S,
    TREE_ERROR,
    Speculation,
)
from simulator.costs.weight_bytes import EngineNumbers

H100, LLAMA = find_gpu("H100"), find_model("Llama-3.1-8B")
CHAIN = Speculation(tokens=3, passes=3, accepted=2.5)
CONTEXT = 500
"""About the middle of an answer to MT-bench."""


class Round(NamedTuple):
    """A published round of one sequence, beside a step without drafts."""

    drafted: DecodeCost
    plain: DecodeCost
    seconds: float
    plain_s: float


def rounds() -> list[Round]:
    """All of them."""
    found = []
    for row in read_table(DATA / "speculative_rounds.csv"):
        model, split = find_model(row["model"]), int(row["tensor_parallel"])
        drafts = Speculation(
            tokens=int(row["tokens"]), passes=int(row["passes"]), accepted=float(row["accepted"])
        )
        found.append(
            Round(
                decode_cost(model, H100, split, speculation=drafts),
                decode_cost(model, H100, split),
                drafts.accepted / float(row["tokens_per_s"]),
                1 / float(row["without_tokens_per_s"]),
            )
        )
    return found


def predicted_s(one: Round) -> float:
    """Of a round: the published step without drafts, and what drafts add to its kernels."""
    assert one.drafted.speculation is not None
    round_s = one.drafted.gpu_s(1, CONTEXT) * one.drafted.speculation.accepted
    return one.plain_s + round_s - one.plain.gpu_s(1, CONTEXT)


def test_the_constants_are_a_fit_to_published_rounds() -> None:
    columns, left = [], []
    for one in rounds():
        drafts = one.drafted.speculation
        assert drafts is not None
        kernels_s = predicted_s(one) - ROUND_S - drafts.passes * PASS_S
        columns.append([1 / one.seconds, drafts.passes / one.seconds])
        left.append(1 - kernels_s / one.seconds)
    found = np.linalg.lstsq(np.array(columns), np.array(left), rcond=None)[0]
    assert found == pytest.approx([ROUND_S, PASS_S], rel=0.02)
    errors = np.array([predicted_s(one) / one.seconds - 1 for one in rounds()])
    assert np.abs(errors).mean() < 0.08
    assert np.abs(errors).max() < 0.22


def test_speedups_of_one_sequence_are_the_published_ones() -> None:
    for one in rounds():
        drafts = one.drafted.speculation
        assert drafts is not None
        published = one.plain_s * drafts.accepted / one.seconds
        predicted = one.plain_s * drafts.accepted / predicted_s(one)
        assert predicted == pytest.approx(published, rel=0.27)


def test_the_second_token_of_deepseek_speeds_up_as_published() -> None:
    """1.76 times with 2.5 to 3 accepted, two passes, four tokens, one sequence (SGLang pull request
    3582, 2025-02-14); on 8 H200 in fp8, with the CPU time of SGLang 0.4."""
    model, gpu, fp8 = find_model("DeepSeek-V3"), find_gpu("H200"), EngineNumbers(weights="fp8")
    plain, drafted = (
        decode_cost(model, gpu, 8, overhead_s=2.41e-3, numbers=fp8, speculation=drafts)
        for drafts in (None, Speculation(tokens=3, passes=2, accepted=2.75))
    )
    assert plain.step_s(1, CONTEXT) / drafted.step_s(1, CONTEXT) == pytest.approx(1.76, rel=0.2)


def speedup(sequences: int, drafts: Speculation) -> float:
    """Of Llama-3.1-8B on an H100, with 800 tokens of context."""
    context = 800 * sequences
    plain = decode_cost(LLAMA, H100).step_s(sequences, context)
    return plain / decode_cost(LLAMA, H100, speculation=drafts).step_s(sequences, context)


def test_large_batches_gain_less() -> None:
    """EAGLE-3 gains 1.38 times at a batch of 64 on an H100 with SGLang (arXiv:2503.01840, abstract;
    its accepted tokens are not stated: 2 to 3 for a chain of three), and less for fewer."""
    gains = [speedup(one, CHAIN) for one in (16, 32, 64, 128, 256, 512)]
    assert gains == sorted(gains, reverse=True)
    few, many = (Speculation(tokens=3, passes=3, accepted=one) for one in (2.0, 3.0))
    assert speedup(64, few) < 1.38 < speedup(64, many)
    # With long chains of which little is accepted, large batches lose.
    assert speedup(512, Speculation(tokens=7, passes=7, accepted=3.5)) < 0.9


def test_trees_in_batches_are_the_least_certain() -> None:
    """Published for one and eight requests: 2.7 and 1.6 times as fast as bf16 without drafts (the
    docstring of `TREE_ERROR`). The accepted tokens follow from the first."""
    model, fp8 = find_model("Qwen3-8B"), EngineNumbers(weights="fp8")
    tree = Speculation(tokens=15, passes=4, accepted=3.5)

    def gain(requests: int) -> float:
        context = 400 * requests
        plain = decode_cost(model, H100, overhead_s=1.33e-3, overlap=False)
        drafted = decode_cost(model, H100, overhead_s=2.41e-3, numbers=fp8, speculation=tree)
        assert drafted.error == TREE_ERROR
        return plain.step_s(requests, context) / drafted.step_s(requests, context)

    assert gain(1) == pytest.approx(2.7, rel=0.02)
    assert 1.6 < gain(8) < (1 + TREE_ERROR) * 1.7


def test_when_products_bound_a_step_all_rows_are_paid_for() -> None:
    """A limit: without reading, launches and drafts only products are left."""
    drafts = Speculation(tokens=3, passes=3, accepted=4.0, pass_s=0.0)
    plain, drafted = decode_cost(LLAMA, H100), decode_cost(LLAMA, H100, speculation=drafts)
    many = 200_000
    bound = drafted._computing_s(many * 4) / 4
    assert bound == pytest.approx(plain._computing_s(many))
    assert drafted.base_s(many) == pytest.approx(plain.base_s(many), rel=0.03)


def test_seconds_are_those_of_a_token_and_sum_up() -> None:
    cost = decode_cost(LLAMA, H100, overhead_s=1e-3, speculation=CHAIN)
    parts = cost.parts(8, 8000)
    assert sum(parts.values()) == pytest.approx(cost.step_s(8, 8000))
    assert parts["drafting"] > 0
    assert cost.engine_s == 1e-3 / CHAIN.accepted
    assert cost.error == CHAIN_ERROR
    plain = decode_cost(LLAMA, H100)
    # Cache is read once per step, by the model and by each pass of a draft of one layer.
    ratio = (1 + 3 / 32) / CHAIN.accepted
    assert cost.context_token_s == pytest.approx(ratio * plain.context_token_s)
    steps = 7
    slow = sum(cost.step_s(8, 8000 + 8 * k) for k in range(steps))
    assert cost.steps_s(8, 8000, steps) == pytest.approx(slow)
    assert "drafting" not in plain.parts(1, 1)


def test_a_measured_pass_replaces_the_model() -> None:
    given = Speculation(tokens=3, passes=3, accepted=2.5, pass_s=2e-3)
    cost = decode_cost(LLAMA, H100, speculation=given)
    assert cost.parts(1, 1)["drafting"] == pytest.approx((3 * 2e-3 + ROUND_S) / 2.5)


def test_verified_tokens_read_more_experts() -> None:
    mixture = find_model("Qwen3-30B-A3B")
    plain, drafted = (decode_cost(mixture, H100, speculation=one) for one in (None, CHAIN))
    read = [one.parts(4, 4)["reading weights"] for one in (plain, drafted)]
    assert read[1] * CHAIN.accepted > 2 * read[0]
    dense = [
        decode_cost(LLAMA, H100, speculation=one).parts(4, 4)["reading weights"]
        for one in (None, CHAIN)
    ]
    assert dense[1] * CHAIN.accepted == pytest.approx(dense[0])


def test_the_draft_takes_memory() -> None:
    plain = cache_tokens(LLAMA, H100)
    drafted = cache_tokens(LLAMA, H100, speculation=CHAIN)
    layer = (LLAMA.parameters - 2 * LLAMA.embedding_parameters) / 32
    room = plain * LLAMA.cache_bytes_per_token() - 2 * layer
    assert drafted == pytest.approx(room / LLAMA.cache_bytes_per_token() / (1 + 1 / 32), abs=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0, "passes": 1, "accepted": 1.0},
        {"tokens": 2, "passes": 3, "accepted": 1.0},
        {"tokens": 2, "passes": 2, "accepted": 3.5},
        {"tokens": 2, "passes": 2, "accepted": 0.5},
    ],
)
def test_impossible_speculation_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"impossible|must be from 1 to"):
        Speculation(**wrong)


MODELED = ("rollout.decode_step_s=null", "rollout.speculative_tokens=3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["rollout.acceptance_length=2"], "nothing is drafted"),
        (["rollout.draft_pass_s=0.001"], "nothing is drafted"),
        (["rollout.draft_layers=2"], "nothing is drafted"),
        ([*MODELED], "acceptance_length is null; set it to the mean tokens of a step, from 1 to 4"),
        ([*MODELED, "rollout.acceptance_length=4.5"], "lower it to 4"),
        (
            [*MODELED, "rollout.acceptance_length=2", "rollout.draft_passes=4"],
            "must be <= rollout.speculative_tokens",
        ),
        (
            ["rollout.speculative_tokens=3", "rollout.acceptance_length=2"],
            "a measured step of one token",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: list[str], message: str) -> None:
    (said,) = problems(load_simulation("small", changes))
    assert message in said.message
    assert "\n" not in said.message


def test_a_run_with_drafts_generates_faster() -> None:
    plain = ["rollout.decode_step_s=null", "model=Qwen3-8B", "weights.update_s=1", "seeds=1"]
    drafts = ["rollout.speculative_tokens=3", "rollout.acceptance_length=2.8"]
    without = simulate(load_simulation("small", plain))
    assert simulate(load_simulation("small", [*plain, *drafts])).step_s < without.step_s
