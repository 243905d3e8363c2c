"""Memory of an engine: by hand, and errors with a fix."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.catalogue.gpu import GPUS, find_gpu
from simulator.catalogue.models import MODELS, find_model
from simulator.costs.engine_memory import cache_tokens, check_tensor_parallel


def test_the_cache_takes_the_memory_that_the_weights_leave() -> None:
    # 0.85 * 80 GiB - 15.23 GB of weights, at 57,344 bytes per token
    expected = int((0.85 * 80 * 2**30 - 2 * find_model("Qwen2.5-7B").parameters) / 57_344)
    assert cache_tokens(find_model("Qwen2.5-7B"), find_gpu("H100")) == expected
    assert 1_000_000 < expected < 1_010_000


def test_four_gpus_hold_more_than_four_times_as_much() -> None:
    model, gpu = find_model("Qwen2.5-32B"), find_gpu("H200")
    alone, four = cache_tokens(model, gpu, 1), cache_tokens(model, gpu, 4)
    assert four > 4 * alone  # the weights are there once
    # Together they have four GPUs' shares of memory minus one set of weights.
    room = 4 * 0.85 * gpu.memory_bytes - model.weight_bytes()
    assert four == pytest.approx(room / model.cache_bytes_per_token(), abs=1)


def test_key_value_heads_are_replicated_if_there_are_fewer_than_gpus() -> None:
    """Qwen2.5-3B has two of them: four GPUs hold each twice."""
    model, gpu = find_model("Qwen2.5-3B"), find_gpu("H100")
    assert cache_tokens(model, gpu, 4) < 1.1 * cache_tokens(model, gpu, 2)


def test_models_of_the_paper_fit_as_the_paper_ran_them() -> None:
    for name, split in (("1.5B", 1), ("7B", 1), ("14B", 1), ("32B", 8)):
        model = find_model(f"R1-Distill-Qwen-{name}")
        assert cache_tokens(model, find_gpu("H800"), split, longest_tokens=28_672) > 28_672


@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(GPUS)),
    st.integers(1, 16),
    st.floats(0.1, 1),
    st.integers(1, 200_000),
)
def test_a_model_fits_or_one_line_gives_a_fix(
    name: str, gpu: str, split: int, utilization: float, longest: int
) -> None:
    try:
        tokens = cache_tokens(
            find_model(name), find_gpu(gpu), split, utilization, longest_tokens=longest
        )
        assert tokens >= longest
    except ValueError as error:
        text = str(error)
        assert "\n" not in text
        assert "tensor_parallel" in text
        fix = re.search(r"use (?:(\S+) with )?(?:tensor_parallel=(\d+)|memory_util\S+=0.9)$", text)
        if fix is None:
            assert "evenly" in text or "no GPU of the catalogue" in text
        else:  # and it does help
            share = utilization if fix.group(2) else 0.9
            wider = int(fix.group(2) or split)
            other = find_gpu(fix.group(1) or gpu)
            assert (
                cache_tokens(find_model(name), other, wider, share, longest_tokens=longest)
                >= longest
            )


@pytest.mark.parametrize(
    ("name", "gpu", "split", "longest", "words"),
    [
        (
            "Qwen2.5-72B",
            "A100",
            1,
            28_672,
            "weights take 135.4 GiB of the 68.0 GiB.*tensor_parallel=4",
        ),
        ("DeepSeek-V3", "H100", 8, 1, "no split within a node helps; use GB200 with"),
        ("Qwen2.5-14B", "A100-40", 1, 40_000, "a sequence of 40000 .*use tensor_parallel=2"),
        ("Llama-3.1-405B", "RTX-4090", 8, 1, "no split within a node helps; use H200 with"),
        # Engines of a rack may have more than 8 GPUs.
        ("DeepSeek-V3", "GB200", 8, 1_000_000, "has room for 15897 .*; use tensor_parallel=16"),
        (
            "Llama-3.1-405B",
            "B300",
            8,
            3_000_000,
            "no split within a node helps; use GB300 with tensor_parallel=16",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_refused_with_a_fix(
    name: str, gpu: str, split: int, longest: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        cache_tokens(find_model(name), find_gpu(gpu), split, longest_tokens=longest)


@given(st.integers(1, 4000), st.integers(1, 200_000))
def test_states_of_too_many_sequences_are_remedied_by_fewer(sequences: int, longest: int) -> None:
    """Not by more GPUs an engine: states of Qwen3.5-27B take 156 MB a sequence."""
    model, gpu = find_model("Qwen3.5-27B"), find_gpu("H100")
    try:
        cache_tokens(model, gpu, longest_tokens=longest, sequences=sequences)
    except ValueError as error:
        found = re.search(r"; use max_running=(\d+)", str(error))
        if found is None:  # not even one fits
            with pytest.raises(ValueError, match=r"tensor_parallel="):
                cache_tokens(model, gpu, longest_tokens=longest, sequences=1)
            return
        fewer = int(found.group(1))
        assert 1 <= fewer < sequences
        assert cache_tokens(model, gpu, longest_tokens=longest, sequences=fewer) >= longest
        with pytest.raises(ValueError, match="use max_running="):
            cache_tokens(model, gpu, longest_tokens=longest, sequences=fewer + 1)


def test_a_split_of_heads_that_is_impossible_is_refused_with_the_possible_ones() -> None:
    with pytest.raises(ValueError, match=r"28 heads and 4 key-value heads.*: 1, 2, 4$"):
        check_tensor_parallel(find_model("Qwen2.5-7B"), find_gpu("H100"), 8)
    for zero in (0, -1):
        with pytest.raises(ValueError, match=f"tensor_parallel is {zero}, but must"):
            check_tensor_parallel(find_model("Qwen2.5-7B"), find_gpu("H100"), zero)


@pytest.mark.parametrize("utilization", [0.0, -0.5, 1.01, float("nan")])
def test_a_utilization_outside_of_0_to_1_is_refused(utilization: float) -> None:
    with pytest.raises(ValueError, match=r"memory_utilization is .*must be in"):
        cache_tokens(find_model("Qwen2.5-7B"), find_gpu("H100"), 1, utilization)


def test_an_empty_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match="longest_tokens is 0, but must be >= 1"):
        cache_tokens(find_model("Qwen2.5-7B"), find_gpu("H100"), longest_tokens=0)
