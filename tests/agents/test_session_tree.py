"""Sessions: sampled tokens are kept, forks are counted, and each token is trained once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.messages import ChatRequest
from areal_lab.agents.session_tree import SessionTree
from areal_lab.agents.template import ChatTemplate, TemplateRefusal
from areal_lab.agents.turns import tree_returns
from areal_lab.data.tokenize import TextCodec
from areal_lab.data.trajectory import FinishReason, Observation, Segment
from tests.agents import smollm2, templates
from tests.agents.check_rows import check_rows
from tests.agents.conversation import (
    ADD,
    NOW,
    Session,
    assistant,
    call,
    generated,
    result,
    system,
    user,
)

END = smollm2.END
CALL = '<tool_call>{"name": "add", "arguments": { "b": 3,"a":2}}</tool_call>'
HI = user("Hi")


def ids(text: str) -> tuple[int, ...]:
    return smollm2.codec().encode(text)


# --- prompts continue what was sampled ------------------------------------------------------------


def test_a_prompt_is_the_one_before_the_sampled_tokens_and_a_bridge() -> None:
    session = Session()
    first, turn, answer = session.turn(system("Be brief."), HI, sampled="Hello")
    second = session.ask(system("Be brief."), HI, answer, user("And?"))
    assert turn.tokens == (*ids("Hello"), END)
    assert second.prompt_tokens[: len(first.prompt_tokens)] == first.prompt_tokens
    assert session.decode(second.prompt_tokens) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert (second.parent, second.follows, second.fork, second.match) == (0, 0, None, "exact")
    assert second.prompt_tokens == first.prompt_tokens + turn.tokens + second.added
    assert (first.parent, first.fork, first.match) == (None, None, None)
    assert not session.tree.forks


@pytest.mark.parametrize(
    "sampled",
    [
        [*ids("\n"), *ids("\n"), END],
        [*ids(" M"), *ids("a"), *ids("ar"), *ids("re"), END],
        [*ids("\n"), *ids("Hi"), END],
        [*ids("😀")[:-1]],
        [*ids("a"), 0, 5, *ids("b")],
    ],
    ids=["line breaks", "pieces of a word", "begins blank", "half a character", "special tokens"],
)
def test_tokens_that_encoding_would_change_are_kept(sampled: list[int]) -> None:
    session = Session()
    first, _, answer = session.turn(HI, sampled=sampled)
    written = ids(f"<|im_start|>assistant\n{answer.content}<|im_end|>")
    kept = (*first.prompt_tokens[-3:], *sampled)
    assert written[: len(kept)] != kept  # encoding its text does change it
    second = session.ask(HI, answer, user("And?"))
    assert second.prompt_tokens[len(first.prompt_tokens) :][: len(sampled)] == tuple(sampled)
    assert second.parent == 0


@pytest.mark.parametrize("name", templates.NAMES)
def test_every_template_continues_through_calls(name: str) -> None:
    session = Session(name)
    first, turn, answer = session.turn(user("2 + 3?"), sampled=CALL, tools=[ADD])
    (asked,) = answer.tool_calls
    history = [user("2 + 3?"), answer, result("5", asked.call_id)]
    second, other, told = session.turn(*history, sampled="It is 5.", tools=[ADD])
    assert (second.parent, second.fork) == (0, None)
    assert second.prompt_tokens == first.prompt_tokens + turn.tokens + second.added
    third = session.ask(*history, told, user("Sure?"), tools=[ADD])
    assert (third.parent, third.fork) == (1, None)
    assert third.prompt_tokens == second.prompt_tokens + other.tokens + third.added


@pytest.mark.parametrize("finish", ["length", "abort"])
def test_a_cut_off_answer_is_ended_by_the_bridge_and_the_end_is_not_trained(
    finish: FinishReason,
) -> None:
    session = Session()
    first = session.ask(HI)
    turn, reply = session.answer(first, ids("Hello"), finish=finish)
    second = session.ask(HI, reply.message, user("And?"))
    assert second.added[0] == END
    assert second.prompt_tokens == first.prompt_tokens + turn.tokens + second.added
    session.answer(second, "Yes")
    (row,) = session.tree.rows()
    assert row.finish_reason == "stop"
    assert row.trained == ((0, len(turn.tokens)), (1, len(ids("Yes")) + 1))
    assert row.parts[1] == Observation(second.added)
    check_rows(session.tree, [first.prompt_tokens, second.prompt_tokens])


@pytest.mark.parametrize("sampled", [(), (END,)], ids=["no token", "only the end"])
def test_an_empty_answer_can_be_continued(sampled: tuple[int, ...]) -> None:
    session = Session()
    first = session.ask(HI)
    _, reply = session.answer(first, sampled, finish="stop" if sampled else "abort")
    assert reply.message.content == ""
    second = session.ask(HI, reply.message, user("And?"))
    assert (second.parent, second.match) == (0, "exact")
    assert session.decode(second.prompt_tokens).endswith(
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    session.answer(second, "Yes")
    check_rows(session.tree, [first.prompt_tokens, second.prompt_tokens])


def test_a_session_that_sampled_nothing_has_no_row() -> None:
    session = Session()
    first = session.ask(HI)
    session.answer(first, (), finish="abort")
    assert session.tree.rows() == ()
    second = session.ask(HI, assistant(""), user("And?"))
    session.answer(second, (), finish="abort")
    assert session.tree.rows() == ()


def test_a_leaf_without_tokens_ends_no_row() -> None:
    session = Session()
    first, turn, answer = session.turn(HI, sampled="Hello")
    second = session.ask(HI, answer, user("And?"))
    session.answer(second, (), finish="abort")
    (row,) = session.tree.rows()
    assert row.parts == turn.generated.segments
    assert row.trained == ((0, len(turn.tokens)),)
    check_rows(session.tree, [first.prompt_tokens, second.prompt_tokens])


def test_tokens_past_a_stop_string_stay_in_the_conversation() -> None:
    session = Session()
    first = session.ask(HI)
    turn, reply = session.answer(first, "Five.\nObservation: six", stop=["Observation:"])
    assert reply.message.content == "Five.\n"
    second = session.ask(HI, assistant("Five."), user("Observation: 5"))
    assert second.match == "stripped"
    assert second.prompt_tokens == first.prompt_tokens + turn.tokens + second.added
    assert "Observation: six<|im_end|>" in session.decode(second.prompt_tokens)


def test_versions_stay_with_their_tokens() -> None:
    """An answer that was continued on another engine, under other weights."""
    session = Session()
    first = session.ask(HI)
    tokens = (*ids("one two three"), END)
    turn = session.tree.record(first, generated(tokens, cuts=[1, 2]), assistant("one two three"))
    (row,) = session.tree.rows()
    assert row.parts == turn.generated.segments
    assert [part.version for part in row.parts if isinstance(part, Segment)] == [0, 1, 2]
    assert row.token_turns == (0,) * len(tokens)
    check_rows(session.tree, [first.prompt_tokens])


def test_the_date_in_a_prompt_is_that_of_the_session() -> None:
    session = Session("LLAMA")
    first = session.ask(HI)
    assert "Today: 09 Mar 2026" in session.decode(first.prompt_tokens)


def test_only_new_text_is_encoded() -> None:
    class Counting(TextCodec):
        characters = 0

        def encode_all(self, texts: Sequence[str], *, begins: bool = True) -> list[tuple[int, ...]]:
            self.characters += sum(map(len, texts))
            return super().encode_all(texts, begins=begins)

    codec = Counting(smollm2.vocabulary()._tokenizer)
    session = Session()
    session.form = ChatFormat(smollm2.template(), codec)
    session.tree = SessionTree(session.form, now=NOW)
    history, counts = [system("s" * 1000)], []
    for turn in range(20):
        history.append(user(f"question {turn:2}"))
        codec.characters = 0
        _, _, answer = session.turn(*history, sampled="a" * 100)
        counts.append(codec.characters)
        history.append(answer)
    assert max(counts[1:]) == min(counts[1:]) < 200 < counts[0]


# --- what clients do to answers -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "match"), [(" Five.\n", "exact"), ("Five.", "stripped"), ("Five.\n", "stripped")]
)
def test_a_client_that_strips_is_recognized(sent: str, match: str) -> None:
    session = Session()
    first, turn, _ = session.turn(HI, sampled=" Five.\n")
    second = session.ask(HI, assistant(sent), user("And?"))
    assert (second.parent, second.match, second.fork) == (0, match, None)
    assert second.prompt_tokens == first.prompt_tokens + turn.tokens + second.added
    assert session.tree.matches == {match: 1}


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ('{ "b": 3,"a":2}', "exact"),
        ('{"a": 2, "b": 3}', "exact"),
        ('{"a": "2", "b": 3}', "call_id"),
        ("not even JSON", "call_id"),
    ],
)
def test_calls_are_known_by_our_id_whatever_their_arguments_became(
    arguments: str, match: str
) -> None:
    session = Session()
    first, turn, answer = session.turn(user("2 + 3?"), sampled=CALL, tools=[ADD])
    (asked,) = answer.tool_calls
    sent = assistant("", replace(asked, arguments=arguments))
    second = session.ask(user("2 + 3?"), sent, result("5", asked.call_id), tools=[ADD])
    assert (second.parent, second.match, second.fork) == (0, match, None)
    assert second.prompt_tokens == first.prompt_tokens + turn.tokens + second.added
    assert '{ "b": 3,"a":2}' in session.decode(second.prompt_tokens)


def test_without_our_id_calls_are_known_by_their_json() -> None:
    session = Session()
    _, _, answer = session.turn(user("2 + 3?"), sampled=CALL, tools=[ADD])
    (asked,) = answer.tool_calls
    renamed = assistant("", replace(asked, call_id="toolu_1", arguments='{"a":2,"b":3}'))
    history = [user("2 + 3?"), renamed, result("5", "toolu_1")]
    assert session.ask(*history, tools=[ADD]).parent == 0
    other = assistant("", replace(asked, call_id="toolu_1", arguments='{"a":2,"b":4}'))
    planned = session.ask(user("2 + 3?"), other, result("6", "toolu_1"), tools=[ADD])
    assert (planned.parent, planned.fork) == (None, "assistant_rewritten")


@pytest.mark.parametrize(
    ("sent", "match"), [("I add.", "exact"), ("", "stripped"), (" I add. ", "stripped")]
)
def test_text_beside_calls_may_be_left_out(sent: str, match: str) -> None:
    session = Session()
    _, _, answer = session.turn(user("2 + 3?"), sampled=f"I add.\n{CALL}", tools=[ADD])
    history = [user("2 + 3?"), replace(answer, content=sent)]
    planned = session.ask(*history, result("5", answer.tool_calls[0].call_id), tools=[ADD])
    assert (planned.parent, planned.match) == (0, match)


def test_other_text_beside_calls_is_a_rewritten_answer() -> None:
    session = Session()
    _, _, answer = session.turn(user("2 + 3?"), sampled=f"I add.\n{CALL}", tools=[ADD])
    history = [user("2 + 3?"), replace(answer, content="I multiply.")]
    planned = session.ask(*history, result("5", answer.tool_calls[0].call_id), tools=[ADD])
    assert (planned.parent, planned.fork) == (None, "assistant_rewritten")


def test_one_of_two_calls_is_a_rewritten_answer() -> None:
    session = Session()
    _, _, answer = session.turn(user("2 + 3?"), sampled=CALL + CALL, tools=[ADD])
    first, _ = answer.tool_calls
    history = [user("2 + 3?"), replace(answer, tool_calls=(first,)), result("5", first.call_id)]
    planned = session.ask(*history, tools=[ADD])
    assert (planned.parent, planned.fork) == (None, "assistant_rewritten")


def test_results_may_come_in_any_order() -> None:
    session = Session("QWEN")
    _, _, answer = session.turn(user("2 + 3?"), sampled=CALL + CALL, tools=[ADD])
    first, second = answer.tool_calls
    results = [result("2nd", second.call_id), result("1st", first.call_id)]
    planned = session.ask(user("2 + 3?"), answer, *results, tools=[ADD])
    assert planned.parent == 0
    added = session.decode(planned.added)
    assert added.index("2nd") < added.index("1st")


@pytest.mark.parametrize("reasoning", [None, "", "hm", "\nhm\n"])
def test_a_client_that_drops_reasoning_changes_nothing(reasoning: str | None) -> None:
    session = Session("QWEN_THINKING")
    sampled = f"<think>\nhm\n</think>\n\n{CALL}"
    first, turn, answer = session.turn(user("2 + 3?"), sampled=sampled, tools=[ADD])
    assert answer.reasoning == "hm"
    sent = replace(answer, reasoning=reasoning)
    history = [user("2 + 3?"), sent, result("5", answer.tool_calls[0].call_id)]
    second = session.ask(*history, tools=[ADD])
    assert (second.parent, second.match, second.fork) == (0, "exact", None)
    assert second.prompt_tokens == first.prompt_tokens + turn.tokens + second.added


def test_other_reasoning_is_a_rewritten_answer() -> None:
    session = Session("QWEN_THINKING")
    _, _, answer = session.turn(HI, sampled="<think>hm</think>Hello")
    planned = session.ask(HI, replace(answer, reasoning="so"), user("And?"))
    assert planned.fork == "assistant_rewritten"


def test_a_message_of_the_client_is_not_taken_for_an_answer() -> None:
    """Only what was sampled may come back with other spaces."""
    session = Session()
    shot = assistant("Five. ")
    session.turn(HI, shot, user("And?"), sampled="Six.")
    planned = session.ask(HI, assistant("Five."), user("And?"))
    assert (planned.parent, planned.fork, planned.follows) == (None, None, None)


# --- forks ----------------------------------------------------------------------------------------


def test_a_client_that_writes_answers_as_text_forks_at_each_turn() -> None:
    """As smolagents does: the call becomes the text of a Python list."""
    session = Session()
    history, prompts = [user("2 + 3?")], []
    for number in range(3):
        planned, turn, _ = session.turn(*history, sampled=f"Call {number}: {CALL}", tools=[ADD])
        prompts.append(planned.prompt_tokens)
        assert planned.follows == (number - 1 if number else None)
        assert planned.parent is None
        assert planned.fork == ("assistant_rewritten" if number else None)
        history += [assistant(f"Calling tools:\n[{{'id': {number}}}]"), user("Observation: 5")]
        assert turn.number == number
    assert session.tree.forks == {"assistant_rewritten": 2}
    assert len(session.tree.rows()) == 3
    check_rows(session.tree, prompts)


def test_what_was_before_a_rewritten_answer_is_continued() -> None:
    session = Session()
    first, turn, answer = session.turn(HI, sampled="One")
    second, _, _ = session.turn(HI, answer, user("b"), sampled="Two")
    third, _, _ = session.turn(HI, answer, user("b"), assistant("2"), user("c"), sampled="Three")
    assert (third.parent, third.follows, third.fork) == (0, 1, "assistant_rewritten")
    start = first.prompt_tokens + turn.tokens
    assert third.prompt_tokens == start + third.added
    assert "<|im_start|>assistant\n2<|im_end|>" in session.decode(third.added)
    check_rows(session.tree, [first.prompt_tokens, second.prompt_tokens, third.prompt_tokens])


def test_a_fork_follows_the_last_answer_of_its_history_that_is_known() -> None:
    session = Session()
    _, _, one = session.turn(HI, sampled="One")
    _, _, two = session.turn(HI, one, user("b"), sampled="Two")
    session.turn(HI, one, user("b"), two, user("c"), sampled="Three")
    history = [HI, assistant("1"), user("b"), two, user("c"), assistant("3"), user("d")]
    planned = session.ask(*history)
    assert (planned.parent, planned.follows, planned.fork) == (None, 1, "assistant_rewritten")


def test_a_hand_off_has_other_instructions_over_the_same_history() -> None:
    session = Session()
    first, _, answer = session.turn(system("A"), HI, sampled="To B")
    second, _, told = session.turn(system("B"), HI, answer, user("go"), sampled="I am B")
    assert (second.parent, second.follows, second.fork) == (None, 0, "system_changed")
    third = session.ask(system("B"), HI, answer, user("go"), told, user("And?"))
    assert (third.parent, third.follows, third.fork) == (1, 1, None)
    back = session.ask(system("A"), HI, answer, user("go"), told, user("And?"))
    assert (back.parent, back.follows, back.fork) == (0, 1, "system_changed")
    assert session.tree.forks == {"system_changed": 2}
    session.answer(third, "Yes")
    session.answer(back, "No")
    prompts = [plan.prompt_tokens for plan in (first, second, third, back)]
    check_rows(session.tree, prompts)
    assert session.tree.follows == (None, 0, 1, 1)
    assert tree_returns(session.tree.follows, [None, None, 1.0, None], 0.5) == (
        0.25,
        0.5,
        1.0,
        None,
    )


def test_other_tools_are_a_fork_and_the_order_of_their_keys_is_not() -> None:
    session = Session("QWEN")
    _, _, answer = session.turn(HI, sampled="Hello", tools=[ADD])
    turned = replace(ADD, parameters=dict(reversed(list(ADD.parameters.items()))))
    assert list(turned.parameters) != list(ADD.parameters)
    assert session.ask(HI, answer, user("And?"), tools=[turned]).fork is None
    more = session.ask(HI, answer, user("And?"), tools=[ADD, replace(ADD, name="sub")])
    assert (more.parent, more.follows, more.fork) == (None, 0, "tools_changed")
    none = session.ask(HI, answer, user("And?"))
    assert (none.parent, none.follows, none.fork) == (None, 0, "tools_changed")
    both = session.ask(system("B"), HI, answer, user("And?"))
    assert both.fork == "system_changed"


def test_a_window_over_the_history_shortens_it() -> None:
    session = Session()
    history, prompts = [HI], []
    for text in ("One", "Two", "Three"):
        planned, _, answer = session.turn(*history, sampled=text)
        prompts.append(planned.prompt_tokens)
        history += [answer, user(f"after {text}")]
    short = session.ask(*history[2:])
    assert (short.parent, short.follows, short.fork) == (None, 2, "history_shortened")
    assert "Hi" not in session.decode(short.prompt_tokens)
    session.answer(short, "Four")
    check_rows(session.tree, [*prompts, short.prompt_tokens])


def test_messages_that_changed_before_an_answer_are_a_fork() -> None:
    session = Session()
    _, _, answer = session.turn(user("Hi, reminder: be good"), sampled="Hello")
    planned = session.ask(HI, answer, user("And?"))
    assert (planned.parent, planned.follows, planned.fork) == (None, 0, "history_changed")


def test_thinking_that_the_template_strips_is_a_fork() -> None:
    session = Session("QWEN_THINKING")
    first, _, answer = session.turn(HI, sampled="<think>hm</think>Hello")
    second, _, _ = session.turn(HI, answer, user("And?"), sampled="<think>so</think>Yes")
    assert (second.parent, second.follows, second.fork) == (None, 0, "thinking_stripped")
    assert session.decode(second.prompt_tokens) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )
    check_rows(session.tree, [first.prompt_tokens, second.prompt_tokens])


def test_calls_go_on_after_thinking_was_stripped() -> None:
    session = Session("QWEN_THINKING")
    _, _, answer = session.turn(HI, sampled="<think>hm</think>Hello", tools=[ADD])
    history = [HI, answer, user("2 + 3?")]
    second, turn, calling = session.turn(*history, sampled=f"<think>add</think>{CALL}", tools=[ADD])
    assert second.fork == "thinking_stripped"
    told = result("5", calling.tool_calls[0].call_id)
    third = session.ask(*history, calling, told, tools=[ADD])
    assert (third.parent, third.fork) == (1, None)
    assert third.prompt_tokens == second.prompt_tokens + turn.tokens + third.added
    assert session.tree.forks == {"thinking_stripped": 1}


def test_thinking_that_the_prompt_opens_is_continued_by_results() -> None:
    session = Session("QWEN_OPENED")
    sampled = f"hm\n</think>\n\n{CALL}"
    first, turn, answer = session.turn(user("2 + 3?"), sampled=sampled, tools=[ADD])
    assert session.decode(first.prompt_tokens).endswith("assistant\n<think>\n")
    assert (answer.reasoning, answer.content) == ("hm", "")
    sent = replace(answer, reasoning=None)
    history = [user("2 + 3?"), sent, result("5", answer.tool_calls[0].call_id)]
    second, _, told = session.turn(*history, sampled="so\n</think>\n\n5", tools=[ADD])
    assert second.prompt_tokens == first.prompt_tokens + turn.tokens + second.added
    third = session.ask(*history, told, user("Sure?"), tools=[ADD])
    assert (third.parent, third.follows, third.fork) == (None, 1, "thinking_stripped")
    assert session.decode(third.prompt_tokens).count("think") == 1


def test_a_template_that_rewrites_its_beginning_is_never_continued() -> None:
    session = Session()
    template = ChatTemplate("{{ messages | length }} messages\n" + templates.CHATML)
    session.form = ChatFormat(template, smollm2.codec())
    session.tree = SessionTree(session.form, now=NOW)
    _, _, answer = session.turn(HI, sampled="Hello")
    planned = session.ask(HI, answer, user("And?"))
    assert (planned.parent, planned.follows, planned.fork) == (None, 0, "template_rewrote")
    assert session.decode(planned.prompt_tokens).startswith("3 messages<|im_start|>user\nHi")


def test_an_answer_whose_end_the_template_leaves_out_is_not_continued() -> None:
    """The end behind it would be that of the result, which would be lost."""
    source = templates.CHATML.replace(
        "message.content + '<|im_end|>\\n' }}",
        "message.content }}{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
        "{{- '<|im_end|>' }}{%- endif %}{{- '\\n' }}",
    )
    session = Session()
    session.form = ChatFormat(ChatTemplate(source), smollm2.codec())
    session.tree = SessionTree(session.form, now=NOW)
    _, _, answer = session.turn(HI, sampled="Hello")
    assert session.ask(HI, answer, user("And?")).parent == 0
    planned = session.ask(HI, answer, result("5", "call00001"))
    assert (planned.parent, planned.fork) == (None, "template_rewrote")
    assert "Hello\n<|im_start|>tool\n5" in session.decode(planned.prompt_tokens)


def test_a_session_whose_tokens_were_changed_is_stopped() -> None:
    session = Session()
    _, turn, answer = session.turn(HI, sampled="Hello")
    session.tree._turns[0] = replace(turn, added=turn.added[1:])
    with pytest.raises(AssertionError):
        session.ask(HI, answer, user("And?"))


def test_a_cause_of_the_client_is_counted_before_one_of_the_template() -> None:
    session = Session("QWEN_THINKING")
    _, _, one = session.turn(HI, sampled="<think>hm</think>One")
    _, _, two = session.turn(HI, one, user("b"), sampled="<think>hm</think>Two")
    rewritten = replace(two, content="2")
    planned = session.ask(HI, one, user("b"), rewritten, user("c"))
    assert (planned.parent, planned.follows, planned.fork) == (None, 1, "assistant_rewritten")
    assert session.tree.forks == {"thinking_stripped": 1, "assistant_rewritten": 1}


# --- branches -------------------------------------------------------------------------------------


def test_replies_to_one_request_are_branches() -> None:
    session = Session()
    first = session.ask(HI, replies=3)
    shown = [
        session.answer(first, text, reply=index)[1].message
        for index, text in enumerate(("One", "Two", "Three"))
    ]
    second = session.ask(HI, shown[1], user("And?"))
    assert second.parent == 1
    session.answer(second, "Yes")
    assert session.tree.follows == (None, None, None, 1)
    assert [row.trained[0].turn for row in session.tree.rows()] == [0, 2, 1]
    check_rows(session.tree, [first.prompt_tokens] * 3 + [second.prompt_tokens])


def test_of_answers_with_the_same_text_the_last_request_and_its_first_reply_count() -> None:
    session = Session()
    for _ in range(2):
        planned = session.ask(HI, replies=2)
        for reply in range(2):
            session.answer(planned, "Same", reply=reply)
    assert session.ask(HI, assistant("Same"), user("And?")).parent == 2


def test_an_answer_that_came_back_exactly_is_meant_before_one_that_was_stripped() -> None:
    session = Session()
    session.turn(HI, sampled="Same")
    session.turn(HI, sampled="Same\n")
    assert session.ask(HI, assistant("Same"), user("And?")).parent == 0
    assert session.ask(HI, assistant("Same\n"), user("And?")).parent == 1
    assert session.ask(HI, assistant(" Same"), user("And?")).parent == 1


def test_of_answers_with_the_same_text_the_one_with_the_rest_of_the_history_counts() -> None:
    session = Session()
    session.turn(HI, sampled="Same")
    _, _, told = session.turn(HI, assistant("Same"), user("b"), sampled="Two")
    session.turn(HI, sampled="Same")
    planned = session.ask(HI, assistant("Same"), user("b"), told, user("c"))
    assert (planned.parent, planned.fork) == (1, None)


def test_calls_of_the_same_text_are_told_apart_by_their_ids() -> None:
    session = Session()
    first = session.ask(HI, tools=[ADD], replies=2)
    shown = [session.answer(first, CALL, tools=[ADD], reply=i)[1].message for i in (0, 1)]
    for number, answer in enumerate(shown):
        told = result("5", answer.tool_calls[0].call_id)
        assert session.ask(HI, answer, told, tools=[ADD]).parent == number


def test_going_back_to_an_earlier_answer_is_a_branch_and_no_fork() -> None:
    session = Session()
    first, turn, one = session.turn(HI, sampled="One")
    second, _, _ = session.turn(HI, one, user("b"), sampled="Two")
    other, _, _ = session.turn(HI, one, user("c"), sampled="Three")
    again, _, _ = session.turn(HI, one, user("b"), sampled="Other")
    assert [plan.parent for plan in (second, other, again)] == [0, 0, 0]
    assert again.prompt_tokens == second.prompt_tokens
    assert not session.tree.forks
    rows = session.tree.rows()
    assert [tuple(t.turn for t in row.trained) for row in rows] == [(0, 1), (2,), (3,)]
    assert rows[1].prompt_tokens == first.prompt_tokens
    assert rows[1].parts[0] == Observation(turn.tokens + other.added)
    plans = (first, second, other, again)
    check_rows(session.tree, [plan.prompt_tokens for plan in plans])


def test_sub_agents_that_take_turns_keep_apart() -> None:
    """Two of them with their own instructions, and two with the same; requests overlap."""
    session = Session()
    openings = [[system("A"), HI], [system("B"), HI], [system("B"), HI], [HI]]
    histories = [list(opening) for opening in openings]
    prompts: dict[int, tuple[int, ...]] = {}
    last: list[int | None] = [None] * len(histories)
    for step in range(4):
        plans = [session.ask(*history) for history in histories]
        for agent in reversed(range(len(histories))):
            assert plans[agent].parent == plans[agent].follows == last[agent]
            turn, reply = session.answer(plans[agent], f"{step} of {agent}")
            prompts[turn.number] = plans[agent].prompt_tokens
            last[agent] = turn.number
            histories[agent] += [reply.message, user(f"go on {step}")]
    assert not session.tree.forks
    assert len(session.tree.rows()) == len(histories)
    check_rows(session.tree, [prompts[number] for number in range(len(prompts))])
    rewards = [float(number == last[1]) if number in last else None for number in prompts]
    returns = tree_returns(session.tree.follows, rewards, 1.0)
    assert sum(value for value in returns if value is not None) == 4.0


def test_examples_of_the_client_are_context() -> None:
    session = Session()
    shots = [
        user("34 * 27"),
        assistant("", call("shot00001", "add", '{"a": 34}')),
        result("918", "shot00001"),
        assistant("Answer: 918"),
    ]
    first, _, _ = session.turn(*shots, user("2 + 3?"), sampled="Answer: 5", tools=[ADD])
    other = session.ask(*shots, user("3 + 3?"), tools=[ADD])
    assert (first.fork, first.follows, other.fork, other.follows) == (None,) * 4
    assert other.parent is None


def test_a_system_message_inside_the_conversation_is_a_message() -> None:
    session = Session("QWEN")
    _, _, answer = session.turn(system("A"), HI, system("reminder"), sampled="Hello")
    planned = session.ask(system("A"), HI, system("reminder"), answer, user("And?"))
    assert planned.parent == 0
    assert session.ask(system("A"), HI, answer, user("And?")).fork == "history_shortened"


def test_a_request_without_a_new_message_asks_for_another_answer_after_the_last() -> None:
    session = Session()
    first, turn, answer = session.turn(HI, sampled="Hello")
    planned = session.ask(HI, answer)
    assert planned.prompt_tokens == first.prompt_tokens + turn.tokens + planned.added
    assert session.decode(planned.added) == "\n<|im_start|>assistant\n"


def test_a_refused_request_leaves_no_trace() -> None:
    session = Session("ALTERNATING")
    _, _, answer = session.turn(HI, sampled="Hello")
    with pytest.raises(TemplateRefusal, match="must alternate"):
        session.ask(HI, answer, user("And?"), user("And?"))
    with pytest.raises(TemplateRefusal, match="must alternate"):
        session.ask(HI, assistant("other"), user("And?"), user("And?"))
    assert not session.tree.forks
    assert not session.tree.matches
    assert session.ask(HI, answer, user("And?")).parent == 0


def test_an_answer_is_of_the_assistant() -> None:
    session = Session()
    planned = session.ask(HI)
    with pytest.raises(ValueError, match="has the role user"):
        session.tree.record(planned, generated([END]), HI)


def test_messages_of_which_the_template_makes_nothing_are_refused() -> None:
    tree = SessionTree(
        ChatFormat(ChatTemplate("{{ messages[0].content }}"), smollm2.codec()), now=NOW
    )
    with pytest.raises(ValueError, match="makes no text of these messages"):
        tree.prompt(ChatRequest(messages=(user(""),)))
