"""A session as a tree of messages, whose prompts continue the sampled tokens.

    system, tools -- user -- response 0 -- result -- response 1 -- result -- response 2
                                 '------ result' - response 3

Each request has its whole conversation. Walking down the tree finds the sampled responses in it,
although clients strip them, rewrite arguments of calls or drop the reasoning: the sampled tokens
are used. The prompt is the tokens through the last of these responses, plus a bridge to the new
messages. If there is no such response, or the template writes earlier text differently, the prompt
is encoded from text, and the cause is counted.

A lookup reads the messages of the request once, regardless of the number of turns; only new text is
encoded. Nothing here waits or depends on the time: requests may be planned and recorded in any
order.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Literal, TypeAlias

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.messages import (
    ChatRequest,
    Message,
    Tool,
    message_characters,
    tool_characters,
)
from areal_lab.agents.turns import Fork, Outline, Row, Turn, rows, tokens_through
from areal_lab.engines.protocol import Generated

Match: TypeAlias = Literal["exact", "stripped", "call_id"]
"""How a client returned a sampled response: as it was shown; with white space stripped, or
without the text next to its calls; or with rewritten arguments of calls, found by the ids of the
calls. Missing reasoning counts as unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Prompt of a request, before it is planned."""

    at: _Node = field(repr=False)
    """Node that the request continues."""
    outline: Outline
    parent: Turn | None
    """Turn whose tokens the prompt continues."""
    added: tuple[int, ...]
    """Prompt tokens after those of the parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """Prompt of a request, ready to sample."""

    number: int
    """Number of the request in its session."""
    prompt_tokens: tuple[int, ...]
    added: tuple[int, ...]
    """Prompt tokens after the parent's response."""
    parent: int | None
    """Turn whose tokens the prompt continues."""
    follows: int | None
    """Previous turn of the conversation."""
    fork: Fork | None
    match: Match | None
    """How the last sampled response was returned; None without one."""
    outline: Outline
    at: _Node = field(repr=False)
    session: str = ""

    def call_id(self, reply: int, index: int) -> str:
        """Id of a tool call: nine letters and digits, as Mistral's templates require."""
        name = f"{self.session}/{self.number}/{reply}/{index}"
        return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()[:9]


_Key: TypeAlias = Hashable


@dataclass(slots=True, eq=False)
class _Root:
    """Beginning of a conversation."""

    system: tuple[Message, ...]
    tools: tuple[Tool, ...]
    key: _Key
    """Equal for equal roots."""


@dataclass(slots=True, eq=False)
class _Node:
    """A message below its parents."""

    root: _Root
    depth: int
    """Number of messages on the path to this one, without those of the root."""
    message: Message | None = None
    """As it was first sent, or shown; None at the top."""
    above: _Node | None = None
    turn: Turn | None = None
    """Set if it was sampled."""
    request: int = -1
    """Number of the request that it was sampled for."""
    answered: _Node | None = None
    """Last sampled message on the path."""
    below: dict[_Key, list[_Node]] = field(default_factory=dict)
    sampled: list[_Node] = field(default_factory=list)
    """Responses sampled after this message."""

    def path(self) -> list[tuple[Message, Turn | None]]:
        """Messages on the path to this one, without those of the root."""
        found, node = [], self
        while node.message is not None and node.above is not None:
            found.append((node.message, node.turn))
            node = node.above
        return found[::-1]


class SessionTree:
    """Turns of one session: plans their prompts, records them, and builds rows of them."""

    def __init__(self, form: ChatFormat, *, now: datetime, session: str = "") -> None:
        """Start a session."""
        self._form = form
        self._now = now
        self._session = session
        self._tops: dict[_Key, _Node] = {}
        self._answers: dict[_Key, list[_Node]] = {}
        self._turns: list[Turn] = []
        self._requests = 0
        self.forks: Counter[Fork] = Counter()
        """Requests that do not continue the turn before them, by cause."""
        self.stored_characters = 0
        """Characters of all messages and tools that the session keeps."""
        self.matches: Counter[Match] = Counter()
        """How the last sampled response of each request was returned."""

    @property
    def turns(self) -> Sequence[Turn]:
        """All turns, in order of creation."""
        return self._turns

    @property
    def follows(self) -> tuple[int | None, ...]:
        """Previous turn of each turn in its conversation: parents for `returns`."""
        return tuple(turn.follows for turn in self._turns)

    @property
    def tools(self) -> tuple[str, ...]:
        """Names of the tools that requests offered to the model, in the order of the first one."""
        offered = (tool.name for top in self._tops.values() for tool in top.root.tools)
        return tuple(dict.fromkeys(offered))

    def draft(self, request: ChatRequest) -> Draft:
        """Encode a prompt, which takes nearly all of the time of planning a turn.

        May be called in another thread: it changes nothing.
        """
        node, rest = self._place(request)
        outline = self._outline(node, rest)
        parent, added = self._continued(node, rest, outline)
        if parent is None and not added:
            raise ValueError("the chat template makes no text of these messages, but needs some")
        return Draft(
            at=node,
            outline=Outline(characters=len(outline), digest=_digest(outline)),
            parent=parent,
            added=added,
        )

    def prompt(self, request: ChatRequest, draft: Draft | None = None) -> PlannedTurn:
        """Plan the response to a request.

        The `draft` is made here if it is missing, or if the session has since got another response
        to continue.
        """
        node, rest = self._place(request)
        if draft is None or not self._is_current(draft, node):
            draft = self.draft(request)
        node = self._kept(draft.at)
        before = node.answered
        fork, follows = self._cause(node, rest)
        parent = draft.parent
        if parent is None:
            fork = fork or _template_cause(node)
        prompt = tokens_through(self._turns, None if parent is None else parent.number)
        # Sampled tokens are never replaced: log-probs belong to them.
        assert parent is None or hash(prompt) == parent.key, parent.number
        prompt += draft.added
        match = None
        if before is not None and before.message is not None:
            _, messages = _without_system(request.messages)
            match = _match(before.message, messages[before.depth - 1])
            self.matches[match] += 1
        if fork is not None:
            self.forks[fork] += 1
        for message in rest:
            node = _add(node, message)
            self.stored_characters += message_characters(message)
        self._requests += 1
        return PlannedTurn(
            number=self._requests - 1,
            prompt_tokens=prompt,
            added=draft.added,
            parent=None if parent is None else parent.number,
            follows=None if follows is None else follows.number,
            fork=fork,
            match=match,
            outline=draft.outline,
            at=node,
            session=self._session,
        )

    def count(self, request: ChatRequest) -> int:
        """Number of prompt tokens of a request; plans nothing."""
        draft = self.draft(request)
        parent = None if draft.parent is None else draft.parent.number
        return len(draft.added) + len(tokens_through(self._turns, parent))

    def record(self, planned: PlannedTurn, generated: Generated, message: Message) -> Turn:
        """Add a response; another one for the same plan is a sibling branch."""
        if message.role != "assistant":
            raise ValueError(f"an answer has the role {message.role}, but must be an assistant's")
        turn = Turn(
            number=len(self._turns),
            parent=planned.parent,
            follows=planned.follows,
            fork=planned.fork,
            added=planned.added,
            generated=generated,
            message=message,
            outline=planned.outline,
            prompt_tokens=len(planned.prompt_tokens),
            key=hash(planned.prompt_tokens + generated.tokens),
        )
        self._turns.append(turn)
        node = _add(planned.at, message, turn=turn, request=planned.number)
        for key in _keys(message):
            self._answers.setdefault(key, []).append(node)
        return turn

    def prompt_of(self, number: int) -> tuple[int, ...]:
        """Prompt tokens of a turn."""
        turn = self._turns[number]
        return tokens_through(self._turns, turn.parent) + turn.added

    def rows(self) -> tuple[Row, ...]:
        """Rows that train each sampled token once."""
        return rows(self._turns)

    def _place(self, request: ChatRequest) -> tuple[_Node, tuple[Message, ...]]:
        """Node that a request continues, possibly a new one, and the new messages."""
        system, messages = _without_system(request.messages)
        described = tuple(
            (t.name, t.description, _canonical(dict(t.parameters))) for t in request.tools
        )
        key = (tuple(message.content for message in system), described)
        top = self._tops.get(key) or _Node(root=_Root(system, request.tools, key), depth=0)
        node = _descend(top, messages)
        return node, messages[node.depth :]

    def _is_current(self, draft: Draft, node: _Node) -> bool:
        """Return whether a draft still continues the right node of its request."""
        return draft.at is node or (
            draft.at.depth == node.depth == 0 and draft.at.root.key == node.root.key
        )

    def _kept(self, node: _Node) -> _Node:
        """The node, if it is in the tree; else the top node that starts its conversation."""
        if node.depth:
            return node
        top = self._tops.get(node.root.key)
        if top is None:
            self._tops[node.root.key] = top = node
            self.stored_characters += sum(map(message_characters, node.root.system))
            self.stored_characters += sum(map(tool_characters, node.root.tools))
        return top

    def _text(self, node: _Node, rest: Sequence[Message]) -> str:
        """Text of a conversation, with responses as they were shown."""
        path = (message for message, _ in node.path())
        messages = [*node.root.system, *path, *rest]
        return self._form.text(messages, node.root.tools, now=self._now)

    def _outline(self, node: _Node, rest: Sequence[Message]) -> str:
        """Text of a conversation, with placeholders for sampled responses."""
        path = (
            message if turn is None else self._form.stand_in(message, turn.number)
            for message, turn in node.path()
        )
        messages = [*node.root.system, *path, *rest]
        return self._form.text(messages, node.root.tools, now=self._now)

    def _continued(
        self, node: _Node, rest: Sequence[Message], outline: str
    ) -> tuple[Turn | None, tuple[int, ...]]:
        """Turn whose tokens a prompt continues, and the added tokens; else the whole prompt."""
        parent = node.answered.turn if node.answered is not None else None
        added = None if parent is None else self._bridge(parent, outline)
        if added is None:
            return None, self._form.encode(self._text(node, rest))
        return parent, added

    def _bridge(self, parent: Turn, outline: str) -> tuple[int, ...] | None:
        """Tokens between a response and the end of the prompt; None if it cannot be continued."""
        start = parent.outline.characters
        if _digest(outline[:start]) != parent.outline.digest:
            return None
        tokens = parent.tokens
        return self._form.bridge(
            outline,
            start,
            parent.message,
            parent.number,
            last_token=tokens[-1] if tokens else None,
        )

    def _cause(self, node: _Node, rest: Sequence[Message]) -> tuple[Fork | None, Turn | None]:
        """Why new messages include responses, and the turn before them.

        A response that follows other messages than those it was sampled for is recognized by its
        text or its calls; of several such responses, the last one in the session counts.
        """
        answers = [index for index, message in enumerate(rest) if message.role == "assistant"]
        before = node.answered.turn if node.answered is not None else None
        if not answers:
            return None, before
        rewritten = node.sampled[-1] if node.sampled and answers[0] == 0 else None
        for index in reversed(answers):
            known = self._known(rest[index], node.root)
            if known is not None:
                return _difference(known, node, index, rewritten), known.turn
        if rewritten is not None:
            return "assistant_rewritten", rewritten.turn
        return None, before

    def _known(self, message: Message, root: _Root) -> _Node | None:
        """Last response that a message may be: of the same root, else of another one."""
        return max(
            (node for node, _ in _matching(self._answers, message)),
            key=lambda node: (node.root is root, node.turn.number if node.turn else 0),
            default=None,
        )


def _difference(known: _Node, node: _Node, index: int, rewritten: _Node | None) -> Fork:
    """Difference before a known response, which is new message `index` after `node`."""
    if known.root is not node.root:
        same = _contents(known.root.system) == _contents(node.root.system)
        return "tools_changed" if same else "system_changed"
    if known.depth > node.depth + index + 1:
        return "history_shortened"
    return "history_changed" if rewritten is None else "assistant_rewritten"


def _template_cause(node: _Node) -> Fork | None:
    """Why earlier sampled tokens cannot be continued; None without any."""
    sampled = [message for message, turn in node.path() if turn is not None]
    if not sampled:
        return None
    thought = any(message.reasoning is not None for message in sampled)
    return "thinking_stripped" if thought else "template_rewrote"


def _without_system(
    messages: Sequence[Message],
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Split off the leading system messages."""
    system = tuple(takewhile(lambda message: message.role == "system", messages))
    return system, tuple(messages[len(system) :])


def _contents(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(message.content for message in messages)


def _descend(top: _Node, messages: Sequence[Message]) -> _Node:
    """Find the node from which a conversation continues: the one with most of its sampled
    responses.

    Responses with equal text are different nodes. Of several, an exact match precedes a stripped
    one, then the last request wins, and its first reply.
    """
    best, reached = top, [(top, 0)]
    preferred = _preference(top, 0)
    for message in messages:
        reached = [
            (below, stripped + more)
            for node, stripped in reached
            for below, more in _matching(node.below, message)
        ]
        for node, stripped in reached:
            if (preference := _preference(node, stripped)) > preferred:
                best, preferred = node, preference
        if not reached:
            break
    return best


def _preference(node: _Node, stripped: int) -> tuple[int, ...]:
    answer = node.answered
    if answer is None or answer.turn is None:
        return (0, -stripped, node.depth)
    return (answer.depth, -stripped, node.depth, answer.request, -answer.turn.number)


def _add(node: _Node, message: Message, turn: Turn | None = None, request: int = -1) -> _Node:
    added = _Node(
        root=node.root,
        depth=node.depth + 1,
        message=message,
        above=node,
        turn=turn,
        request=request,
    )
    added.answered = node.answered if turn is None else added
    for key in [_exact(message)] if turn is None else _keys(message):
        node.below.setdefault(key, []).append(added)
    if turn is not None:
        node.sampled.append(added)
    return added


def _matching(nodes: dict[_Key, list[_Node]], message: Message) -> list[tuple[_Node, int]]:
    """Nodes that a message may match, and whether it would have been stripped (0 or 1)."""
    if message.role != "assistant":
        return [(node, 0) for node in nodes.get(_exact(message), ())]
    *ids, exact, loose = (
        [n for n in nodes.get(key, ()) if n.message and _unchanged(n.message, message)]
        for key in _keys(message)
    )
    if ids and ids[0]:
        return [(node, 0) for node in ids[0]]
    return [(node, 0) for node in exact] + [(node, 1) for node in loose if node not in exact]


def _unchanged(own: Message, sent: Message) -> bool:
    """Return whether the parts that a key leaves out are equal, or were not sent."""
    if sent.reasoning and sent.reasoning.strip() != (own.reasoning or "").strip():
        return False
    content = sent.content.strip()
    return content == own.content.strip() or (not content and bool(own.tool_calls))


def _match(own: Message, sent: Message) -> Match:
    if own.content != sent.content:
        return "stripped"
    return "exact" if _exact(own) == _exact(sent) else "call_id"


def _keys(message: Message) -> list[_Key]:
    """Keys under which a response is found."""
    keys: list[_Key] = [("ids", *(call.call_id for call in message.tool_calls))]
    stripped = ("stripped", message.content.strip(), _calls(message))
    return [*(keys if message.tool_calls else ()), _exact(message), stripped]


def _exact(message: Message) -> _Key:
    return (message.role, message.content, message.call_id, _calls(message))


def _calls(message: Message) -> tuple[tuple[str, str], ...]:
    return tuple((call.name, _canonical(call.arguments)) for call in message.tool_calls)


def _canonical(value: object) -> str:
    """JSON in one form, whatever its spaces and the order of its keys; other text unchanged."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        return json.dumps(parsed, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return str(value).strip()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
