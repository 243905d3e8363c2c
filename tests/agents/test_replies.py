"""What a client is shown of sampled tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.messages import ChatReply, ChatRequest, ToolChoice
from areal_lab.agents.replies import ReplyReader
from areal_lab.agents.session_tree import SessionTree
from areal_lab.agents.template import ChatTemplate
from areal_lab.data.trajectory import FinishReason
from tests.agents import smollm2, templates
from tests.agents.conversation import ADD, NOW, Session, generated, user
from tests.agents.published import FAMILIES, published
from tests.agents.templates import LLAMA_TOKENS, chat_format

END = smollm2.END
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
SAMPLED = st.lists(st.integers(0, smollm2.VOCABULARY - 1), max_size=12)


def ids(text: str) -> list[int]:
    return list(smollm2.codec().encode(text))


def read(
    tokens: list[int],
    finish: FinishReason = "stop",
    *,
    stop: tuple[str, ...] = (),
    choice: ToolChoice = "auto",
    tool: str = "",
    name: str = "SMOLLM2",
    context_tokens: int = 1000,
) -> ChatReply:
    session = Session(name, context_tokens=context_tokens)
    request = ChatRequest(
        messages=(user("2 + 3?"),),
        tools=(ADD, replace(ADD, name="sub")),
        stop=stop,
        tool_choice=choice,
        tool_name=tool,
    )
    planned = session.tree.prompt(request)
    return session.reader.read(request, planned, generated(tokens, finish))


def test_an_answer_is_its_text_without_the_end_token() -> None:
    tokens = [*ids(" Fine.\n"), END]
    reply = read(tokens)
    assert reply.message.content == " Fine.\n"
    assert reply.message.tool_calls == ()
    assert reply.message.reasoning is None
    assert reply.finish == "stop"
    assert [token for part in reply.generated.segments for token in part.tokens] == tokens


def test_shown_tokens_have_the_text_of_the_message_and_their_own_log_probs() -> None:
    tokens = [*ids("Fine: 12"), END]
    reply = read(tokens)
    assert "".join(text for text, _ in reply.shown) == "Fine: 12"
    logprobs = reply.generated.segments[0].logprobs
    assert [logprob for _, logprob in reply.shown] == list(logprobs[:-1])


@given(tokens=SAMPLED, ends=st.booleans())
def test_any_tokens_can_be_shown(tokens: list[int], ends: bool) -> None:
    reply = read(tokens + [END] * ends, "stop" if ends else "length")
    assert "".join(text for text, _ in reply.shown) == reply.message.content
    assert len(reply.shown) <= len(tokens)
    assert reply.message.content == smollm2.codec().decode(tokens)
    assert reply.message.tool_calls == ()


@pytest.mark.parametrize("tokens", [[], [END], [1], [0, END]])
def test_an_answer_without_text_is_empty(tokens: list[int]) -> None:
    reply = read(tokens)
    assert (reply.message.content, reply.shown, reply.finish) == ("", (), "stop")


def test_a_character_that_was_cut_off_is_shown_as_a_replacement() -> None:
    face = ids("😀")
    assert len(face) > 1
    reply = read([*ids("Hi "), *face[:-1]], "length")
    assert reply.message.content == "Hi \N{REPLACEMENT CHARACTER}"
    whole = read([*face, END])
    assert [text for text, _ in whole.shown] == [""] * (len(face) - 1) + ["😀"]


def test_a_stop_string_and_what_follows_are_not_shown() -> None:
    tokens = [*ids("Thought: add\nObservation: 5\nFive"), END]
    reply = read(tokens, stop=("Final", "Observation:", "Five"))
    assert reply.message.content == "Thought: add\n"
    assert reply.finish == "stop"
    assert "".join(text for text, _ in reply.shown) == "Thought: add\n"
    assert len(reply.shown) == len(ids("Thought: add\n"))
    assert [token for part in reply.generated.segments for token in part.tokens] == tokens


def test_a_stop_string_inside_a_token_shows_what_is_before_it() -> None:
    (token,) = ids(" Answer")
    reply = read([token], "length", stop=("swer",))
    assert [text for text, _ in reply.shown] == [" An"]
    assert reply.finish == "stop"
    assert read([token], "length", stop=("",)).message.content == " Answer"


def test_calls_have_ids_that_differ_and_the_text_of_the_model() -> None:
    reply = read([*ids(f"I add.\n{CALL}\n{CALL}"), END])
    assert reply.finish == "tool_calls"
    assert reply.message.content == "I add."
    assert [(one.name, one.arguments) for one in reply.message.tool_calls] == [
        ("add", '{"a": 2}')
    ] * 2
    names = [one.call_id for one in reply.message.tool_calls]
    assert len(set(names)) == 2
    assert all(len(name) == 9 and name.isalnum() for name in names)
    assert "".join(text for text, _ in reply.shown) == f"I add.\n{CALL}\n{CALL}"


def test_ids_of_calls_differ_between_requests_replies_and_sessions() -> None:
    session = Session()
    plans = [session.ask(user("a")), session.ask(user("a"))]
    names = {plan.call_id(reply, index) for plan in plans for reply in (0, 1) for index in (0, 1)}
    assert len(names) == 8
    assert plans[0].call_id(0, 0) == Session().ask(user("b")).call_id(0, 0)


@pytest.mark.parametrize("cut", range(1, len(CALL)))
def test_a_call_that_was_cut_off_is_content(cut: int) -> None:
    reply = read(ids(CALL[:cut]), "length")
    assert reply.message.content == CALL[:cut]
    assert reply.message.tool_calls == ()
    assert reply.finish == "length"
    assert reply.malformed_calls == (cut >= len("<tool_call>"))


def test_bad_calls_are_counted() -> None:
    unknown = CALL.replace("add", "mul")
    reply = read([*ids(f"{CALL}<tool_call>{unknown}"), END])
    assert len(reply.message.tool_calls) == 1
    assert (reply.malformed_calls, reply.unknown_calls) == (1, 1)


def test_a_client_that_wants_no_calls_gets_text() -> None:
    reply = read([*ids(CALL), END], choice="none")
    assert reply.message.content == CALL
    assert (reply.finish, reply.malformed_calls) == ("stop", 0)


def test_a_client_that_wants_one_tool_gets_no_calls_of_another() -> None:
    """It reads the arguments as those of the tool that it named."""
    both = f"{CALL}{CALL.replace('add', 'sub')}"
    reply = read([*ids(both), END], choice="named", tool="sub")
    assert [one.name for one in reply.message.tool_calls] == ["sub"]
    assert (reply.message.content, reply.unknown_calls) == (CALL, 1)
    assert len(read([*ids(both), END]).message.tool_calls) == 2


def test_an_answer_that_fills_the_context_says_so() -> None:
    prompt = read([END]).prompt_tokens
    assert read(ids("12345"), "length", context_tokens=prompt + 6).finish == "length"
    assert read(ids("12345"), "length", context_tokens=prompt + 5).finish == "context"
    assert read([*ids("1234"), END], "stop", context_tokens=prompt + 5).finish == "stop"


def test_an_aborted_answer_is_one_that_was_cut_off() -> None:
    assert read(ids("Fi"), "abort").finish == "length"
    assert read([], "abort").finish == "length"


def test_thinking_is_split_off_only_where_the_template_knows_it() -> None:
    tokens = [*ids("<think>\nhm\n</think>\n\nFive"), END]
    reply = read(tokens, name="QWEN_THINKING")
    assert (reply.message.reasoning, reply.message.content) == ("hm", "Five")
    assert "".join(text for text, _ in reply.shown) == "<think>\nhm\n</think>\n\nFive"
    assert read(tokens).message.content == "<think>\nhm\n</think>\n\nFive"


def test_marks_that_are_special_tokens_are_seen() -> None:
    form = chat_format("MISTRAL")
    reader = ReplyReader(form, context_tokens=1000)
    session = Session("MISTRAL")
    request = ChatRequest(messages=(user("2 + 3?"),), tools=(ADD,))
    planned = session.tree.prompt(request)
    text = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}}]'
    mark, end = form.codec.token("[TOOL_CALLS]"), form.codec.token("</s>")
    tokens = [*form.codec.encode(text), end]
    assert tokens[0] == mark
    reply = reader.read(request, planned, generated(tokens))
    assert [json.loads(one.arguments) for one in reply.message.tool_calls] == [{"a": 2}]
    assert "".join(piece for piece, _ in reply.shown) == text


def test_sampled_calls_of_published_families_are_read_with_their_marks() -> None:
    tool = replace(ADD, name="probe_name")
    for name, family in FAMILIES.items():
        if not family.grammar:
            continue
        form = published(name)
        tree = SessionTree(form, now=NOW)
        request = ChatRequest(messages=(user("2 + 3?"),), tools=(tool,))
        planned = tree.prompt(request)
        said = f"I see.\n</think>\n\n{form.probe_call()[0]}"
        if not form.facts.opens_thinking:
            said = form.probe_call()[0]
        tokens = [*form.codec.encode_all([said], begins=False)[0], *form.end_tokens[:1]]
        reply = ReplyReader(form, context_tokens=1000).read(request, planned, generated(tokens))
        (found,) = reply.message.tool_calls
        assert (found.name, json.loads(found.arguments)) == ("probe_name", {"probe_key": "p"}), name
        assert (reply.finish, reply.message.content, reply.malformed_calls) == ("tool_calls", "", 0)


def test_an_end_token_that_is_not_special_is_not_shown() -> None:
    codec = smollm2.vocabulary(added=LLAMA_TOKENS)
    template = ChatTemplate(templates.LLAMA, tokens={"bos_token": LLAMA_TOKENS[0]})
    session = Session("LLAMA")
    session.form = ChatFormat(template, codec)
    session.tree = SessionTree(session.form, now=NOW)
    session.reader = ReplyReader(session.form, context_tokens=1000)
    end = codec.token("<|eot_id|>")
    _, reply = session.answer(session.ask(user("Hi")), [*ids("Hello"), end])
    assert reply.message.content == "Hello"
    following = session.ask(user("Hi"), reply.message, user("And?"))
    assert following.parent == 0
    assert following.added[0] != end


def test_a_grammar_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="must be one of auto, hermes"):
        ReplyReader(chat_format("SMOLLM2"), grammar="qwen", context_tokens=10)
