"""Conversations end to end: recognized in every layout, rendered, masked, and packed whole."""

import csv
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardkit
from shardkit.errors import OutputError, SampleError, SourceError, UsageError
from shardkit.inspection.inspect import inspect
from shardkit.metadata.manifest import load
from tests.codecs import tokenizer_zoo
from tests.conftest import files_of
from tests.conversion.test_text import make, samples_of
from tests.conversion.text_corpora import few_words, turns, write_lines
from tests.test_cli import run

# Word wN is token N: a turn begins with the word of its role and ends with w13, which belongs to
# what the assistant says; w14 begins a conversation with tools.
TEMPLATE = (
    "{% if tools %}w14 {% endif %}{% for m in messages %}"
    "{{ {'system': 'w10', 'user': 'w11', 'assistant': 'w12', 'tool': 'w15'}[m.role] }} "
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }} w13{% endgeneration %}"
    "{% else %}{{ m.content }} w13{% endif %} {% endfor %}"
)
PLAIN = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
IDS, MASK = [11, 1, 2, 13, 12, 3, 13], [0, 0, 0, 0, 0, 1, 1]
SYSTEM, TOOL = {"role": "system", "content": "w4"}, {"type": "function", "name": "f"}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words")
    tokenizer_zoo.write_json(folder, few_words(20))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


def convert(source, out, tokenizer, to="arrow", sound=True, **text):
    """Convert, verify, and return tokens and masks."""
    options = {
        name: text.pop(name) for name in ("on_error", "shard_samples", "drop") if name in text
    }
    text = {"tokenizer": tokenizer, "chat_template": "auto", **text}
    make(source, to, out, text, sound=sound, **options)
    return [(s["tokens"].tolist(), s["loss_mask"].astype(int).tolist()) for s in samples_of(out)]


LAYOUTS = {
    "messages": ({"messages": PLAIN}, IDS, MASK),
    "messages as JSON": ({"messages": json.dumps(PLAIN)}, IDS, MASK),
    "parts of text": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": t} for t in ("w1", " w2")]},
                PLAIN[1],
            ]
        },
        IDS,
        MASK,
    ),
    "values that are null": ({"messages": [{**PLAIN[0], "name": None}, PLAIN[1]]}, IDS, MASK),
    "several turns": (
        {"messages": [SYSTEM, *PLAIN, {"role": "tool", "content": "w5"}, PLAIN[1]]},
        [10, 4, 13, *IDS, 15, 5, 13, 12, 3, 13],
        [0, 0, 0, *MASK, 0, 0, 0, 0, 1, 1],
    ),
    "a system field": ({"system": "w4", "messages": PLAIN}, [10, 4, 13, *IDS], [0, 0, 0, *MASK]),
    "tools": ({"tools": [TOOL], "messages": PLAIN}, [14, *IDS], [0, *MASK]),
    "tools as JSON": ({"tools": json.dumps([TOOL]), "messages": PLAIN}, [14, *IDS], [0, *MASK]),
    "no tools": ({"tools": "[]", "system": "", "messages": PLAIN}, IDS, MASK),
    "conversations": (
        {"conversations": [{"from": "human", "value": "w1 w2"}, {"from": "gpt", "value": "w3"}]},
        IDS,
        MASK,
    ),
    "conversations with roles": ({"conversations": PLAIN}, IDS, MASK),
    "prompt": ({"prompt": "w1 w2", "completion": "w3"}, IDS, MASK),
    "prompt of messages": ({"prompt": PLAIN[:1], "completion": PLAIN[1:]}, IDS, MASK),
    "instruction": ({"instruction": "w1 w2", "output": "w3"}, IDS, MASK),
    "empty input": ({"instruction": "w1 w2", "input": "", "output": "w3"}, IDS, MASK),
    "input": ({"instruction": "w1", "input": "w2", "output": "w3"}, IDS, MASK),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_becomes_tokens_and_a_mask(name, tokenizer, tmp_path, out):
    record, ids, mask = LAYOUTS[name]
    source = write_lines(tmp_path / "a.jsonl", [record, {**record, "id": 7}])
    assert convert(source, out, tokenizer) == [(ids, mask)] * 2
    assert load(out).ignored == {"values of 'id'": 1}
    assert load(out).text["learned"] == 2 * sum(mask)


def test_files_of_every_kind_hold_the_same_conversations(tokenizer, tmp_path):
    records = [{"messages": [SYSTEM, *PLAIN]}, {"messages": PLAIN * 2}]
    expected = [([10, 4, 13, *IDS], [0, 0, 0, *MASK]), (IDS * 2, MASK * 2)]
    lines = write_lines(tmp_path / "a.jsonl", records)
    (tmp_path / "array.json").write_text(json.dumps(records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        rows = [[json.dumps(record["messages"])] for record in records]
        csv.writer(file).writerows([["messages"], *rows])
    shardkit.convert(tmp_path / "a.parquet", "hf", tmp_path / "stored", workers=0)
    for number, name in enumerate(("a.jsonl", "array.json", "a.parquet", "a.csv", "stored")):
        assert convert(tmp_path / name, tmp_path / f"out{number}", tokenizer) == expected
    for to in ("wds", "parquet", "lmdb"):
        assert convert(lines, tmp_path / to, tokenizer, to) == expected


def test_parts_of_a_conversation_that_only_late_records_have_are_read(tokenizer, tmp_path):
    said = {"instruction": "w1", "output": "w3"}
    late = [{**said, "input": "w2"}, {**said, "system": "w4"}, {**said, "tools": [TOOL]}]
    source = write_lines(tmp_path / "a.jsonl", [*[said] * 150, *late])
    found = [ids for ids, _ in convert(source, tmp_path / "out", tokenizer)]
    plain = [11, 1, 13, 12, 3, 13]
    assert found == [
        *[plain] * 150,
        [11, 1, 2, 13, 12, 3, 13],
        [10, 4, 13, *plain],
        [14, *plain],
    ]
    assert convert(source, tmp_path / "b", tokenizer, drop=["input"])[150][0] == plain


def test_all_tokens_are_learned_if_asked(tokenizer, tmp_path):
    source = write_lines(tmp_path / "a.jsonl", [{"messages": PLAIN}, {"messages": PLAIN[:1]}])
    found = convert(source, tmp_path / "out", tokenizer, loss_on="all")
    assert found == [(IDS, [1] * 7), (IDS[:4], [1] * 4)]
    (row,) = convert(source, tmp_path / "packed", tokenizer, loss_on="all", seq_len=12)
    assert row[1] == [0, *[1] * 6, 0, 1, 1, 1, 0]  # nothing learns how a conversation begins
    assert shardkit.open(tmp_path / "packed")[0]["doc_ends"].tolist() == [7, 11]
    (tmp_path / "unmarked").write_text("{% for m in messages %}{{ m.content }} {% endfor %}")
    words = ["convert", source, "--to", "arrow", "--tokenizer", tokenizer, "--plan"]
    words += ["-o", tmp_path / "b", "--chat-template", tmp_path / "unmarked"]
    assert "does not mark" in run(*words).stderr + run(*words).stdout
    told = run(*words, "--loss-on", "all")
    assert "does not mark" not in told.stderr + told.stdout


@pytest.mark.parametrize("pack", ["concat", "nosplit", "pad"])  # "concat" means "nosplit"
def test_conversations_are_packed_whole(pack, tokenizer, tmp_path, out):
    draw = random.Random(3)
    said = [
        [draw.choices(range(10), k=draw.randint(1, 4)) for _ in range(2 * draw.randint(1, 3))]
        for _ in range(200)
    ]
    source = write_lines(tmp_path / "a.jsonl", [{"messages": turns(*each)} for each in said])
    alone = convert(source, tmp_path / "alone", tokenizer)
    found = []
    packed = convert(source, out, tokenizer, seq_len=40, pack=pack)
    for sample, (tokens, mask) in zip(samples_of(out), packed, strict=True):
        ends = sample["doc_ends"].tolist()
        found += [(tokens[a:b], mask[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
        assert len(tokens) == len(mask) == 40
        assert not any(mask[ends[-1] :])
        assert len(ends) == 1 or pack != "pad"
    assert sorted(found) == sorted(alone)
    if pack != "pad":
        assert len(packed) < len(alone) / 1.5
    about = load(out).text
    learned = sum(sum(mask) for _, mask in alone)
    assert about["learned"] == learned
    assert f"{learned / len(packed) / 40:.2%} of all values" in run("stats", out).stdout
    assert about["cut"] == about["dropped"] == 0


def test_a_conversation_that_fits_into_no_block_is_an_error(tokenizer, tmp_path, out):
    records = [{"messages": PLAIN}, {"messages": PLAIN * 3}, {"messages": PLAIN * 2}]
    source = write_lines(tmp_path / "a.jsonl", records)
    with pytest.raises(SampleError, match="longer than a block") as error:
        convert(source, out, tokenizer, seq_len=10)
    assert (error.value.expected, error.value.found) == ("at most 10 tokens", "21")
    assert error.value.where["key"] == "a.jsonl/" + str(len(json.dumps(records[0])) + 1)
    words = ["convert", source, "--to", "arrow", "-o", out, "--tokenizer", tokenizer]
    words += ["--chat-template", "auto", "--seq-len", 10, "--on-error", "skip"]
    shown = run(*words)
    assert "2 conversations for a block; the longest has 21 tokens" in shown.stdout
    assert "conversations in the field messages" in shown.stderr
    assert load(out).errors == 2
    assert inspect(out)["text"]["longest too long"] == 21
    assert "learned" in run("inspect", out).stdout


BAD = {
    "a message has an unknown role": ({"messages": [{"role": "usr", "content": "w1"}]}, 0),
    "a message has no content": ({"messages": [{"role": "user", "content": None}, PLAIN[1]]}, 0),
    "a message is not a JSON object": ({"messages": [PLAIN[0], "w1"]}, 1),
    "messages cannot have weights": ({"messages": [PLAIN[0], {**PLAIN[1], "weight": 0}]}, 1),
    "a message has content that is not text": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}, PLAIN[1]]},
        0,
    ),
    "the conversation is empty": ({"messages": []}, None),
    "the conversation is not a list": ({"messages": None}, None),
    "nothing of the conversation would be learned": ({"messages": [SYSTEM, PLAIN[0]]}, None),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_conversations_are_errors_of_their_sample(what, tokenizer, tmp_path, out):
    record, at = BAD[what]
    source = write_lines(tmp_path / "a.jsonl", [{"messages": PLAIN}, record, {"messages": PLAIN}])
    with pytest.raises(SampleError) as error:
        convert(source, out, tokenizer)
    assert error.value.what == what
    assert error.value.where["field"] == ("messages" if at is None else f"messages[{at}]")
    assert "--on-error skip" in str(error.value.fix)
    assert convert(source, out, tokenizer, on_error="skip") == [(IDS, MASK)] * 2
    (line,) = (out / "__shardkit__/errors.jsonl").read_text().splitlines()
    assert json.loads(line)["what"] == what


@pytest.mark.parametrize(
    ("record", "what", "field"),
    [
        ({"prompt": "w1", "completion": None}, "the record's completion is not text", "completion"),
        ({"instruction": "w1", "output": 3}, "the record's output is not text", "output"),
        ({"messages": PLAIN, "tools": '"x"'}, "tools are not a list", "tools"),
        ({"messages": PLAIN, "tools": "x"}, "the text of the field is not JSON", "tools"),
        ({"messages": [SYSTEM, *PLAIN], "system": "w1"}, "two system messages", "system"),
    ],
    ids=str,
)
def test_bad_fields_are_errors_of_their_sample(record, what, field, tokenizer, tmp_path, out):
    good = {
        name: "w1" if isinstance(value, int | None) else value for name, value in record.items()
    }
    good.pop("tools", None)
    source = write_lines(tmp_path / "a.jsonl", [{**good, "system": None}, record])
    with pytest.raises(SampleError, match=what) as error:
        convert(source, out, tokenizer)
    assert error.value.where["field"] == field


def test_records_that_are_no_conversations_or_of_several_kinds(tokenizer, tmp_path, out):
    both = [{"messages": PLAIN}, {"prompt": "w1", "completion": "w2"}]
    with pytest.raises(SourceError, match="several kinds") as error:
        convert(write_lines(tmp_path / "a.jsonl", both), out, tokenizer)
    assert "--drop completion" in str(error.value.fix)
    for name, text in {"b.jsonl": '{"body": "w1"}', "c.txt": "w1"}.items():
        (tmp_path / name).write_text(text)
        with pytest.raises(SourceError, match="the first records have none") as error:
            convert(tmp_path / name, out, tokenizer)
        assert "messages; or conversations" in str(error.value.expected)
        assert "--rename question=prompt" in str(error.value.fix)
    shardkit.convert(tmp_path / "b.jsonl", "arrow", tmp_path / "stored", workers=0)
    with pytest.raises(SourceError, match="the first records have none"):
        convert(tmp_path / "stored", out, tokenizer)


@pytest.mark.parametrize(
    ("options", "what", "fix"),
    [
        ("--tokenizer {}", "need a chat template", "--tokenizer {} --chat-template auto"),
        ("--chat-template auto", "--chat-template requires a tokenizer", "give --tokenizer"),
        ("--tokenizer {} --chat-template auto --bos", "--bos cannot be combined", "the template"),
        ("--tokenizer {} --chat-template auto --append-eos", "--append-eos cannot", "leave it out"),
        ("--tokenizer {} --chat-template auto --text-field x", "--text-field cannot", "leave it"),
        ("--tokenizer {} --loss-on all", "--loss-on requires a chat", "--chat-template auto"),
    ],
)
def test_what_belongs_together(options, what, fix, tokenizer, tmp_path):
    for record in ({"messages": PLAIN}, {"prompt": "w1", "completion": "w2"}):
        source = write_lines(tmp_path / "a.jsonl", [record])
        words = ["convert", source, "--to", "arrow", "-o", tmp_path / "out"]
        found = run(*words, *options.format(tokenizer).split(), check=2)
        assert what in found.stderr
        assert fix.format(tokenizer) in found.stderr


def test_stored_conversations_also_need_a_template(tokenizer, tmp_path):
    pq.write_table(pa.Table.from_pylist([{"messages": PLAIN}]), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="need a chat template") as error:
        make(tmp_path / "a.parquet", "arrow", tmp_path / "out", {"tokenizer": tokenizer})
    assert f"--tokenizer {tokenizer} --chat-template auto" in str(error.value.fix)


def test_fields_beside_conversations_are_kept_if_asked(tokenizer, tmp_path, out):
    source = write_lines(tmp_path / "a.jsonl", [{"id": 3, "messages": PLAIN, "origin": "web"}])
    convert(source, out, tokenizer, keep_fields=True)
    assert list(shardkit.open(out).schema) == ["tokens", "loss_mask", "id", "origin"]
    assert not shardkit.open(out).schema["tokens"].optional


def test_c1_c2_the_same_bytes_and_only_with_the_same_template(
    tokenizer, tmp_path, out, monkeypatch
):
    monkeypatch.setattr("shardkit.sources.text.scan.RANGE", 4096)
    monkeypatch.setattr("shardkit.conversion.cuts._LEAST_WORK", 8_000)
    good = [{"messages": turns([n % 10], [1, 2], [3], [n % 7])} for n in range(400)]
    source = write_lines(tmp_path / "a.jsonl", [*good, {"messages": []}])
    with pytest.raises(SampleError):  # in a later task than the first
        convert(source, out, tokenizer, seq_len=64)
    assert list((out.parent / f"{out.name}.partial/tasks").glob("*/result.json"))
    other = tmp_path / "other.jinja"
    other.write_text(TEMPLATE.replace("w15", "w16"))
    with pytest.raises(OutputError, match="the chat template has changed"):
        convert(source, out, tokenizer, seq_len=64, chat_template=other)
    with pytest.raises(OutputError, match="seq_len was 64, is None") as error:
        shardkit.convert(source, "arrow", out, workers=0)
    assert "{%" not in str(error.value)
    with pytest.raises(OutputError, match="loss_on was assistant, is all"):
        convert(source, out, tokenizer, seq_len=64, loss_on="all")
    skip = {"seq_len": 64, "on_error": "skip"}
    convert(source, out, tokenizer, **skip)
    whole = tmp_path / "whole"
    text = shardkit.TextOptions(tokenizer=tokenizer, chat_template="auto", seq_len=64)
    shardkit.convert(source, "arrow", whole, text=text, on_error="skip", workers=2)
    assert files_of(out) == files_of(whole)
    parts = tmp_path / "parts"
    for part in ("1/2", "2/2"):
        shardkit.convert(source, "arrow", parts, text=text, on_error="skip", part=part, workers=0)
    shardkit.merge(parts)
    assert files_of(parts) == files_of(whole)


def test_a_repair_renders_with_the_template_of_the_manifest(tokenizer, tmp_path, out):
    source = write_lines(tmp_path / "a.jsonl", [{"messages": PLAIN}] * 30)
    convert(source, out, tokenizer)
    (shard,) = out.glob("*.arrow")
    before = shard.read_bytes()
    shard.write_bytes(before[:200] + bytes([before[200] ^ 1]) + before[201:])
    (tokenizer / "tokenizer_config.json").rename(tmp_path / "config")
    try:
        shardkit.verify(out, repair=source)
    finally:
        (tmp_path / "config").rename(tokenizer / "tokenizer_config.json")
    assert shard.read_bytes() == before
