"""Random sessions: clients that do what clients do, against a session that compares everything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lab.agents.messages import ChatRequest, Message
from areal_lab.agents.session_tree import PlannedTurn
from areal_lab.agents.template import TemplateRefusal
from areal_lab.agents.turns import tokens_through
from tests.agents import smollm2
from tests.agents.check_rows import check_rows
from tests.agents.conversation import ADD, NOW, Session, assistant, generated, result, system, user
from tests.agents.reference import SlowSession
from tests.agents.templates import chat_format

HI = user("Hi")


@dataclass
class Client:
    """A conversation as one client has it."""

    messages: list[Message]


@dataclass
class Waiting:
    client: Client
    request: ChatRequest
    planned: PlannedTurn


CALLING = json.dumps({"name": "add", "arguments": {"a": 2, "b": [1]}})
TOKENS = st.lists(st.integers(0, smollm2.VOCABULARY - 1), max_size=6)
ENDS = st.sampled_from(["stop", "stop", "length", "abort"])
ECHOES = st.sampled_from([*["verbatim"] * 3, "strip", "strip", "serialize", "rewrite", "drop"])
BLANKS = st.sampled_from(["", "", "\n", "\n\n", " "])
THOUGHTS = st.sampled_from(["", "", "<think>\nhm\n</think>\n\n", "hm\n</think>\n\n"])
ACTIONS = st.sampled_from([*["turn"] * 6, "ask", "ask", "answer", "copy", "shorten", "instruct"])


def echo(answer: Message, how: str) -> list[Message]:
    """What a client keeps of an answer."""
    match how:
        case "strip":
            return [replace(answer, content=answer.content.strip())]
        case "serialize":
            calls = (
                replace(one, arguments=json.dumps(json.loads(one.arguments), indent=1))
                for one in answer.tool_calls
            )
            return [replace(answer, tool_calls=tuple(calls))]
        case "rewrite":
            return [assistant(f"I said: {answer.content}")]
        case "drop":
            return []
        case _:
            return [answer]


class World:
    """A session, and the clients that speak to it."""

    def __init__(self, data: st.DataObject, name: str = "SMOLLM2") -> None:
        self.draw = data.draw
        self.session = Session(name)
        self.clients = [Client([HI]), Client([system("A"), HI])]
        self.waiting: list[Waiting] = []
        self.prompts: list[tuple[int, ...]] = []

    def check(self, one: Waiting) -> None:
        """A prompt ends with what the template writes after the answer, as it was shown."""
        planned, form = one.planned, self.session.form
        root, path = planned.at.root, planned.at.path()
        answers = [index for index, (_, turn) in enumerate(path) if turn is not None]
        if planned.parent is None:
            sent = form.text([*root.system, *(message for message, _ in path)], root.tools, now=NOW)
            assert planned.prompt_tokens == form.encode(sent)
            return
        messages = [*root.system, *(message for message, _ in path)]
        before = messages[: len(root.system) + answers[-1] + 1]
        closed = form.text(before, root.tools, now=NOW, speaks_next=False)
        whole = form.text(messages, root.tools, now=NOW)
        start = tokens_through(self.session.tree.turns, planned.parent)
        assert planned.prompt_tokens == start + planned.added
        if whole.startswith(closed):
            assert self.session.decode(planned.added).endswith(whole[len(closed) :])

    def recorded(self, one: Waiting, sampled: list[int], shown: Message) -> None:
        """An answer was recorded."""

    def ask(self, client: Client) -> None:
        request = ChatRequest(messages=tuple(client.messages), tools=(ADD,))
        try:
            planned = self.session.tree.prompt(request)
        except TemplateRefusal:
            return
        self.waiting.append(Waiting(client, request, planned))
        self.check(self.waiting[-1])

    def answer(self, one: Waiting) -> None:
        codec, ends = self.session.form.codec, self.session.form.end_tokens
        sampled = list(codec.encode(self.draw(THOUGHTS) + self.draw(BLANKS)))
        sampled += self.draw(TOKENS)
        if self.draw(st.booleans()):
            sampled += codec.encode(f"<tool_call>{CALLING}</tool_call>")
        finish = self.draw(ENDS)
        sampled += ends[:1] * (finish == "stop")
        cuts = self.draw(st.lists(st.integers(0, len(sampled)), max_size=2))
        answer = generated(sampled, finish, cuts=cuts)
        shown = self.session.reader.read(one.request, one.planned, answer).message
        turn = self.session.tree.record(one.planned, answer, shown)
        assert turn.number == len(self.prompts)
        self.prompts.append(one.planned.prompt_tokens)
        self.recorded(one, sampled, shown)
        one.client.messages += echo(shown, self.draw(ECHOES))
        results = [result("5", call.call_id) for call in shown.tool_calls]
        one.client.messages += results or [user(self.draw(st.sampled_from(["And?", "Why?"])))]

    def step(self, action: str) -> None:
        client = self.draw(st.sampled_from(self.clients))
        match action:
            case "turn":
                self.ask(client)
                if self.waiting:
                    self.answer(self.waiting.pop())
            case "ask":
                self.ask(client)
            case "answer" if self.waiting:
                self.answer(self.waiting.pop(self.draw(st.integers(0, len(self.waiting) - 1))))
            case "copy":
                self.clients.append(Client(list(client.messages)))
            case "shorten" if len(client.messages) > 3:
                del client.messages[1:3]
            case "instruct":
                client.messages.insert(0, system(self.draw(st.sampled_from("AB"))))

    def check_whole(self) -> None:
        tree = self.session.tree
        for number, turn in enumerate(tree.turns):
            assert tokens_through(tree.turns, number) == self.prompts[number] + turn.tokens
            assert turn.follows is None or turn.follows < number
        check_rows(tree, self.prompts)


class SlowWorld(World):
    """The same, beside a session that compares every request with every history."""

    def __init__(self, data: st.DataObject) -> None:
        super().__init__(data)
        self.slow = SlowSession()

    def check(self, one: Waiting) -> None:
        request, planned = one.request, one.planned
        candidates = self.slow.candidates(request.messages, request.tools)
        assert planned.parent in (candidates or [None])
        fresh = planned.parent is None
        sent = _described(request.messages) if fresh else request.messages
        assert planned.prompt_tokens == self.slow.prompt(sent, planned.parent)

    def recorded(self, one: Waiting, sampled: list[int], shown: Message) -> None:
        self.slow.record(
            messages=one.request.messages,
            tools=one.request.tools,
            parent=one.planned.parent,
            prompt=one.planned.prompt_tokens,
            sampled=tuple(sampled),
            shown=shown,
        )


@settings(max_examples=60)
@given(actions=st.lists(ACTIONS, min_size=10, max_size=25), data=st.data())
def test_a_session_is_as_the_slow_one(actions: list[str], data: st.DataObject) -> None:
    world = SlowWorld(data)
    for action in actions:
        world.step(action)
    world.check_whole()


@pytest.mark.parametrize(
    "name", ["QWEN", "QWEN_THINKING", "QWEN_OPENED", "LLAMA", "MISTRAL", "ALTERNATING"]
)
@settings(max_examples=15)
@given(actions=st.lists(ACTIONS, min_size=10, max_size=25), data=st.data())
def test_prompts_are_what_the_template_writes_around_what_was_sampled(
    name: str, actions: list[str], data: st.DataObject
) -> None:
    world = World(data, name)
    for action in actions:
        world.step(action)
    world.check_whole()


def _described(messages: Sequence[Message]) -> list[Message]:
    """The messages with the tools in the system message, and calls as text."""
    text = chat_format("SMOLLM2").text(messages, (ADD,), now=NOW)
    first = text.removeprefix("<|im_start|>system\n").partition("<|im_end|>")[0]
    rest = messages[1:] if messages[0].role == "system" else messages
    return [system(first), *rest]
