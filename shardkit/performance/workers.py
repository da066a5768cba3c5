"""What the doctor can say of a DataLoader of torch, which loads in processes."""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from shardkit.errors import UsageError
from shardkit.performance.findings import LEAST, Finding
from shardkit.performance.probes import Rate, interleaved, rate_of
from shardkit.stream import dataset as streaming

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from shardkit.stream.loader import Loader


def is_dataloader(source: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.utils.data.DataLoader)


def loader_like(dataloader: DataLoader[Any]) -> Loader:
    """A Loader that makes the same batches with threads.

    Raises UsageError for a DataLoader of something else than our datasets.
    """
    from shardkit.torch import Loader

    dataset: Any = dataloader.dataset
    if not isinstance(dataset, streaming.StreamingDataset):
        raise UsageError(
            "the DataLoader does not load a dataset of shardkit",
            expected="a shardkit.torch.StreamingDataset in it",
            found=type(dataset).__name__,
            fix="`shardkit bench PATH --peers` compares with other ways to load",
        )
    if not dataset.options.batched:
        dataset = dataset.with_options(batch_size=dataloader.batch_size)
    return Loader(dataset)


def dataloader_like(
    loader: Loader, workers: int, *, persistent: bool = True, single: DataLoader[Any] | None = None
) -> DataLoader[Any]:
    """A DataLoader that makes the same batches with processes.

    `single` is one that puts single samples into batches itself, which is done in the same way.
    """
    from torch.utils.data import DataLoader

    from shardkit.torch import StreamingDataset

    options = dict(vars(loader.dataset.options))
    batching: dict[str, Any] = {"batch_size": None}
    if single is not None:
        options["batch_size"] = None
        batching = {"batch_size": single.batch_size, "collate_fn": single.collate_fn}
    return DataLoader(
        StreamingDataset(loader.dataset.source, **options),
        **batching,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
    )


@dataclass(frozen=True)
class Workers:
    """A DataLoader that was measured, and what would be faster."""

    now: Rate
    findings: list[Finding]


def examine(
    dataloader: DataLoader[Any], loader: Loader, processors: int, seconds: float
) -> Workers:
    """Measure it beside what it could be: `loader` is the Loader that is like it."""
    number, persistent = dataloader.num_workers, dataloader.persistent_workers
    made: dict[str, DataLoader[Any] | Loader] = {
        "now": dataloader_like(
            loader,
            number,
            persistent=persistent,
            single=dataloader if dataloader.batch_size else None,
        ),
        "threads": loader,
        "workers": dataloader_like(loader, processors),
    }
    runs = {name: partial(rate_of, one, seconds / 3) for name, one in made.items()}
    rates = {name: _median(some) for name, some in interleaved(runs).items()}
    now = rates["now"]
    processes = "1 worker" if number == 1 else f"{number} workers"
    is_now = f"a DataLoader with {processes} gives {now.rate:,.0f} samples/s"
    findings = [
        Finding(
            "workers",
            f"{is_now}; a Loader, whose threads write into the batch, gives "
            f"{rates['threads'].rate:,.0f}",
            "use shardkit.torch.Loader in its place",
            rate=rates["threads"].rate,
            gain=rates["threads"].rate / now.rate,
        ),
        Finding(
            "workers",
            f"{is_now}; with batches made inside, and {processors} workers, "
            f"{rates['workers'].rate:,.0f}",
            f"StreamingDataset(..., batch_size=) in DataLoader(batch_size=None, "
            f"num_workers={processors}, persistent_workers=True)",
            rate=rates["workers"].rate,
            gain=rates["workers"].rate / now.rate,
            settings={"workers": processors},
        ),
    ]
    if number and not persistent:
        findings.append(_persistent(loader, now, rates["workers"]))
    return Workers(now, [finding for finding in findings if finding.gain >= LEAST])


def _median(rates: list[Rate]) -> Rate:
    """Of all, but for the start: the first one starts workers that may stay."""
    return Rate(statistics.median(one.rate for one in rates), min(one.start for one in rates))


def _persistent(loader: Loader, now: Rate, kept: Rate) -> Finding:
    """Workers that are started for each epoch."""
    epoch = len(loader.dataset.stream.samples) / loader.dataset.world().size / now.rate
    lost = max(now.start - kept.start, 0.0)
    return Finding(
        "workers",
        f"workers start anew for each epoch: {lost:.1f} s before {epoch:.1f} s of loading",
        "DataLoader(..., persistent_workers=True)",
        gain=(epoch + lost) / epoch,
    )
