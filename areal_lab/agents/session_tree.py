"""A session as a tree of messages, in which prompts continue the tokens that were sampled.

    system, tools -- user -- answer 0 -- result -- answer 1 -- result -- answer 2
                                 '------ result' - answer 3

A request brings its whole conversation. Down the tree, the sampled answers in it are found, though
clients strip them, rewrite arguments of calls or drop the reasoning: what was sampled wins. The
prompt is the tokens through the last of these answers and a bridge to the new messages. Where there
is none, or the template writes what was before in another way, it is encoded from text, and the
cause is counted.

A lookup reads the messages of the request once, however many turns the session has had; of text,
only what is new is encoded. Nothing here waits, and nothing depends on the time: requests may be
planned and recorded in any order.
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
from areal_lab.agents.messages import ChatRequest, Message, Tool
from areal_lab.agents.turns import Fork, Outline, Row, Turn, rows, tokens_through
from areal_lab.engines.protocol import Generated

Match: TypeAlias = Literal["exact", "stripped", "call_id"]
"""How a client sent a sampled answer back: as it was shown; with white space stripped, or without
the text beside its calls; or with rewritten arguments of calls, known by the ids of the calls.
Absent reasoning counts as unchanged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTurn:
    """What to sample for a request."""

    number: int
    """Of the request in its session."""
    prompt_tokens: tuple[int, ...]
    added: tuple[int, ...]
    """What of the prompt comes after the parent's answer."""
    parent: int | None
    """The turn whose tokens the prompt continues."""
    follows: int | None
    """The turn before it in the conversation."""
    fork: Fork | None
    match: Match | None
    """How the last sampled answer came back; None if the conversation has none."""
    outline: Outline
    at: _Node = field(repr=False)
    session: str = ""

    def call_id(self, reply: int, index: int) -> str:
        """Id of a call of a tool: nine letters and digits, as Mistral's templates want them.

        Args:
            reply: index of the reply, if there are several.
            index: of the call in its reply.
        """
        name = f"{self.session}/{self.number}/{reply}/{index}"
        return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()[:9]


_Key: TypeAlias = Hashable


@dataclass(slots=True, eq=False)
class _Root:
    """What a conversation begins with."""

    system: tuple[Message, ...]
    tools: tuple[Tool, ...]


@dataclass(slots=True, eq=False)
class _Node:
    """A message after those above it."""

    root: _Root
    depth: int
    """Messages down to this one, without those of the root."""
    message: Message | None = None
    """As it was first sent, or shown; None at the top."""
    above: _Node | None = None
    turn: Turn | None = None
    """Set if it was sampled."""
    request: int = -1
    """The request that it was sampled for."""
    answered: _Node | None = None
    """The last sampled message down to here."""
    below: dict[_Key, list[_Node]] = field(default_factory=dict)
    sampled: list[_Node] = field(default_factory=list)
    """What was sampled after this message."""

    def path(self) -> list[tuple[Message, Turn | None]]:
        """The messages down to here, those of the root excluded."""
        found, node = [], self
        while node.message is not None and node.above is not None:
            found.append((node.message, node.turn))
            node = node.above
        return found[::-1]


class SessionTree:
    """The turns of one session: plans their prompts, records them, and makes rows of them."""

    def __init__(self, form: ChatFormat, *, now: datetime, session: str = "") -> None:
        """Begin a session.

        Args:
            form: of the model.
            now: the time that templates write into prompts, for the whole session: a date that
                changed at midnight would change every prompt.
            session: a name, so that ids of calls differ between sessions.
        """
        self._form = form
        self._now = now
        self._session = session
        self._tops: dict[_Key, _Node] = {}
        self._answers: dict[_Key, list[_Node]] = {}
        self._turns: list[Turn] = []
        self._requests = 0
        self.forks: Counter[Fork] = Counter()
        """Requests that do not continue the turn before them, by cause."""
        self.matches: Counter[Match] = Counter()
        """How the last sampled answer of each request came back."""

    @property
    def turns(self) -> Sequence[Turn]:
        """All turns, in order of creation."""
        return self._turns

    @property
    def follows(self) -> tuple[int | None, ...]:
        """The turn that each turn follows in its conversation: parents for `returns`."""
        return tuple(turn.follows for turn in self._turns)

    def prompt(self, request: ChatRequest) -> PlannedTurn:
        """Plan the answer to a request.

        Raises:
            TemplateRefusal: the model's template refuses the conversation.
            ValueError: the template makes no token of it.
        """
        system, messages = _without_system(request.messages)
        top = self._top(system, request.tools)
        node = _descend(top, messages)
        rest = messages[node.depth :]
        before = node.answered
        fork, follows = self._cause(node, rest)
        outline = self._outline(node, rest)
        parent, added = self._continued(node, rest, outline)
        if parent is None:
            fork = fork or _template_cause(node)
        prompt = tokens_through(self._turns, None if parent is None else parent.number)
        # Sampled tokens are never replaced: log-probs belong to them.
        assert parent is None or hash(prompt) == parent.key, parent.number
        prompt += added
        if not prompt:
            raise ValueError("the chat template makes no text of these messages, but needs some")
        match = None
        if before is not None and before.message is not None:
            match = _match(before.message, messages[before.depth - 1])
            self.matches[match] += 1
        if fork is not None:
            self.forks[fork] += 1
        for message in rest:
            node = _add(node, message)
        self._requests += 1
        return PlannedTurn(
            number=self._requests - 1,
            prompt_tokens=prompt,
            added=added,
            parent=None if parent is None else parent.number,
            follows=None if follows is None else follows.number,
            fork=fork,
            match=match,
            outline=Outline(characters=len(outline), digest=_digest(outline)),
            at=node,
            session=self._session,
        )

    def count(self, request: ChatRequest) -> int:
        """Tokens of the prompt that a request would have; nothing is planned.

        Raises:
            ValueError: as `prompt`.
        """
        system, messages = _without_system(request.messages)
        node = _descend(self._top(system, request.tools), messages)
        rest = messages[node.depth :]
        parent, added = self._continued(node, rest, self._outline(node, rest))
        return len(added) + len(
            tokens_through(self._turns, None if parent is None else parent.number)
        )

    def record(self, planned: PlannedTurn, generated: Generated, message: Message) -> Turn:
        """Add an answer; another one for the same plan is a branch beside it.

        Args:
            planned: from `prompt`.
            generated: what was sampled for its prompt; maybe no token.
            message: the answer as it is shown, with the ids of its calls.

        Raises:
            ValueError: the message is not of the assistant.
        """
        if message.role != "assistant":
            raise ValueError(f"an answer has the role {message.role}, but must be an assistant's")
        sampled = tuple(token for segment in generated.segments for token in segment.tokens)
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
            key=hash(planned.prompt_tokens + sampled),
        )
        self._turns.append(turn)
        node = _add(planned.at, message, turn=turn, request=planned.number)
        for key in _keys(message):
            self._answers.setdefault(key, []).append(node)
        return turn

    def prompt_of(self, number: int) -> tuple[int, ...]:
        """The tokens that a turn was sampled after."""
        turn = self._turns[number]
        return tokens_through(self._turns, turn.parent) + turn.added

    def rows(self) -> tuple[Row, ...]:
        """Rows that train each sampled token once."""
        return rows(self._turns)

    def _top(self, system: tuple[Message, ...], tools: tuple[Tool, ...]) -> _Node:
        described = tuple((t.name, t.description, _canonical(dict(t.parameters))) for t in tools)
        key = (tuple(message.content for message in system), described)
        if key not in self._tops:
            self._tops[key] = _Node(root=_Root(system, tools), depth=0)
        return self._tops[key]

    def _text(self, node: _Node, rest: Sequence[Message]) -> str:
        """The text of a conversation, with answers as they were shown."""
        path = (message for message, _ in node.path())
        messages = [*node.root.system, *path, *rest]
        return self._form.text(messages, node.root.tools, now=self._now)

    def _outline(self, node: _Node, rest: Sequence[Message]) -> str:
        """The text of a conversation, with stand-ins for sampled answers."""
        path = (
            message if turn is None else self._form.stand_in(message, turn.number)
            for message, turn in node.path()
        )
        messages = [*node.root.system, *path, *rest]
        return self._form.text(messages, node.root.tools, now=self._now)

    def _continued(
        self, node: _Node, rest: Sequence[Message], outline: str
    ) -> tuple[Turn | None, tuple[int, ...]]:
        """The turn whose tokens a prompt continues, and what it adds; else the whole prompt."""
        parent = node.answered.turn if node.answered is not None else None
        added = None if parent is None else self._bridge(parent, outline)
        if added is None:
            return None, self._form.encode(self._text(node, rest))
        return parent, added

    def _bridge(self, parent: Turn, outline: str) -> tuple[int, ...] | None:
        """Tokens between an answer and the end of the prompt; None if it cannot be continued."""
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
        """Why new messages have answers among them, and the turn before them.

        An answer that is sent with other messages before it than it was sampled for is known by its
        text or its calls; of several such answers, the last one in the session is meant.
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
        """The last answer that a message may be: of the same root, else of another one."""
        return max(
            (node for node, _ in _matching(self._answers, message)),
            key=lambda node: (node.root is root, node.turn.number if node.turn else 0),
            default=None,
        )


def _difference(known: _Node, node: _Node, index: int, rewritten: _Node | None) -> Fork:
    """What is different before a known answer, which is new message `index` after `node`."""
    if known.root is not node.root:
        same = _contents(known.root.system) == _contents(node.root.system)
        return "tools_changed" if same else "system_changed"
    if known.depth > node.depth + index + 1:
        return "history_shortened"
    return "history_changed" if rewritten is None else "assistant_rewritten"


def _template_cause(node: _Node) -> Fork | None:
    """Why what was sampled before cannot be continued; None if nothing was."""
    sampled = [message for message, turn in node.path() if turn is not None]
    if not sampled:
        return None
    thought = any(message.reasoning is not None for message in sampled)
    return "thinking_stripped" if thought else "template_rewrote"


def _without_system(
    messages: Sequence[Message],
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """The system messages at the beginning, and the others."""
    system = tuple(takewhile(lambda message: message.role == "system", messages))
    return system, tuple(messages[len(system) :])


def _contents(messages: Sequence[Message]) -> tuple[str, ...]:
    return tuple(message.content for message in messages)


def _descend(top: _Node, messages: Sequence[Message]) -> _Node:
    """The node from which a conversation continues: the one with most of its sampled answers.

    Answers of the same text are different nodes. Of several, what came back exactly is meant before
    what was stripped, then the last request, and of that its first reply.
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
    """The nodes that a message may stand for, and whether it would have been stripped (0 or 1)."""
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
    """Whether what a key leaves out is the same, or was not sent."""
    if sent.reasoning and sent.reasoning.strip() != (own.reasoning or "").strip():
        return False
    content = sent.content.strip()
    return content == own.content.strip() or (not content and bool(own.tool_calls))


def _match(own: Message, sent: Message) -> Match:
    if own.content != sent.content:
        return "stripped"
    return "exact" if _exact(own) == _exact(sent) else "call_id"


def _keys(message: Message) -> list[_Key]:
    """Under what an answer is found."""
    keys: list[_Key] = [("ids", *(call.call_id for call in message.tool_calls))]
    stripped = ("stripped", message.content.strip(), _calls(message))
    return [*(keys if message.tool_calls else ()), _exact(message), stripped]


def _exact(message: Message) -> _Key:
    return (message.role, message.content, message.call_id, _calls(message))


def _calls(message: Message) -> tuple[tuple[str, str], ...]:
    return tuple((call.name, _canonical(call.arguments)) for call in message.tool_calls)


def _canonical(value: object) -> str:
    """JSON in one form, whatever its spaces and the order of its keys; other text as it is."""
    try:
        parsed = json.loads(value) if isinstance(value, str) else value
        return json.dumps(parsed, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return str(value).strip()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
