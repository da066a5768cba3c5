"""Generated corpora."""

import json

from tokenizers import Tokenizer, models, pre_tokenizers

from tests.codecs import tokenizer_zoo


def write_lines(path, rows):
    """JSON Lines; a row that is text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_bytes("".join(line + "\n" for line in lines).encode())
    return path


def write_corpus(path, texts):
    """Documents with a number beside their text."""
    return write_lines(path, ({"text": text, "n": n} for n, text in enumerate(texts)))


def turns(*said):
    """A conversation; what the assistant says is at odd places."""
    return [
        {"role": "assistant" if number % 2 else "user", "content": " ".join(f"w{n}" for n in words)}
        for number, words in enumerate(said)
    ]


def few_words(size):
    """The tokenizer.json of a vocabulary of `size` words: w0, w1, ..."""
    vocab = {f"w{number}": number for number in range(size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return json.loads(tokenizer.to_str())


def prose(count, seed=1):
    """Documents in several scripts; one in fifty is empty."""
    texts = tokenizer_zoo.documents(count, seed)
    return ["" if n % 50 == 49 else text for n, text in enumerate(texts)]
