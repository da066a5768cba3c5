"""Tokenizers of tokenizer.json: ids, the fast engine and its proof, ids of special tokens."""

import functools
import json
import pickle
import random
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from shardkit.codecs.tokenizers import bytelevel, load_tokenizer, open_copy, patterns
from shardkit.codecs.tokenizers.engines import ByteLevelByTiktoken
from shardkit.errors import DamagedError, SampleError, SourceError, UsageError
from tests.codecs import tokenizer_zoo as zoo
from tests.conftest import few

MEGABYTE = 1_000_000
MODES = ("special", "text")


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A folder for each tokenizer of the zoo."""
    root = tmp_path_factory.mktemp("zoo")
    for name in zoo.NAMES:
        zoo.write_json(root / name, name)
    return root


@functools.cache
def loaded(folder, special_tokens="special"):
    return load_tokenizer(folder, special_tokens=special_tokens)


@functools.cache
def original(folder, special_tokens="special"):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = special_tokens == "text"
    return tokenizer


def assert_same_ids(folder, texts, special_tokens="special"):
    """Compares with `encode`, which keeps offsets, and not with what the code under test calls."""
    ours = loaded(folder, special_tokens).encode(texts)
    theirs = original(folder, special_tokens).encode_batch(texts, add_special_tokens=False)
    for text, ids, encoding in zip(texts, ours, theirs, strict=True):
        assert ids.dtype == np.uint32
        assert ids.tolist() == encoding.ids, text[:80]


def characters(step=1):
    """Code points of all planes; of the large uniform blocks one of `step`."""
    uniform = [range(0x3400, 0xA000), range(0xAC00, 0xD7A4), range(0xE000, 0xF900)]
    uniform += [range(0x17000, 0x18D00), range(0x20000, 0xE0000), range(0xE1000, 0x110000)]
    skipped = {code for block in uniform for code in block if code % step}
    surrogates = range(0xD800, 0xE000)
    return [chr(c) for c in range(0x110000) if c not in skipped and c not in surrogates]


# Each character beside letters, digits, spaces, line ends, apostrophes and itself.
FRAMES = ("a{0}1 ", " {0} {0}", "{0}", "'{0}", "'{0}e\n{0}", "A{0}b{0}  \u0301", "\r{0}{0}\u00a0")


TORTURE = [
    "",
    " ",
    "\n",
    "a",
    zoo.END,
    f"before{zoo.END}after {zoo.END}{zoo.END} \n{zoo.END}  end",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>{}</tool_call> </tool_call <tool_call><|im",
    "<|begin_of_text|>x<|end_of_text|><|eot_id|><|eot_id|",
    "<" * 50 + "|endoftext|>",
    f"{zoo.END}\u0338 ≯<|im_end|>\u0338",  # a mark that would join what is before it
    "<tool_call>\u0338e\u0301</tool_call>\u0301",
    "can't CAN'T we'LL I'D it'ſ 'ſ 'K x'ré 's's''s ’s",
    "  a   b    c\t\td \t e\u00a0\u00a0f\u2003g\u3000h",
    "a\r\nb\rc\nd\r\r\n\n\re\u2028f\u2029g\u0085h\x0bi\x0cj\x1ck\x1f",
    "\n\n\n   \n  x \n\n  ",
    "e\u0301 \u0301e a\u0323\u0307 a\u0307\u0323 \u1100\u1161\u11a8 가\u11a8 \u212b \u2126 \uf900",
    "क\u094dष \u0915\u093c \u0958 ซ\u0e33 ང\u0f71\u0f72 \U0001109a\U000110ba \u16d63\u16d67",
    "١٢٣ १२३ 1²3 ½ Ⅷ 12345678901 1,234.56 ၁၂ 𝟏𝟐𝟑",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 👍🏽 ☠️ \u200d\u200b\u2060\ufeff\u180e\u00ad",
    "𠀀𪚥 \U000e0041 \U0010ffff \U000f0000 \U00050000",
    "def f(x):\n    return {'a': [1, 2.5e-10], \"b\": not x}  # комментарий\n\n\n",
    "\x00\x01\x7f\x80\x9f",
]


@pytest.mark.parametrize("name", few(zoo.FAST, "gpt2"))
def test_characters_of_all_planes_are_split_alike(folder, name, large):
    """By default some, as the long run has all but of the large uniform blocks."""
    mine = characters(389)[zoo.FAST.index(name) :: len(zoo.FAST)]
    for some, frames in (
        [(characters(101), FRAMES[:2]), (mine, FRAMES[2:])] if large else [(mine[::16], FRAMES)]
    ):
        for at in range(0, len(some), 2000):
            block = some[at : at + 2000]
            texts = ["".join(frame.format(c) for c in block) for frame in frames]
            assert_same_ids(folder / name, texts)


# Letters that fold to those of contractions, marks, digits of scripts, odd spaces, two joiners.
ODD = "ſKİıßﬆﬁŉ\u0301\u0338\u0327\u1161\u11a8\u212b٣²½\u00a0\u0085\u200b\u200d\u3000\u180e\u2028"
ALPHABET = "aZ'stremdlvSTREMDLV 1\n\r\t<|endofx>/_tool" + ODD
strings = st.one_of(
    st.text(st.sampled_from(ALPHABET)),
    st.text(),
    st.lists(st.sampled_from([zoo.END, "<tool_call>", "'ll", "  ", "\n", "e\u0301", "a"])).map(
        "".join
    ),
)


@pytest.mark.parametrize("name", few(zoo.FAST, "gpt2", "qwen2"))
@given(texts=st.lists(strings, max_size=5), special_tokens=st.sampled_from(MODES))
@example(texts=["≮|endoftext|>", "<\u0338|endoftext|>"], special_tokens="special")
def test_any_text_gets_the_ids_of_tokenizers(folder, name, special_tokens, texts):
    assert_same_ids(folder / name, texts, special_tokens)


LONG = {
    "one letter": "a" * MEGABYTE,
    "letters": "".join(random.Random(0).choices("abcdefghijklmnopqrstuvwxyz", k=MEGABYTE)),
    "spaces": " " * MEGABYTE,
    "spaces and a letter": " " * MEGABYTE + "a",
    "line ends": "\n" * MEGABYTE + "a",
    "odd spaces": "\t\u00a0\u3000" * 200_000 + "a",
    "line ends of Windows": "\r\n" * 500_000,
    "emoji": "😀" * 250_000,
    "ideographs": "的一是不了" * 66_000,
    "digits": "1234567890" * 100_000,
    "marks": "e" + "\u0301" * 300_000,
    "special tokens": zoo.END * 50_000,
    "special tokens and spaces": zoo.END + " " * MEGABYTE + "a" + zoo.END,
}


@pytest.mark.parametrize("name", few(["gpt2", "qwen2", "gpt4o"], "gpt2"))
def test_a_megabyte_without_a_word_gets_its_ids(folder, name, large):
    """By default the end of it, but for one text that is known to stop a regex engine."""
    for kind, text in LONG.items():
        part = 3 if large else 20
        whole = kind == "spaces and a letter" or (large and name == "gpt2")
        assert_same_ids(folder / name, [text if whole else text[-(len(text) // part) :]])


def changed(tmp_path, change, name="gpt2"):
    """A tokenizer of the zoo, after a change of its document, by its name and by two parts."""
    document = zoo.tokenizer_json(name)
    model = document["model"]
    change(document=document, vocab=model["vocab"], merges=model.get("merges"))
    return zoo.write_json(tmp_path / "changed", document).parent


def put(*where, **options):
    def change(document, **_):
        for step in where:
            document = document[step]
        document.update(options)

    return change


def without_a_byte(vocab, merges, **_):
    used = {character for merge in merges for character in "".join(merge)}
    del vocab[next(token for token in vocab if len(token) == 1 and token not in used)]


def swap_ids(vocab, **_):
    first, second = [token for token in vocab if vocab[token] in (700, 701)]
    vocab[first], vocab[second] = vocab[second], vocab[first]


def move_merges(merges, **_):
    merges[:] = merges[20:] + merges[:20]


def drop_a_merge(merges, **_):
    """Of a token that another token is made of."""
    parts = {part for merge in merges for part in merge}
    merges.remove(next(merge for merge in merges if "".join(merge) in parts))


def list_another_split(vocab, merges, **_):
    """A token of three bytes by a pair that its bytes do not end in."""
    at = next(i for i, (a, b) in enumerate(merges) if len(a) == 2 and len(b) == 1)
    a, b = merges[at]
    vocab[a[1] + b] = len(vocab)
    merges[at] = [a[0], a[1] + b]


def list_a_later_split(vocab, merges, **_):
    """A second merge of a token, which its bytes never come to: training finds such ones."""
    parts = [pair for pair in merges if len(pair[0]) == 1 and len(pair[1]) == 2]
    a, b = next((a, b) for a, b in parts if a + b[0] in vocab)
    merges.append([a + b[0], b[1]])


def words_that_no_merge_makes(*words):
    """Such words are taken where a piece of text is one of them as a whole."""

    def change(document, vocab, **_):
        vocab.update({word: len(vocab) + i for i, word in enumerate(words)})
        document["model"]["ignore_merges"] = True

    return change


def add(*contents):
    def change(document, **_):
        first, *_ = added = document["added_tokens"]
        added += [{**first, "content": word, "id": 5000 + n} for n, word in enumerate(contents)]

    return change


REJECTED = {
    "shuffled merges": (lambda merges, **_: random.Random(1).shuffle(merges), "order of ids"),
    "first merges last": (move_merges, "order of ids|merge differently"),
    "a dropped merge": (drop_a_merge, "merge differently by ids"),
    "swapped ids": (swap_ids, "order of ids"),
    "another split": (list_another_split, "merge differently by ids"),
    "a word without merges": (words_that_no_merge_makes("qj"), "no merge makes"),
    "a missing byte": (without_a_byte, "single byte"),
    "dropout": (put("model", dropout=0.1), "options of another"),
    "byte fallback": (put("model", byte_fallback=True), "options of another"),
    "lower case": (put(normalizer={"type": "Lowercase"}), "is Lowercase"),
    "a space in front": (put("pre_tokenizer", add_prefix_space=True), "splits text in another"),
    "no split": (put("pre_tokenizer", use_regex=False), "splits text in another"),
    "no pre-tokenizer": (put(pre_tokenizer=None), "splits text in another"),
    "another one": (put(pre_tokenizer={"type": "Whitespace"}), "splits text in another"),
    "an added token that strips": (put("added_tokens", 0, lstrip=True), "found in another way"),
    "an added token of whole words": (
        put("added_tokens", 0, single_word=True),
        "found in another way",
    ),
    "added tokens of spaces": (add("  ", "    "), "found in another way"),
    "an added token in another": (add("<a>", "<a><b>"), "found in another way"),
}


@pytest.mark.parametrize(("change", "reason"), REJECTED.values(), ids=REJECTED)
def test_what_is_not_proven_is_left_to_tokenizers(tmp_path, change, reason):
    folder = changed(tmp_path, change)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.engine == "tokenizers"
    (note,) = [note for note in tokenizer.notes if "tokenizers is used" in note]
    assert re.search(reason, note)
    if change is not REJECTED["dropout"][0]:
        assert_same_ids(folder, zoo.documents(5, seed=2) + TORTURE)


def older_merges(merges, **_):
    merges[:] = map(" ".join, merges)


SPLIT = ("pre_tokenizer", "pretokenizers", 0)
ACCEPTED = {
    "matches kept": (put(*SPLIT, behavior="Removed", invert=True), "qwen2"),
    "older merges": (older_merges, "llama3"),
    "a merge that never happens": (list_a_later_split, "gpt2"),
    "a dropped last merge": (lambda merges, **_: merges.pop(), "gpt2"),
    "a word without merges": (words_that_no_merge_makes("zqxj", "Ġzqxj"), "gpt2"),
    "words that are never pieces": (words_that_no_merge_makes("q|", "Ã©Ġ"), "gpt2"),
    "added tokens that are no special": (add("[a]", "#b"), "gpt2"),
    "an added token that merges make": (add("A", "Ra"), "llama3"),
}


@pytest.mark.parametrize(("change", "name"), ACCEPTED.values(), ids=ACCEPTED)
def test_other_ways_to_write_the_same_are_proven(tmp_path, change, name):
    folder = changed(tmp_path, change, name)
    words = "the [a]#b the#[a] zqxj zqxjzqxj q| q|q| aq|j é é "
    for special_tokens in MODES:
        assert loaded(folder, special_tokens).engine == "tiktoken"
        assert_same_ids(folder, [*zoo.documents(5, seed=3), *TORTURE, words], special_tokens)


def test_truncation_and_padding_of_a_file_are_not_applied(tmp_path, folder):
    def cut_and_pad(document, **_):
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(document))
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=9)
        document.update(json.loads(tokenizer.to_str()))

    for name in ("gpt2", "unigram"):
        (ids,) = load_tokenizer(changed(tmp_path, cut_and_pad, name)).encode(["a few words more"])
        assert ids.tolist() == loaded(folder / name).encode(["a few words more"])[0].tolist()


def test_documents_with_unsafe_characters_go_to_tokenizers(folder):
    """Here e with an acute accent is one, as if the two libraries' Unicode tables differed."""
    given = loaded(folder / "qwen2")
    tokenizer = replace(given, unsafe=(*given.unsafe, (ord("é"), ord("é") + 1)))
    engine = tokenizer._engine()
    assert isinstance(engine, ByteLevelByTiktoken)
    sent = []
    slow = engine._slow.encode
    engine._slow.encode = lambda texts: sent.extend(texts) or slow(texts)
    texts = ["plain", "é", "è", "a é b", "\U000f0000", ""]
    found = as_lists(tokenizer.encode(texts))
    assert sent == ["é", "a é b", "\U000f0000"]
    assert found == [original(folder / "qwen2").encode(text).ids for text in texts]


def test_what_the_regex_engines_see_differently_is_found(monkeypatch):
    measured = patterns._by_tiktoken

    def older(members, text):
        """As if the tables of one did not know two letters yet."""
        found = measured(members, text)
        return re.sub("[ßア]", "", found) if "L" in members else found

    patterns.unsafe.cache_clear()
    monkeypatch.setattr(patterns, "_by_tiktoken", older)
    found = patterns.unsafe(patterns.GPT2)
    patterns.unsafe.cache_clear()
    assert [(a, b) for a, b in found if a < 0x40000] == [(0xDF, 0xE0), (0x30A2, 0x30A3)]
    assert found[-1] == (0xF0000, 0x110000)


def test_the_known_patterns_are_those_of_the_models_and_others_are_left(tmp_path):
    assert set(patterns.KNOWN) == {patterns.GPT2, zoo.LLAMA3, zoo.QWEN2, zoo.GPT4O}
    longer = put(*SPLIT, "pattern", Regex=zoo.QWEN2 + r"|\d")
    assert load_tokenizer(changed(tmp_path, longer, "qwen2")).engine == "tokenizers"


@pytest.mark.parametrize("special_tokens", MODES)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_ids_are_those_of_tokenizers_by_the_fast_engine_where_it_is_right(
    folder, name, special_tokens, large
):
    texts = zoo.documents(60 if large else 20, seed=1)
    assert_same_ids(folder / name, texts + TORTURE, special_tokens)
    tokenizer, slow = loaded(folder / name, special_tokens), name not in zoo.FAST
    assert tokenizer.kind == "huggingface"
    assert tokenizer.engine == ("tokenizers" if slow else "tiktoken")
    assert set(tokenizer.versions()) == {"tokenizers", tokenizer.engine}
    assert slow == any("tokenizers is used" in note for note in tokenizer.notes)


# Though its tables may be older, and give other normal forms to text that is not.
@pytest.mark.large
def test_what_python_says_is_normalized_is_so_for_tokenizers():
    dice = random.Random(0)
    known = [c for c in characters(13) if unicodedata.category(c) != "Cn"]
    marks = [c for c in known if unicodedata.combining(c)]
    texts = [joint.join(known) for joint in ("a", "\u0327", "\u0338\u0301 ")]
    texts += ["".join(dice.choices(marks, k=5)).join(known)]
    texts += ["".join(dice.choices(marks + known[:4000], k=100_000))]
    normalize = tokenizers.normalizers.NFC().normalize_str
    for text in texts:
        normal = unicodedata.normalize("NFC", text)
        assert normalize(normal) == normal


def test_a_file_or_libraries_that_changed_since_are_an_error(folder, tmp_path):
    path = zoo.write_json(tmp_path, "gpt2")
    tokenizer = load_tokenizer(path)
    path.write_text(path.read_text("utf-8") + " ", "utf-8")
    for use in (lambda: tokenizer.encode(["a"]), tokenizer.files):
        with pytest.raises(SourceError, match="has changed") as caught:
            use()
        assert caught.value.where["path"] == str(path)
    tokenizer = replace(loaded(folder / "gpt2"), libraries=(("tokenizers", "0.0.1"),))
    with pytest.raises(UsageError, match="other versions") as caught:
        tokenizer.encode(["a"])
    assert caught.value.expected == "tokenizers 0.0.1"


def test_the_vocabulary_gives_the_type_of_ids_and_what_options_may_name(tmp_path, folder):
    gpt2 = loaded(folder / "gpt2")
    for size, dtype in [(256, "|u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4")]:
        assert replace(gpt2, vocab_size=size).dtype == dtype
    assert loaded(folder / "qwen2").vocab_size == zoo.SIZE + 4
    inside = changed(tmp_path / "a", put("added_tokens", 0, id=0))
    assert load_tokenizer(inside).vocab_size == zoo.SIZE
    found = load_tokenizer(changed(tmp_path / "b", put(added_tokens=[])))
    assert found.eos_id is None
    assert "set one with eos_token" in found.notes[0]
    for options, message in [
        ({"eos_token": "<nothing>"}, "not in the vocabulary"),
        ({"special_tokens": "some"}, "special_tokens is 'some'"),
    ]:
        with pytest.raises(UsageError, match=message):
            load_tokenizer(folder / "gpt2", **options)


def test_another_process_gets_the_same_ids_without_a_proof(folder):
    code = """
import pickle, sys
from shardkit.codecs.tokenizers import bytelevel, patterns
def never(*args):
    raise AssertionError("decided again")
bytelevel.prove = patterns.unsafe = never
tokenizer, texts = pickle.load(sys.stdin.buffer)
pickle.dump([ids.tolist() for ids in tokenizer.encode(texts)], sys.stdout.buffer)
"""
    tokenizer = loaded(folder / "qwen2")
    given = pickle.dumps((tokenizer, TORTURE))
    done = subprocess.run([sys.executable, "-c", code], input=given, stdout=-1, check=True)
    assert pickle.loads(done.stdout) == as_lists(tokenizer.encode(TORTURE))


@pytest.mark.parametrize("name", ["qwen2", "wordpiece"])
def test_many_threads_get_the_same_ids(folder, name):
    batches = [zoo.documents(5, seed=n) + TORTURE for n in range(8)]
    tokenizer = replace(loaded(folder / name), notes=("a fresh engine",))
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(tokenizer.encode, batches))
    for batch, arrays in zip(batches, found, strict=True):
        expected = original(folder / name).encode_batch(batch, add_special_tokens=False)
        assert as_lists(arrays) == [encoding.ids for encoding in expected]
    with pytest.raises(SampleError, match=r"U\+D83D, at character 3"):  # half a surrogate pair
        tokenizer.encode(["fine", "é", "bad\ud83d"])


def as_lists(arrays):
    return [ids.tolist() for ids in arrays]


def test_a_wrong_fast_engine_is_found_by_comparing(folder, tmp_path):
    """As if a version of a library broke the rules that the proof builds on."""
    right = loaded(folder / "gpt2")
    assert right.checked_on(zoo.documents(10)) is right
    path = zoo.write_json(tmp_path, "shuffled")
    slow = load_tokenizer(path)
    wrong = replace(right, path=str(path), digest=slow.digest)
    texts = ["a", *zoo.documents(3)]
    checked = wrong.checked_on(texts)
    assert checked.engine == "tokenizers"
    assert "tokenizers is used: tiktoken gave other ids for document 1" in checked.notes[-1]
    assert as_lists(checked.encode(texts)) == as_lists(slow.encode(texts))
    assert slow.checked_on(texts) is slow


@pytest.mark.parametrize("name", ["qwen2", "unigram"])
def test_a_copy_in_a_dataset_or_a_pickle_is_the_same_tokenizer(folder, tmp_path, name):
    tokenizer = loaded(folder / name, "text")
    identity = json.loads(json.dumps(tokenizer.identity()))
    assert identity["file"] == "tokenizer.json"
    assert "/" not in json.dumps(identity)
    for file, content in tokenizer.files().items():
        (tmp_path / file).write_bytes(content)
    texts = zoo.documents(3, seed=5) + TORTURE
    fast = open_copy(tmp_path, identity, fast=True)
    assert fast.engine == tokenizer.engine
    assert len(pickle.dumps(tokenizer)) < 2000
    pickled = pickle.loads(pickle.dumps(tokenizer))
    assert pickled == tokenizer
    at = tokenizer.at(tmp_path / "tokenizer.json")
    for copy in (fast, open_copy(tmp_path, identity), at, pickled):
        assert copy.identity() == tokenizer.identity()
        assert copy.decode([5, 300, 700]) == tokenizer.decode([5, 300, 700])
        assert as_lists(copy.encode(texts)) == as_lists(tokenizer.encode(texts))
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    with pytest.raises(DamagedError, match="not the one with which it was created"):
        open_copy(tmp_path, identity)


@pytest.mark.parametrize("name", ["qwen2", "llama3", "shuffled"])
def test_decoding_gives_the_text_back(folder, name):
    tokenizer = loaded(folder / name)
    text = unicodedata.normalize("NFC", f"It’s 12 的 é\n\n  {zoo.END} x")
    assert tokenizer.decode(tokenizer.encode([text])[0]) == text


def test_special_ids_are_guessed_by_name_or_named_by_files_beside(folder, tmp_path):
    def ids_of(tokenizer):
        return tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id

    note = "documents end with <|endoftext|> (0), going by its name"
    assert note in loaded(folder / "gpt2").notes
    guessed = {"gpt2": (0, None, None), "llama3": (2000, 1999, None), "unigram": (2, 1, None)}
    for name, ids in {**guessed, "wordpiece": (4, None, 1)}.items():
        assert ids_of(loaded(folder / name)) == ids
    path = zoo.write_json(tmp_path, "qwen2")
    config = {"eos_token": {"content": "<|im_end|>"}, "pad_token": zoo.END, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    special = {"eos_token": zoo.END, "bos_token": "<|im_start|>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(special))
    found = load_tokenizer(tmp_path)
    names = ("<|im_end|>", "<|im_start|>", zoo.END)
    assert ids_of(found) == tuple(map(original(folder / "qwen2").token_to_id, names))
    assert not found.notes
    assert load_tokenizer(path, eos_token=zoo.END).eos_id == 0
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UsageError, match="not a JSON object"):
        load_tokenizer(path)


def test_the_proof_takes_a_short_way_only_where_it_comes_to_the_same(monkeypatch):
    def proof():
        try:
            bytelevel.prove({"merges": merges}, vocab)
        except bytelevel.UnprovenError as why:
            return str(why)
        return ""

    dice = random.Random(0)
    outcomes = Counter()
    for _ in range(600):
        tokens = list("abc")
        merges = []
        for _ in range(dice.randrange(1, 14)):
            pair = dice.choice(tokens), dice.choice(tokens)
            if len("".join(pair)) <= 8 and pair not in merges:
                merges.append(pair)
                tokens += ["".join(pair)] * ("".join(pair) not in tokens)
        if dice.random() < 0.4:
            one, other = dice.choices(range(len(tokens)), k=2)
            tokens[one], tokens[other] = tokens[other], tokens[one]
        vocab = {token: number for number, token in enumerate(tokens)}
        if dice.random() < 0.3:  # a token that no merge makes
            vocab.setdefault("".join(dice.choices("abc", k=dice.randrange(2, 4))), len(vocab))
        found = proof()
        with monkeypatch.context() as patch:
            patch.setattr(bytelevel, "_stay_apart", lambda *_: False)
            assert proof() == found, (merges, vocab)
        outcomes[found[:4]] += 1
    assert min(outcomes[words] for words in ("", "the ", "its ")) > 20
