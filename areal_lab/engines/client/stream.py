"""The stream of one sample from a server: its tokens so far, for every kind of message.

    incremental messages       [0,4) [4,8) [8,9)
    cumulative messages        [0,4) [0,8) [0,9)      --> tokens, log-probs, version spans
    one message at the end     [0,9)

Versions are the server's. The last message has the span of each version; an earlier message may
name one version for all its tokens, or none: then the version that the engine last reported counts.
If that version differs from the previous one, some tokens of the message may be older than the
change. So if the last message never arrives, only the tokens before such a message are confirmed.

A sample ends with the token that completes a stop string, even if the server sends more: a server
without a tokenizer does not search for one, no server sees the earlier part of a resubmitted
response, and SGLang decodes only one token more than the encoded stop string has.
"""

from __future__ import annotations

from itertools import pairwise

from areal_lab.control.events import Version
from areal_lab.data.stop_strings import StopScanner
from areal_lab.data.trajectory import FinishReason, Segment
from areal_lab.engines.client.dialect import Chunk, Span
from areal_lab.engines.protocol import EngineError, Generated


class SampleStream:
    """The received part of one sample."""

    def __init__(
        self,
        request_id: str,
        sent_as: str = "",
        sent_to: Version | None = None,
        stops: StopScanner | None = None,
        *,
        prompt_tokens: tuple[int, ...] | None = None,
    ) -> None:
        self.request_id = request_id
        self.sent_as = sent_as
        """The id that the server knows."""
        self._sent_to = sent_to
        """Version that the engine reported before the request was sent, if it did."""
        self.finish_reason: FinishReason | None = None
        self.lost_caches = 0
        """Interruptions that dropped its cache, if the server does not count them."""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[Span] = []
        self._confirmed: int | None = None
        """Tokens before the first one of uncertain version; None if all versions are certain."""
        self._prompt_tokens = prompt_tokens
        """Prompt with images that the server has yet to report; None for other prompts."""
        self._stops = stops
        self._end: int | None = None
        """Tokens up to the one that completed a stop string, if one did."""
        self._retractions = 0
        self._cached_tokens = 0

    def __len__(self) -> int:
        return len(self._tokens) if self._end is None else self._end

    @property
    def stopped(self) -> bool:
        """True if a stop string was found, so the server need not continue the sample."""
        return self._end is not None

    @property
    def ended(self) -> bool:
        """True if the sample is complete, and stays so if the engine is lost now."""
        return bool(self._tokens) and self._ended_as not in (None, "abort")

    @property
    def _ended_as(self) -> FinishReason | None:
        confirmed = len(self._tokens) if self._confirmed is None else self._confirmed
        return "stop" if self._end is not None and self._end <= confirmed else self.finish_reason

    def add(self, chunk: Chunk, held: Version) -> None:
        """Add a message."""
        count = len(chunk.tokens)
        self._check_prompt(chunk)
        if len(chunk.logprobs) != count:
            raise self._error(f"has {count} tokens, but log-probs of {len(chunk.logprobs)}")
        received = len(self._tokens)
        start = received if chunk.total is None else chunk.total - count
        if not 0 <= start <= received:
            raise self._error(f"continues at token {start}, but {received} were received")
        known = received - start
        if list(chunk.tokens[:known]) != self._tokens[start : start + count]:
            raise self._error("changed tokens that were sent before")
        self._tokens += chunk.tokens[known:]
        self._logprobs += chunk.logprobs[known:]
        if self._stops is not None and self._end is None:
            completing = self._stops.completing(chunk.tokens[known:])
            self._end = None if completing is None else received + completing + 1
        if chunk.spans is not None:
            self._spans = list(chunk.spans)
            self._confirmed = None
            self._check_spans()
        else:
            self._stamp(held if chunk.version is None else chunk.version)
        self.finish_reason = chunk.finish_reason
        self._retractions = chunk.retractions
        self._cached_tokens = chunk.cached_tokens or self._cached_tokens

    def generated(self) -> Generated:
        """Received tokens whose version is certain; an unfinished sample ends with `abort`."""
        confirmed = len(self._tokens) if self._confirmed is None else self._confirmed
        return Generated(
            request_id=self.request_id,
            segments=tuple(
                Segment(
                    tokens=tuple(self._tokens[span.start : min(span.end, len(self))]),
                    logprobs=tuple(self._logprobs[span.start : min(span.end, len(self))]),
                    version=span.version,
                )
                for span in self._spans
                if span.end <= confirmed and span.start < len(self)
            ),
            finish_reason=self._ended_as or "abort",
            retractions=self._retractions + self.lost_caches,
            cached_tokens=self._cached_tokens,
        )

    def _stamp(self, version: Version) -> None:
        end = len(self._tokens)
        if not self._spans:
            self._spans = [Span(version, 0, end)] if end else []
            if end and self._sent_to not in (None, version):
                self._confirmed = 0
            return
        last = self._spans[-1]
        if last.end == end:
            return
        if last.version == version:
            self._spans[-1] = last._replace(end=end)
        else:
            self._confirmed = last.end if self._confirmed is None else self._confirmed
            self._spans.append(Span(version, last.end, end))

    def _check_spans(self) -> None:
        received = len(self._tokens)
        edges = [0, *(edge for span in self._spans for edge in span[1:]), received]
        if any(end != start for end, start in list(pairwise(edges))[::2]):
            raise self._error(f"has {received} tokens, but its version spans are {self._spans}")

    def _check_prompt(self, chunk: Chunk) -> None:
        """Compare the server's prompt with ours, if it has images: one may have been lost."""
        asked, reported = self._prompt_tokens, chunk.prompt_tokens
        if asked is None or (reported is None and chunk.finish_reason is None):
            return
        if reported != asked:
            found = "none" if reported is None else f"another one, of {len(reported)}"
            raise self._error(
                f"has a prompt of {len(asked)} tokens with its images, but the engine reports "
                f"{found}: it lost an image, resizes images in another way, or read the text of "
                "the prompt as other tokens (docs/vision.md)"
            )
        self._prompt_tokens = None

    def _error(self, what: str) -> EngineError:
        return EngineError(f"request {self.request_id} {what}")
