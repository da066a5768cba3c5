"""Torch's doors: tensors, DataLoader with any workers, torchdata, and what others would split."""

import contextlib
import copy
import functools
import itertools
import json
import pickle
import time
import weakref
from collections import Counter, namedtuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

import shardkit
from shardkit.errors import DamagedError, ShardkitWarning, UsageError
from shardkit.stream import torch_loader
from shardkit.torch import Loader, StreamingDataset
from tests.stream.data import (
    keys,
    photo,
    real_keys,
    same,
    with_states,
    write,
    write_documents,
    write_photos,
    write_tokens,
)

CROP = {"image": [shardkit.RandomResizedCrop(16), shardkit.RandomHorizontalFlip()]}
SHUFFLED = {"shuffle": True, "batch_size": 5}
in_workers = functools.partial(DataLoader, batch_size=None)


def first(path, **options):
    return next(iter(Loader(path, **{"batch_size": 4, **options})))


def test_images_are_channels_last_tensors_of_the_same_memory(photos):
    batch = first(photos, transforms=CROP, device="cpu")
    image = batch["image"]
    assert (image.shape, image.dtype) == ((4, 3, 16, 16), torch.uint8)
    assert image.is_contiguous(memory_format=torch.channels_last)
    assert (batch["label"].dtype, batch["valid"].dtype) == (torch.int64, torch.bool)
    assert image.device == torch.device("cpu")
    assert isinstance(batch["__key__"], list)
    arrays = first(photos, transforms=CROP, to="numpy")["image"]
    assert (image.permute(0, 2, 3, 1).numpy() == arrays).all()

    def collate(samples):  # decides the layout
        return {"image": np.stack([s["image"] for s in samples]).transpose(0, 3, 1, 2)}

    assert same(first(photos, transforms=CROP, collate=collate)["image"], image)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_normalized_images_are_what_torch_makes_of_the_pixels(photos, dtype):
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.25)
    normalize = shardkit.Normalize(mean, std, dtype=dtype)
    plain = first(photos, transforms=CROP)["image"]
    made = first(photos, transforms={"image": [*CROP["image"], normalize]})["image"]
    assert made.dtype == getattr(torch, dtype)
    assert made.is_contiguous(memory_format=torch.channels_last)
    shift, scale = (torch.tensor(values).view(1, 3, 1, 1) for values in (mean, std))
    expected = (plain.float() / 255 - shift) / scale
    assert torch.allclose(made.float(), expected, atol=1e-6 if dtype == "float32" else 0.02)


def test_tokens_become_integers_that_torch_can_count_with(tmp_path):
    tokens = first(write_tokens(tmp_path / "t"))["tokens"]
    assert (tokens.dtype, tokens.shape) == (torch.int64, (4, 16))
    assert first(tmp_path / "t", to="numpy")["tokens"].dtype == np.uint16
    ragged = first(write_documents(tmp_path / "d", [3, 5, 2, 9]))["tokens"]
    assert ragged[0].tolist() == [0, 1, 2]
    assert all(tokens.dtype == torch.int64 for tokens in ragged)
    padded = first(tmp_path / "d", collate=shardkit.pad_collate(multiple_of=4))
    assert padded["tokens"].shape == (4, 12)
    assert padded["attention_mask"].sum().item() == 19


def test_a_device_and_page_locked_memory_are_for_tensors(photos):
    for options, words in [
        ({"to": "numpy", "device": "cpu"}, "cannot be used with"),
        ({"to": "jax"}, "to must be one of"),
        *[({"device": d}, f"there is no device '{d}'") for d in ("cuda:99", "gpu", "mps:3")],
    ]:
        with pytest.raises(UsageError, match=words):
            Loader(photos, batch_size=4, **options)
    if not torch.cuda.is_available():
        with pytest.warns(ShardkitWarning, match="no GPU"):
            assert len(list(Loader(photos, batch_size=4, pin_memory=True))) == 10


@pytest.fixture
def locked(monkeypatch):
    """Torch's page-locked memory in use. It needs a GPU, so here, all is real but the locking."""
    used = []  # each ends when torch could use the memory again

    def alive():
        return [memory for one in used if (memory := one()) is not None]

    def empty(size, dtype, pin_memory):
        assert pin_memory
        memory = np.empty(size, np.uint8)
        used.append(weakref.ref(memory))
        return torch.from_numpy(memory)

    def copied(tensor):
        memory = empty(max(tensor.nbytes, tensor.itemsize), torch.uint8, True).view(tensor.dtype)
        return memory[: tensor.numel()].view(tensor.shape).copy_(tensor)

    def is_locked(tensor):
        """Only in memory of torch's own does it know of copies that read from it."""
        start = tensor.untyped_storage().data_ptr()
        return any(memory.ctypes.data == start for memory in alive())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.Tensor, "is_pinned", is_locked)
    monkeypatch.setattr(torch.Tensor, "pin_memory", copied)
    return alive


def test_page_locked_memory_is_used_again_when_nothing_refers_to_a_batch(photos, locked):
    options = {"batch_size": 4, "transforms": CROP, "shuffle": True}
    plain = Loader(photos, **options)
    loader = Loader(photos, pin_memory=True, threads=2, **options)
    for _ in range(2):
        held, expected = list(loader), list(plain)
        assert same(held, expected)
        views = [batch["image"][1:, :, ::2] for batch in held]
        del held
        list(loader), list(plain)
        for view, batch in zip(views, expected, strict=True):
            assert (view == batch["image"][1:, :, ::2]).all()
        assert len(locked()) == len(views)
        del view, views
        assert not locked()


Named = namedtuple("Named", "only")
ELSEWHERE = torch.ones(1, device="meta")  # only memory of the CPU can be page-locked


def nested(samples):
    """What detection models take: a dict for each image, and more."""
    numbers = [len(sample["__key__"]) + n for n, sample in enumerate(samples)]
    targets = [{"boxes": np.full((n, 4), n), "ids": np.arange(n, dtype=np.uint16)} for n in numbers]
    return {
        "label": torch.tensor(numbers),
        "elsewhere": ELSEWHERE,
        "targets": targets,
        "more": {"deep": [[np.ones(3)[::-1]]], "pair": (torch.ones(2), 7), "n": Named(np.ones(2))},
        "names": np.array(["a", "b"]),
        "ids": [1, 2],
    }


CUT = {("image", "boxes", "categories"): [shardkit.RandomResizedCrop(16)]}
WAYS = {
    "rows": ("photos", {"batch_size": 4, "transforms": CROP}),
    "lists of images": ("photos", {"batch_size": 4, "transforms": {"image": shardkit.Resize(16)}}),
    "boxes": ("detection", {"batch_size": 4, "transforms": CUT}),
    "collate": ("photos", {"batch_size": 4, "collate": nested}),
    "tokens": ("documents", {"batch_size": 4}),
    "padded": ("documents", {"batch_size": 4, "collate": shardkit.pad_collate()}),
    "Pack": ("documents", {"batching": shardkit.Pack(8, 2)}),
    "Bucket": ("documents", {"batching": shardkit.Bucket(4, [4, 8])}),
    "Dynamic": ("documents", {"batching": shardkit.Dynamic(20)}),
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
    return write_documents(tmp_path_factory.mktemp("torch") / "documents", [3, 5, 2, 7] * 5)


@pytest.fixture(scope="module")
def detection(tmp_path_factory):
    boxes, categories = shardkit.Array("float32", (None, 4)), shardkit.Array("int64", (None,))
    schema = {"image": shardkit.Image(), "boxes": boxes, "categories": categories}
    samples = (
        {"image": photo(n), "boxes": np.full((m, 4), 20, np.float32), "categories": np.arange(m)}
        for n in range(12)
        for m in [1 + n % 3]
    )
    return write(tmp_path_factory.mktemp("torch") / "detection", "wds", schema, samples)


@pytest.fixture(params=WAYS)
def way(request):
    """A dataset and options of each way to make batches."""
    dataset, options = WAYS[request.param]
    return request.getfixturevalue(dataset), options


def all_in(batches, kind):
    return [value for value in tree_leaves(batches) if isinstance(value, kind)]


def test_no_array_is_left_in_a_batch_and_every_tensor_is_moved(way):
    path, options = way
    batch = next(iter(Loader(path, device="meta", **options)))
    arrays = all_in(batch, np.ndarray)
    assert all(array.tolist() == ["a", "b"] for array in arrays)  # no tensor can hold text
    tensors = all_in(batch, torch.Tensor)
    assert len(tensors) > 1
    assert all(tensor.is_meta for tensor in tensors)


def test_every_tensor_is_in_page_locked_memory_of_its_own(way, locked):
    path, options = way

    def tensors(**more):
        every = all_in(list(Loader(path, threads=2, **options, **more)), torch.Tensor)
        return [tensor for tensor in every if not tensor.is_meta]

    held = tensors(pin_memory=True) + tensors(pin_memory=True)
    assert all(tensor.is_pinned() for tensor in held)
    places = sorted((tensor.untyped_storage().data_ptr(), tensor.nbytes) for tensor in held)
    assert all(one + size <= other for (one, size), (other, _) in itertools.pairwise(places))
    assert all(map(torch.equal, held, 2 * tensors()))


def test_copies_to_a_gpu_are_waited_for_by_its_stream_and_keep_their_source(monkeypatch):
    """By what is done to a GPU's streams and events, in order, where there is no GPU."""
    gpu, done = Mock(), []
    gpu.record_event.side_effect = lambda: done.append("event") or gpu
    gpu.wait_event.side_effect = lambda event: done.append("wait for event")
    gpu.query.return_value = False  # the copy is not finished

    def copied(tensor):
        done.append("copy")
        tensor = tensor.clone()
        tensor.record_stream = lambda stream: done.append("used on current")
        return tensor

    def moved(value, device):
        return torch_loader._each(value, torch.Tensor, copied)

    def stream(own):
        done.append("on own stream")
        return contextlib.nullcontext()

    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr("shardkit.stream.torch_loader._moved", moved)
    copies = torch_loader._Copies(torch.device("cuda", 0))
    batch = {"image": torch.ones(2, 3), "__key__": ["a", "b"]}
    begun = copies.begun(batch)
    assert done == ["on own stream", "copy", "event"]
    assert list(copies.finished(begun)) == ["image", "__key__"]
    assert done[3:] == ["wait for event", "used on current"]
    source = weakref.ref(batch["image"])
    del batch
    assert source() is not None, "the copy may still read from it"
    gpu.query.return_value = True
    copies.finished(copies.begun({"image": torch.ones(1)}))
    assert source() is None


@pytest.mark.parametrize(
    ("start_method", "persistent", "more"),
    [
        ("fork", False, {}),
        ("fork", True, {"sampling": shardkit.Balanced([n % 5 for n in range(37)])}),
        *(
            pytest.param(*case, {}, marks=pytest.mark.large)
            for case in [("forkserver", False), ("forkserver", True), ("spawn", True)]
        ),
    ],
    indirect=["start_method"],
)
@pytest.mark.usefixtures("start_method")
def test_workers_of_a_dataloader_change_nothing_and_count_epochs(photos, persistent, more):
    """S3: batches are made inside; the order is that of the Loader, epoch by epoch."""
    options = {"transforms": CROP, **SHUFFLED, **more}
    loader = Loader(photos, **options)
    expected = [list(loader) for _ in range(3)]
    data = in_workers(
        StreamingDataset(photos, **options), num_workers=2, persistent_workers=persistent
    )
    assert len(data) == len(expected[0])
    for epoch in expected:
        assert same(list(data), epoch)


@pytest.mark.usefixtures("start_method")
def test_a_change_of_workers_and_set_epoch_keep_the_count(photos):
    dataset, loader = StreamingDataset(photos, **SHUFFLED), Loader(photos, **SHUFFLED)
    epochs = [keys(loader) for _ in range(9)]
    for epoch, workers in enumerate([0, 3, 1]):
        assert keys(in_workers(dataset, num_workers=workers)) == epochs[epoch]
    dataset.set_epoch(7)
    again = pickle.loads(pickle.dumps(dataset))
    assert [keys(again), keys(again)] == epochs[7:]
    data = in_workers(dataset, num_workers=2, persistent_workers=True)
    assert [keys(data), keys(data)] == epochs[7:]
    dataset.set_epoch(1)
    assert keys(data) == epochs[1], "workers that run already must hear of it"


@pytest.mark.parametrize(("workers", "world"), [(0, 3), (3, 1), (1, 2)])
@pytest.mark.usefixtures("start_method")
def test_single_samples_come_once_and_ranks_have_as_many(photos, workers, world):
    counts, came = [], Counter()
    options = {"shuffle": True, "fields": ["image", "label"], "transforms": CROP}
    for rank in range(world):
        dataset = StreamingDataset(photos, rank=rank, world_size=world, **options)
        batches = list(DataLoader(dataset, batch_size=4, num_workers=workers))
        counts.append(sum(len(batch["label"]) for batch in batches))
        came += real_keys(batches)
        assert batches[0]["image"].shape == (4, 3, 16, 16)
        assert batches[0]["label"].dtype == torch.int64
    assert len(set(counts)) == 1
    assert came == Counter({f"{n:04d}": 1 for n in range(37)})


def test_few_single_samples_are_made_together_if_they_are_large(photos, monkeypatch):
    dataset, read = StreamingDataset(photos, fields=["label"]), []
    samples, original = dataset.stream.samples, dataset.stream.samples.read_many
    monkeypatch.setattr(
        samples, "read_many", lambda rows, *_: read.append(len(rows)) or original(rows)
    )
    for most, expected in ((3.5, [*[3] * 12, 1]), (0.1, [1] * 37), (99, [37])):
        monkeypatch.setattr("shardkit.stream.dataset._BYTES_AT_ONCE", most * samples.mean_bytes)
        read.clear()
        assert len(list(dataset)) == 37
        assert read == expected


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.large)])
@pytest.mark.usefixtures("start_method")
def test_batches_are_not_batched_again(photos, workers):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    for batches in ({"batch_size": 4}, {"global_batch_size": 4}):
        dataset = StreamingDataset(photos, fields=["label"], **batches)
        both = r"both [\s\S]* would make batches[\s\S]*batch_size=None"
        with pytest.raises(UsageError, match=both):
            next(iter(DataLoader(dataset, batch_size=2, num_workers=workers)))
        assert len(list(in_workers(dataset, num_workers=workers))) == 10
    with pytest.raises(UsageError, match="would make batches"):
        next(iter(stateful.StatefulDataLoader(dataset, num_workers=workers)))
    loader = Loader(photos, batch_size=4)
    assert pickle.loads(pickle.dumps(loader)).remaining == 10  # as workers get it
    for size in (None, 2):
        with pytest.raises(UsageError, match="iterate over the Loader itself"):
            next(iter(DataLoader(loader, batch_size=size, num_workers=workers)))
        with pytest.raises(UsageError, match="does not support indexing"):
            next(iter(DataLoader(loader.dataset, batch_size=size)))
    with pytest.raises(UsageError, match=r"shardkit\.open\(path\)\[index\]"):
        _ = dataset[0]


@pytest.mark.parametrize("name", ["torch.distributed", "RANK"])
def test_workers_belong_to_the_rank_that_starts_them(photos, name, start_method, monkeypatch):
    """Its place is not known to workers that are not forked: each rank read everything."""
    if name == "RANK":  # as a forkserver that is older does not know it
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
    else:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    dataset = StreamingDataset(photos, batch_size=5, fields=["label"], check_ranks=False)
    mine = keys(StreamingDataset(photos, batch_size=5, fields=["label"], rank=1, world_size=2))
    assert keys(in_workers(dataset, num_workers=2)) == mine
    sent = pickle.dumps(dataset)
    monkeypatch.undo()
    assert keys(pickle.loads(sent)) == mine
    unknown = pickle.dumps(StreamingDataset(photos, batch_size=5, fields=["label"]))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert keys(pickle.loads(unknown)) == mine, "made by the launcher: each rank has its own place"


def test_datasets_made_of_one_another_count_their_own_epochs(photos):
    epochs = [keys(batches) for batches in [Loader(photos, **SHUFFLED)] * 4]
    train = StreamingDataset(photos, **SHUFFLED)
    assert keys(train) == epochs[0]
    for other in (train.with_options(last="drop"), copy.copy(train), copy.deepcopy(train)):
        assert keys(other)[:7] == epochs[1][:7], "they continue where they were made"
        other.set_epoch(0)
    assert [keys(train), keys(train)] == epochs[1:3]


@pytest.mark.usefixtures("start_method")
def test_a_seed_of_torch_before_each_epoch_does_not_repeat_it(photos):
    """Nor do the workers of two DataLoaders that begin together take each other's epoch."""
    epochs = [keys(batches) for batches in [Loader(photos, **SHUFFLED)] * 5]
    generator = torch.Generator()
    data = in_workers(StreamingDataset(photos, **SHUFFLED), num_workers=2, generator=generator)
    for number in range(3):
        generator.manual_seed(1)
        assert keys(data) == epochs[number]
    one, other = iter(data), iter(data)
    assert sorted([keys(one), keys(other)]) == sorted(epochs[3:])


def wait_for_the_first(worker):
    time.sleep(worker / 2)


def test_workers_that_begin_late_do_not_take_the_epoch_of_others_with_their_seed(photos):
    """Else an epoch would have some samples twice, and others not at all."""
    dataset = StreamingDataset(photos, **SHUFFLED)
    pair = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(1)
        options = {"generator": generator, "worker_init_fn": wait_for_the_first}
        pair.append(iter(in_workers(dataset, num_workers=2, **options)))
    epochs = [keys(batches) for batches in [Loader(photos, **SHUFFLED)] * 2]
    assert sorted(map(keys, pair)) == sorted(epochs)


def count_epochs(dataset, out):
    out.write_text(json.dumps([keys(in_workers(dataset, num_workers=1)) for _ in range(2)]))


def test_ranks_that_get_a_dataset_count_its_epochs_each_by_itself(photos, tmp_path, start_method):
    """As from torch.multiprocessing.spawn: ranks took epochs 0 and 2, and 1 and 3."""
    expected = [keys(batches) for batches in [Loader(photos, **SHUFFLED)] * 2]
    dataset = StreamingDataset(photos, **SHUFFLED)
    for number in range(2):
        out = tmp_path / f"{number}"
        torch.manual_seed(number)
        rank = torch.multiprocessing.Process(target=count_epochs, args=(dataset, out))
        rank.start()
        rank.join()
        assert json.loads(out.read_text()) == expected


def test_an_error_of_a_worker_is_told_in_lines(tmp_path):
    """Torch makes it again of its text, which is no name from data with line breaks."""
    path = write_photos(tmp_path / "out", samples=8)
    shard = path / "shard-000000.tar"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(DamagedError) as raised:
        next(iter(in_workers(StreamingDataset(path, batch_size=4), num_workers=1)))
    name, where, *rest = str(raised.value).splitlines()[-5:]
    assert name.endswith("DamagedError: the shard is not as long as its manifest says")
    assert where.startswith(f"  where: {shard}")
    assert [line.split()[0] for line in rest] == ["expected:", "found:", "fix:"]
    assert str(DamagedError("Caught\nx", fix=None)) == "Caught\\nx"


# --- torchdata -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "batch_size"),
    [(0, 5), (2, 5), *(pytest.param(n, None, marks=pytest.mark.large) for n in (0, 2))],
)
@pytest.mark.usefixtures("start_method")
def test_torchdata_saves_and_continues_at_any_step(photos, workers, batch_size):
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")
    options = {"shuffle": True, "fields": ["image", "label"], "transforms": CROP}

    def make():
        dataset = StreamingDataset(photos, batch_size=batch_size, **options)
        size = None if batch_size else 5
        return stateful.StatefulDataLoader(dataset, batch_size=size, num_workers=workers)

    batches, states = with_states(make(), 2)
    half = len(batches) // 2
    for number in (half - 2, half - 1, half + 1):
        again = make()
        again.load_state_dict(pickle.loads(pickle.dumps(states[number])))
        rest = list(again)
        # torchdata: a loader that was at its end ends once
        if number < half - 1 or (number == half - 1 and not rest):
            rest += list(again)
        assert same(rest, batches[number + 1 :]), number


@pytest.mark.parametrize(("dispatch", "workers"), [(True, 1), (False, 0)])
@pytest.mark.usefixtures("start_method")
def test_accelerate_is_told_not_to_split_again(photos, dispatch, workers):
    data_loader = pytest.importorskip("accelerate.data_loader", reason="needs accelerate")
    pytest.importorskip("accelerate").PartialState(cpu=True)
    options = {"batch_size": 4, "num_workers": workers}

    def prepared(**world):
        dataset = StreamingDataset(photos, fields=["label"], **world)
        if dispatch:
            return data_loader.DataLoaderDispatcher(dataset, **options)
        return data_loader.prepare_data_loader(
            DataLoader(dataset, **options),
            num_processes=2, process_index=0, dispatch_batches=False, put_on_device=False,
        )  # fmt: skip

    with pytest.raises((UsageError, RuntimeError), match="Accelerate would split"):
        list(prepared(rank=0, world_size=2))
    assert len(list(itertools.islice(prepared(rank=0, world_size=1), 2))) == 2
