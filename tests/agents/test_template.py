"""Chat templates: what they may use, where they are found, and that transformers agrees."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from areal_lab.agents import template as template_module
from areal_lab.agents.template import ChatTemplate, TemplateRefusal, load_template
from tests.agents import templates
from tests.agents.conversation import NOW
from tests.agents.templates import LLAMA_TOKENS, MISTRAL_TOKENS
from tests.fuzz import one_line

USER = {"role": "user", "content": "2 < 3 & 'x'?"}
CALLS = [
    {
        "id": "call00001",
        "type": "function",
        "function": {"name": "add", "arguments": {"b": "é <b>", "a": [1, None]}},
    }
]
CONVERSATION = [
    {"role": "system", "content": "Be brief. "},
    USER,
    {"role": "assistant", "content": "", "tool_calls": CALLS, "reasoning_content": "hm"},
    {"role": "tool", "content": "5", "tool_call_id": "call00001"},
    {"role": "assistant", "content": " So: 5 \n"},
    {"role": "user", "content": "Thanks"},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def rendered(source: str, **arguments: object) -> str:
    return ChatTemplate(source, arguments=arguments).render([USER], [], now=NOW, speaks_next=True)


@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("speaks_next", [True, False])
@pytest.mark.parametrize("name", ["QWEN", "QWEN_THINKING", "LLAMA", "MISTRAL"])
def test_transformers_renders_the_same_text(
    name: str, speaks_next: bool, tools: list[dict[str, object]]
) -> None:
    source = getattr(templates, name)
    special = LLAMA_TOKENS if name == "LLAMA" else MISTRAL_TOKENS
    tokens = {"bos_token": special[0], "eos_token": special[1]}
    ours = ChatTemplate(source, tokens=tokens)
    now = datetime.now()  # theirs takes no other; the templates write the day
    text = ours.render(CONVERSATION, tools, now=now, speaks_next=speaks_next)
    (theirs,), _ = render_jinja_template(
        [CONVERSATION],
        tools=tools or None,
        chat_template=source,
        add_generation_prompt=speaks_next,
        **tokens,
    )
    assert text == theirs


def test_the_names_that_templates_expect_are_there() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m | tojson }}{% endgeneration %}"
        "{% if loop.first %}{% break %}{% endif %}{% endfor %}"
        " {{ strftime_now('%Y-%m-%d') }} {{ add_generation_prompt }} {{ tools is none }} {{ mode }}"
    )
    assert rendered(source, mode="fast") == (
        '{"role": "user", "content": "2 < 3 & \'x\'?"} 2026-03-09 True True fast'
    )


def test_names_set_inside_a_generation_block_stay_there() -> None:
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{% endgeneration %}{{ x }}"
    assert rendered(source) == "1"


def test_lines_with_nothing_but_a_block_leave_nothing() -> None:
    source = "{% if messages %}\n  {% if tools is none %}\n  a\n  {% endif %}\n{% endif %}\nb"
    assert rendered(source) == "  a\nb"


def test_an_error_of_the_template_is_a_refusal_with_its_words() -> None:
    with pytest.raises(TemplateRefusal, match="refuses the conversation: roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(TemplateRefusal, match="can only concatenate str"):
        rendered("{{ 'a' + messages[0]['missing'] | length }}")


def test_a_template_cannot_leave_the_sandbox() -> None:
    with pytest.raises(TemplateRefusal, match="unsafe"):
        rendered("{{ ''.__class__.__mro__ }}")
    with pytest.raises(TemplateRefusal, match="unsafe"):
        rendered("{{ strftime_now.__globals__['json'] }}")
    with pytest.raises(TemplateRefusal, match="unsafe"):
        rendered("{{ messages.append(1) }}")


def test_a_template_that_cannot_be_read_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("fine\n{% if %}")
    with pytest.raises(ValueError, match=r"mine\.jinja: line 2 of the chat template cannot be"):
        load_template(tmp_path, file)
    with pytest.raises(ValueError, match=r"the chat template .*absent\.jinja cannot be read"):
        load_template(tmp_path, tmp_path / "absent.jinja")


def test_the_file_of_the_folder_is_used_unless_another_one_is_given(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("own {{ bos_token }}{{ eos_token }}")
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "mine.jinja").write_text("mine {{ bos_token }} {{ tone }}")
    own = load_template(tmp_path)
    mine = load_template(tmp_path, tmp_path / "mine.jinja", arguments={"tone": "dry"})
    assert own.render([USER], [], now=NOW, speaks_next=True) == "own <s></s>"
    assert mine.render([USER], [], now=NOW, speaks_next=True) == "mine <s> dry"


def test_a_template_for_tools_in_the_configuration_is_used_with_tools(tmp_path: Path) -> None:
    sources = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": sources}))
    template = load_template(tmp_path)
    assert template.render([USER], [], now=NOW, speaks_next=True) == "plain"
    assert template.render([USER], [TOOL], now=NOW, speaks_next=True) == "with 1"


@pytest.mark.parametrize("config", [None, "{}", '{"chat_template": []}'])
def test_a_folder_without_a_template_is_refused_with_a_fix(
    tmp_path: Path, config: str | None
) -> None:
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=r"has no chat template .*give a template file") as refused:
        load_template(tmp_path)
    assert "\n" not in str(refused.value)


def test_conversations_load_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, areal_lab.agents.replies, areal_lab.agents.turns;"
        "print(sorted({'torch', 'transformers', 'asyncio'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"


GREEDY = {
    "product": "{{ 'x' * 10**10 }}",
    "product of a message": "{{ messages[0].content * 10**10 }}",
    "list": "{{ [1] * 10**10 }}",
    "doubled": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "filter": "{{ 'x' | center(10**10) }}",
    "percent": "{{ '%10000000000d' % 1 }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "join": "{{ ('x' * 1000) | list | join('y' * 10**7) }}",
    "JSON": "{{ messages | tojson(indent=10**10) }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "text": "{{ 'x' * 40000000 }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "time": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}
"""Templates that would take gigabytes, or hours."""


def test_a_template_that_takes_much_memory_or_time_is_refused_and_others_are_rendered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(template_module, "CPU_S", 0.5)
    monkeypatch.setattr(template_module, "_of_thread", threading.local())
    fine = ChatTemplate("{{ messages[0].content }}!")
    for name, source in GREEDY.items():
        with pytest.raises(ValueError, match="chat template") as raised:
            ChatTemplate(source).render([USER], [], now=NOW, speaks_next=True)
        assert one_line(raised.value), name
        assert fine.render([USER], [], now=NOW, speaks_next=True) == f"{USER['content']}!"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2 * 2**20, "KiB of this process"
    # One whose process ends, or says nothing for too long.
    renderer = template_module._renderer()
    for how in (signal.SIGKILL, signal.SIGSTOP):
        renderer._socket.settimeout(0.2)
        os.kill(renderer._end.peek()[2][1].pid, how)  # type: ignore[index]  # it is alive
        with pytest.raises(TemplateRefusal, match=r"ended its process|takes too long"):
            fine.render([USER], [], now=NOW, speaks_next=True)
        assert fine.render([USER], [], now=NOW, speaks_next=True) == f"{USER['content']}!"


def test_every_thread_and_every_fork_has_its_own_process_which_ends_with_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}!")
    found: list[Any] = []

    def render() -> None:
        text = template.render([USER], [], now=NOW, speaks_next=True)
        found.append((text, template_module._renderer()._end.peek()[2][1]))  # type: ignore[index]

    render()
    thread = threading.Thread(target=render)
    thread.start()
    thread.join()
    (first, here), (second, there) = found
    assert first == second
    assert here.pid != there.pid
    assert here.poll() is None
    assert there.poll() is not None
    if (child := os.fork()) == 0:
        status = 1
        try:
            render()
            status = int(found[-1][0] != first or found[-1][1].pid == here.pid)
        finally:
            template_module._renderer()._end()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render([USER], [], now=NOW, speaks_next=True) == first
