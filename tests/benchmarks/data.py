"""Make the data that the benchmarks share, of your own.

    python -m tests.benchmarks.data photos PHOTOS OUT --samples 50000
    python -m tests.benchmarks.data photos PHOTOS OUT --samples 20000 --as-they-are
    python -m tests.benchmarks.data corpus TEXTS OUT --megabytes 250

PHOTOS is any folder of images, which become 256 px large on the short side, about 28 kB each. Each
repeat of a photo is cut at another pixel, so that no store can fold repeats into one. Classes are
folders, one per original photo. With `--as-they-are` the files are copied whole, for benchmarks
that resize them.

TEXTS is any folder of text files. `OUT/corpus.jsonl` has documents of their paragraphs, drawn anew
for each document and with a number in each, so that no two are alike. `OUT/tokenizer.json` is a
byte-level BPE with 32,000 tokens and GPT-2's split pattern, trained on the texts. `OUT/chats.jsonl`
is about as large, of conversations of the same paragraphs, for the chat template beside it.
"""

import json
import random
import sys
from functools import partial
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from tests.benchmarks.harness import arguments

SHORT_SIDE = 256
QUALITY = 90
STEP = 13  # cuts per axis: 13 x 13 = 169 different repeats


def make_photos(photos, out, samples, *, as_they_are=False):
    """Write `samples` files to `out/<class>/<repeat>.jpg`; returns their bytes."""
    paths = [path for path in sorted(photos.rglob("*")) if path.is_file()]
    repeats = -(-samples // len(paths))
    if repeats > STEP * STEP and not as_they_are:
        raise SystemExit(f"{samples} samples need {repeats} repeats; at most {STEP * STEP} differ")
    originals = [partial(_whole, path) if as_they_are else _cuts(path) for path in paths]
    written = 0
    for number in range(samples):
        repeat, photo = divmod(number, len(paths))
        file = out / f"{photo:04d}/{repeat:03d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        written += file.write_bytes(originals[photo](repeat))
    return written


def _whole(path, repeat):
    return path.read_bytes()


def _cuts(path):
    with Image.open(path) as image:
        scale = min(SHORT_SIDE / min(image.size), 1)
        size = (round(image.width * scale), round(image.height * scale))
        pixels = np.asarray(image.convert("RGB").resize(size, Image.Resampling.BOX))

    def cut(repeat):
        part = np.ascontiguousarray(pixels[repeat % STEP :, repeat // STEP :])
        return simplejpeg.encode_jpeg(part, QUALITY, "RGB", "420")

    return cut


VOCABULARY = 32_000
END = "<|endoftext|>"
PARAGRAPHS = (1, 60)  # of a document
TURNS = ("<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.role == 'assistant' %}"
    "{% generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}"
    "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}{{- '\n' }}{%- endfor %}"
)


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


def make_chats(paragraphs, out, size):
    """Write about `size` bytes of JSON lines with `messages`; returns how many there are."""
    draw = random.Random(1)
    written = chats = 0
    with out.open("w", encoding="utf-8") as file:
        while written < size:
            turns = [{"role": "system", "content": f"Conversation {chats}."}]
            for role in ("user", "assistant") * draw.randint(1, 5):
                turns.append({"role": role, "content": draw.choice(paragraphs)})
            written += file.write(json.dumps({"messages": turns}) + "\n")
            chats += 1
    return chats


def make_tokenizer(paragraphs, out):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END, *TURNS], **options)
    tokenizer.train_from_iterator(paragraphs, trainer)
    tokenizer.save(str(out))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    out.with_name("tokenizer_config.json").write_text(json.dumps(about), "utf-8")


def main(words):
    parser = arguments(__doc__)
    parser.add_argument("what", choices=("photos", "corpus"))
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--as-they-are", action="store_true")
    parser.add_argument("--megabytes", type=float, default=250)
    given = parser.parse_args(words)
    if given.what == "photos":
        more = {"as_they_are": given.as_they_are}
        total = make_photos(given.source, given.out, given.samples, **more)
        return f"{given.samples} photos, {total / given.samples:.0f} bytes each, in {given.out}"
    given.out.mkdir(parents=True, exist_ok=True)
    found = paragraphs_of(given.source)
    make_tokenizer(found, given.out / "tokenizer.json")
    total = make_corpus(found, given.out / "corpus.jsonl", given.megabytes * 10**6)
    make_chats(found, given.out / "chats.jsonl", given.megabytes * 10**6)
    return f"{total} documents in {given.out / 'corpus.jsonl'}"


if __name__ == "__main__":
    print(main(sys.argv[1:]))
