"""Training layouts beyond tensor and pipeline parallelism, for each kind of trainer."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from simulator.catalogue.gpu import find_gpu
from simulator.catalogue.models import find_model
from simulator.config.schema import TrainerConfig
from simulator.costs.host_copies import copy_rate
from simulator.costs.micro_batching import cut_within_budget
from simulator.costs.trainers import SPEEDS
from simulator.costs.training import TrainingCost, training_cost
from simulator.costs.training_layout import GIB, training_memory
from simulator.costs.training_timing import (
    BUBBLE,
    FIXED,
    FORWARD_BACKWARD,
    GRADIENTS,
    OPTIMIZER,
    PADDING,
    PROXIMAL,
    REFERENCE,
    SLOWEST_RANK,
    TrainTiming,
    forward_only_s,
    one_forward_one_backward_s,
)
from tests.reference import pipeline_oracle

H100, GB200, H20 = find_gpu("H100"), find_gpu("GB200"), find_gpu("H20")
SMALL, MIXTURE, LARGE = (
    find_model(name) for name in ("Llama-3.1-8B", "Qwen3-30B-A3B", "Qwen3-235B-A22B")
)
LENGTHS = np.full(512, 4096)
KINDS = sorted(SPEEDS)
PINNED_BYTES_PER_S = copy_rate("to host", H100, pinned=True, gpus=16).bytes_per_s


def cost(kind: str = "megatron", gpus: int = 16, model=SMALL, gpu=H100, **more) -> TrainingCost:
    settings = {"micro_batch_tokens": 8192, "proximal_logprobs": False} | more
    found = training_cost(TrainerConfig(kind=kind, **settings), model, gpu, gpus)
    assert isinstance(found, TrainingCost)
    return found


def step(*args, **more) -> TrainTiming:
    return cost(*args, **more).step(LENGTHS, minibatches=1)


# --- expert parallelism --------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "expert"), [(16, 16), (8, 8)])
def test_qwen3_30b_trains_on_the_gb200s_it_was_trained_on(gpus: int, expert: int) -> None:
    """A published run of GRPO trains it on 16, and on 8, with sequences of up to 4,096 tokens."""
    fits = cost(
        gpus=gpus, model=MIXTURE, gpu=GB200, expert_parallel=expert, reference_logprobs=True
    )
    assert fits.step(LENGTHS, minibatches=4).seconds > 0


def test_expert_parallelism_divides_the_experts_state_but_not_the_rest() -> None:
    def memory(expert: int):
        config = TrainerConfig(kind="megatron", expert_parallel=expert)
        return training_memory(MIXTURE, config, gpus=16, micro_batch_tokens=8192, gradient_bytes=2)

    one, eight = memory(1), memory(8)
    experts = MIXTURE.moe_layers * MIXTURE.experts * MIXTURE.expert_parameters
    assert one.parameters - eight.parameters == pytest.approx(2 * experts * 7 / 8)
    assert one.gradients - eight.gradients == pytest.approx(2 * experts * 7 / 8)
    # Adam's state is spread over all GPUs either way.
    assert one.optimizer == eight.optimizer == 12 * MIXTURE.parameters / 16


def test_a_mixture_that_does_not_fit_is_refused_with_expert_parallelism_as_the_fix() -> None:
    with pytest.raises(ValueError, match=r"raise trainer.expert_parallel, trainer.tensor"):
        cost(gpus=8, model=MIXTURE)
    assert cost(gpus=8, model=MIXTURE, expert_parallel=8).data_parallel == 8


def test_experts_of_one_node_are_faster_than_those_of_many() -> None:
    def seconds(expert: int) -> float:
        layout = {"tensor_parallel": 2, "pipeline_parallel": 8, "expert_parallel": expert}
        return step(gpus=256, model=LARGE, **layout).seconds

    assert seconds(8) < seconds(16) < seconds(32)
    # A rack of GB200 is one NVLink domain.
    inside, across = (
        step(gpus=64, model=MIXTURE, gpu=gpu, expert_parallel=64).seconds for gpu in (GB200, H100)
    )
    assert inside < across / 2


def test_even_experts_are_faster_and_matter_only_with_expert_parallelism() -> None:
    even, uneven = (
        step(model=MIXTURE, expert_parallel=8, expert_imbalance=one).seconds for one in (1, 1.5)
    )
    assert even < uneven < 1.5 * even
    alone = [step("fsdp2", model=MIXTURE, expert_imbalance=one).seconds for one in (1, 1.5)]
    assert alone[0] == alone[1]


def test_gathering_fewer_experts_makes_prime_rl_faster_with_expert_parallelism() -> None:
    assert step("prime_rl", model=MIXTURE, expert_parallel=8, expert_imbalance=1).seconds < (
        step("prime_rl", model=MIXTURE).seconds
    )


# --- sequences -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["context_parallel", "sequence_parallel"])
def test_sharing_a_sequence_divides_its_activations_and_most_of_its_time(way: str) -> None:
    long = {"micro_batch_tokens": 65_536, "gpus": 8}
    lengths = np.full(8, 65_536)
    whole = cost(gpu=find_gpu("B200"), **long)
    shared = cost(gpu=find_gpu("B200"), **long, **{way: 8})
    one, eight = (
        training_memory(SMALL, at.config, gpus=8, micro_batch_tokens=65_536)
        for at in (whole, shared)
    )
    assert eight.activations == one.activations / 8
    apart, together = (at.step(lengths, minibatches=1).seconds for at in (whole, shared))
    assert apart <= together < 1.1 * apart


def test_keys_and_values_arrive_behind_the_attention_of_long_sequences_only() -> None:
    def exposed(tokens: int) -> float:
        """Seconds of the passes that context parallelism adds, relative."""
        many = {"micro_batch_tokens": tokens, "gpu": find_gpu("B200"), "gpus": 16}
        lengths = np.full(64, tokens)
        shared, apart = (
            cost(**many, context_parallel=one).step(lengths, minibatches=1).parts[FORWARD_BACKWARD]
            for one in (16, 1)
        )
        return shared / apart - 1

    assert exposed(65_536) == pytest.approx(0, abs=1e-9)
    assert exposed(2_048) > 0.02


def test_copies_of_shards_in_each_node_spare_the_network() -> None:
    """HSDP: gathers stay in a node, and only what a GPU holds is reduced over the network."""
    slow = dataclasses.replace(H100, network_bytes_per_s=1e9)
    everywhere = step("fsdp2", 64, gpu=slow, micro_batch_tokens=4096).seconds
    in_nodes = step("fsdp2", 64, gpu=slow, micro_batch_tokens=4096, shard_group=8).seconds
    assert in_nodes < everywhere / 2
    memory = [
        training_memory(
            SMALL,
            TrainerConfig(kind="fsdp2", shard_group=group),
            gpus=64,
            micro_batch_tokens=4096,
            fully_sharded=True,
        )
        for group in (0, 8)
    ]
    assert memory[1].optimizer == 8 * memory[0].optimizer


def test_a_trainer_without_shards_has_no_shard_group() -> None:
    with pytest.raises(ValueError, match="kind megatron does not shard parameters"):
        cost("megatron", shard_group=8)


# --- pipelines, precision, gradients, offload ----------------------------------------------------


def test_chunks_divide_the_bubble() -> None:
    whole, cut = (step(pipeline_parallel=4, pipeline_chunks=one).parts[BUBBLE] for one in (1, 4))
    assert cut == pytest.approx(whole / 4)


def test_a_step_in_fp8_is_as_much_faster_as_published_ones() -> None:
    """NVIDIA's recipes in fp8 are 1.25 to 1.53 times as fast as in bf16."""
    bf16, fp8 = (step(precision=one).seconds for one in ("bf16", "fp8"))
    assert 1.25 < bf16 / fp8 < 1.53


def test_gradients_of_a_step_with_many_micro_batches_are_hidden() -> None:
    megatron, areal = (
        step(kind, 16, micro_batch_tokens=4096).parts[GRADIENTS] for kind in ("megatron", "areal")
    )
    assert megatron < areal / 10


def test_gradients_that_take_longer_than_the_last_micro_batch_are_waited_for() -> None:
    slow = dataclasses.replace(H100, network_bytes_per_s=1e8)
    at = cost(gpus=16, gpu=slow)
    timing = at.step(LENGTHS, minibatches=1)
    backward = timing.parts[FORWARD_BACKWARD] * 0.75 / (512 / 16 / 2)
    sent = 15 / 16 * 4 * SMALL.parameters / (8 * 1e8 * 0.72)
    assert timing.parts[GRADIENTS] == pytest.approx(sent - backward, rel=0.02)


def test_gradients_in_fp32_take_twice_the_memory_and_the_bytes() -> None:
    memory = [
        training_memory(
            SMALL, TrainerConfig(), gpus=8, micro_batch_tokens=0, gradient_bytes=one
        ).gradients
        for one in (2, 4)
    ]
    assert memory[1] == 2 * memory[0] == 4 * SMALL.parameters
    slow = dataclasses.replace(H100, network_bytes_per_s=1e8)
    usual, same, wide = (
        step(gpu=slow, gradient_precision=one).parts[GRADIENTS] for one in ("usual", "bf16", "fp32")
    )
    assert usual == same
    # Two more bytes of four (gradients out, parameters in) for each parameter.
    more = 15 / 16 * 2 * SMALL.parameters / (8 * 1e8 * 0.72)
    assert wide - usual == pytest.approx(more, rel=0.01)


def test_offloading_the_optimizer_trades_memory_for_copies() -> None:
    layout = {"gpus": 8, "pipeline_parallel": 1}
    with pytest.raises(ValueError, match=r"H100 has 80\.0"):
        cost("areal", **layout, micro_batch_tokens=32768, reference_logprobs=True)
    offloaded = step("megatron", **layout, optimizer_offload=True)
    usual = step("megatron", **layout)
    copied = 12 * SMALL.parameters / 8 / PINNED_BYTES_PER_S
    assert offloaded.parts[OPTIMIZER] - usual.parts[OPTIMIZER] == pytest.approx(copied)
    memory = training_memory(
        SMALL, TrainerConfig(optimizer_offload=True), gpus=8, micro_batch_tokens=0
    )
    assert memory.optimizer == 0


def test_a_reference_on_the_host_takes_no_memory_but_three_copies() -> None:
    def memory(on_host: bool) -> float:
        config = TrainerConfig(reference_logprobs=True)
        return training_memory(
            SMALL, config, gpus=8, micro_batch_tokens=0, reference_on_host=on_host
        ).parameters

    assert memory(True) == 2 * SMALL.parameters == memory(False) / 2
    timing = step(proximal_logprobs=True, reference_logprobs=True)
    copies = 3 * 2 * SMALL.parameters / PINNED_BYTES_PER_S
    assert timing.parts[REFERENCE] - timing.parts[PROXIMAL] == pytest.approx(copies)
    shared = step("fsdp2", proximal_logprobs=True, reference_logprobs=True)
    assert shared.parts[REFERENCE] == shared.parts[PROXIMAL]


# --- measured factors ----------------------------------------------------------------------------


def test_a_factor_scales_passes_and_a_fixed_time_is_added_once() -> None:
    plain = step(proximal_logprobs=True)
    slower = step(proximal_logprobs=True, time_factor=2.0, fixed_s=7.0)
    assert slower.parts[FIXED] == 7
    for name in (FORWARD_BACKWARD, PROXIMAL):
        assert slower.parts[name] == pytest.approx(2 * plain.parts[name])
    assert slower.parts[OPTIMIZER] == plain.parts[OPTIMIZER]


# --- all kinds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_more_gpus_and_faster_hardware_are_never_slower(kind: str) -> None:
    seconds = [step(kind, 8 * 2**one).seconds for one in range(4)]
    assert seconds == sorted(seconds, reverse=True)
    base = step(kind, model=MIXTURE, gpu=GB200, expert_parallel=8).seconds
    for name in ("flops_per_s", "memory_bytes_per_s", "nvlink_bytes_per_s"):
        faster = dataclasses.replace(GB200, **{name: 2 * getattr(GB200, name)})
        assert step(kind, model=MIXTURE, gpu=faster, expert_parallel=8).seconds <= base


@pytest.mark.parametrize("kind", KINDS)
def test_parts_sum_to_the_seconds(kind: str) -> None:
    timing = step(kind, model=MIXTURE, gpu=GB200, expert_parallel=8, reference_logprobs=True)
    assert timing.seconds == sum(timing.parts.values())


def test_memory_of_a_fully_sharded_model_includes_the_layers_it_gathers() -> None:
    config = TrainerConfig(kind="fsdp2")
    memory = training_memory(MIXTURE, config, gpus=64, micro_batch_tokens=0, fully_sharded=True)
    assert memory.gathered == pytest.approx(2 * 2 * MIXTURE.parameters / MIXTURE.layers)
    assert memory.gathered / GIB == pytest.approx(2.4, abs=0.1)


def test_a_compute_bound_gpu_loses_little_to_traffic() -> None:
    """An H20 has a seventh of the FLOP/s of an H100 and more bandwidth."""
    reached = {}
    for gpu in (H100, H20):
        timing = step("fsdp2", 8, gpu=gpu)
        reached[gpu.name] = timing.flops / timing.seconds / (8 * gpu.flops_per_s)
    assert reached["H20"] > reached["H100"]


# --- who shares a batch, and padding -------------------------------------------------------------


def waiting(balance: str, lengths: np.ndarray, minibatches: int = 8) -> tuple[float, float]:
    """Seconds of work, and seconds in which ranks wait for the slowest."""
    found = cost("fsdp2", micro_batch_tokens=32768, balance=balance)
    parts = found.step(lengths, minibatches=minibatches).parts
    return parts[FORWARD_BACKWARD], parts.get(SLOWEST_RANK, 0.0)


def test_ranks_that_share_the_batch_wait_in_every_minibatch() -> None:
    """The work is the same but for the packing."""
    lengths = np.random.default_rng(0).lognormal(6.5, 1.0, 1024).astype(np.int64) + 1
    work, each = waiting("minibatch", lengths)
    same_work, whole = waiting("batch", lengths)
    assert same_work == pytest.approx(work, rel=0.1)
    assert whole > 2 * each > 0


def test_what_is_balanced_makes_no_difference_to_equal_lengths_or_to_one_minibatch() -> None:
    equal = np.full(1024, 2000)
    assert waiting("batch", equal) == pytest.approx(waiting("minibatch", equal))
    lengths = np.random.default_rng(1).integers(900, 1100, 1024)
    one = waiting("batch", lengths, minibatches=1)
    assert one == pytest.approx(waiting("minibatch", lengths, minibatches=1), rel=0.02)


@pytest.mark.parametrize("seed", range(3))
def test_each_sequence_is_trained_once_whatever_is_balanced(seed: int) -> None:
    """The lanes of a balanced batch: equal numbers of sequences, whose tokens are nearly equal."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 4000, 960)
    lanes = cut_within_budget(
        lengths, ranks=4, minibatches=6, max_tokens=8192, least=1, balance="batch"
    ).parts()
    assert sorted(one for lane in lanes for batch in lane for one in batch) == list(range(960))
    assert {sum(map(len, lane)) for lane in lanes} == {40}
    of_rank = [
        sum(lengths[one] for lane in lanes[rank::4] for batch in lane for one in batch)
        for rank in range(4)
    ]
    assert max(of_rank) < 1.01 * min(of_rank)
    # A rank cuts its part in batch order.
    firsts = [min(one for batch in lane for one in batch) for lane in lanes[0::4]]
    assert firsts == sorted(firsts)


def test_pipelines_of_megatron_pad_micro_batches_to_the_longest() -> None:
    lengths = np.tile([8000, 5000], 128)
    timing = cost(pipeline_parallel=2).step(lengths, minibatches=1)
    # One sequence each: 3,000 of 8,000 tokens are padding in half of the micro-batches, without
    # the attention that the others have.
    share = timing.parts[PADDING] / timing.parts[FORWARD_BACKWARD]
    assert 0.8 * 3 / 13 < share < 3 / 13
    assert PADDING not in cost().step(lengths, minibatches=1).parts
    assert PADDING not in cost("areal", pipeline_parallel=2).step(lengths, minibatches=1).parts
    assert PADDING not in cost(pipeline_parallel=2).step(LENGTHS, minibatches=1).parts


def _ones(count: int) -> tuple[np.ndarray, np.ndarray]:
    return np.ones((1, count)), np.ones((1, count), bool)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_equal_micro_batches_leave_a_bubble_of_stages_minus_one(stages: int, count: int) -> None:
    forward, present = _ones(count)
    seconds = one_forward_one_backward_s(
        forward, 2 * forward, present, stages=stages, hop_s=0 * forward
    )
    assert seconds == pytest.approx((count + stages - 1) * 3)


def test_it_equals_a_simulation_of_every_pass() -> None:
    generator = np.random.default_rng(0)
    for _ in range(150):
        lanes, count, stages = (int(generator.integers(1, high)) for high in (4, 9, 7))
        forward, backward, hop = generator.exponential(size=(3, lanes, count))
        counts = generator.integers(1, count + 1, lanes)
        seconds = one_forward_one_backward_s(
            forward, backward, np.arange(count) < counts[:, None], stages=stages, hop_s=hop
        )
        for lane, own in enumerate(counts):
            slow = pipeline_oracle.one_forward_one_backward_s(
                forward[lane, :own], backward[lane, :own], hop[lane, :own], stages
            )
            assert seconds[lane] == pytest.approx(slow, rel=1e-12)


def test_unequal_micro_batches_make_stages_wait_for_each_other() -> None:
    present = np.ones((1, 16), bool)
    even, uneven = np.full((1, 16), 2.0), np.tile([1.0, 3.0], (1, 8))
    assert even.sum() == uneven.sum()
    slow, fast = (
        one_forward_one_backward_s(one, 2 * one, present, stages=4, hop_s=0 * one)
        for one in (uneven, even)
    )
    assert slow > 1.1 * fast


def test_a_longer_micro_batch_never_ends_earlier() -> None:
    generator = np.random.default_rng(1)
    forward = generator.exponential(size=(1, 9))
    present = np.ones_like(forward, bool)
    zero = np.zeros_like(forward)
    before = one_forward_one_backward_s(forward, forward, present, stages=4, hop_s=zero)
    for one in range(9):
        longer = forward.copy()
        longer[0, one] += 0.5
        after = one_forward_one_backward_s(longer, longer, present, stages=4, hop_s=zero)
        assert after >= before


def test_forward_only_queues_behind_the_longest() -> None:
    forward = np.array([[1.0, 3.0, 2.0]])
    present = np.array([[True, True, True]])
    assert forward_only_s(forward, present, stages=4, hop_s=0 * forward) == 6 + 3 * 3
    assert forward_only_s(forward, present, stages=1, hop_s=0 * forward) == 6
