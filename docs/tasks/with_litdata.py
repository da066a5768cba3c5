# The ten tasks of docs/coming-from.md with LitData and torch.
# ruff: noqa: F821 - train, validate, frame and bucket are yours

import csv
import json
from pathlib import Path

import litdata
import numpy as np
import PIL.Image
import torch
from litdata import StreamingDataLoader, StreamingDataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Subset
from transformers import AutoTokenizer


# 1. Images in class folders
def pixels(path):
    return np.array(PIL.Image.open(path).convert("RGB").resize((64, 64)))


def photo(path):
    return {"image": pixels(path), "label": ["cat", "dog"].index(Path(path).parent.name)}


paths = sorted(map(str, Path("photos").glob("*/*.jpg")))
litdata.optimize(photo, paths, "photos-lit", chunk_bytes="64MB")
photos = StreamingDataset("photos-lit", shuffle=True)
for batch in StreamingDataLoader(photos, batch_size=4):
    train(batch["image"], batch["label"])


# 2. Labels in a CSV
def labelled(row):
    label = ["cat", "dog"].index(row["label"])
    return {"image": pixels(f"flat/{row['file']}"), "label": label}


rows = list(csv.DictReader(Path("labels.csv").read_text().splitlines()))
litdata.optimize(labelled, rows, "labelled-lit", chunk_bytes="64MB")
for batch in StreamingDataLoader(StreamingDataset("labelled-lit", shuffle=True), batch_size=4):
    train(batch["image"], batch["label"])


# 3. Captions
def captioned(path):
    return {"image": pixels(path), "text": Path(path).with_suffix(".txt").read_text()}


paths = sorted(map(str, Path("captioned").glob("*.jpg")))
litdata.optimize(captioned, paths, "captioned-lit", chunk_bytes="64MB")
for batch in StreamingDataLoader(StreamingDataset("captioned-lit", shuffle=True), batch_size=4):
    train(batch["image"], batch["text"])

# 4. Chats, with a mask of what is learned
tokenizer = AutoTokenizer.from_pretrained("tokenizer")


def render(row):
    asked = {"return_dict": True, "return_assistant_tokens_mask": True}
    made = tokenizer.apply_chat_template(row["messages"], **asked)
    return {"tokens": np.array(made["input_ids"]), "loss_mask": np.array(made["assistant_masks"])}


def pad(rows):
    names = ("tokens", "loss_mask")
    return {
        n: pad_sequence([torch.as_tensor(row[n]) for row in rows], batch_first=True) for n in names
    }


rows = [json.loads(line) for line in Path("chats.jsonl").read_text().splitlines()]
litdata.optimize(render, rows, "chats-lit", chunk_bytes="64MB")
chats = StreamingDataset("chats-lit", shuffle=True)
for batch in StreamingDataLoader(chats, batch_size=4, collate_fn=pad):
    train(batch["tokens"], batch["loss_mask"])


# 5. A DataFrame
def same(row):
    return row


litdata.optimize(same, frame.to_dict("records"), "frame-lit", chunk_bytes="64MB")
for batch in StreamingDataLoader(StreamingDataset("frame-lit", shuffle=True), batch_size=4):
    train(batch["x"], batch["label"])

# 6. Several ranks, and resuming
loader = StreamingDataLoader(StreamingDataset("photos-lit", shuffle=True), batch_size=4)
for step, batch in enumerate(loader):
    train(batch["image"], batch["label"])
    if step == 1:
        torch.save(loader.state_dict(), "state.pt")
        break
loader = StreamingDataLoader(StreamingDataset("photos-lit", shuffle=True), batch_size=4)
loader.load_state_dict(torch.load("state.pt"))
for batch in loader:
    train(batch["image"], batch["label"])

# 7. A bucket, with a bounded local cache
far = StreamingDataset(f"{bucket}/litdata", cache_dir="cache", max_cache_size="1GB", shuffle=True)
for batch in StreamingDataLoader(far, batch_size=4):
    train(batch["image"], batch["label"])

# 8. A filter
dogs = [number for number in range(len(photos)) if photos[number]["label"] == 1]
for batch in DataLoader(Subset(photos, dogs), batch_size=4, shuffle=True):
    train(batch["image"], batch["label"])

# 9. A split
first, second = litdata.train_test_split(photos, splits=[0.8, 0.2])
for batch in StreamingDataLoader(first, batch_size=4):
    train(batch["image"], batch["label"])
for batch in StreamingDataLoader(second, batch_size=4):
    validate(batch["image"], batch["label"])

# 10. The first samples
for number in range(3):
    print(photos[number])
