"""Requests of evaluation keys: each is served by itself, and nothing of it is kept.

text or tokens --> prompt tokens --sampler--> tokens --sampler's scores--> Completion
messages --a conversation of one request--> ChatReply
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

from areal_lab.agents.conversation import DRAFTING, MOST_AT_ONCE, TreeConversation
from areal_lab.agents.gateway.calls import (
    Completion,
    CompletionRequest,
    PromptTooLong,
    Scores,
    TokenScore,
)
from areal_lab.agents.gateway.errors import ApiError
from areal_lab.agents.messages import ChatReply, ChatRequest
from areal_lab.agents.workflow import TurnSampler
from areal_lab.data.problems import sample_seed
from areal_lab.data.tokenize import TextCodec
from areal_lab.engines.protocol import Generated, Ranked, SamplingParams

_MAX_TOKENS: Final = 16
_BEFORE: Final = 8
"""Tokens of the prompt before the first new token, which may end inside a character or begin
with a space that only tokens in the middle of a text have."""


class Evaluation:
    """The `Conversation` of an evaluation key."""

    def __init__(self, open_conversation: Callable[[], TreeConversation], codec: TextCodec) -> None:
        """Open a conversation for each request.

        Args:
            open_conversation: makes a conversation with a sampler of its own.
            codec: tokenizer of the model.
        """
        self._open = open_conversation
        self._codec = codec

    async def reply(self, request: ChatRequest) -> list[ChatReply]:
        """See `Conversation.reply`."""
        conversation = self._open()
        replies = await conversation.reply(request)
        if not request.top_logprobs:
            return replies
        return [
            replace(
                reply,
                top=await self._top(
                    conversation.sampler,
                    conversation.tree.prompt_of(number),
                    reply.generated,
                    request.top_logprobs,
                    conversation.samplings[number].temperature,
                ),
            )
            for number, reply in enumerate(replies)
        ]

    async def complete(self, request: CompletionRequest) -> list[Completion]:
        """Complete all prompts, `request.replies` times each, in order.

        Raises:
            PromptTooLong: a prompt leaves no room for a token.
            ValueError: the request cannot be served; the message is for the client.
        """
        longest = self._open().sampler.sampling.max_new_tokens
        if request.max_new_tokens is None:
            request = replace(request, max_new_tokens=min(_MAX_TOKENS, longest))
        elif request.max_new_tokens > longest:
            raise ValueError(
                f"max_tokens is {request.max_new_tokens}, but must be at most {longest} "
                "(gconfig.max_new_tokens of the gateway)"
            )
        tasks = []
        async with asyncio.TaskGroup() as group:
            for prompt in request.prompts:
                tokens = await self._encoded(prompt)
                text = prompt if isinstance(prompt, str) else None
                for index in range(request.replies):
                    one = self._completion(request, tokens, text, index)
                    tasks.append(group.create_task(one))
        return [task.result() for task in tasks]

    async def prompt_tokens(self, request: ChatRequest) -> int:
        """See `Conversation.prompt_tokens`."""
        return await self._open().prompt_tokens(request)

    def rows(self, _scores: Scores) -> list[dict[str, Any]]:
        """Nothing is kept."""
        return []

    async def _encoded(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            known = self._codec.vocabulary
            if wrong := [token for token in prompt if not 0 <= token < known]:
                raise ValueError(
                    f"prompt has token {wrong[0]}, but tokens must be from 0 to {known - 1}"
                )
            return prompt
        if len(prompt) <= MOST_AT_ONCE:
            tokens = self._codec.encode(prompt)
        else:
            loop = asyncio.get_running_loop()
            tokens = await loop.run_in_executor(DRAFTING, self._codec.encode, prompt)
        if not tokens:
            raise ValueError("prompt is empty, but must have at least one token")
        return tokens

    async def _completion(
        self, request: CompletionRequest, prompt: tuple[int, ...], text: str | None, index: int
    ) -> Completion:
        conversation = self._open()  # which the gateway finds as long as it is referenced
        sampler = conversation.sampler
        most = request.max_new_tokens or 0
        if len(prompt) + min(most, 1) > sampler.context_tokens:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens, but the context of "
                f"{sampler.context_tokens} must have room for it and a new token"
            )
        sampling = _sampling(request, sampler.sampling)
        generated = None
        if most:
            seeded = {}
            if request.seed is not None:
                seeded["seed"] = sample_seed(request.seed, "asked", 0, index)
            generated = await sampler.turn(prompt, sampling, **seeded)
            if generated.finish_reason == "abort":
                raise ApiError(503, "the gateway is closing", code="closing")
        new = () if generated is None else generated.tokens
        pieces = self._texts((*prompt[-_BEFORE:], *new))[len(prompt[-_BEFORE:]) :]
        special = self._codec.special_tokens
        visible = "".join(
            piece for token, piece in zip(new, pieces, strict=True) if token not in special
        )
        stops = [at for stop in request.stop if (at := visible.find(stop)) >= 0]
        end = min(stops, default=len(visible))
        finish = "stop" if stops or (generated and generated.finish_reason == "stop") else "length"
        scores: list[TokenScore] = []
        if request.logprobs is not None:
            if request.echo:
                scores = await self._echoed(sampler, prompt, request.logprobs)
            top = await self._top(
                sampler, prompt, generated, request.logprobs, sampling.temperature
            )
            parts = () if generated is None else generated.segments
            logprobs = [value for part in parts for value in part.logprobs]
            scores += [
                TokenScore(text=piece, logprob=logprob, top=best, visible=token not in special)
                for token, piece, logprob, best in zip(
                    new, pieces, logprobs, top or ((),) * len(new), strict=True
                )
            ]
            scores = _until(scores, end, len(prompt) if request.echo else 0, cut=bool(stops))
        before = ""
        if request.echo:
            before = "".join(self._texts(prompt)) if text is None else text
        return Completion(
            text=before + visible[:end],
            finish="stop" if finish == "stop" else "length",
            scores=tuple(scores),
            prompt_tokens=len(prompt) if index == 0 else 0,
            cached_tokens=0 if generated is None else min(generated.cached_tokens, len(prompt)),
            generated_tokens=len(new),
        )

    async def _echoed(
        self, sampler: TurnSampler, prompt: tuple[int, ...], top: int
    ) -> list[TokenScore]:
        """Log-probs of a prompt."""
        scored = await sampler.token_logprobs(prompt, start=0, top=top)
        texts = self._texts(prompt)
        return [
            TokenScore(text=text, logprob=logprob, top=self._named(best))
            for text, logprob, best in zip(texts, scored.logprobs, scored.top, strict=True)
        ]

    async def _top(
        self,
        sampler: TurnSampler,
        prompt: Sequence[int],
        generated: Generated | None,
        top: int,
        temperature: float,
    ) -> tuple[tuple[tuple[str, float], ...], ...]:
        """The most likely tokens at the place of each sampled one.

        Scores s are of temperature 1 and sampled log-probs l of temperature T, so those of other
        tokens v are s_v / T - (s / T - l): the last term is the logarithm of the normalizer.
        """
        if generated is None or not generated.tokens or not top:
            return ()
        tokens = generated.tokens
        scored = await sampler.token_logprobs((*prompt, *tokens), start=len(prompt), top=top)
        if {part.version for part in generated.segments} != {scored.version}:
            raise ApiError(503, "the weights changed while the request was served", retry_after_s=1)
        sampled = [value for part in generated.segments for value in part.logprobs]
        t = temperature or 1.0
        found = []
        for own, logprob, best in zip(scored.logprobs, sampled, scored.top, strict=True):
            assert own is not None, "no new token is the first of its sequence"
            shift = own / t - logprob
            found.append(self._named(tuple((token, s / t - shift) for token, s in best)))
        return tuple(found)

    def _named(self, ranked: Ranked) -> tuple[tuple[str, float], ...]:
        return tuple((self._codec.decode_all([token]), logprob) for token, logprob in ranked)

    def _texts(self, tokens: Sequence[int]) -> list[str]:
        """Text of each token; special tokens by their names."""
        special, texts = self._codec.special_tokens, []
        for is_special, run in groupby(tokens, special.__contains__):
            some = list(run)
            if is_special:
                texts += [special[token] for token in some]
                continue
            text, at = self._codec.decode(some), 0
            for count in self._codec.characters(some, text) or (*(0,) * (len(some) - 1), len(text)):
                texts.append(text[at : at + count])
                at += count
        return texts


def _sampling(request: CompletionRequest, base: SamplingParams) -> SamplingParams:
    return replace(
        base,
        max_new_tokens=max(1, request.max_new_tokens or 0),
        temperature=base.temperature if request.temperature is None else request.temperature,
        top_p=base.top_p if request.top_p is None else request.top_p,
        stop=tuple(dict.fromkeys((*base.stop, *request.stop))),
        json_schema=request.json_schema,
    )


def _until(scores: list[TokenScore], end: int, first: int, *, cut: bool) -> list[TokenScore]:
    """Drop new tokens (from `first` on) whose text begins at or behind a stop string."""
    if not cut:
        return scores
    at, kept = 0, scores[:first]
    for each in scores[first:]:
        if at >= end:
            break
        kept.append(each)
        at += len(each.text) if each.visible else 0
    return kept
