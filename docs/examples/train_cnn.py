"""Train a small CNN on images, with one process or several, and continue exactly after a stop.

    shardkit convert sample_data/images --to wds -o images
    python train_cnn.py images
    torchrun --nproc-per-node 2 train_cnn.py images --checkpoint two.pt
    torchrun --nproc-per-node 2 train_cnn.py images --checkpoint two.pt --resume --steps 200

The second run by torchrun goes on where the first one ended, or was killed: with the next sample,
and with the losses of a run that never stopped. Any number of processes may continue it that
divides the global batch. On GPUs, give the Loader a `device=` and move the model there.
"""

import argparse
import itertools
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # see destroy_process_group
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shardkit
from shardkit.torch import Loader

IMAGE = [
    shardkit.RandomResizedCrop(32, scale=(0.5, 1.0)),
    shardkit.RandomHorizontalFlip(),
    shardkit.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
]


def make_cnn(classes: int) -> nn.Module:
    """Norms go by sample, not by batch, so that the number of processes changes nothing."""
    layers = []
    for inputs, outputs in [(3, 16), (16, 32), (32, 64)]:
        layers.append(nn.Conv2d(inputs, outputs, kernel_size=3, stride=2, padding=1))
        layers += [nn.GroupNorm(4, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


def main() -> None:
    options = parse()
    torch.use_deterministic_algorithms(True)
    if not dist.is_torchelastic_launched():  # by torchrun
        train(options)
        return
    dist.init_process_group("gloo")
    train(options, dist.get_rank(), dist.get_world_size())
    # Ends torch's threads, which may otherwise abort the process when Python ends. It needs the
    # import of torch.distributed.nn before init_process_group, and a model that is gone, as here.
    dist.destroy_process_group()


def train(options: argparse.Namespace, rank: int = 0, processes: int = 1) -> None:
    # The Loader finds out by itself which rank it is, and gives this rank's share of each batch.
    dataset = shardkit.open(options.data)
    loader = Loader(
        dataset,
        global_batch_size=options.batch,
        shuffle=True,
        seed=options.seed,
        fields=["image", "label"],
        transforms={"image": IMAGE},
    )

    # The only random numbers of torch: a model with dropout must save torch.get_rng_state() too.
    torch.manual_seed(options.seed)
    net = make_cnn(len(dataset.classes))
    optimizer = torch.optim.AdamW(net.parameters(), lr=options.lr)
    step = 0
    if options.resume:
        saved = torch.load(options.checkpoint, weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    model = DistributedDataParallel(net) if processes > 1 else net

    for batch in itertools.islice(endless(loader), options.steps - step):
        # Padding, at the end of an epoch, does not count. Each process divides by what all of them
        # count together; the mean that DistributedDataParallel makes of gradients becomes a sum.
        weight = batch["valid"].float()
        losses = cross_entropy(model(batch["image"]), batch["label"], reduction="none")
        loss = (losses * weight).sum() / summed(weight.sum())
        optimizer.zero_grad()
        (loss * processes).backward()
        optimizer.step()
        step += 1

        mean = summed(loss.detach()).item()
        if rank == 0:
            report({"epoch": loader.epoch, "step": step, "loss": mean}, options.log_file)
        if rank == 0 and step % options.checkpoint_every == 0:  # all ranks have the same state
            save(
                options.checkpoint,
                step=step,
                model=net.state_dict(),
                optimizer=optimizer.state_dict(),
                loader=loader.state_dict(),
            )


def endless(loader):
    """Batches, epoch after epoch."""
    while True:
        yield from loader


def summed(value):
    """The sum of a tensor over all processes."""
    if dist.is_initialized():
        dist.all_reduce(value)
    return value


def report(line, log_file):
    print("epoch {epoch}  step {step}  loss {loss:.6f}".format(**line), flush=True)
    if log_file:
        with open(log_file, "a") as file:
            file.write(json.dumps(line) + "\n")


def save(path, **parts):
    """Write a checkpoint beside the last one and rename it: at any moment there is a whole one."""
    with open(f"{path}.new", "wb") as file:
        torch.save(parts, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(f"{path}.new", path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small CNN on images.")
    parser.add_argument("data", help="a dataset with the fields image and label")
    parser.add_argument("--steps", type=int, default=100, help="where to end")
    parser.add_argument("--batch", type=int, default=8, help="samples, of all processes together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="cnn.pt", help="the file to save to")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="continue at the checkpoint")
    parser.add_argument("--log-file", metavar="FILE", help="a line of JSON for each step, appended")
    return parser.parse_args()


if __name__ == "__main__":
    main()
