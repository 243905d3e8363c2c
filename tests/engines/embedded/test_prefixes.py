"""Shared prefixes: found among all, and those of ended requests as exact as computed again."""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.engines.embedded import batcher as batcher_module
from areal_lab.engines.embedded.batcher import Batcher, Sample
from areal_lab.engines.embedded.cache import KeptPrefixes, KVCache, Prefixes
from areal_lab.engines.protocol import MemoryTag, PauseMode
from areal_lab.engines.weights.folder import deduplicated_state
from tests.engines.embedded.test_batcher import FLOAT32_ERROR, batcher_of
from tests.engines.tiny import VOCABULARY, largest_error, request, run, tiny_model

ENOUGH = 1 << 26
KINDS = ["llama", "qwen2", "qwen3"]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=12), st.data())
def test_the_longest_shared_prefix_is_found_among_all(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    """Tokens above 255 have several bytes, whose order must be that of the numbers."""
    scale = data.draw(st.sampled_from([1, 200, 70_000]))
    known = [(np.array(prompt, dtype=np.int64) * scale, at) for at, prompt in enumerate(prompts)]
    cut = data.draw(st.integers(0, len(known)))
    prefixes = Prefixes(known[:cut])
    for tokens, of in known[cut:]:
        prefixes.add(tokens, of)
    removed = set(data.draw(st.lists(st.sampled_from(range(len(known))), unique=True))
                  if known else [])  # fmt: skip
    for of in removed:
        prefixes.remove(of)
    wanted = np.array(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))) * scale
    best = max((_common(one, wanted) for one, at in known if at not in removed), default=0)
    source, shared = prefixes.longest_of(wanted)
    assert shared == min(best, len(wanted) - 1)
    if shared:
        assert source is not None
        assert source not in removed
        assert list(known[source][0][:shared]) == list(wanted[:shared])
    else:
        assert source is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept_prefix_bytes", [0, 20_000, ENOUGH], ids=["none", "few", "all"])
def test_turns_of_conversations_are_exact_however_much_is_kept(
    kind: str, kept_prefix_bytes: int
) -> None:
    """Conversations of uneven turns take turns; one of them is continued twice."""
    model = tiny_model(kind)
    batcher = batcher_of(model, max_running_requests=3, kept_prefix_bytes=kept_prefix_bytes)
    chance = random.Random(1)
    histories = [[chance.randrange(2, VOCABULARY) for _ in range(5 + 3 * i)] for i in range(4)]
    computed = 0
    for turn in range(4):
        for index, history in enumerate(histories):
            new_tokens = 3 + (index + turn) % 3
            batcher.add(request(f"{turn}-{index}", history, new_tokens, seed=index))
        branch = histories[1][: len(histories[1]) // 2]
        batcher.add(request(f"{turn}-branch", [*branch, 7, 8], 2, seed=9))
        samples = run(batcher)
        for sample in samples.values():
            assert largest_error(model, sample) < FLOAT32_ERROR
        for index, history in enumerate(histories):
            sample = samples[f"{turn}-{index}"]
            if turn and kept_prefix_bytes == ENOUGH:
                # All except the last sampled token, which no step has computed, and the new ones.
                assert sample.cached_tokens == len(history) - 3
            observed = [chance.randrange(2, VOCABULARY) for _ in range(2)]
            histories[index] = [*history, *sample.tokens, *observed]
        assert batcher.kept_prefix_bytes <= kept_prefix_bytes
        computed = batcher.prompt_tokens
    whole = sum(len(history) for history in histories)
    if kept_prefix_bytes == ENOUGH:
        assert computed < whole
    elif not kept_prefix_bytes:
        assert computed > 1.5 * whole


def test_a_conversation_is_kept_once() -> None:
    """Its running turn takes the prefix over, and leaves a longer one."""
    batcher = batcher_of(tiny_model(), kept_prefix_bytes=ENOUGH)
    history = list(range(2, 12))
    sizes = []
    for turn in range(3):
        sample = turn_of(batcher, history, f"t{turn}")
        history = [*history, *sample.tokens, 5]
        sizes.append(batcher.kept_prefix_bytes)
    token_bytes = sizes[0] / 13  # the last one of 10 + 4 tokens is not computed
    assert sizes[1] == 18 * token_bytes
    assert sizes[2] == 23 * token_bytes
    batcher.add(request("running", history, 4))
    batcher.step()
    assert not batcher.kept_prefix_bytes
    assert batcher.cache_bytes


@pytest.mark.parametrize("mode", ["flush", "keep", "release"])
def test_nothing_of_old_weights_is_kept(mode: str) -> None:
    old, new = tiny_model(), tiny_model(seed=1)
    batcher = batcher_of(old, kept_prefix_bytes=ENOUGH)
    history = list(range(2, 12))
    sample = turn_of(batcher, history, "old")
    assert batcher.kept_prefix_bytes
    if mode == "release":
        batcher.release_memory([MemoryTag.KV_CACHE])
        assert not batcher.cache_bytes
        batcher.resume_memory([MemoryTag.KV_CACHE])
    weights = deduplicated_state(new)
    batcher.replace_weights(weights, "1", flush=mode == "flush")
    assert not batcher.kept_prefix_bytes
    after = turn_of(batcher, [*history, *sample.tokens, 5], "new")
    assert after.cached_tokens == 0
    assert largest_error(new, after) < FLOAT32_ERROR


def test_what_was_computed_with_two_weights_is_not_kept() -> None:
    old, new = tiny_model(), tiny_model(seed=1)
    batcher = batcher_of(old, kept_prefix_bytes=ENOUGH)
    batcher.add(request("r", range(2, 12), 6))
    batcher.step()
    batcher.pause(PauseMode.IN_PLACE)
    batcher.replace_weights(deduplicated_state(new), "1", flush=False)
    batcher.resume()
    run(batcher)
    assert not batcher.kept_prefix_bytes


def test_the_oldest_are_forgotten_first() -> None:
    kept = KeptPrefixes(3 * 4 * 10)

    def add(first: int) -> None:
        def copy() -> list[torch.Tensor]:
            assert kept.size_bytes <= 80, "there must be room before it is copied"
            return [torch.zeros(1, 1, 10, 1)]

        kept.add(np.array([first, *range(9)]), 40, copy)

    for first in range(5):
        add(first)
    assert kept.size_bytes == 120
    found = [kept.longest_of(np.array([first, *range(9), 9]))[1] for first in range(5)]
    assert found == [0, 0, 10, 10, 10]
    kept.add(np.arange(31), 124, pytest.fail)
    assert kept.size_bytes == 120, "one that does not fit must displace none"
    kept.add(np.arange(30), 120, lambda: [torch.zeros(1, 1, 30, 1)])
    assert kept.longest_of(np.arange(31))[1] == 30
    assert kept.size_bytes == 120


def test_a_prompt_without_anything_new_takes_a_prefix_over() -> None:
    """All except its last token are copied."""
    batcher = batcher_of(tiny_model(), kept_prefix_bytes=ENOUGH)
    sample = turn_of(batcher, list(range(2, 12)), "first")
    again = request("again", [*range(2, 12), *sample.tokens[:-1]], 4)
    batcher.add(again)
    batcher.step()
    assert batcher.running[0].cached_tokens == len(again.prompt_tokens) - 1
    assert not batcher.kept_prefix_bytes


def test_aborted_requests_are_not_kept_and_a_flush_drops_what_is() -> None:
    batcher = batcher_of(tiny_model(), kept_prefix_bytes=ENOUGH)
    batcher.add(request("aborted", range(2, 12), 4))
    batcher.step()
    batcher.abort()
    assert not batcher.kept_prefix_bytes
    turn_of(batcher, list(range(2, 12)), "ended")
    assert batcher.kept_prefix_bytes
    batcher.flush()
    assert not batcher.cache_bytes


def test_only_what_is_computed_counts_in_the_budget_of_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And a prompt that waits for the next step finds its prefix there."""
    model = tiny_model()
    batcher = batcher_of(model, kept_prefix_bytes=ENOUGH)
    histories = [[first, *range(20, 50)] for first in (2, 3, 4)]
    for index, history in enumerate(histories):
        history.extend((*turn_of(batcher, history, f"{index}").tokens, 5, 6, 7))
    monkeypatch.setattr(batcher_module, "PREFILL_TOKENS", 10)
    for index, history in enumerate(histories):
        batcher.add(request(f"next{index}", history, 4))
    batcher.step()
    assert len(batcher.running) == 2  # of 4 new tokens each
    samples = run(batcher)
    for index, history in enumerate(histories):
        sample = samples[f"next{index}"]
        assert sample.cached_tokens == len(history) - 4
        assert largest_error(model, sample) < FLOAT32_ERROR


def test_a_copied_prefix_has_no_memory_during_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = batcher_of(tiny_model(), kept_prefix_bytes=ENOUGH)
    copies = []
    copy, forward = KVCache.copy, Batcher._forward

    def watched_copy(cache: KVCache, row: int, tokens: int) -> list[torch.Tensor]:
        layers = copy(cache, row, tokens)
        copies.extend(weakref.ref(layer) for layer in layers)
        return layers

    def watched_forward(batcher: Batcher, *args: Any) -> torch.Tensor:
        assert all(copied() is None for copied in copies)
        return forward(batcher, *args)

    monkeypatch.setattr(KVCache, "copy", watched_copy)
    history = list(range(2, 12))
    sample = turn_of(batcher, history, "first")
    assert all(copied() is not None for copied in copies)
    monkeypatch.setattr(Batcher, "_forward", watched_forward)
    after = turn_of(batcher, [*history, *sample.tokens, 5], "second")
    assert after.cached_tokens == 13
    assert len(copies) == 4  # two layers of each turn


@pytest.mark.parametrize("times", [1, 2, 99])
def test_kept_prefixes_make_room_for_running_requests(
    monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """The memory ends when the first layer has grown: for a moment, for a step, or for good."""
    model = tiny_model()
    batcher = batcher_of(model, kept_prefix_bytes=ENOUGH)
    sample = turn_of(batcher, list(range(2, 12)), "first")
    first_bytes = batcher.kept_prefix_bytes
    turn_of(batcher, list(range(40, 60)), "other")
    new_zeros, calls = torch.Tensor.new_zeros, []

    def short_of_memory(tensor: torch.Tensor, *shape: Any) -> torch.Tensor:
        calls.append(shape)
        if 2 <= len(calls) <= times + 1:
            raise torch.OutOfMemoryError("no memory is left")
        return new_zeros(tensor, *shape)

    monkeypatch.setattr(torch.Tensor, "new_zeros", short_of_memory)
    batcher.add(request("long", [*range(2, 12), *sample.tokens, *range(20, 90)], 4))
    if times == 99:
        with pytest.raises(torch.OutOfMemoryError):
            batcher.step()
        return
    long = run(batcher)["long"]
    assert largest_error(model, long) < FLOAT32_ERROR
    if times == 2:  # alone, without anything that is kept
        assert long.retractions > 0
        return
    assert long.cached_tokens == 13
    assert len(calls) == 3, "a layer that has grown does not grow again"
    kept = len(long.request.prompt_tokens) + 3
    assert batcher.kept_prefix_bytes == kept * first_bytes // 13


@pytest.mark.parametrize("size", [(9, 10), (2, 65)], ids=["rows", "tokens"])
def test_a_cache_grows_in_all_layers_after_it_failed(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    cache = KVCache(
        layers=3, kv_heads=1, head_dim=2, dtype=torch.float32, device=torch.device("cpu")
    )
    cache.reserve(2, 10, live=0, longest=0)
    with torch.inference_mode():
        for layer in cache.layers:
            layer[:, :2, :, :10] = 7
    new_zeros, calls = torch.Tensor.new_zeros, iter(range(9))

    def fails_once(tensor: torch.Tensor, *shape: Any) -> torch.Tensor:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("no memory is left")
        return new_zeros(tensor, *shape)

    monkeypatch.setattr(torch.Tensor, "new_zeros", fails_once)
    with pytest.raises(torch.OutOfMemoryError):
        cache.reserve(*size, live=2, longest=10)
    cache.reserve(*size, live=2, longest=10)
    assert len({layer.shape for layer in cache.layers}) == 1
    assert cache.rows >= size[0]
    assert cache.capacity >= size[1]
    assert all((layer[:, :2, :, :10] == 7).all() for layer in cache.layers)


def turn_of(batcher: Batcher, history: list[int], name: str) -> Sample:
    batcher.add(request(name, history, 4))
    return run(batcher)[name]


def _common(one: np.ndarray, other: np.ndarray) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
