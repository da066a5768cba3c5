"""Small tokenizers of every kind, trained on the spot, and text to train and to try them on."""

import base64
import functools
import io
import json
import random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# As they stand in the tokenizer.json of Llama 3, Qwen2 and GPT-4o.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
END = "<|endoftext|>"
SIZE = 2000

Json = dict[str, Any]


def documents(count=300, seed=0):
    """Made-up prose in several scripts, with numbers, contractions, code and odd spaces."""
    dice = random.Random(seed)
    letters = ["etaoinshrdlu"] * 2 + ["оеаинтсрвл", "的一是不了人我在", "éàüöñç", "ािकरनसत"]
    words = [
        "".join(dice.choices(alphabet, k=dice.randint(1, 9)))
        for alphabet in letters
        for _ in range(150)
    ]
    words += ["don't", "I'll", "WE'VE", "it’s", "😀", "👩‍👩‍👧", "def", "return", "==", "://", "..."]
    joints = [" "] * 12 + [", ", ". ", "\n", "\n\n", "    ", "\t", "\r\n", " - ", "  ", "\u00a0"]

    def document():
        chosen = dice.choices(words, k=dice.randint(5, 120))
        parts = [word if dice.random() > 0.1 else str(dice.randrange(10**6)) for word in chosen]
        return "".join(part.title() + dice.choice(joints) for part in parts)

    return [document() if n % 3 else document().lower() for n in range(count)]


def byte_level(pattern=None, nfc=False, size=SIZE):
    """Byte-level BPE; without a pattern, split as for GPT-2."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, tokenizer.pre_tokenizer])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return _trained(tokenizer, trainers.BpeTrainer, [END], size, initial_alphabet=alphabet)


def _trained(tokenizer, trainer, special, size=SIZE, **options):
    made = trainer(vocab_size=size, special_tokens=special, show_progress=False, **options)
    # Unigram takes long, and fewer have as many pieces.
    count = 100 if trainer is trainers.UnigramTrainer else 300
    tokenizer.train_from_iterator(documents(count), made)
    return tokenizer


def _qwen2():
    """With more added tokens, some of which are not special, as in chats."""
    tokenizer = byte_level(QWEN2, nfc=True)
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    return _json(tokenizer)


def _llama3():
    """Made from ranks, as Llama's was: every pair that joins to a token is listed as a merge."""
    document = _json(byte_level(LLAMA3))
    vocab = document["model"]["vocab"]
    del vocab[END]
    merges = document["model"]["merges"] = []
    for token in sorted(vocab, key=vocab.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if vocab.keys() >= {*pair}]
        merges += map(list, sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]])))
    document["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(document | {"added_tokens": []}))
    tokenizer.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"])
    return _json(tokenizer)


def _shuffled():
    """Merges in another order than their ids: only `tokenizers` can do it."""
    document = tokenizer_json("gpt2")
    random.Random(0).shuffle(document["model"]["merges"])
    return document


def _wordpiece():
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[EOS]"]
    return _json(_trained(tokenizer, trainers.WordPieceTrainer, special))


def _unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    return _json(_trained(tokenizer, trainers.UnigramTrainer, special, unk_token="<unk>"))


_MAKERS = {
    "gpt2": lambda: _json(byte_level()),
    "llama3": _llama3,
    "qwen2": _qwen2,
    "gpt4o": lambda: _json(byte_level(GPT4O)),
    "shuffled": _shuffled,
    "wordpiece": _wordpiece,
    "unigram": _unigram,
}
FAST = ("gpt2", "llama3", "qwen2", "gpt4o")
NAMES = tuple(_MAKERS)


def _json(tokenizer):
    return json.loads(tokenizer.to_str())


@functools.cache
def _text(name):
    return json.dumps(_MAKERS[name](), ensure_ascii=False)


def tokenizer_json(name):
    """One of `NAMES`, as the content of its tokenizer.json, to be changed at will."""
    return json.loads(_text(name))


def write_json(folder, document):
    """Writes tokenizer.json into a folder; `document` may be one of `NAMES`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    content = _text(document) if isinstance(document, str) else json.dumps(document)
    path.write_text(content, encoding="utf-8")
    return path


@functools.cache
def ranks(pattern=LLAMA3):
    """What tiktoken would be given; the same merges as `byte_level` has. Not to be changed."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    no_progress = [byte for byte in range(256) if byte not in seen]
    stands_for = {chr(byte): byte for byte in seen}
    stands_for |= {chr(0x100 + i): byte for i, byte in enumerate(no_progress)}
    vocab = _json(byte_level(pattern))["model"]["vocab"]
    del vocab[END]
    return {bytes(stands_for[c] for c in token): number for token, number in vocab.items()}


def write_ranks(path, pattern=LLAMA3):
    """A file of tiktoken's ranks, which has to have the name of an encoding."""
    by_rank = sorted(ranks(pattern).items(), key=lambda item: item[1])
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in by_rank)
    path.write_bytes(b"".join(lines))
    return path


@functools.cache
def sentencepiece_model(kind="unigram"):
    """A .model file of the `sentencepiece` library."""
    from sentencepiece import SentencePieceTrainer

    file, lines = io.BytesIO(), (line for text in documents() for line in text.splitlines())
    options = {"model_type": kind, "vocab_size": 1000, "byte_fallback": True, "minloglevel": 2}
    SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=file, **options)
    return file.getvalue()
