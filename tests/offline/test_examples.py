"""Rows become the tokens that generation would see, and only responses are learned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from areal_lab.config.offline import DemonstrationsConfig, PairsConfig
from areal_lab.config.problem import ConfigError
from areal_lab.data.batch import input_tokens
from areal_lab.data.wrapping import Wrapping
from areal_lab.offline.examples import Encoder, Example, Learn
from areal_lab.offline.rows import Row
from tests.offline.small import TEMPLATE, model_folder

END = 1
CONVERSATION = (("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4"))


def encoder(folder: Path, learn: Learn = "responses", **dataset: Any) -> Encoder:
    chat = dataset.get("chat", False)
    return Encoder(model_folder(folder, chat=chat), DemonstrationsConfig(**dataset), learn)


def texts(encoder: Encoder, example: Example) -> tuple[str, list[str]]:
    """The whole text, and the learned parts; the end token is shown as `$`."""

    def shown(tokens: Any) -> str:
        return "".join("$" if t == END else encoder.codec.decode([t]) for t in tokens)

    return shown(example.tokens), [shown(example.tokens[a:b]) for a, b in example.learned]


def one(encoder: Encoder, *responses: Any, prompt: Any = "1+1=") -> Example:
    (item,) = encoder.items([Row("here", prompt, responses)]).items
    return item.examples[0]


def test_a_response_is_learned_with_its_end(tmp_path: Path) -> None:
    plain = encoder(tmp_path)
    assert texts(plain, one(plain, "2")) == ("1+1=2$", ["2$"])
    without = encoder(tmp_path, end_text="\n", end_token=False)
    assert texts(without, one(without, " 2")) == ("1+1= 2\n", [" 2\n"])
    around = encoder(tmp_path, prompt_template="{prompt}=", end_token=False)
    assert texts(around, one(around, "2", prompt="1+1")) == ("1+1=2", ["2"])
    everything = encoder(tmp_path, "everything")
    assert texts(everything, one(everything, "2")) == ("1+1=2$", ["+1=2$"])


def test_an_end_token_in_the_text_of_a_response_stands_once(tmp_path: Path) -> None:
    plain = encoder(tmp_path)
    name = plain.codec.added_tokens[END]
    assert texts(plain, one(plain, f"2{name}")) == ("1+1=2$", ["2$"])
    with_text = encoder(tmp_path, end_text="\n")
    assert texts(with_text, one(with_text, f"2{name}")) == ("1+1=2\n$", ["2\n$"])
    chat = encoder(tmp_path / "chat", chat=True)
    template = tmp_path / "chat" / "model" / "chat_template.jinja"
    template.write_text(TEMPLATE.replace("'\\n'", repr(name)))
    chat = encoder(tmp_path / "chat", chat=True)
    for content in ("2", f"2{name}"):
        assert texts(chat, one(chat, content, prompt="1+1")) == ("+1+1=*2$", ["2$"])
        messages = (("user", "1+1"), ("assistant", content), ("user", "2+2"), ("assistant", "4"))
        assert texts(chat, one(chat, messages, prompt=""))[1] == ["2$", "4$"]


def test_a_whole_text_is_learned_from_its_second_token_on(tmp_path: Path) -> None:
    plain = encoder(tmp_path)
    assert texts(plain, one(plain, "1+1=2", prompt="")) == ("1+1=2$", ["+1=2$"])


def test_a_prompt_has_the_tokens_of_generation(tmp_path: Path) -> None:
    found = encoder(tmp_path)
    example = one(found, "2")
    trajectory = example.trajectory(0, 0)
    assert trajectory.prompt_tokens == found.codec.encode("1+1=")
    assert trajectory.response_tokens == (*found.codec.encode("2"), END)


def test_all_messages_of_the_assistant_are_learned(tmp_path: Path) -> None:
    chat = encoder(tmp_path, chat=True)
    example = one(chat, CONVERSATION, prompt="")
    assert texts(chat, example) == ("+1+1=*2\n+2+2=*4\n", ["2\n", "4\n"])
    trajectory = example.trajectory(0, 0)
    assert trajectory.generated_tokens == 4
    assert trajectory.prompt_tokens + trajectory.response_tokens == tuple(example.tokens)
    # Text goes through the template as one message each.
    assert texts(chat, one(chat, "2", prompt="1+1")) == ("+1+1=*2\n", ["2\n"])


def test_a_score_is_read_at_the_last_token(tmp_path: Path) -> None:
    example = one(encoder(tmp_path, "score"), "2")
    assert example.learned == ()
    trajectory = example.trajectory(0, 0)
    assert input_tokens(trajectory) == tuple(example.tokens)
    assert trajectory.generated_tokens == 1


def test_the_rule_of_a_reward_model_gives_the_tokens_of_its_training(tmp_path: Path) -> None:
    for name, settings in {
        "chat": {"chat": True},
        "plain": {"prompt_template": "+{prompt}=", "end_text": "\n"},
    }.items():
        scores = encoder(tmp_path / name, "score", **settings)
        trained = tuple(one(scores, "2", prompt="1+1").tokens)
        model = scores.wrapping
        model.write(tmp_path)
        again = Wrapping.read(tmp_path)
        assert again == model
        wrapped = again.prompt("1+1")
        for prompt, response in (("1+1", "2"), (wrapped, "2"), (wrapped, "2\n")):
            assert again.tokens(scores.codec, prompt, response) == trained


def test_long_rows_are_refused_or_left_out_and_counted_never_cut(tmp_path: Path) -> None:
    rows = [Row("row 1", "1+1=", ("2",)), Row("row 2", "1+1=", ("2" * 300,))]
    message = "row 2 has 305 tokens, but a row may have at most 256"
    with pytest.raises(ConfigError, match=re.escape(message)):
        encoder(tmp_path).items(rows)
    found = encoder(tmp_path, too_long="drop").items(rows)
    assert len(found.items) == 1
    assert found.dropped == {"longer than 256 tokens": 1}
    found = encoder(tmp_path, too_long="drop", max_tokens=5).items(rows)
    assert found.dropped == {"longer than 5 tokens": 2}
    assert len(encoder(tmp_path, max_tokens=6, too_long="drop").items(rows).items) == 1


def test_pairs_of_equal_responses_are_left_out_and_counted(tmp_path: Path) -> None:
    pairs = Encoder(model_folder(tmp_path), PairsConfig(), "responses")
    found = pairs.items([Row("", "1", ("2", "2")), Row("", "1", ("2", "3"))])
    assert len(found.items) == 1
    assert found.dropped == {"chosen and rejected are equal": 1}


def test_what_the_model_lacks_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template"):
        Encoder(model_folder(tmp_path), DemonstrationsConfig(), "responses", chat=True)
    model = model_folder(tmp_path / "chat", chat=True)
    changing = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (model / "chat_template.jinja").write_text(changing)
    chat = encoder(tmp_path / "chat", chat=True)
    with pytest.raises(ConfigError, match="line 7: the chat template writes message 2 differently"):
        chat.items([Row("line 7", "", (CONVERSATION,))])
    for program, why in (
        ("{{ 'x' * 10 ** 10 }}", "it takes more than 256 MiB of memory"),
        ("{{ raise_exception('users first') }}", "users first"),
    ):
        (model / "chat_template.jinja").write_text(program)
        chat = encoder(tmp_path / "chat", chat=True)
        with pytest.raises(ConfigError, match=f"line 7: .*: {why}$"):
            chat.items([Row("line 7", "", (CONVERSATION,))])
