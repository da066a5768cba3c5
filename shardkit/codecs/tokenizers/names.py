"""Find the tokenizer that a user names, and decide which library encodes with it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardkit.codecs.tokenizers import bytelevel, engines, patterns
from shardkit.codecs.tokenizers.patterns import FACTS, Facts, are_ranks, read_ranks
from shardkit.codecs.tokenizers.tokenizer import (
    IDENTITY,
    Tokenizer,
    digest,
    encoding_data,
    versions,
)
from shardkit.errors import DamagedError, FormatError, NotFoundError, UsageError
from shardkit.helpers.checked import checked
from shardkit.helpers.mistyped import meant
from shardkit.helpers.os_errors import explained
from shardkit.storage import fs
from shardkit.storage.remote.path import RemotePath

SPECIAL_TOKENS = ("special", "text")
_SIDECARS = ("tokenizer_config.json", "special_tokens_map.json")
# Usual names of these tokens, most likely first.
_USUAL = {
    "eos": (
        *("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[EOS]", "<|eos|>", "<EOS>"),
        *("<｜end▁of▁sentence｜>", "<|im_end|>"),
    ),
    "bos": (
        *("<s>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "[BOS]", "<|bos|>", "<BOS>"),
        "<｜begin▁of▁sentence｜>",
    ),
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<PAD>", "<｜▁pad▁｜>"),
}
_NAMED = (*_USUAL, "unk", "sep", "cls", "mask")


def load_tokenizer(
    name: str | os.PathLike[str], special_tokens: str = "special", eos_token: str | None = None
) -> Tokenizer:
    """Load the tokenizer of a file, a folder or a name.

    Tried in this order: an existing path; a tiktoken encoding; a repository on the Hugging Face
    hub. `special_tokens`: how text such as "<|endoftext|>" in a document is encoded, as a "special"
    token or as "text". Raises UsageError for anything that is not a tokenizer or cannot be loaded.
    """
    if special_tokens not in SPECIAL_TOKENS:
        raise UsageError(
            f"special_tokens is {special_tokens!r}", expected=" or ".join(SPECIAL_TOKENS)
        )
    if "://" in str(name):
        raise UsageError(
            "a tokenizer cannot be read from a URL", found=str(name), fix="copy it to this machine"
        )
    path = Path(name).expanduser()
    if path.is_dir():
        return _of_file(_in_folder(path), special_tokens, eos_token)
    if path.exists():
        return _of_file(path, special_tokens, eos_token)
    is_file = path.suffix in (".json", ".model", ".tiktoken")
    if is_file or str(name).startswith((".", "~", os.sep)) or str(name).count("/") > 1:
        raise NotFoundError("there is no such tokenizer", path=str(name), fix=meant(path))
    import tiktoken

    if str(name) in tiktoken.list_encoding_names():
        return _of_encoding(str(name), special_tokens, eos_token)
    return _of_file(_in_folder(_fetched(str(name))), special_tokens, eos_token)


def open_copy(
    path: str | os.PathLike[str], identity: Mapping[str, Any], fast: bool = False
) -> Tokenizer:
    """Open the tokenizer of a dataset from the copy of its file next to the manifest.

    `fast`: use the faster engine if it provably gives the same ids, which takes time to check.
    Raises DamagedError if the file is not the one in the manifest.
    """
    file = path if isinstance(path, Path) else Path(path)
    if file.is_dir():
        file = file / identity["file"]
    data = fs.read(file)
    if digest(data) != identity["digest"]:
        raise DamagedError(
            "the tokenizer file of a dataset is not the one with which it was created",
            path=str(file),
            expected=f"xxh3-128 {identity['digest']}",
            found=digest(data),
            fix="restore the file",
        )
    known = {name: identity[name] for name in IDENTITY}
    engine = {"huggingface": "tokenizers"}.get(known["kind"], known["kind"])
    if fast and engine == "tokenizers":
        tokenizer = _huggingface(file, data, identity["special_tokens"], None)
        return replace(tokenizer, **known)
    if engine not in ("tokenizers", "tiktoken", "sentencepiece"):
        raise FormatError(
            "the tokenizer of the dataset has a kind that this version does not know",
            path=str(file),
            found=f"{engine!r:.60}",
            fix="use the shardkit that wrote it, or a newer one",
        )
    return Tokenizer(
        **known,
        engine=engine,
        path=_absolute(file),
        pattern=identity.get("pattern", ""),
        added=tuple(identity.get("special_ids", {}).items()),
        libraries=versions(engine),
    )


def _absolute(path: Path) -> str | RemotePath:
    return path if isinstance(path, RemotePath) else str(path.absolute())


def _in_folder(folder: Path) -> Path:
    """Return the file in a folder that contains the tokenizer."""
    with explained("list the folder of a tokenizer", folder):
        names = sorted(os.listdir(folder))
    if "tokenizer.json" in names:
        return folder / "tokenizer.json"
    others = [name for name in names if name.endswith((".model", ".tiktoken"))]
    if len(others) == 1:
        return folder / others[0]
    raise UsageError(
        "the folder has no tokenizer" if not others else "the folder has several tokenizers",
        path=str(folder),
        expected="tokenizer.json, or one file that ends in .model or .tiktoken",
        found=", ".join(others or names[:10]) or "nothing",
        fix="give the file; to make a tokenizer.json from vocab.json and merges.txt, or vocab.txt, "
        "use transformers' AutoTokenizer.from_pretrained and save_pretrained",
    )


def _fetched(name: str) -> Path:
    """Return the local folder of a hub repository's tokenizer, downloaded or from the cache."""
    from huggingface_hub import snapshot_download

    wanted = ["tokenizer.json", "*.model", "*.tiktoken", *_SIDECARS, "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # the hub's errors, those of its HTTP client, and ValueError
        raise UsageError(
            f"there is no file {name!r}, and it could not be downloaded from the Hugging Face hub",
            found=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            fix="check the name; without a network, give a tokenizer.json or its folder",
        ) from error


def _of_file(path: Path, special_tokens: str, eos_token: str | None) -> Tokenizer:
    data = fs.read(path)
    if data.lstrip()[:1] == b"{":
        return _huggingface(path, data, special_tokens, eos_token)
    if are_ranks(data):
        return _ranks(path, data, special_tokens, eos_token)
    if path.suffix == ".model":
        return _sentencepiece(path, data, special_tokens, eos_token)
    raise UsageError(
        "the file is not a tokenizer",
        path=str(path),
        expected="a tokenizer.json, a SentencePiece .model or a .tiktoken file",
        found=f"{len(data)} bytes that begin with {data[:16]!r}" if data else "an empty file",
    )


def _huggingface(path: Path, data: bytes, special_tokens: str, eos_token: str | None) -> Tokenizer:
    slow = engines.open_tokenizers(data, str(path.absolute()), special_tokens)
    document = json.loads(slow.to_str())
    model = document["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: pairs of a token and its score
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    added = {token["content"]: token["id"] for token in document["added_tokens"]}
    vocab = {**vocab, **added}
    ids, notes = _ids(vocab, added, named_beside(path), eos_token)
    fast: dict[str, Any] = {}
    try:
        found = bytelevel.settings(document, special_tokens)
        with ThreadPoolExecutor(1) as thread:  # both libraries release the interpreter lock
            measured = thread.submit(patterns.unsafe, found.pattern)
            bytelevel.prove(model, bytelevel.ranks(model, found.pattern))
        fast = {"pattern": found.pattern, "nfc": found.nfc, "unsafe": measured.result()}
        fast["added"] = tuple(found.added.items())
    except bytelevel.UnprovenError as why:
        notes.append(
            f"tokenizers is used instead of tiktoken, which is several times as fast: {why}"
        )
    libraries = ("tokenizers", "tiktoken") if fast else ("tokenizers",)
    return Tokenizer(
        kind="huggingface",
        engine=libraries[-1],
        path=_absolute(path),
        file="tokenizer.json",
        digest=digest(data),
        special_tokens=special_tokens,
        vocab_size=max(vocab.values(), default=-1) + 1,
        **ids,
        notes=tuple(notes),
        **fast,
        libraries=versions(*libraries),
    )


def _ranks(path: Path, data: bytes, special_tokens: str, eos_token: str | None) -> Tokenizer:
    """Load a file of ranks, whose name determines the split pattern and the special tokens."""
    facts = FACTS.get(path.stem)
    if facts is None:
        raise UsageError(
            "a file of tiktoken's ranks does not say how text is split, nor does its name",
            path=str(path),
            expected="a name such as " + ", ".join(f"{name}.tiktoken" for name in FACTS),
            fix="name it after its encoding, or use the tokenizer.json of the same model",
        )
    return _tiktoken(path.stem, str(path.absolute()), data, facts, special_tokens, eos_token)


def _of_encoding(name: str, special_tokens: str, eos_token: str | None) -> Tokenizer:
    import tiktoken

    data = encoding_data(name)
    encoding = tiktoken.get_encoding(name)
    pattern = FACTS[name].pattern if name in FACTS else encoding._pat_str
    facts = Facts(pattern, encoding._special_tokens)
    return _tiktoken(name, None, data, facts, special_tokens, eos_token)


def _tiktoken(
    name: str,
    path: str | None,
    data: bytes,
    facts: Facts,
    special_tokens: str,
    eos_token: str | None,
) -> Tokenizer:
    file = f"{name}.tiktoken"
    ranks, special = read_ranks(data, path or file), facts.special
    taken = set(ranks.values())
    whole = all(bytes([byte]) in ranks for byte in range(256)) and len(taken) == len(ranks)
    if not whole or not taken.isdisjoint(special.values()):
        raise UsageError(
            f"a file of tiktoken's ranks is incomplete, or not that of {name}, as its name says",
            path=path or file,
            expected="each of the 256 bytes, and other numbers than those of special tokens",
        )
    ids, notes = _ids(special, special, {}, eos_token)
    return Tokenizer(
        kind="tiktoken",
        engine="tiktoken",
        path=path,
        file=file,
        digest=digest(data),
        special_tokens=special_tokens,
        vocab_size=max(taken | set(special.values())) + 1,
        **ids,
        notes=tuple(notes),
        pattern=facts.pattern,
        added=tuple(special.items()),
        libraries=versions("tiktoken"),
    )


def _sentencepiece(
    path: Path, data: bytes, special_tokens: str, eos_token: str | None
) -> Tokenizer:
    processor = engines.open_sentencepiece(data, str(path))
    size = processor.get_piece_size()
    found = {"eos": processor.eos_id(), "bos": processor.bos_id(), "pad": processor.pad_id()}
    named = {name: processor.id_to_piece(index) for name, index in found.items() if index >= 0}
    vocab = {processor.id_to_piece(index): index for index in range(size)}
    ids, notes = _ids(vocab, {}, named, eos_token)
    if special_tokens == "special":
        notes.append("SentencePiece never encodes text of a document as one of its control tokens")
    return Tokenizer(
        kind="sentencepiece",
        engine="sentencepiece",
        path=str(path.absolute()),
        file="tokenizer.model",
        digest=digest(data),
        special_tokens=special_tokens,
        vocab_size=size,
        **ids,
        notes=tuple(notes),
        libraries=versions("sentencepiece"),
    )


def _ids(
    vocab: Mapping[str, int], added: Iterable[str], named: Mapping[str, str], eos_token: str | None
) -> tuple[dict[str, Any], list[str]]:
    """Return `eos_id`, `bos_id` and `pad_id`: given, named by a file or guessed; and notes."""
    if eos_token is not None and eos_token not in vocab:
        raise UsageError(
            f"eos_token is {eos_token!r}, which is not in the vocabulary",
            fix="name one of its tokens, such as " + ", ".join(list(added)[:5]) if added else None,
        )
    tokens = dict(named) if eos_token is None else {**named, "eos": eos_token}
    ids: dict[str, Any] = {}
    notes = []
    for name, usual in _USUAL.items():
        token = tokens.get(name)
        if token is None or token not in vocab:
            token = next((guess for guess in usual if guess in added), None)
            if name == "eos" and token is not None:
                notes.append(f"documents end with {token} ({vocab[token]}), going by its name")
        ids[f"{name}_id"] = None if token is None else vocab[token]
    if ids["eos_id"] is None:
        notes.append("no token that ends documents is known; set one with eos_token")
    return ids, notes


def named_beside(path: Path) -> dict[str, str]:
    """Return the tokens, such as eos, that the files next to a tokenizer.json name."""
    named: dict[str, str] = {}
    for content in (read_sidecar(path.with_name(name)) for name in _SIDECARS):
        for name in _NAMED:
            token = content.get(f"{name}_token")
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                named.setdefault(name, token)
    return named


def read_sidecar(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file next to a tokenizer; empty if there is no such file."""
    if not path.exists():
        return {}
    try:
        return checked(dict[str, Any], json.loads(fs.read(path)))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            "a file next to a tokenizer is not a JSON object", path=str(path), found=str(error)
        ) from error
