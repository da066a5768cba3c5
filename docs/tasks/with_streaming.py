# The ten tasks of docs/coming-from.md with MosaicML Streaming (MDS) and torch.
# ruff: noqa: F821 - train, validate, frame and bucket are yours

import csv
import json
from pathlib import Path

import numpy as np
import PIL.Image
import torch
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Subset
from transformers import AutoTokenizer

# 1. Images in class folders
IMAGE = "ndarray:uint8:64,64,3"


def pixels(path):
    return np.array(PIL.Image.open(path).convert("RGB").resize((64, 64)))


with MDSWriter(out="photos-mds", columns={"image": IMAGE, "label": "int"}) as writer:
    for label, name in enumerate(["cat", "dog"]):
        for path in sorted(Path("photos", name).glob("*.jpg")):
            writer.write({"image": pixels(path), "label": label})
photos = StreamingDataset(local="photos-mds", shuffle=True, batch_size=4)
for batch in StreamingDataLoader(photos, batch_size=4):
    train(batch["image"], batch["label"])

# 2. Labels in a CSV
with MDSWriter(out="labelled-mds", columns={"image": IMAGE, "label": "int"}) as writer:
    for row in csv.DictReader(Path("labels.csv").read_text().splitlines()):
        label = ["cat", "dog"].index(row["label"])
        writer.write({"image": pixels(f"flat/{row['file']}"), "label": label})
labelled = StreamingDataset(local="labelled-mds", shuffle=True, batch_size=4)
for batch in StreamingDataLoader(labelled, batch_size=4):
    train(batch["image"], batch["label"])

# 3. Captions
with MDSWriter(out="captioned-mds", columns={"image": IMAGE, "text": "str"}) as writer:
    for path in sorted(Path("captioned").glob("*.jpg")):
        writer.write({"image": pixels(path), "text": path.with_suffix(".txt").read_text()})
captioned = StreamingDataset(local="captioned-mds", shuffle=True, batch_size=4)
for batch in StreamingDataLoader(captioned, batch_size=4):
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
        n: pad_sequence([torch.tensor(row[n]) for row in rows], batch_first=True) for n in names
    }


types = {"tokens": "ndarray:int64", "loss_mask": "ndarray:int64"}
with MDSWriter(out="chats-mds", columns=types) as writer:
    for line in Path("chats.jsonl").read_text().splitlines():
        writer.write(render(json.loads(line)))
chats = StreamingDataset(local="chats-mds", shuffle=True, batch_size=4)
for batch in StreamingDataLoader(chats, batch_size=4, collate_fn=pad):
    train(batch["tokens"], batch["loss_mask"])

# 5. A DataFrame
with MDSWriter(out="frame-mds", columns={"x": "float64", "label": "int"}) as writer:
    for row in frame.to_dict("records"):
        writer.write(row)
rows = StreamingDataset(local="frame-mds", shuffle=True, batch_size=4)
for batch in StreamingDataLoader(rows, batch_size=4):
    train(batch["x"], batch["label"])

# 6. Several ranks, and resuming
photos = StreamingDataset(local="photos-mds", shuffle=True, batch_size=4)
loader = StreamingDataLoader(photos, batch_size=4)
for step, batch in enumerate(loader):
    train(batch["image"], batch["label"])
    if step == 1:
        torch.save(loader.state_dict(), "state.pt")
        break
photos = StreamingDataset(local="photos-mds", shuffle=True, batch_size=4)
loader = StreamingDataLoader(photos, batch_size=4)
loader.load_state_dict(torch.load("state.pt"))
for batch in loader:
    train(batch["image"], batch["label"])

# 7. A bucket, with a bounded local cache
far = StreamingDataset(
    remote=f"{bucket}/mds", local="cache-mds", cache_limit="1gb", shuffle=True, batch_size=4
)
for batch in StreamingDataLoader(far, batch_size=4):
    train(batch["image"], batch["label"])

# 8. A filter
dogs = [number for number in range(len(photos)) if photos[number]["label"] == 1]
for batch in DataLoader(Subset(photos, dogs), batch_size=4, shuffle=True):
    train(batch["image"], batch["label"])

# 9. A split
for split in ("train", "val"):
    with MDSWriter(out=f"split-mds/{split}", columns={"image": IMAGE, "label": "int"}) as writer:
        for number in range(len(photos)):
            if (number % 5 == 0) == (split == "val"):
                writer.write(photos[number])
for split, use in (("train", train), ("val", validate)):
    part = StreamingDataset(local="split-mds", split=split, shuffle=True, batch_size=4)
    for batch in StreamingDataLoader(part, batch_size=4):
        use(batch["image"], batch["label"])

# 10. The first samples
for number in range(3):
    print(photos[number])
