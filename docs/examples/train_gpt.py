r"""Train a tiny GPT on blocks of tokens, with one process or several, and continue after a stop.

    shardkit convert sample_data/text/essays --to arrow -o blocks \
        --tokenizer tokenizer.json --seq-len 64
    python train_gpt.py blocks
    torchrun --nproc-per-node 2 train_gpt.py blocks --checkpoint two.pt
    torchrun --nproc-per-node 2 train_gpt.py blocks --checkpoint two.pt --resume --steps 200

docs/text.md trains such a tokenizer. The second run by torchrun goes on where the first one ended,
or was killed: with the next block, and with the losses of a run that never stopped. Any number of
processes may continue it that divides the global batch.

Blocks may be of documents or of conversations (docs/instruction-tuning.md). Of conversations, only
what the assistant says is learned.
"""

import argparse
import itertools
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.nn  # see destroy_process_group
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import shardkit
from shardkit.torch import Loader, documents


class GPT(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, tokens, positions, mask):
        x = self.tokens(tokens) + self.positions(positions)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, mask):
        rows = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = rows.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, width)
        seen = scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None])
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def inputs(batch):
    """Positions inside of documents, what a token may see, and which tokens are to be foretold."""
    found = documents(batch)
    document, position = found["segment_ids"], found["position_ids"]
    mask = (document[:, :, None] == document[:, None, :]).tril()
    # Nothing foretells a first token. Blocks that fill up the last batch do not count.
    counts = (document > 0) & (position > 0) & batch["valid"][:, None]
    if "loss_mask" in batch:  # conversations, of which only what the assistant says is learned
        counts &= batch["loss_mask"]
    return position, mask, counts


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
    loader = Loader(dataset, global_batch_size=options.batch, shuffle=True, seed=options.seed)

    # The only random numbers of torch: a model with dropout must save torch.get_rng_state() too.
    torch.manual_seed(options.seed)
    tokenizer, _ = dataset.tokenizer()
    net = GPT(tokenizer["vocab_size"], length=len(dataset[0]["tokens"]))
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
        position, mask, counts = inputs(batch)
        logits = model(batch["tokens"], position, mask)[:, :-1]
        labels = batch["tokens"].masked_fill(~counts, -100)[:, 1:]
        losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        # Each process divides by the tokens of all of them; the mean that DistributedDataParallel
        # makes of gradients becomes a sum.
        learned = summed(counts.sum())
        loss = losses / learned
        optimizer.zero_grad()
        (loss * processes).backward()
        optimizer.step()
        step += 1

        mean = summed(loss.detach()).item()
        if rank == 0:
            line = {"epoch": loader.epoch, "step": step, "loss": mean, "learned": learned.item()}
            report(line, options.log_file)
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
    parser = argparse.ArgumentParser(description="Train a tiny GPT on tokens.")
    parser.add_argument("data", help="a dataset of blocks of tokens")
    parser.add_argument("--steps", type=int, default=100, help="where to end")
    parser.add_argument("--batch", type=int, default=8, help="samples, of all processes together")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint", default="gpt.pt", help="the file to save to")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--resume", action="store_true", help="continue at the checkpoint")
    parser.add_argument("--log-file", metavar="FILE", help="a line of JSON for each step, appended")
    return parser.parse_args()


if __name__ == "__main__":
    main()
