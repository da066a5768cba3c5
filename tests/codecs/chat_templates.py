"""Chat templates in the known shapes of ten model families, and made-up conversations."""

import re
from random import Random

from tests.codecs import tokenizer_zoo as zoo

CHATML = r"""
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

LLAMA2 = r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set rest = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}
    {%- set rest = messages %}{% set system = false %}
{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate: user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set text = message['content'] %}
    {%- if loop.first and system is not false %}
        {%- set text = '<<SYS>>\n' ~ system ~ '\n<</SYS>>\n\n' ~ text %}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + text.strip() + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{ ' ' + text.strip() + ' ' + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""

LLAMA3 = r"""
{{- bos_token }}
{%- set calls = namespace(seen=false) %}
{%- if tools is not none and tools %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\nEnvironment: ipython\nTools:\n\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\n\n' }}{% endfor %}
    {{- '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role in ['tool', 'ipython'] or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {%- if message.role == 'assistant' %}
            {%- generation %}{{ message['content'] | trim + '<|eot_id|>' }}{% endgeneration %}
        {%- else %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- set calls.seen = true %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('only one call at a time') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
        {% generation %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}' }}
        {{- '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' }}
        {{- message.content | tojson if message.content is mapping else message.content }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = r"""
{%- set system = messages[0]['content'] if messages[0]['role'] == 'system' else none %}
{%- set rest = messages[1:] if system is not none else messages %}
{%- set users = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in rest if message.role in ('user', 'assistant') and 'tool_calls' not in message %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message['role'] == 'user' %}
        {%- if tools and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is not none %}
            {{- '[INST] ' + system + '\n\n' + message['content'] + '[/INST]' }}
        {%- else %}
            {{- '[INST] ' + message['content'] + '[/INST]' }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {%- generation %}{{ '[TOOL_CALLS] [' -}}
        {%- for call in message.tool_calls %}
            {{- call.function | tojson }}{{ ', ' if not loop.last else ']' }}
        {%- endfor %}
        {{- eos_token }}{% endgeneration %}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{ ' ' + message['content'] | trim + eos_token }}{% endgeneration %}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' ~ message.content | string ~ '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""

GEMMA = r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\n' }}
    {%- if role == 'model' %}
        {%- generation %}{{ message['content'] | trim + '<end_of_turn>' }}{% endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<end_of_turn>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
"""

PHI3 = r"""
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|assistant|>\n' }}
        {%- generation %}{{ message['content'] + '<|end|>' }}{% endgeneration %}
        {{- '\n' }}
    {%- elif message['role'] in ['user', 'system'] %}
        {{- '<|user|>\n' if message['role'] == 'user' else '<|system|>\n' }}
        {{- message['content'] + '<|end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}
"""

QWEN25 = r"""
{%- set first = messages[0]['content'] if messages[0]['role'] == 'system' else 'You can help.' %}
{{- '<|im_start|>system\n' + first }}
{%- if tools %}
    {{- '\n\n# Tools\n\nThese functions can be called:\n<tools>' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\n</tools>\n\nAnswer calls in <tool_call></tool_call> tags.' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- generation %}
        {%- if message.content %}{{ '\n' + message.content }}{% endif %}
        {%- for call in message.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{ call.name }}
            {{- '", "arguments": ' }}{{ call.arguments | tojson }}{{ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}{{ message.content }}{{ '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

ZEPHYR = r"""
{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>' }}
{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}

{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}
"""

DEEPSEEK = r"""
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% set ns.system = message['content'] %}{% endif %}
{%- endfor %}
{{- bos_token }}{{ ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '<｜User｜>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['content'] is not none %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '<｜Assistant｜>' }}
        {%- generation %}{{ content + '<｜end▁of▁sentence｜>' }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}
"""

COMMAND_R = r"""
{{- bos_token }}
{%- macro turn(name) %}{{ '<|START_OF_TURN_TOKEN|>' ~ name }}{% endmacro %}
{%- if messages[0]['role'] == 'system' %}
    {%- set loop_messages = messages[1:] %}
    {{- turn('<|SYSTEM_TOKEN|>') ~ messages[0]['content'] ~ '<|END_OF_TURN_TOKEN|>' }}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for document in documents or [] %}
    {{- loop.index0 ~ ': ' ~ document['title'] ~ '\n' }}
    {{- document.items() | map('last') | join('; ') }}
{%- endfor %}
{%- for message in loop_messages %}
    {%- set content = message['content'] %}
    {%- if message['role'] == 'user' %}
        {{- turn('<|USER_TOKEN|>') ~ content.strip() ~ '<|END_OF_TURN_TOKEN|>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- turn('<|CHATBOT_TOKEN|>') }}
        {%- generation %}{{ content.strip() ~ '<|END_OF_TURN_TOKEN|>' }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ turn('<|CHATBOT_TOKEN|>') }}{% endif %}
"""

FAMILIES = {
    "ChatML": (CHATML, None, "<|im_end|>"),
    "Llama 2": (LLAMA2, "<s>", "</s>"),
    "Llama 3": (LLAMA3, "<|begin_of_text|>", "<|eot_id|>"),
    "Mistral": (MISTRAL, "<s>", "</s>"),
    "Gemma": (GEMMA, "<bos>", "<eos>"),
    "Phi-3": (PHI3, "<s>", "<|endoftext|>"),
    "Qwen 2.5": (QWEN25, None, "<|im_end|>"),
    "Zephyr": (ZEPHYR, "<s>", "</s>"),
    "DeepSeek": (DEEPSEEK, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "Command R": (COMMAND_R, "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|begin_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"),
    *("[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<bos>", "<eos>"),
    *("<start_of_turn>", "<end_of_turn>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
    *(
        "<|system|>",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
    ),
    *("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"),
    *("<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
)


def special(name):
    """The special tokens of a family."""
    return [token for token in SPECIAL if token in "".join(filter(None, FAMILIES[name]))]


def unmarked(template):
    """The same template without generation marks, with the same white space."""
    return re.sub(r"\bgeneration\b", "if true", template).replace("endgeneration", "endif")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Returns “{name}” <b>now</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
    for name in ("weather", "zeit_für")
]
BORDERS = ("", "", "", " ", "\n", "\n\n", "  \n", "\t", "\u00a0", "\u3000")
ODD = (
    "",
    " ",
    "\n",
    "e\u0301",
    "\u0301 combining",
    "👩‍👩‍👧",
    "a</think>b",
    "<think>\nhm\n</think>\n\nyes",
)


def conversations(count, seed=0):
    """Conversations as variables of templates: some have system messages, tools or documents."""
    dice = Random(seed)
    prose = [text[:90] for text in zoo.documents(200, seed)]

    def content():
        middle = dice.choice(prose) if dice.random() < 0.7 else dice.choice(ODD + SPECIAL)
        return dice.choice(BORDERS) + middle + dice.choice(BORDERS)

    def call():
        function = {"name": "weather", "arguments": {"city": dice.choice(prose), "n": [1.5, None]}}
        return [
            {
                "role": "assistant",
                "content": dice.choice([None, ""]),
                "tool_calls": [{"type": "function", "function": function}],
            },
            {"role": "tool", "content": content()},
        ]

    def one():
        tooled = dice.random() < 0.2
        messages = [{"role": "system", "content": content()}] if dice.random() < 0.3 else []
        for _ in range(dice.randint(1, 4)):
            messages.append({"role": "user", "content": content()})
            if tooled and dice.random() < 0.7:
                messages += call()
            messages.append({"role": "assistant", "content": content()})
        if dice.random() < 0.1:
            messages.pop()
        found = {"messages": messages}
        if tooled:
            found["tools"] = TOOLS
        if dice.random() < 0.1:
            found["documents"] = [{"title": content(), "text": content()}]
        return found

    return [one() for _ in range(count)]
