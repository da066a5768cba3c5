"""What names stand for: tiktoken's ranks and encodings, SentencePiece, hub names, errors."""

from __future__ import annotations

import base64
import contextlib
import json
import pickle
import random
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tiktoken.registry
import tiktoken_ext.openai_public as openai

from shardkit.codecs.tokenizers import load_tokenizer, open_copy
from shardkit.codecs.tokenizers.ranks import FACTS
from shardkit.errors import DamagedError, NotFoundError, SampleError, StorageError, UsageError
from tests.codecs import tokenizer_zoo as zoo

TEXTS = [
    *zoo.documents(20, seed=1),
    "",
    f"a{zoo.END}b <|fim_middle|> <|endofprompt|>",
    "\u0085 'ſ K",
]
ENCODINGS = sorted(FACTS)


def official(name: str, monkeypatch: pytest.MonkeyPatch) -> tiktoken.Encoding:
    """An encoding as tiktoken makes it, but with the ranks of the zoo instead of a download."""
    ranks = zoo.ranks()
    monkeypatch.setattr(openai, "load_tiktoken_bpe", lambda *_, **__: ranks)
    monkeypatch.setattr(openai, "data_gym_to_mergeable_bpe_ranks", lambda **_: ranks)
    facts = openai.ENCODING_CONSTRUCTORS[name]()
    facts.pop("explicit_n_vocab", None)
    return tiktoken.Encoding(**facts)


@pytest.mark.parametrize("name", ENCODINGS)
def test_a_file_of_ranks_is_tiktokens_encoding_of_its_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = official(name, monkeypatch)
    path = zoo.write_ranks(tmp_path / f"{name}.tiktoken")
    tokenizer = load_tokenizer(path)
    assert (tokenizer.kind, tokenizer.engine) == ("tiktoken", "tiktoken")
    assert tokenizer.vocab_size == expected.n_vocab
    assert tokenizer.eos_id == expected.eot_token
    assert dict(tokenizer.added) == expected._special_tokens
    as_text = load_tokenizer(path, special_tokens="text")
    for text, special, plain in zip(
        TEXTS, tokenizer.encode(TEXTS), as_text.encode(TEXTS), strict=True
    ):
        assert special.tolist() == expected.encode(text, allowed_special="all")
        assert plain.tolist() == expected.encode(text, disallowed_special=())


def test_all_of_tiktokens_encodings_are_known() -> None:
    assert set(ENCODINGS) >= set(tiktoken.list_encoding_names())


LONG = [" " * 1_000_000 + "a", "a" + "\t\u00a0" * 400_000 + f"b{zoo.END}\n c", "x" * 1_000_000]


@pytest.mark.parametrize("text", LONG, ids=["spaces", "odd spaces", "letters"])
def test_text_that_tiktoken_cannot_split_is_split_for_it(tmp_path: Path, text: str) -> None:
    tokenizer = load_tokenizer(zoo.write_ranks(tmp_path / "cl100k_base.tiktoken"))
    same = tokenizer.decode(tokenizer.encode([text])[0])
    assert same == text


def test_a_run_of_spaces_is_one_piece_but_for_its_last_however_long_it_is(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(zoo.write_ranks(tmp_path / "cl100k_base.tiktoken"), "text")
    ids = tokenizer.encode([" " * 1000 + "a", " " * 1_000_000 + "a"])
    assert ids[0][-3:].tolist() == ids[1][-3:].tolist()


def test_what_cannot_be_split_at_all_is_an_error_of_the_document(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(zoo.write_ranks(tmp_path / "gpt2.tiktoken"))
    spaces = " " * 1_000_000 + "a"
    assert len(tokenizer.encode([spaces])[0]) > 0  # split by `tokenizers`
    with pytest.raises(SampleError, match="tiktoken cannot split"):
        tokenizer.encode(["\U000f0000" + spaces])


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> str:
    """An encoding that tiktoken has by name, with a pattern that is not among the known."""
    made = {
        "name": "zoo",
        "pat_str": r"\w+|\W",
        "mergeable_ranks": zoo.ranks(),
        "special_tokens": {"<end>": 3000},
    }
    tiktoken.list_encoding_names()
    monkeypatch.setitem(tiktoken.registry.ENCODING_CONSTRUCTORS, "zoo", lambda: made)  # type: ignore[arg-type]
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, "zoo", raising=False)
    return "zoo"


def test_a_named_encoding_is_kept_as_a_file_of_ranks(named: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(named, eos_token="<end>")
    expected = tiktoken.get_encoding(named)
    assert (tokenizer.kind, tokenizer.eos_id, tokenizer.vocab_size) == ("tiktoken", 3000, 3001)
    ((file, content),) = tokenizer.files().items()
    assert file == "zoo.tiktoken"
    (tmp_path / file).write_bytes(content)
    copies = [open_copy(tmp_path, json.loads(json.dumps(tokenizer.identity())))]
    copies += [pickle.loads(pickle.dumps(tokenizer)), tokenizer.at(tmp_path / file)]
    text = "a word, <end> 12"
    for copy in copies:
        assert copy.identity() == tokenizer.identity()
        assert copy.encode([text])[0].tolist() == expected.encode(text, allowed_special="all")


@pytest.fixture(params=["unigram", "bpe"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "spm.model"
    path.write_bytes(zoo.sentencepiece_model(request.param))
    return path


def test_a_sentencepiece_model_gives_its_ids(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    expected = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert (tokenizer.kind, tokenizer.engine) == ("sentencepiece", "sentencepiece")
    assert (tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (2, 1, None)
    assert tokenizer.vocab_size == 1000
    for text, ids in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert ids.dtype == np.uint32
        assert ids.tolist() == expected.encode(text)
    assert tokenizer.decode(tokenizer.encode(["the same 的"])[0]) == "the same 的"
    assert load_tokenizer(model, eos_token="<s>").eos_id == 1


def test_ids_that_are_no_tokens_are_an_error(model: Path, tmp_path: Path) -> None:
    for path in (model, zoo.write_ranks(tmp_path / "gpt2.tiktoken")):
        for wrong in (40_000, -5):
            with pytest.raises(DamagedError, match=rf"no such token(.|\n)*found: {wrong}"):
                load_tokenizer(path).decode([5, wrong, 7])


def test_a_sentencepiece_model_is_kept_in_a_dataset(model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    folder = tmp_path / "dataset"
    folder.mkdir()
    for file, content in tokenizer.files().items():
        (folder / file).write_bytes(content)
    copy = open_copy(folder, tokenizer.identity())
    assert copy.identity() == tokenizer.identity()
    assert copy.encode(["text"])[0].tolist() == tokenizer.encode(["text"])[0].tolist()


def test_a_missing_library_is_named_with_what_installs_it(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UsageError, match="a SentencePiece model needs"):
        load_tokenizer(model)


def test_a_folder_stands_for_the_tokenizer_in_it(tmp_path: Path, model: Path) -> None:
    assert load_tokenizer(model.parent).kind == "sentencepiece"
    zoo.write_json(model.parent, "gpt2")
    assert load_tokenizer(model.parent).kind == "huggingface"
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    zoo.write_ranks(ranks / "o200k_base.tiktoken")
    assert load_tokenizer(str(ranks)).kind == "tiktoken"


def _folder_of_several(folder: Path) -> Path:
    for name in ("a.model", "b.model"):
        (folder / name).write_bytes(b"")
    return folder


def _file(name: str, content: bytes) -> object:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


_RANKS = b"".join(base64.b64encode(bytes([n])) + b" %d\n" % n for n in range(256))
NO_TOKENIZERS = {
    "an empty folder": (lambda folder: folder, "has no tokenizer"),
    "several": (_folder_of_several, "several tokenizers"),
    "text": (_file("x.txt", b"hello"), "begin with b'hello'"),
    "nothing": (_file("tokenizer.json", b""), "an empty file"),
    "other JSON": (_file("tokenizer.json", b'{"a": 1}'), "not a tokenizer of the `tokenizers`"),
    "JSON that is cut": (_file("tokenizer.json", b'{"version": '), "not a tokenizer of the"),
    "no protobuf": (_file("x.model", b"\n\xffnothing"), "not a SentencePiece model"),
    "ranks of no name": (_file("tokenizer.model", _RANKS), "does not say how text is split"),
    "a bad line": (_file("gpt2.tiktoken", _RANKS + b"!\n"), "invalid line"),
    "a cut line": (_file("gpt2.tiktoken", _RANKS + b"YWI="), "invalid line"),
    "a missing byte": (_file("gpt2.tiktoken", _RANKS[7:]), "incomplete"),
    "a number twice": (_file("gpt2.tiktoken", _RANKS + b"YWI= 7\n"), "a duplicate number"),
    "another encoding": (_file("gpt2.tiktoken", _RANKS + b"YWI= 50256\n"), "special tokens"),
}


@pytest.mark.parametrize(("write", "message"), NO_TOKENIZERS.values(), ids=NO_TOKENIZERS)
def test_what_is_no_tokenizer_is_named(tmp_path: Path, write: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_tokenizer(write(tmp_path))  # type: ignore[operator]
    assert message in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["gpt2", "unigram"])
def test_damaged_files_give_our_errors_or_open(tmp_path: Path, name: str) -> None:
    dice = random.Random(name)
    data = zoo.write_json(tmp_path, name).read_bytes()
    path = tmp_path / "tokenizer.json"
    for _ in range(40):
        at = dice.randrange(len(data))
        cut = data[:at] + (
            b"" if dice.random() < 0.3 else bytes([dice.randrange(256)]) + data[at + 1 :]
        )
        path.write_bytes(cut)
        with contextlib.suppress(UsageError):
            load_tokenizer(path).encode(["text"])


@pytest.mark.parametrize(
    "name", ["./none", "/none/at/all", "none.json", "a.tiktoken", "~/none.model"]
)
def test_a_path_that_does_not_exist_is_not_looked_for_elsewhere(name: str) -> None:
    with pytest.raises(NotFoundError, match="no such tokenizer"):
        load_tokenizer(name)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("name", ["gpt2", "o200k_base"])
def test_without_a_network_an_encoding_needs_a_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(tiktoken.registry.ENCODINGS, name, raising=False)
    with pytest.raises(UsageError, match="could not download the file") as caught:
        load_tokenizer(name)
    assert "TIKTOKEN_CACHE_DIR" in str(caught.value.fix)
    assert f"{name}.tiktoken" in str(caught.value.fix)


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize(
    "name", ["shardkit-tests/no-such-tokenizer", "no-such-tokenizer", "no such"]
)
def test_without_a_network_a_hub_name_needs_a_file(name: str) -> None:
    with pytest.raises(UsageError, match="could not be downloaded") as caught:
        load_tokenizer(name)
    assert "give a tokenizer.json" in str(caught.value.fix)


def test_a_hub_name_is_opened_from_the_files_that_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zoo.write_json(tmp_path, "llama3")
    asked = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    tokenizer = load_tokenizer("org/name")
    assert tokenizer.path == str(tmp_path / "tokenizer.json")
    ((name, wanted),) = asked
    assert name == "org/name"
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(wanted)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = zoo.write_json(tmp_path, "gpt2")
    tokenizer = load_tokenizer(path)
    path.unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        tokenizer.encode(["a"])


def test_importing_the_package_loads_no_tokenizer_library() -> None:
    code = "import sys, shardkit.codecs.tokenizers; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "shardkit.codecs.tokenizers" in loaded
    assert loaded.isdisjoint({"tokenizers", "tiktoken", "sentencepiece", "huggingface_hub"})
