"""Make the corpus that the text benchmarks share, and a tokenizer for it.

    python tests/benchmarks/corpus.py TEXTS OUT --megabytes 250

TEXTS is any folder of text files. `OUT/corpus.jsonl` has documents of their paragraphs, drawn anew
for each document and with a number in each, so that no two are alike. `OUT/tokenizer.json` is a
byte-level BPE with 32,000 tokens and GPT-2's split pattern, trained on the texts.
"""

import argparse
import json
import random
from pathlib import Path

VOCABULARY = 32_000
END = "<|endoftext|>"
PARAGRAPHS = (1, 60)  # of a document


def paragraphs_of(texts):
    """What stands between empty lines, in all files."""
    found = []
    for path in sorted(texts.rglob("*.txt")):
        text = path.read_text("utf-8", errors="replace")
        found += [part for part in text.split("\n\n") if part.strip()]
    return found


def make_corpus(paragraphs, out, size):
    """Write about `size` bytes of JSON lines; returns how many documents they are."""
    draw = random.Random(0)
    written = documents = 0
    with out.open("w", encoding="utf-8") as file:
        while written < size:
            chosen = draw.choices(paragraphs, k=draw.randint(*PARAGRAPHS))
            text = f"{documents}. " + "\n\n".join(chosen)
            written += file.write(json.dumps({"id": documents, "text": text}) + "\n")
            documents += 1
    return documents


def make_tokenizer(paragraphs, out, vocabulary=VOCABULARY):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraphs, trainer)
    tokenizer.save(str(out))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=250)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found = paragraphs_of(options.texts)
    make_tokenizer(found, options.out / "tokenizer.json")
    total = make_corpus(found, options.out / "corpus.jsonl", options.megabytes * 10**6)
    print(f"{total} documents in {options.out / 'corpus.jsonl'}")
