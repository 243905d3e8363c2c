"""The engine with pages: its own tests again, through recorded passes of fixed shapes; limits."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from areal_lab.engines.embedded import attention, decode_steps
from areal_lab.engines.embedded import batcher as batcher_module
from areal_lab.engines.embedded.batcher import Batcher, Refused, Sample
from areal_lab.engines.embedded.decode_steps import DecodeSteps, page_bucket, row_bucket
from areal_lab.engines.embedded.pages import PagedCache
from areal_lab.engines.protocol import MemoryTag, PauseMode
from areal_lab.engines.weights.folder import deduplicated_state
from tests.engines.embedded import test_batcher, test_images, test_prefixes, test_shared_rows
from tests.engines.embedded.recorded import Recordings
from tests.engines.embedded.test_batcher import FLOAT32_ERROR, batcher_of
from tests.engines.embedded.test_shared_rows import check_rows, group
from tests.engines.tiny import largest_error, ragged_requests, request, run, tiny_model
from tests.kernels import require_interpreter

PAGE = 8
ENOUGH = 1 << 26

# The same promises, whatever holds keys and values. Left out: how contiguous rows are divided,
# copied and grown, and one-shot checks that no cache takes part in.
_OF_ROWS = {
    "test_rows_of_very_different_lengths_are_attended_in_blocks",
    "test_a_copied_prefix_has_no_memory_during_the_pass",
    "test_kept_prefixes_make_room_for_running_requests",
    "test_a_cache_grows_in_all_layers_after_it_failed",
    "test_the_oldest_are_forgotten_first",
    "test_the_longest_shared_prefix_is_found_among_all",
    "test_a_group_is_computed_once_until_its_samples_differ",  # counts calls, which are replayed
    "test_requests_with_one_row_of_logits_get_their_own_tokens",
}
_OF_IMAGES = ("test_logprobs_are_those_of_transformers",
              "test_an_interrupted_response_continues_exactly",
              "test_a_picture_does_not_take_the_keys_of_another")  # fmt: skip
for _module in (test_batcher, test_prefixes, test_shared_rows):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and callable(_test) and _name not in _OF_ROWS:
            globals()[_name] = _test
for _name in _OF_IMAGES:
    globals()[_name] = getattr(test_images, _name)
models, folder, small = test_batcher.models, test_images.folder, test_images.small


@pytest.fixture(autouse=True)
def recordings(monkeypatch: pytest.MonkeyPatch) -> Recordings:
    """Every batcher has pages of 8 tokens and replays its passes."""
    found = Recordings()
    original = decode_steps.choose_cache

    def with_pages(*args: Any, limit_bytes: int | None, **options: Any) -> Any:
        cache, steps = original(
            *args, limit_bytes=limit_bytes or ENOUGH, page_tokens=PAGE, **options
        )
        assert steps is not None
        steps._capture = found
        return cache, steps

    monkeypatch.setattr(batcher_module, "choose_cache", with_pages)
    return found


def pages(batcher: Batcher) -> PagedCache:
    cache = batcher._cache
    assert isinstance(cache, PagedCache)
    return cache


def conserved(batcher: Batcher) -> None:
    """Every page is free or has owners, and each owner is a row or a kept prefix."""
    cache = pages(batcher).pages
    assert cache.free + cache.used == cache.count
    owners = [page for row in range(cache.rows) for page in cache.of_row(row)]
    for kept in batcher._kept._by_age:
        owners += kept.content.pages
    counts = [owners.count(page) for page in range(cache.count + 1)]
    assert counts == cache._owners
    check_rows(batcher)
    assert cache.rows == len(batcher._rows)
    read = [page for row in range(cache.rows) for page in cache.of_row(row)]
    for kept in batcher._kept._by_age:
        read += kept.content.pages[: kept.tokens // PAGE]
    for row, (sample, *_) in enumerate(batcher._rows):
        assert len(cache.of_row(row)) * PAGE >= sample.length
        written = cache.of_row(row)[sample.length // PAGE :]
        assert all(read.count(page) == 1 for page in written), "others read what this row writes"


@pytest.mark.parametrize("seed", range(4))
def test_pages_are_conserved_whatever_happens(seed: int) -> None:
    """Admission, decoding, ends, aborts, pauses and new weights, in a cache that is too small."""
    chance = random.Random(seed)
    model = tiny_model()
    token_bytes = pages(batcher_of(model)).token_bytes
    batcher = batcher_of(
        model,
        max_running_requests=6,
        kept_prefix_bytes=60 * token_bytes,
        cache_limit_bytes=(16 + chance.randrange(8)) * PAGE * token_bytes,
    )
    state = {name: value.clone() for name, value in model.state_dict().items()}
    todo = ragged_requests(16, seed) + [
        one for name in "ab" for one in group(name, [3, 4, 5, 6], 4, new_tokens=24)
    ]
    ended: list[Sample] = []
    aborted: list[Sample] = []
    while todo or batcher.running or batcher.waiting:
        match chance.randrange(12):
            case 0 | 1 | 2 if todo:
                for _ in range(min(len(todo), chance.randrange(1, 5))):
                    batcher.add(todo.pop())
            case 3 if batcher.running:
                one = chance.choice(batcher.running)
                aborted += batcher.abort([one.request.request_id])
            case 4:
                batcher.pause(chance.choice([PauseMode.RETRACT, PauseMode.IN_PLACE]))
                if not batcher.running:
                    batcher.replace_weights(state, "1", flush=True)
                batcher.resume()
            case _:
                ended += batcher.step()
        conserved(batcher)
    for sample in ended:
        temperature = sample.request.sampling.temperature
        assert len(sample.tokens) == sample.request.sampling.max_new_tokens
        assert largest_error(model, sample, temperature) < 4 * FLOAT32_ERROR
    assert len(ended) + len(aborted) == 24
    batcher.flush()
    assert pages(batcher).pages.free == pages(batcher).pages.count


@pytest.mark.parametrize("length", [PAGE - 1, PAGE, PAGE + 1])
@pytest.mark.parametrize("continued", [0, 1, PAGE])
def test_prefixes_that_end_at_the_edge_of_a_page_are_shared(length: int, continued: int) -> None:
    """Equal prompts and longer ones in one step, then one that continues an ended request."""
    model = tiny_model()
    batcher = batcher_of(model, kept_prefix_bytes=ENOUGH)
    prompt = list(range(2, 2 + length))
    for index in range(3):
        batcher.add(request(f"same{index}", prompt, 2 * PAGE, seed=index))
    batcher.add(request("longer", [*prompt, *range(40, 40 + continued + 1)], 3))
    batcher.step()
    conserved(batcher)
    assert batcher.prompt_tokens == length + continued + 1
    samples = run(batcher)
    history = [*prompt, *samples["same0"].tokens[: PAGE - 1 + continued], 50]
    batcher.add(request("next", history, 3))
    samples |= run(batcher)
    assert samples["next"].cached_tokens == len(history) - 1
    for sample in samples.values():
        assert largest_error(model, sample) < FLOAT32_ERROR


# --- the limit ---


def test_requests_wait_and_the_newest_is_retracted_if_the_cache_is_full() -> None:
    model = tiny_model()
    token_bytes = pages(batcher_of(model)).token_bytes
    batcher = batcher_of(model, cache_limit_bytes=(1 + 12) * PAGE * token_bytes)
    assert batcher.cache_limit_bytes == 12 * PAGE * token_bytes
    for index in range(6):
        batcher.add(request(f"r{index}", [index + 2] * 20, 40, seed=index))
    batcher.step()
    # Three pages each, and one must stay free for each running row.
    assert len(batcher.running) == 3
    assert batcher.cache_waits == 1
    samples = run(batcher)
    assert batcher.cache_retractions == sum(sample.retractions for sample in samples.values()) > 0
    assert samples["r0"].retractions == 0, "the oldest one never makes room"
    for sample in samples.values():
        assert len(sample.tokens) == 40
        assert largest_error(model, sample) < 3e-5


@pytest.mark.parametrize(("length", "retracts"), [(PAGE - 1, True), (PAGE, False)])
def test_samples_of_a_group_wait_if_there_is_no_page_to_leave_their_row(
    length: int, retracts: bool
) -> None:
    """One is admitted per page that it may need; where these are gone, it is computed later."""
    model = tiny_model()
    token_bytes = pages(batcher_of(model)).token_bytes
    batcher = batcher_of(model)
    for one in group("g", list(range(2, 2 + length)), 6, new_tokens=PAGE):
        batcher.add(one)
    expected = {name: sample.tokens for name, sample in run(batcher).items()}
    small = batcher_of(model, cache_limit_bytes=(1 + 4) * PAGE * token_bytes)
    small.add_all(group("g", list(range(2, 2 + length)), 6, new_tokens=PAGE))
    small.step()
    conserved(small)
    assert len(small.running) + len(small.waiting) == 6
    assert small.cache_waits == 1
    assert len(small.running) == 3
    found = run(small)
    assert {name: sample.tokens for name, sample in found.items()} == expected
    retracted = sum(sample.retractions for sample in found.values())
    assert small.cache_retractions == retracted
    assert (retracted > 0) is retracts
    assert pages(small).pages.free == pages(small).pages.count


def test_samples_that_differ_when_the_pages_are_used_up_wait_again() -> None:
    """Those of their row: its first ones continue."""
    model = tiny_model()
    token_bytes = pages(batcher_of(model)).token_bytes
    tokens = []
    for limit in (None, (1 + 8) * PAGE * token_bytes):
        batcher = batcher_of(model, cache_limit_bytes=limit)
        for name in range(3):
            prompt = [name + 2] * 12
            batcher.add_all(group(str(name), prompt, 4, new_tokens=24, temperature=0.04))
        ended = {}
        split = batcher._split_rows
        lost = 0

        def watched(split: Any = split, batcher: Batcher = batcher) -> None:
            nonlocal lost
            before = batcher.cache_retractions
            split()
            lost += batcher.cache_retractions - before

        batcher._split_rows = watched  # type: ignore[method-assign]
        while batcher.running or batcher.waiting:
            ended |= {one.request.request_id: one.tokens for one in batcher.step()}
            conserved(batcher)
        assert (lost > 0) is (limit is not None)
        tokens.append(ended)
    assert tokens[0] == tokens[1]


def test_the_cache_can_be_filled_by_one_request_to_its_last_slot() -> None:
    """And a kept prefix that it continues does not block it."""
    model = tiny_model()
    token_bytes = pages(batcher_of(model)).token_bytes
    batcher = batcher_of(
        model, kept_prefix_bytes=ENOUGH, cache_limit_bytes=(1 + 4) * PAGE * token_bytes
    )
    batcher.add(request("first", range(2, 18), 4))
    first = run(batcher)["first"]
    history = [*first.request.prompt_tokens, *first.tokens, 5]
    whole = request("whole", history, 4 * PAGE + 1 - len(history))
    batcher.check(whole)
    batcher.add(whole)
    assert largest_error(model, run(batcher)["whole"]) < FLOAT32_ERROR
    assert batcher.cache_refusals == 0
    with pytest.raises(Refused, match=f"needs 21 \\+ 13 tokens .* but the cache holds {4 * PAGE}"):
        batcher.check(request("more", history, 4 * PAGE + 2 - len(history)))
    assert batcher.cache_refusals == 1


def test_a_kept_prefix_is_given_up_where_it_blocks_the_request_that_continues_it() -> None:
    """It has three of four pages, of which its last is not shared; the request needs all four."""
    model = tiny_model()
    token_bytes = pages(batcher_of(model)).token_bytes
    batcher = batcher_of(
        model, kept_prefix_bytes=ENOUGH, cache_limit_bytes=(1 + 4) * PAGE * token_bytes
    )
    batcher.add(request("first", range(2, 18), 4))
    first = run(batcher)["first"]
    longer = [*first.request.prompt_tokens, *first.tokens, *range(40, 48)]
    sample = batcher.add(request("longer", longer, 3))
    assert not batcher.step()
    assert batcher.cache_waits == 1
    batcher.step()
    assert batcher.running == [sample]
    assert sample.cached_tokens == 0
    assert largest_error(model, run(batcher)["longer"]) < FLOAT32_ERROR


def test_a_limit_below_two_pages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"may use 1000 bytes, but must have at least \d+, two"):
        batcher_of(tiny_model(), cache_limit_bytes=1000)


# --- fixed shapes ---


def test_256_ragged_rows_take_one_attention_call_per_layer_and_step(
    recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contiguous rows take more than 200 calls at lengths of responses, if they are divided as on
    a CPU."""
    calls = []
    original = decode_steps.gathered_attention

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        calls.append(args[0].shape[0])
        return original(*args, **options)

    monkeypatch.setattr(decode_steps, "gathered_attention", counted)
    model = tiny_model()
    batcher = batcher_of(model, max_running_requests=256)
    chance = random.Random(0)
    lengths = [1 + min(int(chance.lognormvariate(3.5, 1.0)), 200) for _ in range(256)]
    for index, length in enumerate(lengths):
        prompt = [chance.randrange(2, 97) for _ in range(length)]
        batcher.add(request(f"r{index}", prompt, 6, seed=index))
    while batcher.waiting or any(not sample.tokens for sample in batcher.running):
        batcher.step()
    assert len(batcher.running) == 256
    calls.clear()
    recordings.passes.clear()
    batcher.step()
    layers = model.config.num_hidden_layers
    assert calls == [256] * layers
    responses = [int(chance.lognormvariate(6.2, 1.0)) + 1 for _ in range(256)]
    divided = list(attention.similar_rows(responses, attention.SPLIT_COST_TOKENS))
    assert len(divided) > 200
    (operations,) = recordings.passes
    per_layer = len(operations) / layers
    # A replay is one call of the host, for all of these.
    replayed = recordings.replays
    batcher.step()
    assert recordings.replays == replayed + 1
    assert per_layer > 40


def test_all_passes_of_a_bucket_run_the_same_operations_on_the_same_shapes() -> None:
    """What a graph of one of them replays is right for the others."""
    model = tiny_model()
    seen: dict[tuple[int, int], list[list[Any]]] = {}
    recorded = Recordings()

    class Again(dict[Any, Any]):
        """Forgets every bucket, so that each pass is recorded again."""

        def __setitem__(self, key: Any, value: Any) -> None:
            signature = [
                (str(one.function), [tuple(t.shape) for t in _outputs(one.out)])
                for one in recorded.passes[-1]
            ]
            seen.setdefault(key, []).append(signature)

    batcher = batcher_of(model, max_running_requests=6)
    assert isinstance(batcher._steps, DecodeSteps)
    batcher._steps._capture = recorded
    batcher._steps._buckets = Again()
    for one in ragged_requests(12):
        batcher.add(one)
    run(batcher)
    assert len(seen) > 3
    assert max(map(len, seen.values())) > 5
    for signatures in seen.values():
        assert all(signature == signatures[0] for signature in signatures)


def _outputs(out: Any) -> Iterator[torch.Tensor]:
    yield from (t for t in (out if isinstance(out, tuple) else (out,)) if torch.is_tensor(t))


def test_buckets_are_few_and_close() -> None:
    rows = [row_bucket(count) for count in range(1, 257)]
    assert sorted(set(rows)) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert all(count <= bucket <= 1.5 * count for count, bucket in enumerate(rows, start=1))
    assert [page_bucket(count, 100) for count in (1, 4, 5, 8, 9, 65, 100)] == [
        4, 4, 8, 8, 16, 100, 100,
    ]  # fmt: skip
    assert page_bucket(1, 2) == 2, "the table has no more columns"


def test_released_memory_forgets_the_passes_that_read_it(recordings: Recordings) -> None:
    new = tiny_model(seed=1)
    batcher = batcher_of(tiny_model())
    batcher.add(request("before", [5, 6, 7], 6))
    run(batcher)
    assert recordings.replays
    batcher.release_memory(MemoryTag)
    batcher.resume_memory(MemoryTag)
    batcher.replace_weights(deduplicated_state(new), "1", flush=True)
    batcher.add(request("after", [8, 9, 10], 6))
    assert largest_error(new, run(batcher)["after"]) < FLOAT32_ERROR


def test_the_engine_decodes_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel in the engine, through Triton's interpreter, which cannot be recorded."""
    require_interpreter()
    from areal_lab.engines.embedded.decode_kernel import decode_attention

    monkeypatch.setattr(decode_steps, "gathered_attention", decode_attention)
    model = tiny_model("qwen3")
    batcher = batcher_of(model, max_running_requests=3)
    assert isinstance(batcher._steps, DecodeSteps)
    batcher._steps._capture = None
    for one in ragged_requests(3):
        batcher.add(request(one.request_id, one.prompt_tokens, 4))
    for sample in run(batcher).values():
        assert largest_error(model, sample) < FLOAT32_ERROR
