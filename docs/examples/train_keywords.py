"""Train a small CNN on spoken commands, or on words made of tones: which one is it?

    pip install "shardkit[audio,torch]"
    python train_keywords.py words

The first run writes 120 short WAV files of three rates in four class folders, and converts them to
shards at 16 kHz. For Speech Commands (https://arxiv.org/abs/1804.03209), convert it once:

    shardkit convert speech_commands --to wds -o words/shards --sample-rate 16000 --mono

Clips of a second are decoded in the threads of the Loader; a spectrogram is made on the device.
"""

import argparse
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np
import soundfile
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shardkit
from shardkit.torch import Loader

RATE = 16_000
CLIP = [shardkit.RandomClip(1.0), shardkit.Mono(), shardkit.Resample(RATE)]
WORDS = {"down": (900, 300), "left": (300, 300), "right": (900, 900), "up": (300, 900)}  # Hz


def write_word(path: Path, tones: tuple[int, int], seed: int) -> None:
    """Two tones, one after the other, somewhere in 1.1 seconds of noise."""
    random = np.random.default_rng(seed)
    rate = (8000, 16_000, 44_100)[seed % 3]
    sound = random.normal(0, 0.05, rate * 11 // 10)
    time = np.arange(rate // 4) / rate
    start = random.integers(rate // 10, rate // 2)
    for tone in tones:
        hertz = tone * random.uniform(0.9, 1.1)
        sound[start : start + len(time)] += 0.3 * np.sin(2 * np.pi * hertz * time)
        start += len(time)
    soundfile.write(path, sound, rate)


def write_shards(folder: Path) -> Path:
    for word, tones in WORDS.items():
        (folder / "wav" / word).mkdir(parents=True, exist_ok=True)
        for seed in range(30):
            write_word(folder / "wav" / word / f"{seed}.wav", tones, seed)
    shardkit.convert(folder / "wav", "wds", folder / "shards", sample_rate=RATE, mono=True)
    return folder / "shards"


class Spectrogram(nn.Module):
    """The logarithm of the power of 128 bands, every 10 milliseconds."""

    def forward(self, audio: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(400, device=audio.device)
        spectrum = torch.stft(audio[:, 0], 512, 160, 400, window, return_complex=True)
        return (spectrum[:, None, :128].abs() ** 2 + 1e-6).log() / 10


def make_cnn(classes: int) -> nn.Module:
    layers: list[nn.Module] = [Spectrogram()]
    for inputs, outputs in [(1, 16), (16, 32), (32, 32)]:
        layers.append(nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1))
        layers += [nn.GroupNorm(4, outputs), nn.ReLU()]
    pooled = [nn.AdaptiveAvgPool2d((8, 4)), nn.Flatten()]
    return nn.Sequential(*layers, *pooled, nn.Linear(32 * 32, classes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where shards/ is, or will be")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    options = parser.parse_args()
    shards = options.folder / "shards"
    if not shards.exists():
        shards = write_shards(options.folder)

    torch.manual_seed(0)
    loader = Loader(shards, batch_size=options.batch, shuffle=True, transforms={"audio": CLIP})
    model = make_cnn(len(shardkit.open(shards).classes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches = chain.from_iterable(repeat(loader))  # epoch after epoch
    for step, batch in enumerate(islice(batches, options.steps), 1):
        scores = model(batch["audio"])
        loss = cross_entropy(scores, batch["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        right = (scores.argmax(dim=1) == batch["label"]).float().mean()
        print(f"step {step}  loss {loss:.4f}  right {right:.0%}", flush=True)


if __name__ == "__main__":
    main()
