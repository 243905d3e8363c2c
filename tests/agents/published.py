"""How families of models write calls, in our own words: as published, without what changes nothing.

Each is a list of messages between marks; they differ in the marks, in what begins the assistant's
message, in how a call and a result are written, and in what they refuse.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.template import ChatTemplate
from tests.agents import smollm2


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of chat templates."""

    before: str = "{{ '<|im_start|>' + m.role + '\\n' }}"
    """Before the content of a message `m`."""
    after: str = "{{ '<|im_end|>\\n' }}"
    """After it and its calls."""
    speaks: str = "{{ '<|im_start|>assistant\\n' }}"
    """Where the assistant begins."""
    call: str = ""
    """A call `c` of a message, with `args`; empty: calls are ignored."""
    calls: tuple[str, str] = ("", "")
    """Around all calls of a message."""
    content: str = "{{ m.content or '' }}"
    result: str = "{{ '<|im_start|>tool\\n' + m.content + '<|im_end|>\\n' }}"
    """A tool's result; empty: it is refused."""
    begin: str = ""
    special: tuple[str, ...] = ()
    """Special tokens that SmolLM2's vocabulary has not."""
    added: tuple[str, ...] = ()
    """Tokens that were added and are not special."""
    grammar: str
    """That reads the calls; empty: none does."""

    @property
    def source(self) -> str:
        """The template."""
        refused = "{{ raise_exception('no results of tools') }}"
        lines = (
            self.begin,
            "{% if tools %}{{ '[tools] ' + tools | tojson + '\\n' }}{% endif %}",
            "{% for m in messages %}",
            f"{{% if m.role == 'tool' %}}{self.result or refused}{{% else %}}",
            self.before,
            self.content,
            f"{{% if m.tool_calls %}}{self.calls[0]}" if self.call else "",
            "{% for t in m.tool_calls %}{% set c = t.function %}" if self.call else "",
            f"{{% set args = c.arguments %}}{self.call}{{% endfor %}}" if self.call else "",
            f"{self.calls[1]}{{% endif %}}" if self.call else "",
            f"{self.after}{{% endif %}}{{% endfor %}}",
            f"{{% if add_generation_prompt %}}{self.speaks}{{% endif %}}",
        )
        return "".join(lines)


_JSON_CALL: Final = (
    '{{ \'<tool_call>\\n{"name": "\' + c.name + \'", "arguments": \' + (args | tojson) }}'
    "{{ '}\\n</tool_call>' }}"
)
_NAME_AND_ARGUMENTS: Final = "{{ {'name': c.name, 'arguments': args} | tojson }}"
_LIST: Final = f"{_NAME_AND_ARGUMENTS}{{% if not loop.last %}}, {{% endif %}}"
_IN_XML: Final = (
    "{{ '<tool_call>\\n<function=' + c.name + '>\\n' }}{% for k, v in args | items %}"
    "{{ '<parameter=' + k + '>\\n' + (v if v is string else v | tojson) + '\\n</parameter>\\n' }}"
    "{% endfor %}{{ '</function>\\n</tool_call>' }}"
)
_GLM_CALL: Final = (
    "{{ '\\n<tool_call>' + c.name + '\\n' }}{% for k, v in args | items %}"
    "{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
    "{{ v if v is string else v | tojson }}{{ '</arg_value>\\n' }}{% endfor %}{{ '</tool_call>' }}"
)
_DS = "<\uff5ctool\u2581{}\uff5c>".format
_DEEPSEEK: Final = tuple(
    map(_DS, ("calls\u2581begin", "call\u2581begin", "sep", "call\u2581end", "calls\u2581end"))
)
_DS_OUTPUT: Final = (_DS("output\u2581begin"), _DS("output\u2581end"))
_DS_ROLES: Final = ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\uff5c>")
_DS_FRAME: Final = (f"{{{{ '{_DEEPSEEK[0]}' }}}}", f"{{{{ '{_DEEPSEEK[4]}' }}}}")
_DS_BEFORE: Final = f"{{{{ '{_DS_ROLES[1]}' if m.role == 'assistant' else '{_DS_ROLES[0]}' }}}}"
_DS_AFTER: Final = f"{{% if m.role == 'assistant' %}}{{{{ '{_DS_ROLES[2]}' }}}}{{% endif %}}"

FAMILIES: Final = {
    "QWEN2.5": Family(call="{{ '\\n' }}" + _JSON_CALL, grammar="hermes"),
    "QWEN3_THINKING": Family(
        call=_JSON_CALL,
        speaks="{{ '<|im_start|>assistant\\n<think>\\n' }}",
        added=("<think>", "</think>", "<tool_call>", "</tool_call>"),
        grammar="hermes",
    ),
    "QWEN3_THINKING_CLOSED": Family(
        call=_JSON_CALL,
        content="{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}"
        "{% endif %}{{ m.content or '' }}",
        speaks="{{ '<|im_start|>assistant\\n<think>\\n' }}",
        grammar="hermes",
    ),
    "QWEN3_CODER": Family(call=_IN_XML, grammar="qwen3_coder"),
    "HERMES3": Family(
        call='{{ \'<tool_call>\\n{"arguments": \' + (args | tojson) + \', "name": "\' + c.name }}'
        "{{ '\"}\\n</tool_call>' }}",
        grammar="hermes",
    ),
    "SMOLLM3": Family(
        call=_JSON_CALL,
        content="{% if m.role == 'assistant' %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}"
        "{{ m.content or '' }}",
        result="{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}",
        grammar="hermes",
    ),
    "LLAMA3.1": Family(
        before="{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}",
        after="{{ '<|eot_id|>' }}",
        speaks="{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
        call="{{ '{\"name\": \"' + c.name + '\", \"parameters\": ' + (args | tojson) + '}' }}",
        result="{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content }}"
        "{{ '<|eot_id|>' }}",
        begin="{{ '<|begin_of_text|>' }}",
        special=("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        grammar="llama3",
    ),
    "MISTRAL_V13": Family(
        before="{% if m.role == 'user' %}{{ '[INST]' }}{% endif %}",
        after="{{ '[/INST]' if m.role == 'user' else '</s>' }}",
        speaks="",
        call="{{ '[TOOL_CALLS]' + c.name + '[ARGS]' + (args | tojson) }}",
        result="{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}",
        begin="{{ '<s>' }}",
        special=(
            "<s>",
            "</s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[ARGS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        grammar="mistral_args",
    ),
    "DEEPSEEK_V3.1": Family(
        before=_DS_BEFORE,
        after=_DS_AFTER,
        content="{% if m.role == 'assistant' %}{{ '</think>' }}{% endif %}{{ m.content or '' }}",
        speaks="{% if messages[-1].role != 'tool' %}"
        f"{{{{ '{_DS_ROLES[1]}</think>' }}}}{{% endif %}}",
        # Arguments are text, and the model goes on behind a result.
        call=f"{{{{ '{_DEEPSEEK[1]}' + c.name + '{_DEEPSEEK[2]}' + args + '{_DEEPSEEK[3]}' }}}}",
        calls=_DS_FRAME,
        result=f"{{{{ '{_DS_OUTPUT[0]}' + m.content + '{_DS_OUTPUT[1]}' }}}}",
        special=_DS_ROLES,
        added=(*_DEEPSEEK, *_DS_OUTPUT, "</think>"),
        grammar="deepseek",
    ),
    "DEEPSEEK_R1": Family(
        before=_DS_BEFORE,
        after=_DS_AFTER,
        speaks=f"{{{{ '{_DS_ROLES[1]}<think>\\n' }}}}",
        call=f"{{{{ '{_DEEPSEEK[1]}function{_DEEPSEEK[2]}' + c.name + '\\n```json\\n' }}}}"
        f"{{{{ (args | tojson) + '\\n```{_DEEPSEEK[3]}' }}}}",
        calls=_DS_FRAME,
        result="{{ '<tool\u2581output>' + m.content }}",
        special=_DS_ROLES,
        added=_DEEPSEEK,
        grammar="deepseek",
    ),
    "GLM4.5": Family(
        before="{{ '<|' + m.role + '|>\\n' }}",
        after="",
        speaks="{{ '<|assistant|>\\n' }}",
        content="{% if m.role == 'assistant' %}{{ '<think></think>\\n' }}{% endif %}"
        "{{ m.content or '' }}",
        call=_GLM_CALL,
        result="{{ '<|observation|>\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}",
        begin="{{ '[gMASK]<sop>' }}",
        special=("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "[gMASK]", "<sop>"),
        grammar="glm",
    ),
    "PHI4_MINI": Family(
        before="{{ '<|' + m.role + '|>' }}",
        after="{{ '<|end|>' }}",
        speaks="{{ '<|assistant|>' }}",
        call=_LIST,
        calls=("{{ '<|tool_call|>[' }}", "{{ ']<|/tool_call|>' }}"),
        result="{{ '<|tool_response|>' + m.content + '<|end|>' }}",
        special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool_response|>"),
        added=("<|tool_call|>", "<|/tool_call|>"),
        grammar="phi4",
    ),
    "GRANITE3.3": Family(
        before="{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' }}",
        after="{{ '<|end_of_text|>\\n' }}",
        speaks="{{ '<|start_of_role|>assistant<|end_of_role|>' }}",
        call=_LIST,
        calls=("{{ '<|tool_call|>[' }}", "{{ ']' }}"),
        result="{{ '<|start_of_role|>tool<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}",
        special=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>"),
        grammar="phi4",
    ),
    "GEMMA3": Family(
        before="{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}",
        after="{{ '<end_of_turn>\\n' }}",
        speaks="{{ '<start_of_turn>model\\n' }}",
        result="",
        begin="{{ '<bos>' }}",
        special=("<bos>", "<start_of_turn>", "<end_of_turn>"),
        grammar="hermes",  # of the description that is written for it
    ),
    # Ids of calls have their names: others cannot be read back.
    "KIMI_K2": Family(
        call="{{ '<|tool_call_begin|>' + t.id + '<|tool_call_argument_begin|>' + (args | tojson) }}"
        "{{ '<|tool_call_end|>' }}",
        calls=("{{ '<|tool_calls_section_begin|>' }}", "{{ '<|tool_calls_section_end|>' }}"),
        special=(
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
        ),
        grammar="",
    ),
    # An answer is several messages on channels.
    "GPT_OSS": Family(
        before="{{ '<|start|>' + m.role }}",
        after="{{ '<|end|>' }}",
        speaks="{{ '<|start|>assistant' }}",
        content="{% if not m.tool_calls %}{{ '<|channel|>final<|message|>' + m.content }}"
        "{% endif %}",
        call="{{ ' to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}"
        "{{ (args | tojson) + '<|call|>' }}",
        special=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"),
        grammar="",
    ),
}


@cache
def published(name: str) -> ChatFormat:
    """The format of a family."""
    family = FAMILIES[name]
    codec = smollm2.vocabulary(*family.special, added=family.added)
    return ChatFormat(ChatTemplate(family.source), codec)
