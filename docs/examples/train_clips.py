"""Train a small 3D CNN on clips of videos: which way does the square move?

    pip install "shardkit[video,torch]"
    python train_clips.py clips

The first run writes 80 short MP4 files in four class folders, and converts them to shards. Clips
are decoded in the threads of the Loader, from the keyframes before them.
"""

import argparse
from itertools import chain, islice, repeat
from pathlib import Path

import av
import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shardkit
from shardkit.torch import Loader

WAYS = {"down": (0, 1), "left": (-1, 0), "right": (1, 0), "up": (0, -1)}
CLIP = [shardkit.SampleFrames(6, stride=1, random=True), shardkit.Resize(32)]


def write_video(path: Path, way: tuple[int, int], seed: int) -> None:
    """32 frames of a bright square that moves 2 pixels a frame, from anywhere, over noise."""
    random = np.random.default_rng(seed)
    x, y = random.integers(0, 64, 2)
    noise = random.integers(0, 64, (64, 64, 3), np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"g": "8"})
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for number in range(32):
            frame = noise.copy()
            frame[:16, :16] = 255
            frame = np.roll(frame, (y + 2 * number * way[1], x + 2 * number * way[0]), (0, 1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def write_shards(folder: Path) -> Path:
    for way, (x, y) in WAYS.items():
        (folder / "videos" / way).mkdir(parents=True, exist_ok=True)
        for seed in range(20):
            write_video(folder / "videos" / way / f"{seed}.mp4", (x, y), seed)
    shardkit.convert(folder / "videos", "wds", folder / "shards", overwrite=True)
    return folder / "shards"


def make_cnn(classes: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in [(3, 8), (8, 16)]:
        layers.append(nn.Conv3d(inputs, outputs, kernel_size=3, stride=(1, 2, 2), padding=1))
        layers += [nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, classes))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small 3D CNN on clips of videos.")
    parser.add_argument("folder", type=Path, help="where the videos and shards are, or are made")
    parser.add_argument("--steps", type=int, default=60, help="where to end")
    options = parser.parse_args()
    shards = options.folder / "shards"
    dataset = shardkit.open(shards if shards.exists() else write_shards(options.folder))
    loader = Loader(dataset, batch_size=16, shuffle=True, seed=0, transforms={"video": CLIP})

    torch.manual_seed(0)
    model = make_cnn(len(dataset.classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    for step, batch in enumerate(islice(batches, options.steps), 1):
        clips = batch["video"].movedim(2, 1)  # (batch, frames, 3, height, width): channels first
        scores = model((clips.float() / 127.5).diff(dim=2))  # what changes from frame to frame
        loss = cross_entropy(scores, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (scores.argmax(1) == batch["label"]).float().mean()
        print(f"step {step}  loss {loss.item():.3f}  right {right.item():.0%}", flush=True)


if __name__ == "__main__":
    main()
