"""The contract of all engines with the pipeline: tokens, log-probs, versions, interruptions.

Each test runs against a real server of each engine. Where engines differ, `engines.py` says so.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.client.dialect import Digest
from areal_lab.engines.client.engine_client import EngineError, VersionMismatch
from areal_lab.engines.launch.detect import dialect_at
from areal_lab.engines.protocol import Generated, PauseMode, ScoredTokens
from areal_lab.engines.weights.folder import write_weights
from areal_lab.functional.logprobs.cutoff import Cutoff, top_k, top_p
from tests.data.byte_tokenizer import save_byte_tokenizer
from tests.data.test_stop_strings import decoding_everything
from tests.real_engines.conftest import Announce, only
from tests.real_engines.lab import (
    CONTEXT,
    END_TOKEN,
    LONG,
    Lab,
    plain_logprobs,
    request,
    tokens_of,
    versions_of,
)

PROMPTS = [[5, 6, 7], [5, 6, 8, 9], [11], [5, 6, 7], [12, 13, 14, 15, 16, 17]]
CLEARLY = 1e-3
"""A log-prob that differs by more was not computed by that model; by less than a tenth, it was."""
INTERRUPTED_PROMPT = list(range(2, 34))


def proven_versions(lab: Lab, prompt: list[int], result: Generated) -> list[int | None]:
    """For each token, the one version of 0 and 1 that re-scoring finds; None if both or neither
    fit."""
    fits = [lab.errors(version, prompt, result) for version in (0, 1)]
    found: list[int | None] = []
    for old, new in zip(*(error.tolist() for error in fits), strict=True):
        match (old < CLEARLY / 10, new < CLEARLY / 10):
            case (True, False) if new > CLEARLY:
                found.append(0)
            case (False, True) if old > CLEARLY:
                found.append(1)
            case _:
                found.append(None)
    return found


# --- generating ---


def test_a_batch_comes_back_in_order_with_the_logprobs_of_transformers(lab: Lab) -> None:
    async def scenario() -> list[Generated]:
        requests = [request(f"r{i}", p, 6 + i, seed=i) for i, p in enumerate(PROMPTS)]
        return await lab.client.generate(requests)

    results = lab.run(scenario())
    for index, (prompt, result) in enumerate(zip(PROMPTS, results, strict=True)):
        assert result.request_id == f"r{index}"
        assert versions_of(result) == [0]
        assert len(tokens_of(result)) == 6 + index
        assert result.finish_reason == "length"
        assert lab.errors(0, prompt, result).max() < lab.facts.error


def test_a_temperature_is_part_of_the_reported_distribution(lab: Lab) -> None:
    async def scenario() -> list[Generated]:
        return await lab.client.generate([request("r", PROMPTS[0], 40, temperature=0.7, seed=3)])

    (result,) = lab.run(scenario())
    reported = torch.tensor(result.segments[0].logprobs)
    plain = plain_logprobs(lab.models[0], PROMPTS[0], tokens_of(result), temperature=0.7)
    assert (plain - reported).abs().max() < lab.facts.error


@only("embedded", "sglang")
@pytest.mark.parametrize("start", [0, 1, 5])
def test_scores_of_given_tokens_are_those_of_transformers(lab: Lab, start: int) -> None:
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]

    async def scenario() -> list[ScoredTokens]:
        await lab.begin_again()
        # The second call finds what the first one left in a cache.
        return [await lab.client.token_logprobs(tokens, start=start, top=3) for _ in range(2)]

    with torch.no_grad():
        whole = lab.models[0](torch.tensor([tokens])).logits[0].log_softmax(-1)
    for scored in lab.run(scenario()):
        assert scored.version == 0
        assert len(scored.logprobs) == len(scored.top) == len(tokens) - start
        for index, (logprob, top) in enumerate(
            zip(scored.logprobs, scored.top, strict=True), start
        ):
            if index == 0:
                assert (logprob, top) == (None, ())
                continue
            best = whole[index - 1].topk(3)
            assert logprob is not None
            assert abs(logprob - whole[index - 1, tokens[index]].item()) < lab.facts.error
            assert [token for token, _ in top] == best.indices.tolist()
            values = torch.tensor([value for _, value in top])
            assert (values - best.values).abs().max() < lab.facts.error


def test_greedy_tokens_are_those_of_transformers(lab: Lab) -> None:
    async def scenario() -> list[Generated]:
        return await lab.client.generate(
            [request(f"r{i}", p, 20, temperature=0.0) for i, p in enumerate(PROMPTS)]
        )

    for prompt, result in zip(PROMPTS, lab.run(scenario()), strict=True):
        ids = torch.tensor([prompt])
        expected = lab.models[0].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )
        assert tokens_of(result) == expected[0, len(prompt) :].tolist()


def test_a_seed_determines_the_tokens_where_an_engine_has_seeds(lab: Lab) -> None:
    async def scenario() -> list[list[int]]:
        client = lab.client
        (alone,) = await client.generate([request("alone", PROMPTS[0], 30, seed=7)])
        among = await client.generate(
            [request(f"r{seed}", PROMPTS[0], 30, seed=seed) for seed in range(5, 10)]
        )
        return [tokens_of(alone), *(tokens_of(one) for one in among)]

    alone, *among = lab.run(scenario())
    assert len({tuple(tokens) for tokens in among}) == len(among)
    assert (alone == among[2]) is lab.facts.backend.own_seeds


def test_top_k_1_is_greedy_and_top_p_samples_from_the_head(lab: Lab) -> None:
    async def scenario() -> list[Generated]:
        return await lab.client.generate(
            [
                request("greedy", PROMPTS[1], 20, temperature=0.0),
                request("k1", PROMPTS[1], 20, top_k=1),
                request("head", PROMPTS[1], 200, top_p=0.3),
            ]
        )

    greedy, first_only, head = lab.run(scenario())
    assert tokens_of(first_only) == tokens_of(greedy)
    ids = torch.tensor([[*PROMPTS[1], *tokens_of(head)]])
    with torch.no_grad():
        probabilities = lab.models[0](ids).logits[0, len(PROMPTS[1]) - 1 : -1].softmax(-1)
    drawn = probabilities.gather(1, torch.tensor(tokens_of(head))[:, None])
    above = (probabilities * (probabilities > drawn)).sum(-1)
    assert above.max() < 0.3 + 1e-4


@pytest.mark.parametrize(
    ("cut", "keep"),
    [({"top_k": 1}, top_k(1)), ({"top_k": 5}, top_k(5)), ({"top_p": 0.3}, top_p(0.3))],
    ids=["top_k=1", "top_k=5", "top_p=0.3"],
)
def test_log_probs_after_top_k_or_top_p_are_of_the_documented_distribution(
    lab: Lab, cut: dict[str, float], keep: Cutoff
) -> None:
    async def scenario() -> list[Generated]:
        return await lab.client.generate(
            [request("r", PROMPTS[1], 100, temperature=0.7, seed=3, **cut)]
        )

    (result,) = lab.run(scenario())
    reported = torch.tensor(result.segments[0].logprobs)
    temperature = 0.7 if lab.facts.backend.tempered_top_1 or cut != {"top_k": 1} else 1.0
    of_all, of_those_left = (
        plain_logprobs(lab.models[0], PROMPTS[1], tokens_of(result), temperature, rule)
        for rule in (None, keep)
    )
    assert (of_those_left - of_all).max() > CLEARLY  # else it could not be told from which
    expected = of_all if lab.facts.backend.whole_logprobs else of_those_left
    assert (expected - reported).abs().max() < lab.facts.error


def test_stop_tokens_end_a_response_and_belong_to_it(lab: Lab) -> None:
    async def scenario() -> tuple[Generated, Generated]:
        (free,) = await lab.client.generate([request("free", PROMPTS[0], 30, temperature=0.0)])
        stop = tokens_of(free)[4]
        (stopped,) = await lab.client.generate(
            [request("stopped", PROMPTS[0], 30, temperature=0.0, stop_token_ids=(stop,))]
        )
        return free, stopped

    free, stopped = lab.run(scenario())
    first = tokens_of(free).index(tokens_of(free)[4])
    assert tokens_of(stopped) == tokens_of(free)[: first + 1]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("mode", [None, *PauseMode])
def test_stop_strings_end_a_response_where_its_decoded_text_has_them(
    lab: Lab, mode: PauseMode | None, tmp_path: Path
) -> None:
    """At the same token on every engine; this server has no tokenizer, so the client ends it."""
    save_byte_tokenizer(tmp_path)
    codec = TextCodec.load(tmp_path)
    lab.client.note_tokenizer(tmp_path)

    async def scenario() -> tuple[Generated, Generated, str]:
        (free,) = await lab.client.generate([request("free", PROMPTS[0], LONG, temperature=0.0)])
        tokens = tokens_of(free)
        texts = [codec.decode_all(tokens[at : at + 3]) for at in range(40, 60)]
        stop = next(text for text in texts if "\ufffd" not in text)
        one = request("r", PROMPTS[0], LONG, temperature=0.0, stop=(stop,))
        if mode is None:
            (stopped,) = await lab.client.generate([one])
        else:
            running = asyncio.create_task(lab.client.generate([one]))
            while not running.done() and not lab.client.received_tokens("r"):
                await lab.client.ready()
            await lab.client.pause(mode)
            await lab.client.resume()
            (stopped,) = await running
        return free, stopped, stop

    free, stopped, stop = lab.run(scenario())
    tokens = tokens_of(free)
    end = decoding_everything(codec, [stop], tokens)
    if END_TOKEN in tokens[:end]:
        end = tokens.index(END_TOKEN) + 1
    assert tokens_of(stopped) == tokens[:end]
    assert stopped.finish_reason == "stop"


def test_the_models_end_token_ends_a_response_unless_it_is_ignored(lab: Lab) -> None:
    async def scenario() -> list[Generated]:
        both = [
            request(f"{name}{index}", [index + 2], 200, ignore_eos=name == "on", seed=index)
            for name in ("on", "end")
            for index in range(8)
        ]
        return await lab.client.generate(both)

    results = lab.run(scenario())
    for result in results[:8]:
        assert len(tokens_of(result)) == 200
    ended = [result for result in results[8:] if result.finish_reason == "stop"]
    assert ended
    for result in ended:
        assert tokens_of(result).index(END_TOKEN) == len(tokens_of(result)) - 1


def test_an_unservable_request_is_refused_in_one_line(lab: Lab) -> None:
    async def scenario(prompt: list[int], count: int) -> str:
        with pytest.raises(EngineError) as raised:
            await lab.client.generate([request("r", prompt, count)])
        return str(raised.value)

    message = lab.run(scenario([5] * (CONTEXT + 10), 5))
    assert lab.client.base_url in message
    assert "\n" not in message
    with pytest.raises(ValueError, match="empty prompt"):  # which SGLang dies of
        request("r", [], 5)


def test_a_prompt_may_fill_the_context_but_for_what_an_engine_reserves(lab: Lab) -> None:
    reserved = lab.facts.backend.reserved_tokens
    prompt = ([5, 6, 7] * CONTEXT)[: CONTEXT - reserved - 1]

    async def scenario() -> Generated:
        if reserved:
            with pytest.raises(EngineError, match=r"it gave up: Input length"):
                await lab.client.generate([request("r", [*prompt, 8], 1)])
        (result,) = await lab.client.generate([request("r", prompt, 1)])
        return result

    result = lab.run(scenario())
    assert len(tokens_of(result)) == 1
    assert lab.errors(0, prompt, result).max() < 10 * lab.facts.error


def test_prompt_tokens_found_in_the_cache_are_counted_where_an_engine_counts(lab: Lab) -> None:
    prompt = list(range(2, 80))

    async def scenario() -> list[int]:
        one = await lab.client.generate([request("first", prompt, 3)])
        two = await lab.client.generate([request("second", prompt, 3), request("third", prompt, 3)])
        return [result.cached_tokens for result in one + two]

    first, *others = lab.run(scenario())
    assert first == 0
    assert any(count > 0 for count in others) is lab.facts.counts_shared_tokens
    assert max(others) <= len(prompt)


def test_a_server_reports_its_dialect_and_its_version(lab: Lab) -> None:
    async def scenario() -> None:
        assert await dialect_at(lab.engine.base_url, key=lab.client.key) is lab.client.api
        assert await lab.client.engine_name() == lab.engine.backend
        assert await lab.client.engine_version() == lab.engine.version

    lab.run(scenario())


# --- interruptions ---


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
def test_exact_modes_recompute_under_the_new_weights(lab: Lab, mode: PauseMode) -> None:
    """Spans are those that re-scoring proves, and later tokens equal a full recompute. A request
    sent during the pause starts under the new weights."""

    async def scenario() -> tuple[list[Generated], Generated]:
        client = lab.client
        requests = [
            request(f"r{index}", INTERRUPTED_PROMPT[: 32 - index], LONG, seed=index)
            for index in range(3)
        ]
        async with lab.running(requests) as answers:
            await client.pause(mode)
            held = asyncio.create_task(client.generate([request("held", [3, 4], 5)]))
            await lab.load(1, mode)
            assert not held.done()
            await client.resume()
        return answers.result(), (await held)[0]

    results, held = lab.run(scenario())
    for index, result in enumerate(results):
        prompt = INTERRUPTED_PROMPT[: 32 - index]
        assert versions_of(result) == [0, 1]
        assert len(tokens_of(result)) == LONG
        assert (result.finish_reason, result.retractions) == ("length", 1)
        change = len(result.segments[0].tokens)
        assert lab.errors(0, prompt, result)[:change].max() < 10 * lab.facts.error
        assert lab.errors(1, prompt, result)[change:].max() < 10 * lab.facts.error
        proven = proven_versions(lab, prompt, result)
        stamped = [0] * change + [1] * (LONG - change)
        assert all(found in (None, stamp) for found, stamp in zip(proven, stamped, strict=True))
        assert sum(found is not None for found in proven) > 0.9 * LONG
    assert versions_of(held) == [1]


def test_in_place_continues_with_the_old_cache_and_is_biased(lab: Lab, announce: Announce) -> None:
    async def scenario() -> tuple[Generated, Generated]:
        client = lab.client
        async with lab.running([request("r", INTERRUPTED_PROMPT, LONG, seed=3)]) as answers:
            await client.pause(PauseMode.IN_PLACE)
            await lab.load(1, PauseMode.IN_PLACE)
            await client.resume()
        (later,) = await client.generate([request("later", INTERRUPTED_PROMPT, 20)])
        return answers.result()[0], later

    result, later = lab.run(scenario())
    assert versions_of(result) == [0, 1]
    assert result.retractions == 0
    change = len(result.segments[0].tokens)
    assert lab.errors(0, INTERRUPTED_PROMPT, result)[:change].max() < 10 * lab.facts.error
    bias = lab.errors(1, INTERRUPTED_PROMPT, result)[change:]
    announce(
        f"{lab.facts.name}: bias of in_place after {change} tokens: "
        f"mean {bias[:50].mean():.3f}, largest {bias[:50].max():.3f} nat over the next 50; "
        f"mean {bias[-50:].mean():.3f} over the last 50\n"
    )
    assert (bias[:50].max().item() > CLEARLY) is lab.facts.backend.biased_in_place
    # Who asks later shares nothing with the old cache, though the prompt is the same.
    assert versions_of(later) == [1]
    assert lab.errors(1, INTERRUPTED_PROMPT, later).max() < 10 * lab.facts.error


def test_an_interruption_without_new_weights_changes_no_distribution(lab: Lab) -> None:
    """And, where seeds decide, no token."""

    async def scenario(mode: PauseMode) -> tuple[Generated, Generated]:
        one = request("r", INTERRUPTED_PROMPT, LONG, seed=3)
        (undisturbed,) = await lab.client.generate([replace(one, request_id="u")])
        async with lab.running([one]) as answers:
            await lab.client.pause(mode)
            await lab.client.resume()
        return undisturbed, answers.result()[0]

    for mode in PauseMode:
        undisturbed, result = lab.run(scenario(mode))
        assert versions_of(result) == [0]
        assert lab.errors(0, INTERRUPTED_PROMPT, result).max() < 10 * lab.facts.error
        if lab.facts.backend.own_seeds and mode in lab.facts.same_draws_after:
            assert tokens_of(result) == tokens_of(undisturbed)


def test_abort_ends_one_request_and_keeps_what_it_has(lab: Lab) -> None:
    async def scenario() -> list[Generated]:
        requests = [request("r1", [5, 6, 7], LONG), request("r10", [8, 9], LONG)]
        async with lab.running(requests) as answers:
            await lab.client.abort(["r1", "unknown"])
        return answers.result()

    aborted, whole = lab.run(scenario())
    assert aborted.finish_reason == "abort"
    assert 0 < len(tokens_of(aborted)) < LONG
    assert lab.errors(0, [5, 6, 7], aborted).max() < 10 * lab.facts.error
    assert (whole.finish_reason, len(tokens_of(whole))) == ("length", LONG)


def test_waiting_requests_survive_every_kind_of_pause(lab: Lab) -> None:
    """Twelve requests for eight places: four have no token when the pause comes."""

    async def scenario(mode: PauseMode) -> list[Generated]:
        requests = [request(f"{mode}-{i}", [i + 2, 5], 400, seed=i) for i in range(12)]
        task = asyncio.create_task(lab.client.generate(requests))
        while not lab.client.received_tokens(requests[0].request_id):
            await lab.client.ready()
        await lab.client.pause(mode)
        await lab.load(1, mode)
        await lab.client.resume()
        return await task

    for mode in PauseMode:
        lab.run(lab.load(0))
        results = lab.run(scenario(mode))
        assert [len(tokens_of(result)) for result in results] == [400] * 12
        assert {result.finish_reason for result in results} == {"length"}
        assert any(versions_of(result) == [0, 1] for result in results)
        assert any(versions_of(result) == [1] for result in results)


def test_a_client_that_hangs_up_frees_its_places(lab: Lab) -> None:
    """Eight slots are taken by requests of a client that left; the next one runs long before those
    could have ended."""

    async def scenario() -> int:
        client = lab.client
        for round_ in range(3):
            requests = [request(f"{round_}-{i}", [5, 6], 900) for i in range(8)]
            task = asyncio.create_task(client.generate(requests))
            while not all(client.received_tokens(one.request_id) for one in requests):
                await client.ready()
            task.cancel()
            await asyncio.wait({task})
        async with lab.running([request("next", [7, 8], 400)]) as answers:
            pass
        return len(tokens_of(answers.result()[0]))

    assert lab.run(scenario()) == 400


# --- weights ---


def test_a_server_that_was_not_started_for_adapters_says_so(lab: Lab) -> None:
    if lab.facts.name != "embedded":  # never is
        assert not lab.run(lab.client.supports_adapters())


def test_versions_and_digests_follow_the_weights(lab: Lab) -> None:
    async def scenario() -> list[tuple[int, str | None]]:
        seen = []
        for version in (1, 2, 1, 0):
            await lab.load(version)
            seen.append((await lab.client.version(), await lab.client.digest()))
        return seen

    seen = lab.run(scenario())
    assert [version for version, _ in seen] == [1, 2, 1, 0]
    digests = [digest for _, digest in seen]
    assert None not in digests
    assert digests[0] == digests[2]
    assert len(set(digests)) == 3


def test_a_digest_is_of_all_weights_where_an_engine_says_so(lab: Lab) -> None:
    """One matrix of one layer differs. A digest that leaves it out raises no false alarm."""
    model = copy.deepcopy(lab.models[0])
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(1.5)
    weights = write_weights(model, lab.root / "one-matrix", 3, dtype=torch.float32)

    async def scenario() -> tuple[Digest | None, Digest | None, Generated]:
        before = await lab.client.digest()
        await lab.client.load_weights(weights, PauseMode.RETRACT)
        (result,) = await lab.client.generate([request("r", [5, 6], 20)])
        return before, await lab.client.digest(), result

    before, after, result = lab.run(scenario())
    assert before is not None
    assert after is not None
    assert before.whole is after.whole is lab.facts.whole_digest
    assert (before.value != after.value) is lab.facts.whole_digest
    plain = plain_logprobs(model, [5, 6], tokens_of(result))
    assert (plain - torch.tensor(result.segments[0].logprobs)).abs().max() < lab.facts.error


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone"])
def test_a_damaged_folder_is_refused_and_the_old_weights_live_on(lab: Lab, damage: str) -> None:
    weights = lab.fresh_weights(1)
    file = weights.path / "model.safetensors"
    content = bytearray(file.read_bytes())
    match damage:
        case "flipped":
            content[-3] ^= 64
            file.write_bytes(content)
        case "cut":
            file.write_bytes(content[:-1000])
        case "gone":
            file.unlink()

    async def scenario() -> list[Generated]:
        async with lab.running([request("r", [5, 6], 200)]) as answers:
            with pytest.raises(EngineError, match="v00000001") as raised:
                await lab.client.load_weights(weights, PauseMode.RETRACT)
            assert not isinstance(raised.value, VersionMismatch)
            assert "\n" not in str(raised.value)
        assert await lab.client.version() == 0
        return answers.result()

    (result,) = lab.run(scenario())
    assert versions_of(result) == [0]
    assert lab.errors(0, [5, 6], result).max() < 10 * lab.facts.error
