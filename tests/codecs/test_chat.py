"""Chat templates: ids and masks equal to those of transformers; the rule without marks; bounds."""

import functools
import json
import pickle
import tracemalloc

import numpy as np
import pytest
import tokenizers
import transformers

from shardkit.codecs.tokenizers import budget, chat, load_tokenizer, template
from shardkit.codecs.tokenizers.chat import ChatTemplate
from shardkit.errors import SampleError, UsageError
from tests.codecs import chat_templates as chats
from tests.codecs import tokenizer_zoo as zoo

KINDS = {"qwen2": "tiktoken", "llama3": "tiktoken", "unigram": "tokenizers"}  # and their engines
LARGE = pytest.mark.large


@functools.cache
def document(kind, family):
    """A tokenizer.json with the special tokens of a family."""
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(zoo.tokenizer_json(kind)))
    tokenizer.add_special_tokens(chats.special(family))
    if kind == "llama3":  # as Llama 3 has it: the spaces around a token are not in its offsets
        tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    return json.loads(tokenizer.to_str())


def write(folder, template, kind="qwen2", family="ChatML", **config):
    zoo.write_json(folder, document(kind, family))
    if template is not None:
        config["chat_template"] = template
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder


def opened(folder, choice="auto"):
    return ChatTemplate.of(choice, load_tokenizer(folder))


def of_family(folder, name, kind="qwen2", marked=True):
    template, bos, eos = chats.FAMILIES[name]
    template = template if marked else chats.unmarked(template)
    return write(folder, template, kind, name, bos_token=bos, eos_token=eos)


def theirs(reference, conversation):
    """Ids and mask by transformers, or None if it cannot render the conversation."""
    rest = {key: value for key, value in conversation.items() if key != "messages"}
    try:
        found = reference.apply_chat_template(
            conversation["messages"], return_dict=True, return_assistant_tokens_mask=True, **rest
        )
    except Exception:  # of jinja2, or whatever Python raises in a template
        return None
    return found["input_ids"], found["assistant_masks"]


def assert_equal_to_transformers(folder, count):
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    conversations = chats.conversations(count)
    good = 0
    template = pickle.loads(pickle.dumps(opened(folder)))
    for conversation, found in zip(conversations, template.encode_many(conversations), strict=True):
        expected = theirs(reference, conversation)
        if expected is None:
            assert isinstance(found, SampleError), conversation
            continue
        assert not isinstance(found, SampleError), found
        ids, mask = found
        assert ids.dtype == template.tokenizer.dtype
        assert (ids.tolist(), mask.astype(int).tolist()) == expected, conversation
        good += 1
    assert good > 0.5 * count


SAMPLE = [(name, [*KINDS][n % len(KINDS)], 20) for n, name in enumerate(chats.FAMILIES)]
WHOLE = [pytest.param(name, kind, 1000, marks=LARGE) for name in chats.FAMILIES for kind in KINDS]


@pytest.mark.parametrize(("family", "kind", "count"), SAMPLE + WHOLE)
def test_ids_and_masks_equal_those_of_transformers(tmp_path, family, kind, count):
    folder = of_family(tmp_path, family, kind)
    if (kind, family) != ("qwen2", "DeepSeek"):  # tokens that are not ASCII, and normalization
        assert load_tokenizer(folder).engine == KINDS[kind]
    assert_equal_to_transformers(folder, count)


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "gpt4o", "qwen2", "unigram"])
@pytest.mark.parametrize("prefix", [False, True])
def test_offsets_equal_those_of_tokenizers(tmp_path, kind, prefix):
    one = tokenizers.Tokenizer.from_str(json.dumps(zoo.tokenizer_json(kind)))
    one.add_special_tokens(["<|im_end|>"])
    one.add_tokens(["\t\n"])
    if kind not in ("qwen2", "unigram"):
        byte_level = tokenizers.processors.ByteLevel(trim_offsets=True, add_prefix_space=prefix)
        one.post_processor = tokenizers.processors.Sequence([byte_level])
    zoo.write_json(tmp_path, json.loads(one.to_str()))
    texts = [
        " é  😀 \t\n \n\n <|im_end|>  \t\n  a",
        *("", " ", "  x", "    ", "     x", "e\u0301 ", "\u0301e"),
        *zoo.documents(60),
    ]
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.engine == "tiktoken") == (kind != "unigram")
    found = tokenizer.encode_with_offsets(texts)
    for encoded, expected in zip(
        found, one.encode_batch(texts, add_special_tokens=False), strict=True
    ):
        assert encoded.ids.tolist() == expected.ids
        assert list(zip(encoded.starts, encoded.ends, strict=True)) == expected.offsets


def test_offsets_of_ranks_are_those_of_their_bytes(tmp_path):
    zoo.write_ranks(tmp_path / "cl100k_base.tiktoken")
    encoded = load_tokenizer(tmp_path).encode_with_offsets(["a 😀<|endoftext|>é"])[0]
    assert encoded.ends[-1] == len("a 😀<|endoftext|>é")
    special = encoded.ids.tolist().index(100257)
    assert (encoded.starts[special], encoded.ends[special]) == (3, 16)
    assert encoded.starts[special + 1] == 16


# --- Templates without marks ----------------------------------------------------------------------

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "two"},
]
LEARNED = {
    "ChatML": ["one<|im_end|>\n", "two<|im_end|>\n"],
    "Llama 2": [" one </s>", " two </s>"],
    "Llama 3": ["one<|eot_id|>", "two<|eot_id|>"],
    "Mistral": [" one</s>", " two</s>"],
    "Gemma": ["one<end_of_turn>\n", "two<end_of_turn>\n"],
    "Phi-3": ["one<|end|>\n", "two<|end|>\n<|endoftext|>"],
    "Qwen 2.5": ["one<|im_end|>\n", "two<|im_end|>\n"],
    "Zephyr": ["one</s>\n", "two</s>\n"],
    "DeepSeek": ["one<｜end▁of▁sentence｜>", "two<｜end▁of▁sentence｜>"],
    "Command R": ["one<|END_OF_TURN_TOKEN|>", "two<|END_OF_TURN_TOKEN|>"],
}


def learned(template, messages, **variables):
    """The texts of the tokens that are learned, one for each run of them."""
    ids, mask = template.encode(messages, **variables)
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False)).reshape(-1, 2)
    return [template.tokenizer.decode(ids[start:stop]) for start, stop in edges]


@pytest.mark.parametrize("family", chats.FAMILIES)
def test_without_marks_what_is_added_for_a_message_is_learned(tmp_path, family):
    template = opened(of_family(tmp_path, family, marked=False))
    assert learned(template, TURNS) == LEARNED[family]
    assert all(template.encode(TURNS, loss_on="all")[1])


@pytest.mark.parametrize("family", chats.FAMILIES)
@pytest.mark.parametrize("count", [15, pytest.param(1000, marks=LARGE)])
def test_without_marks_the_mask_is_that_of_marks_but_for_white_space(tmp_path, family, count):
    marked = opened(of_family(tmp_path / "marked", family))
    template = opened(of_family(tmp_path / "unmarked", family, marked=False))
    conversations = chats.conversations(count, seed=1)
    good = 0
    for conversation, one, other in zip(
        conversations,
        marked.encode_many(conversations),
        template.encode_many(conversations),
        strict=True,
    ):
        if isinstance(other, SampleError):
            assert isinstance(one, SampleError) or "does not mark" in other.what
            continue
        assert np.array_equal(one[0], other[0])
        for number in one[0][one[1] != other[1]]:
            text = template.tokenizer.decode([number])
            assert text.isspace() or text == template.special["eos_token"], conversation
        good += 1
    assert good > 0.3 * count


QWEN3 = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- set text = m.content %}
    {%- if m.role == 'assistant' %}
        {%- set thought = text.split('</think>')[0] if '</think>' in text else '' %}
        {%- set text = text.split('</think>')[-1] %}
        {%- if loop.last %}{{ '<think>' + thought + '</think>' }}{% endif %}
    {%- endif %}
    {{- text + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def test_a_template_that_shows_thoughts_only_in_the_last_message(tmp_path):
    template = opened(write(tmp_path, QWEN3, eos_token="<|im_end|>"))
    assert learned(template, TURNS) == ["one<|im_end|>\n", "<think></think>two<|im_end|>\n"]
    messages = [{**m, "content": f"hm</think>{m['content']}"} for m in TURNS]
    assert learned(template, messages) == ["one<|im_end|>\n", "<think>hm</think>two<|im_end|>\n"]


def test_a_token_across_a_border_is_learned(tmp_path):
    template = opened(of_family(tmp_path, "ChatML", marked=False))
    messages = [TURNS[0], {"role": "assistant", "content": "\n\n\n\nyes"}]
    assert "".join(learned(template, messages)).lstrip() == "yes<|im_end|>\n"


LOOP = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}BODY{% endfor %}PROMPT"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
UNKNOWN = {
    "only the prompt has a tag": LOOP.replace("BODY", "{{ m.content }}<|im_end|>").replace(
        "PROMPT", PROMPT.replace("assistant\\n", "assistant\\n<think>")
    ),
    "the last message ends in another way": LOOP.replace(
        "BODY", "{{ m.content + (eos_token if loop.last else '</turn>') }}"
    ).replace("PROMPT", PROMPT),
    "the number of messages comes first": "{{ messages | length }}"
    + LOOP.replace("BODY", "{{ m.content }}<|im_end|>").replace("PROMPT", PROMPT),
    "contents are shown twice": LOOP.replace(
        "BODY", "{{ m.content + m.content }}{% if loop.last %}.{% endif %}<|im_end|>"
    ).replace("PROMPT", PROMPT),
    "prompts alone are refused": "{% if messages | length < 2 %}{{ raise_exception('alone') }}"
    "{% endif %}" + LOOP.replace("BODY", "{{ m.content }}").replace("PROMPT", PROMPT),
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_a_border_that_cannot_be_told_is_refused(tmp_path, why):
    template = opened(write(tmp_path, UNKNOWN[why], eos_token="<|im_end|>"))
    with pytest.raises(SampleError, match="does not mark what the assistant") as caught:
        template.encode(TURNS)
    assert "--loss-on all" in caught.value.fix
    assert template.encode(TURNS, loss_on="all")[1].all()


def test_a_conversation_whose_beginnings_take_too_long_is_refused(tmp_path, monkeypatch):
    template = opened(of_family(tmp_path, "ChatML", marked=False))
    template.encode(TURNS * 50)
    monkeypatch.setattr(chat, "_STEPS", 10_000)
    template.encode(TURNS)
    with pytest.raises(SampleError, match="does not mark") as caught:
        template.encode(TURNS * 50)
    assert "too many steps" in caught.value.found


def test_a_mark_whose_position_is_not_known_is_refused(tmp_path):
    text = "{% macro m(x) %}abc{% generation %}{{ x }}{% endgeneration %}{% endmacro %}"
    template = opened(write(tmp_path, text + "{{ m(messages[0].content) }}"))
    with pytest.raises(SampleError, match="cannot render") as caught:
        template.encode(TURNS)
    assert "macro" in caught.value.found


# --- Where templates come from --------------------------------------------------------------------


def texts(template):
    return {name: one.text for name, one in template.templates.items()}


def test_a_template_is_found_where_transformers_finds_it(tmp_path):
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    write(tmp_path, named)
    template = opened(tmp_path)
    assert texts(template) == {"default": "d", "tool_use": "t"}
    tokenizer = template.tokenizer
    assert tokenizer.decode(template.encode(TURNS, tools=[])[0]) == "t"
    assert tokenizer.decode(template.encode(TURNS)[0]) == "d"
    (tmp_path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert texts(opened(tmp_path)) == {"default": "file"}
    (tmp_path / "additional_chat_templates").mkdir()
    more = tmp_path / "additional_chat_templates" / "tool_use.jinja"
    more.write_text("tools", encoding="utf-8")
    assert texts(opened(tmp_path)) == {"default": "file", "tool_use": "tools"}
    assert texts(opened(tmp_path, more)) == {"default": "tools"}
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert reference.chat_template == texts(opened(tmp_path))
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(SampleError, match="without tools"):
        opened(tmp_path).encode(TURNS)


def test_what_cannot_be_a_template_is_refused(tmp_path):
    folder = write(tmp_path, None)
    with pytest.raises(UsageError, match="has no chat template"):
        opened(folder)
    write(tmp_path, 1)
    with pytest.raises(UsageError, match="not a template"):
        opened(folder)
    (tmp_path / "bad.jinja").write_text("a\n{% for %}", encoding="utf-8")
    with pytest.raises(UsageError, match="not valid") as caught:
        opened(folder, tmp_path / "bad.jinja")
    assert caught.value.where["path"] == str(tmp_path / "bad.jinja")
    assert caught.value.found.startswith("line 2, {% for %}: Expected an expression")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="not text"):
        opened(folder, tmp_path / "bytes.jinja")
    for text in ("{{ " + "(" * 5000, "{{ 1" + "0" * 5000 + " }}", "a" * (template.MAX_SIZE + 1)):
        with pytest.raises(UsageError, match="not valid"):
            template.Template(text, "x").check()


def test_a_tokenizer_that_would_encode_special_tokens_as_text_is_refused(tmp_path):
    folder = write(tmp_path, "x", eos_token="<|gone|>")
    with pytest.raises(UsageError, match="lacks tokens") as caught:
        opened(folder)
    assert caught.value.found == "<|gone|>"
    folder = write(tmp_path, "x", added_tokens_decoder={"1": {"content": "<|new|>"}})
    with pytest.raises(UsageError, match="lacks tokens"):
        opened(folder)
    write(tmp_path, "x")
    with pytest.raises(UsageError, match="encoded as text"):
        ChatTemplate.of("auto", load_tokenizer(folder, special_tokens="text"))
    model = tmp_path / "x.model"
    model.write_bytes(zoo.sentencepiece_model())
    with pytest.raises(UsageError, match="SentencePiece"):
        ChatTemplate.of("auto", load_tokenizer(model))


def test_notes_name_what_is_decided_for_the_user(tmp_path):
    marks = "{#{% generation %}#}"  # a comment
    template = opened(write(tmp_path, marks + "{{ bos_token }}{{ strftime_now('%d %b %Y') }}"))
    ids, _ = template.encode(TURNS, loss_on="all")
    assert template.tokenizer.decode(ids) == "26 Jul 2024"
    unnamed, unmarked, date = template.notes
    assert "uses bos_token" in unnamed
    assert "does not mark" in unmarked
    assert "its header too" in unmarked
    assert "26 July 2024" in date
    assert opened(of_family(tmp_path, "Gemma")).notes == ()
    assert "header" not in opened(of_family(tmp_path, "Gemma", marked=False)).notes[0]


def test_messages_are_given_as_transformers_gives_them(tmp_path):
    folder = write(tmp_path, "{{ messages | tojson }}")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    messages = [
        {"role": "user", "content": None, "name": "é</b>"},
        {"role": "assistant", "reasoning": "hm", "content": [{"type": "text", "text": None}]},
    ]
    ids, _ = opened(folder).encode(messages, loss_on="all")
    assert ids.tolist() == theirs(reference, {"messages": messages})[0]


def test_a_text_that_cannot_be_encoded_is_an_error_of_its_conversation(tmp_path):
    zoo.write_ranks(tmp_path / "cl100k_base.tiktoken")
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    template = opened(tmp_path, tmp_path / "chat.jinja")
    contents = ["a", " " * 1_000_000, "b", "\ud800", "c"]
    found = template.encode_many(
        [{"messages": [{"role": "user", "content": content}]} for content in contents]
    )
    assert [isinstance(one, SampleError) for one in found] == [False, True, False, True, False]
    with pytest.raises(UsageError, match="loss_on is 'user'"):
        template.encode(TURNS, loss_on="user")


@pytest.mark.parametrize("messages", [[], None, "text", ["text"], [{"role": object()}]])
def test_what_is_not_a_conversation_is_an_error_of_the_sample(tmp_path, messages):
    with pytest.raises(SampleError):
        opened(of_family(tmp_path, "ChatML")).encode(messages)


def test_an_error_of_a_template_names_its_line(tmp_path):
    template = opened(of_family(tmp_path, "Gemma"))
    with pytest.raises(SampleError) as caught:
        template.encode([{"role": "system", "content": "x"}])
    line = "{%- if messages[0]['role'] == 'system' %}"
    assert caught.value.found.startswith(f"line 3, {line}")
    assert caught.value.found.endswith(": no system role")


# --- Hostile templates ----------------------------------------------------------------------------

GROW = "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = VALUE %}{% endfor %}"
HOSTILE = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ namespace(a=1).__class__ }}",
    "{{ namespace(_a=1) }}",
    "{{ lipsum.__globals__ }}",
    "{{ [''.format] | map(attribute='__self__') | list }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ messages.append(1) }}",
    "{{ [-10**9] | map('#body') | list }}{{ 'a' * 10**9 }}",
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * [0] }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%.999999999f' | format(1) }}",
    "{{ '%(a(b))999999999d' % {'a(b)': 1} }}",
    "{{ 2 ** 99999999 }}",
    "{{ (-1) ** 99999999 }}",
    GROW.replace("'aa'", "7").replace("VALUE", "ns.x * ns.x"),
    GROW.replace("VALUE", "ns.x + ns.x"),
    GROW.replace("VALUE", "ns.x ~ ns.x"),
    GROW.replace("VALUE", "[ns.x, ns.x] | join('-')"),
    GROW.replace("VALUE", "'a'.join([ns.x, ns.x])"),
    GROW.replace("VALUE", "ns.x | replace('a', 'aa')"),
    GROW.replace("VALUE", "ns.x.replace('', 'aa')"),
    GROW.replace("VALUE", "'%s%s' % (ns.x, ns.x)"),
    GROW.replace("VALUE", "[ns.x, ns.x]") + "{{ ns.x }}",
    GROW.replace("VALUE", "[ns.x] + [ns.x]") + "{{ ns.x | tojson }}",
    GROW.replace("VALUE", "dict(a=ns.x, b=ns.x)"),
    GROW.replace("'aa'", "['a']").replace("VALUE", "ns.x * 2"),
    GROW.replace("'aa'", "('a',)").replace("VALUE", "(ns.x, ns.x)") + "{{ {}[ns.x] }}",
    GROW.replace("'aa'", "[['k', ['a']]]").replace("VALUE", "ns.x | groupby('1') | list"),
    "{% macro m() %}{{ m(varargs, varargs) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% set ns = namespace(n=0) %}{% block b %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n % 50 %}{{ self.b() }}{{ self.b() }}{% endif %}{% endblock %}",
    "{% for i in [[1]] recursive %}{% if loop.depth < 90 %}{{ loop([[i], [i]]) }}{% endif %}"
    "{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
    "{{ range(10**9) }}",
    "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "{{ range(99999) | select('in', range(99999, 0, -1) | list) | list }}",
    *(
        "{% set x = 'a' * 999 %}{% for i in range(99999) %}{{ '' if USE }}{% endfor %}".replace(
            "USE", use
        )
        for use in ("'b' in x", "x.upper()", "x | upper", "x[1:]", "x == i ~ x[1:]", "x is lower")
    ),
    "{% set x %}{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}{% endset %}",
    "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    "{% for i in range(99999) %}" + "A" * 999 + "{% endfor %}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ 'a'.encode().ljust(10**9) }}",
    "{{ (5).to_bytes(10**10, 'big') }}",
    "{{ 'a b' | indent(10**9) }}",
    "{{ 'a' | indent('b' * 99999, first=true) }}",
    "{{ {'a': [1]} | tojson(indent=10**9) }}",
    "{{ {'a': [1]} | tojson(separators=('a' * 99999, 'b')) }}",
    "{{ strftime_now('%Y' * 999) }}",
    *(
        "{% set t = (0,) * 9999 %}{% for i in range(99999) %}{{ '' if USE }}{% endfor %}".replace(
            "USE", use
        )
        for use in ("messages[0][t]", "t in messages[0]", "1 != t == t ~ ''")
    ),
    "{% set l = range(99999) | list %}{% for i in range(99999) %}{% for j in l if j < 0 %}"
    "{% endfor %}{% endfor %}",
    "{{ range(999) | map(attribute='a.' * 9999 ~ 'a', default={'a': {}}) | list | length }}",
    "{% set v = {'a': ('a' * 99) * 99}.values() %}{{ ([v] * 999999) | string | length }}",
    "{% set v = namespace(a='a' * 99) %}{{ [v] | string }}",
    "{% set x = ('f' * 99999) | int(0, 16) %}{{ x // 3 == 0 }}",
    "{{ [[1] * 9999] | tojson(separators=('a' * 700, 'b')) | length }}",
    "{% include 'x' %}",
    "{{ namespace }}",
    "{{ messages | map('upper') }}",
    "{{ [range] | join }}",
    "{{ 1 / 0 }}",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_template_ends_in_an_error_within_a_bound(monkeypatch, text):
    monkeypatch.setattr(budget, "STEPS", 20_000)
    hostile = template.Template(text, "hostile.jinja")
    hostile.check()
    variables = {"messages": TURNS}
    tracemalloc.start()
    try:
        with pytest.raises(SampleError, match="cannot render") as caught:
            hostile.render(variables, hostile.steps(variables))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert caught.value.found.startswith("line 1, ")


@pytest.mark.parametrize(
    "name",
    [
        *("attr", "batch", "center", "filesizeformat", "pprint", "random", "round", "slice"),
        *("striptags", "sum", "urlencode", "urlize", "wordwrap", "xmlattr"),
    ],
)
def test_a_filter_without_bounds_does_not_exist(name):
    with pytest.raises(UsageError, match="not valid") as caught:
        template.Template(f"{{{{ 'a' | {name} }}}}", "x").check()
    assert f"No filter named '{name}'" in caught.value.found


def test_a_huge_conversation_is_refused():
    with pytest.raises(SampleError, match="too large"):
        template.Template("", "x").steps({"messages": ["a" * (1 << 24)]})
