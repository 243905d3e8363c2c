"""Exchanges inside layers: copies of tokens against drawn routes, and bytes by hand."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.catalogue.find_gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import TrainerConfig
from simulator.costs.communication import all_reduce_s, all_to_all_s
from simulator.costs.layers.exchanges import Exchanges, exchanges, expert_copies
from simulator.costs.layers.groups import groups_of

H100 = find_gpu("H100")
DENSE, MIXTURE = find_model("Qwen3-32B"), find_model("Qwen3-30B-A3B")
TOKENS = 8192


def sent(model=MIXTURE, gpus: int = 32, tokens: float = TOKENS, **layout: int) -> Exchanges:
    config = TrainerConfig(**layout)
    return exchanges(
        np.array([[tokens]]),
        np.array([[True]]),
        model=model,
        gpu=H100,
        groups=groups_of(config, model, gpus),
        full_tokens=TOKENS,
        ulysses=config.sequence_parallel,
    )


def vars_of(one: Exchanges) -> list[float]:
    return [float(part[0, 0]) for part in (one.tensor_s, one.ring_s, one.heads_s, one.experts_s)]


@pytest.mark.parametrize("gpus", [8, 16, 64])
def test_copies_of_a_token_are_those_of_drawn_routes(gpus: int) -> None:
    """The experts of a token lie on independent GPUs; 8 GPUs make a node."""
    generator = np.random.default_rng(0)
    chosen = generator.integers(0, gpus, (20_000, MIXTURE.active_experts))
    nodes = chosen // 8
    copies = (chosen != 0).sum(axis=1).mean(), (nodes != 0).sum(axis=1).mean()
    near, far = expert_copies(MIXTURE, gpus, 8, "copies")
    assert near + far == pytest.approx(copies[0], rel=0.02)
    assert far == pytest.approx(copies[1], rel=0.02)

    def elsewhere(places: np.ndarray, count: int) -> float:
        return sum(float((places == one).any(axis=1).mean()) for one in range(1, count))

    near, far = expert_copies(MIXTURE, gpus, 8, "ranks")
    assert near == pytest.approx(elsewhere(chosen, gpus), rel=0.02)
    assert far == pytest.approx(elsewhere(nodes, gpus // 8), rel=0.02, abs=1e-9)


def test_a_model_on_one_gpu_exchanges_nothing() -> None:
    assert vars_of(sent()) == [0, 0, 0, 0]


def test_tensor_parallelism_reduces_the_hidden_vectors_twice_per_layer() -> None:
    size = TOKENS * DENSE.hidden * 2
    by_hand = 2 * DENSE.layers * all_reduce_s(size, 4, H100)
    whole = sent(DENSE, tensor_parallel=4)
    assert float(whole.tensor_s[0, 0]) == pytest.approx(by_hand)
    staged = sent(DENSE, tensor_parallel=4, pipeline_parallel=4)
    assert float(staged.tensor_s[0, 0]) == pytest.approx(by_hand / 4)
    shared = sent(DENSE, tensor_parallel=4, context_parallel=2)
    half = 2 * DENSE.layers * all_reduce_s(size / 2, 4, H100)
    assert float(shared.tensor_s[0, 0]) == pytest.approx(half)


def test_tokens_go_to_experts_and_back_in_every_layer_that_has_some() -> None:
    size = TOKENS * MIXTURE.hidden * 2 * 8 * 7 / 8
    by_hand = 2 * MIXTURE.moe_layers * all_to_all_s(size, 8, H100, far_bytes=0)
    near = float(sent(expert_parallel=8).experts_s[0, 0])
    assert near == pytest.approx(by_hand)
    # A quarter of the tokens per GPU, as with tensor and sequence parallelism.
    assert float(sent(expert_parallel=8, tensor_parallel=4).experts_s[0, 0]) < near / 3
    across = float(sent(expert_parallel=16).experts_s[0, 0])
    assert across > 4 * near


def test_ulysses_inside_a_node_sends_less_than_it_would_over_the_network() -> None:
    inside = float(sent(DENSE, sequence_parallel=8).heads_s[0, 0])
    across = float(sent(DENSE, sequence_parallel=8, tensor_parallel=4).heads_s[0, 0])
    # Four times fewer heads per GPU, but six of eight partners are in other nodes.
    assert across > inside
    ring = float(sent(DENSE, context_parallel=8).ring_s[0, 0])
    # Keys and values of 8 of 64 heads, but of all tokens instead of an eighth.
    assert ring == pytest.approx(inside, rel=0.6)


def test_half_a_micro_batch_takes_about_half_of_the_time() -> None:
    for layout in ({"tensor_parallel": 4}, {"expert_parallel": 8}, {"sequence_parallel": 4}):
        whole, half = (sum(vars_of(sent(tokens=n, **layout))) for n in (TOKENS, TOKENS / 2))
        assert 0.5 <= half / whole < 0.6
