"""What names stand for: tiktoken's ranks and encodings, SentencePiece, hub names, errors."""

import base64
import contextlib
import itertools
import json
import pickle
import random
import socket
import subprocess
import sys

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tiktoken.registry
import tiktoken_ext.openai_public as openai

from shardkit.codecs.tokenizers import load_tokenizer, open_copy
from shardkit.codecs.tokenizers.patterns import FACTS
from shardkit.errors import DamagedError, NotFoundError, SampleError, UsageError
from tests.codecs import tokenizer_zoo as zoo
from tests.codecs.sample_images import damaged

TEXTS = ["", f"a{zoo.END}b <|fim_middle|> <|endofprompt|>", "\u0085 'ſ K"]
TEXTS += zoo.documents(20, seed=1)
ENCODINGS = set(FACTS)


def official(name, monkeypatch):
    """An encoding as tiktoken makes it, but with the ranks of the zoo instead of a download."""
    ranks = zoo.ranks()
    monkeypatch.setattr(openai, "load_tiktoken_bpe", lambda *_, **__: ranks)
    monkeypatch.setattr(openai, "data_gym_to_mergeable_bpe_ranks", lambda **_: ranks)
    facts = openai.ENCODING_CONSTRUCTORS[name]()
    facts.pop("explicit_n_vocab", None)
    return tiktoken.Encoding(**facts)


@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_a_file_of_ranks_is_tiktokens_encoding_of_its_name(tmp_path, name, monkeypatch):
    expected = official(name, monkeypatch)
    path = zoo.write_ranks(tmp_path / f"{name}.tiktoken")
    tokenizer = load_tokenizer(path)
    assert (tokenizer.kind, tokenizer.engine) == ("tiktoken", "tiktoken")
    assert tokenizer.vocab_size == expected.n_vocab
    assert tokenizer.eos_id == expected.eot_token
    assert dict(tokenizer.added) == expected._special_tokens
    plain = load_tokenizer(path, special_tokens="text").encode(TEXTS)
    for text, special, as_text in zip(TEXTS, tokenizer.encode(TEXTS), plain, strict=True):
        assert special.tolist() == expected.encode(text, allowed_special="all")
        assert as_text.tolist() == expected.encode(text, disallowed_special=())
    assert name in ENCODINGS >= set(tiktoken.list_encoding_names())


def test_text_that_tiktoken_cannot_split_is_an_error(tmp_path):
    tokenizer = load_tokenizer(zoo.write_ranks(tmp_path / "cl100k_base.tiktoken"))
    with pytest.raises(SampleError, match="tiktoken cannot split"):
        tokenizer.encode(["a", " " * 1_000_000 + "a"])


def kept(tokenizer, folder):
    """What a dataset in that folder, a pickle and the copied file give."""
    ((file, content),) = tokenizer.files().items()
    (folder / file).write_bytes(content)
    copies = [open_copy(folder, json.loads(json.dumps(tokenizer.identity())))]
    return [*copies, pickle.loads(pickle.dumps(tokenizer)), tokenizer.at(folder / file)]


def test_a_named_encoding_is_kept_as_a_file_of_ranks(tmp_path, monkeypatch):
    """One that tiktoken has by name, with a pattern that is not among the known."""
    made = {"name": "zoo", "pat_str": r"\w+|\W", "mergeable_ranks": zoo.ranks()}
    made["special_tokens"] = {"<end>": 3000}
    tiktoken.list_encoding_names()
    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, "zoo", lambda: made)
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "zoo", raising=False)
    tokenizer = load_tokenizer("zoo", eos_token="<end>")
    assert (tokenizer.kind, tokenizer.eos_id, tokenizer.vocab_size) == ("tiktoken", 3000, 3001)
    assert list(tokenizer.files()) == ["zoo.tiktoken"]
    text = "a word, <end> 12"
    expected = tiktoken.get_encoding("zoo").encode(text, allowed_special="all")
    for copy in kept(tokenizer, tmp_path):
        assert copy.identity() == tokenizer.identity()
        assert copy.encode([text])[0].tolist() == expected


@pytest.fixture(params=["unigram", "bpe"])
def model(request, tmp_path):
    path = tmp_path / "in/spm.model"
    path.parent.mkdir()
    path.write_bytes(zoo.sentencepiece_model(request.param))
    return path


def test_a_sentencepiece_model_gives_its_ids(model, tmp_path, monkeypatch):
    tokenizer = load_tokenizer(model)
    expected = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert (tokenizer.kind, tokenizer.engine) == ("sentencepiece", "sentencepiece")
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (2, 1, None)
    assert tokenizer.vocab_size == 1000
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert ids.dtype == np.uint32
        assert ids.tolist() == expected.encode(text)
    for copy in kept(tokenizer, tmp_path):
        assert copy.identity() == tokenizer.identity()
        assert copy.decode(copy.encode(["the same 的"])[0]) == "the same 的"
    assert load_tokenizer(model, eos_token="<s>").eos_id == 1
    ranks = load_tokenizer(zoo.write_ranks(tmp_path / "gpt2.tiktoken"))
    for some, wrong in itertools.product((tokenizer, ranks), (40_000, -5)):
        with pytest.raises(DamagedError, match=rf"no such token(.|\n)*found: {wrong}"):
            some.decode([5, wrong, 7])
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UsageError, match="a SentencePiece model needs"):
        load_tokenizer(model)


def test_a_folder_stands_for_the_tokenizer_in_it_and_a_path_for_no_other(tmp_path):
    """`tokenizer.json` goes before others."""
    (tmp_path / "spm.model").write_bytes(zoo.sentencepiece_model())
    assert load_tokenizer(tmp_path).kind == "sentencepiece"
    zoo.write_json(tmp_path, "gpt2")
    assert load_tokenizer(tmp_path).kind == "huggingface"
    (tmp_path / "ranks").mkdir()
    zoo.write_ranks(tmp_path / "ranks/o200k_base.tiktoken")
    assert load_tokenizer(str(tmp_path / "ranks")).kind == "tiktoken"
    for name in ("./none", "/none/at/all", "none.json", "a.tiktoken", "~/none.model"):
        with pytest.raises(NotFoundError, match="no such tokenizer"):
            load_tokenizer(name)


_RANKS = b"".join(base64.b64encode(bytes([n])) + b" %d\n" % n for n in range(256))
NO_TOKENIZERS = [
    ({}, "has no tokenizer"),
    ({"a.model": b"", "b.model": b""}, "several tokenizers"),
    ({"x.txt": b"hello"}, "begin with b'hello'"),
    ({"tokenizer.json": b""}, "an empty file"),
    ({"tokenizer.json": b'{"a": 1}'}, "not a tokenizer of the `tokenizers`"),
    ({"tokenizer.json": b'{"version": '}, "not a tokenizer of the"),
    ({"x.model": b"\n\xffnothing"}, "not a SentencePiece model"),
    ({"tokenizer.model": _RANKS}, "does not say how text is split"),
    ({"gpt2.tiktoken": _RANKS + b"!\n"}, "invalid line"),
    ({"gpt2.tiktoken": _RANKS + b"YWI="}, "invalid line"),
    ({"gpt2.tiktoken": _RANKS[7:]}, "incomplete"),
    ({"gpt2.tiktoken": _RANKS + b"YWI= 7\n"}, "incomplete"),
    ({"gpt2.tiktoken": _RANKS + b"YWI= 50256\n"}, "incomplete"),
]


@pytest.mark.parametrize(("files", "message"), NO_TOKENIZERS)
def test_what_is_no_tokenizer_is_named(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_tokenizer(tmp_path / name if len(files) == 1 else tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["gpt2", "unigram"])
def test_damaged_files_give_our_errors_or_open(tmp_path, name):
    dice = random.Random(name)
    path = zoo.write_json(tmp_path, name)
    data = path.read_bytes()
    for _ in range(25):
        path.write_bytes(damaged(data, dice, len(data)))
        with contextlib.suppress(UsageError):
            load_tokenizer(path).encode(["text"])


def test_without_a_network_a_name_needs_a_file(tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    for name, message, fix in [
        ("gpt2", "could not download the file", "gpt2.tiktoken"),
        ("o200k_base", "could not download the file", "TIKTOKEN_CACHE_DIR"),
        ("shardkit-tests/no-such-tokenizer", "could not be downloaded", "give a tokenizer.json"),
        ("no such", "could not be downloaded", "give a tokenizer.json"),
    ]:
        monkeypatch.delitem(tiktoken.registry.ENCODINGS, name, raising=False)
        with pytest.raises(UsageError, match=message) as caught:
            load_tokenizer(name)
        assert fix in str(caught.value.fix)


def test_a_hub_name_is_opened_from_the_files_that_come(tmp_path, monkeypatch):
    path, asked = zoo.write_json(tmp_path, "llama3"), {}

    def download(name, allow_patterns):
        asked[name] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    tokenizer = load_tokenizer("org/name")
    assert tokenizer.path == str(path)
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(asked["org/name"])
    tokenizer = load_tokenizer(path, special_tokens="text")
    path.unlink()
    with pytest.raises(NotFoundError, match="cannot read"):
        tokenizer.encode(["a"])


def test_importing_the_package_loads_no_tokenizer_library():
    code = "import sys, shardkit.codecs.tokenizers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "shardkit.codecs.tokenizers" in loaded
    assert loaded.isdisjoint({"tokenizers", "tiktoken", "sentencepiece", "huggingface_hub"})
