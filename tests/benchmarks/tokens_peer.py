"""One way to tokenize a corpus, run in a process and an environment of its own.

    python tokens_peer.py datasets CORPUS TOKENIZER OUT

All read `text` of JSON lines, end documents by the tokenizer's end, cut the run of tokens into
blocks of 1,024 and store those. Prints {"tokens": ...}.

datasets         `map(batched=True, num_proc=2)`, tokens and blocks in one function; then saved
encode_batch     tokenizers' own threads, 1,000 documents at a time; blocks appended to a file
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 1024
BATCH = 1000
END = "<|endoftext|>"


def load(path: str) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path)


def with_datasets(corpus: str, tokenizer: str, out: str) -> int:
    import datasets

    encoder = load(tokenizer)
    end = encoder.token_to_id(END)

    def blocks(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = encoder.encode_batch(batch["text"], add_special_tokens=False)
        run = [token for document in encoded for token in (*document.ids, end)]
        return {"tokens": [run[n : n + BLOCK] for n in range(0, len(run), BLOCK)]}

    data = datasets.load_dataset("json", data_files=corpus, split="train", cache_dir=f"{out}-cache")
    features = datasets.Features({"tokens": datasets.List(datasets.Value("uint16"))})
    made = data.map(
        blocks, batched=True, num_proc=2, remove_columns=data.column_names, features=features
    )
    made.save_to_disk(out)
    return sum(len(tokens) for batch in made.iter(1000) for tokens in batch["tokens"])


def texts(corpus: str) -> Iterator[list[str]]:
    batch = []
    with open(corpus, encoding="utf-8") as lines:
        for line in lines:
            batch.append(json.loads(line)["text"])
            if len(batch) == BATCH:
                yield batch
                batch = []
    yield batch


def with_batches(corpus: str, tokenizer: str, out: str) -> int:
    import numpy as np

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    encoder = load(tokenizer)
    end, total = encoder.token_to_id(END), 0
    with open(out, "wb") as file:
        for batch in texts(corpus):
            encoded = encoder.encode_batch(batch, add_special_tokens=False)
            run = np.fromiter((t for d in encoded for t in (*d.ids, end)), np.uint16)
            run.tofile(file)
            total += len(run)
    return total


PEERS = {"datasets": with_datasets, "encode_batch": with_batches}

if __name__ == "__main__":
    name, *words = sys.argv[1:]
    Path(words[2]).parent.mkdir(parents=True, exist_ok=True)
    print(json.dumps({"tokens": PEERS[name](*words)}))
