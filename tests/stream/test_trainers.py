"""Lightning, Accelerate and transformers' Trainer continue inside an epoch, with other ranks too.

`main` is one rank: what it gets as it trains with each of them.
"""

import itertools
import logging
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardkit.torch import Loader
from tests.stream.data import write_tokens
from tests.stream.launch import launch

# Their imports take longer than the tests.
pytestmark = [pytest.mark.large, pytest.mark.xdist_group("trainers")]
SAMPLES, EPOCHS, STEPS = 37, 3, 5  # 5 steps of 8 samples are an epoch


class Seen(list):
    """What a training loop got: the epoch and the keys of each step, without padding."""

    def add(self, epoch, batch):
        valid = batch["valid"].tolist()
        real = [key for key, is_real in zip(batch["__key__"], valid, strict=True) if is_real]
        self.append((epoch, real))


def make_loader(data, **options):
    return Loader(data, global_batch_size=8, shuffle=True, threads=1, **options)


def loss_of(model, batch):
    return model(batch["tokens"].float()).mean()


def lightning(data, folder, stop=-1, loaders=None, **options):
    import lightning.pytorch as pl

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen = Seen()

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(16, 1)

        def train_dataloader(self):
            return make_loader(data) if loaders is None else loaders()

        def training_step(self, batch, number):
            batches = [batch] if loaders is None else list(batch.values())
            for each in batches:
                seen.add(self.current_epoch, each)
            return loss_of(self.layer, batches[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    saving = pl.callbacks.ModelCheckpoint(folder, filename="last", every_n_train_steps=max(stop, 1))
    world = dist.get_world_size() if dist.is_initialized() else 1
    trainer = pl.Trainer(
        max_epochs=EPOCHS, max_steps=stop, callbacks=[saving] if stop > 0 else [],
        accelerator="cpu", devices=world, strategy="ddp" if world > 1 else "auto", logger=False,
        enable_checkpointing=stop > 0, enable_progress_bar=False, enable_model_summary=False,
        **options,
    )  # fmt: skip
    last = folder / "last.ckpt"
    trainer.fit(Model(), ckpt_path=last if last.exists() else None)
    return seen


def accelerate(data, folder, stop=-1):
    from accelerate import Accelerator

    seen, accelerator = Seen(), Accelerator(cpu=True)
    layer = torch.nn.Linear(16, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.01))
    loader = make_loader(data)
    accelerator.register_for_checkpointing(loader)
    if folder.exists():
        accelerator.load_state(folder)
    while loader.epoch < EPOCHS and len(seen) != stop:
        for batch in loader:
            seen.add(loader.epoch, batch)
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if len(seen) == stop:
                accelerator.save_state(folder)
                break
        else:
            if loader.epoch == EPOCHS - 1:
                break
    return seen


def transformers(data, folder, stop=-1):
    from transformers import Trainer, TrainingArguments

    logging.getLogger("transformers").setLevel(logging.ERROR)
    seen = Seen()

    class OurTrainer(Trainer):
        def get_train_dataloader(self):
            return make_loader(data)

        def compute_loss(self, model, inputs, **_):
            seen.add(int(self.state.global_step // STEPS), inputs)
            return loss_of(model, inputs)

    arguments = TrainingArguments(
        output_dir=str(folder), num_train_epochs=EPOCHS, max_steps=stop, use_cpu=True,
        save_strategy="steps" if stop > 0 else "no", save_steps=max(stop, 1), report_to=[],
        logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    OurTrainer(torch.nn.Linear(16, 1), arguments).train(
        resume_from_checkpoint=any(folder.glob("checkpoint-*"))
    )
    return seen


TRAINING = {train.__name__: train for train in (lightning, accelerate, transformers)}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("trainers") / "tokens", samples=SAMPLES)


@pytest.fixture(scope="module")
def whole(data):
    """What comes without a stop."""
    loader, seen = make_loader(data), Seen()
    for epoch in range(EPOCHS):
        for batch in loader:
            seen.add(epoch, batch)
    return seen


@pytest.mark.filterwarnings("ignore")  # of theirs
@pytest.mark.parametrize("train", TRAINING.values(), ids=TRAINING)
def test_training_continues_with_the_next_sample(train, data, whole, tmp_path):
    """Inside the first epoch and a later one, and at an epoch's end."""
    assert train(data, tmp_path / "whole") == whole
    for stop in (2, STEPS, STEPS + 3):
        folder = tmp_path / str(stop)
        assert train(data, folder, stop) == whole[:stop]
        assert train(data, folder) == whole[stop:], f"stopped behind step {stop}"


@pytest.mark.filterwarnings("ignore")
def test_lightning_continues_a_shorter_loader_that_it_goes_through_twice_in_an_epoch(
    data, tmp_path
):
    short = write_tokens(tmp_path / "short", samples=17)  # 3 batches beside 5

    def loaders():
        return {"long": make_loader(data), "short": make_loader(short)}

    whole = lightning(data, tmp_path / "whole", loaders=loaders)
    assert len(whole) == 2 * EPOCHS * STEPS
    for stop in (2, 3, STEPS + 4):
        folder = tmp_path / str(stop)
        assert lightning(data, folder, stop, loaders=loaders) == whole[: 2 * stop]
        assert lightning(data, folder, loaders=loaders) == whole[2 * stop :], stop


@pytest.mark.filterwarnings("ignore")
def test_lightning_may_ask_for_a_loader_anew_in_each_epoch(data, whole, tmp_path):
    assert lightning(data, tmp_path, reload_dataloaders_every_n_epochs=1) == whole


@pytest.mark.filterwarnings("ignore")
def test_skipping_batches_reads_none_of_them(data, whole, monkeypatch):
    """Accelerate's skip_first_batches, by which Trainer continues."""
    from accelerate import PartialState, skip_first_batches

    from shardkit.stream.reading import Samples

    PartialState(cpu=True)
    loader = make_loader(data)
    loader.set_epoch(1)
    read, read_many = [], Samples.read_many
    monkeypatch.setattr(
        Samples, "read_many", lambda self, n, *most: read.append(n) or read_many(self, n, *most)
    )
    seen = Seen()
    rest = skip_first_batches(loader, 3)
    assert len(rest) == 2
    assert len(rest.dataset) == SAMPLES
    for batch in rest:
        seen.add(1, batch)
    assert seen == whole[STEPS + 3 : 2 * STEPS]
    assert len(read) == 2
    assert loader.state_dict()["samples"] == SAMPLES, "it counts as an epoch of the loader"
    assert next(iter(loader))["__key__"] == whole[2 * STEPS][1]


def prepare():
    import accelerate.accelerator
    import lightning.pytorch
    import transformers

    return accelerate, lightning, transformers.Trainer, transformers.TrainingArguments


def main(data, folder, stop):
    warnings.simplefilter("ignore")
    return {name: train(data, Path(folder, name), stop) for name, train in TRAINING.items()}


@pytest.mark.torchrun
def test_a_run_of_two_ranks_continues_with_any_number(data, tmp_path):
    """S1 and S4 over the epochs of both runs: each sample exactly once in each."""
    jobs = [[2, data, tmp_path, STEPS + 2], [1, data, tmp_path, -1], [4, data, tmp_path, -1]]
    # What all ranks together got, by the name of the library.
    before, *continued = (
        {
            name: Counter((epoch, k) for rank in ranks for epoch, keys in rank[name] for k in keys)
            for name in TRAINING
        }
        for ranks in launch(__name__, jobs)
    )
    expected = Counter((epoch, f"{n:04d}") for epoch in range(EPOCHS) for n in range(SAMPLES))
    for after, name in itertools.product(continued, TRAINING):
        assert before[name].total() == SAMPLES + 2 * 8, name
        assert before[name] + after[name] == expected, name
