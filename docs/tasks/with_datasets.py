# The ten tasks of docs/coming-from.md with datasets (Hugging Face), torch and torchdata.
# ruff: noqa: F821 - train, validate, frame and bucket are yours

import os
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, Image, load_dataset
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler
from transformers import AutoTokenizer


# 1. Images in class folders
def prepare(batch):
    pixels = [np.asarray(image.convert("RGB").resize((64, 64))) for image in batch["image"]]
    return {**batch, "image": pixels}


photos = load_dataset("imagefolder", data_dir="photos", split="train")
for batch in DataLoader(photos.with_transform(prepare), batch_size=4, shuffle=True):
    train(batch["image"], batch["label"])

# 2. Labels in a CSV
table = load_dataset("csv", data_files="labels.csv", split="train").class_encode_column("label")
table = table.map(lambda row: {"image": f"flat/{row['file']}"}).cast_column("image", Image())
for batch in DataLoader(table.with_transform(prepare), batch_size=4, shuffle=True):
    train(batch["image"], batch["label"])

# 3. Captions
paths = sorted(Path("captioned").glob("*.jpg"))
texts = [path.with_suffix(".txt").read_text() for path in paths]
pairs = Dataset.from_dict({"image": [*map(str, paths)], "text": texts})
pairs = pairs.cast_column("image", Image()).with_transform(prepare)
for batch in DataLoader(pairs, batch_size=4, shuffle=True):
    train(batch["image"], batch["text"])

# 4. Chats, with a mask of what is learned
tokenizer = AutoTokenizer.from_pretrained("tokenizer")


def render(row):
    asked = {"return_dict": True, "return_assistant_tokens_mask": True}
    made = tokenizer.apply_chat_template(row["messages"], **asked)
    return {"tokens": made["input_ids"], "loss_mask": made["assistant_masks"]}


def pad(rows):
    names = ("tokens", "loss_mask")
    return {
        n: pad_sequence([torch.tensor(row[n]) for row in rows], batch_first=True) for n in names
    }


chats = load_dataset("json", data_files="chats.jsonl", split="train").map(render)
for batch in DataLoader(chats, batch_size=4, shuffle=True, collate_fn=pad):
    train(batch["tokens"], batch["loss_mask"])

# 5. A DataFrame
for batch in DataLoader(Dataset.from_pandas(frame).with_format("torch"), 4, shuffle=True):
    train(batch["x"], batch["label"])

# 6. Several ranks, and resuming
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
prepared = photos.with_transform(prepare)
sampler = StatefulDistributedSampler(prepared, num_replicas=ranks, rank=rank)
loader = StatefulDataLoader(prepared, batch_size=4, sampler=sampler)
for step, batch in enumerate(loader):
    train(batch["image"], batch["label"])
    if step == 1:
        torch.save(loader.state_dict(), "state.pt")
        break
sampler = StatefulDistributedSampler(prepared, num_replicas=ranks, rank=rank)
loader = StatefulDataLoader(prepared, batch_size=4, sampler=sampler)
loader.load_state_dict(torch.load("state.pt"))
for batch in loader:
    train(batch["image"], batch["label"])

# 7. A bucket, with a bounded local cache
far = load_dataset("parquet", data_files=f"{bucket}/parquet/*.parquet", split="train")
for batch in DataLoader(far.with_transform(prepare), batch_size=4, shuffle=True):
    train(batch["image"], batch["label"])

# 8. A filter
dogs = photos.filter(lambda label: label == 1, input_columns="label").with_transform(prepare)
for batch in DataLoader(dogs, batch_size=4, shuffle=True):
    train(batch["image"], batch["label"])

# 9. A split
parts = photos.with_transform(prepare).train_test_split(0.2, seed=0)
for batch in DataLoader(parts["train"], batch_size=4, shuffle=True):
    train(batch["image"], batch["label"])
for batch in DataLoader(parts["test"], batch_size=4):
    validate(batch["image"], batch["label"])

# 10. The first samples
for number in range(3):
    print(photos[number])
