"""Chat templates of the kinds that there are, each as short as it can be."""

from __future__ import annotations

from functools import cache

from areal_lab.agents.chat_format import ChatFormat
from areal_lab.agents.template import ChatTemplate
from tests.agents import smollm2

CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Knows nothing of tools, and nothing but its messages."""

_QWEN_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
"""
_QWEN_CALLS = """\
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
QWEN = (
    _QWEN_TOOLS
    + """\
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content or not message.tool_calls %}
            {{- '\\n' + message.content }}
        {%- endif %}
"""
    + _QWEN_CALLS
)
"""As Qwen2.5: tools in the system message, calls in marks, several results in one message."""

QWEN_THINKING = (
    _QWEN_TOOLS
    + """\
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if message.reasoning_content and loop.index0 > ns.last_user %}
            {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content }}
"""
    + _QWEN_CALLS
)
"""As Qwen3: thinking stays until the user speaks again."""

_SPEAKS = "{{- '<|im_start|>assistant\\n' }}{%- endif %}"
QWEN_OPENED = QWEN_THINKING.removesuffix(_SPEAKS) + _SPEAKS.replace("n' }}", "n<think>\\n' }}")
"""As Qwen3 Thinking: the prompt opens the thinking."""

LLAMA = """\
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' }}
{{- strftime_now('%d %b %Y') + '\\n\\n' }}
{%- if messages[0].role == 'system' %}
    {{- messages[0].content | trim }}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
        {{- '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
    {%- if loop.first and tools %}
        {{- tools | tojson(indent=4) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""
"""As Llama 3.2: the date, trimmed contents, one call at most."""

MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(turns=0) %}
{%- for message in messages if message.role == 'user' or
        (message.role == 'assistant' and not message.tool_calls) %}
    {%- if (message.role == 'user') != (ns.turns % 2 == 0) %}
        {{- raise_exception('user and assistant must alternate') }}
    {%- endif %}
    {%- set ns.turns = ns.turns + 1 %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.first %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}
                {{- raise_exception('ids of calls must have nine characters') }}
            {%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + ', "id": "' + call.id + '"}' }}
            {{- ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson }}
        {{- ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}"""
"""As Mistral v3: special tokens around everything, strict alternation, ids of nine characters."""

PLAIN_TEXT = """\
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}"""
"""No special token at all."""

ALTERNATING = """\
{%- for message in messages %}
    {%- if message.role not in ('user', 'assistant') or
            (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""As Gemma: neither system messages nor results of tools."""

LLAMA_TOKENS = (
    "<|begin_of_text|>",
    "<|eot_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|python_tag|>",
)
MISTRAL_TOKENS = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)


@cache
def chat_format(name: str) -> ChatFormat:
    """The format of a template by its name here, or of SmolLM2's own."""
    if name == "SMOLLM2":
        return ChatFormat(smollm2.template(), smollm2.codec())
    special = {"LLAMA": LLAMA_TOKENS, "MISTRAL": MISTRAL_TOKENS}.get(name, ())
    codec = smollm2.vocabulary(*special) if special else smollm2.codec()
    tokens = {"bos_token": special[0], "eos_token": special[1]} if special else None
    return ChatFormat(ChatTemplate(globals()[name], tokens=tokens), codec)


NAMES = (
    *("SMOLLM2", "CHATML", "QWEN", "QWEN_THINKING", "LLAMA", "MISTRAL", "PLAIN_TEXT"),
    "ALTERNATING",
)
"""Templates that leave what was said before as it is, at least where nothing was thought."""
