"""docs/troubleshooting.md: its headings are messages of the code, those met most among them."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardkit
from shardkit.errors import ShardkitError
from shardkit.stream import Loader
from shardkit.testing import make_image
from tests.conftest import write_images
from tests.parsed import ROOT, code

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
MESSAGES = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


def test_every_heading_is_a_message_of_the_code():
    texts = code().texts
    for message in MESSAGES:
        for part in (part.strip() for part in message.split("…")):
            assert not part or any(part in text for text in texts), message
    assert len(MESSAGES) == len({*MESSAGES}) == PAGE.count("\n### ")


def _told(message: str) -> bool:
    """Whether a heading is the first line of the message."""
    patterns = (".*".join(re.escape(part) for part in m.split("…")) for m in MESSAGES)
    return any(re.match(pattern, message) for pattern in patterns)


def _shards(folder: Path, **options: Any) -> Path:
    shardkit.convert(folder / "images", "wds", folder / "shards", workers=0, **options)
    return folder / "shards"


def _cut(folder: Path) -> None:
    path = next(_shards(folder).glob("*.tar"))
    path.write_bytes(path.read_bytes()[:-2000])
    list(shardkit.open(folder / "shards"))


def _cut_image(folder: Path) -> None:
    path = folder / "images/class0/000.jpg"
    path.write_bytes(path.read_bytes()[:-100])
    _shards(folder)


def _unfinished(folder: Path) -> None:
    for action in (_cut_image, lambda f: shardkit.open(f / "shards.partial")):
        try:
            action(folder)
        except shardkit.SampleError:
            continue


def _other_seed(folder: Path) -> None:
    path = _shards(folder)
    state = Loader(path, batch_size=4, shuffle=True).state_dict()
    Loader(path, batch_size=4, shuffle=True, seed=1).load_state_dict(state)


def _text(data: bytes) -> Callable[[Path], object]:
    def convert(folder: Path) -> None:
        (folder / "x.jsonl").write_bytes(data)
        shardkit.convert(folder / "x.jsonl", "wds", folder / "text", workers=0)

    return convert


def _no_row(folder: Path) -> None:
    (folder / "x.csv").write_text("file_name,label\nclass0/000.jpg,a\n")
    table = {"metadata": folder / "x.csv", "label_column": "label"}
    shardkit.convert(folder / "images", "wds", folder / "out", workers=0, **table)


def _image(place: str, data: bytes) -> Callable[[Path], object]:
    def convert(folder: Path) -> None:
        (folder / "images" / place).write_bytes(data)
        _shards(folder)

    return convert


MISTAKES: dict[str, Callable[[Path], object]] = {
    "open images": lambda folder: shardkit.open(folder / "images"),
    "open nothing": lambda folder: shardkit.open(folder / "imagse"),
    "open splits": lambda f: shardkit.open(_shards(f, split="train=0.5,val=0.5")),
    "open unfinished work": _unfinished,
    "a shard is cut": _cut,
    "not an image": _image("class0/x.jpg", b"<html>Not found</html>"),
    "an image is cut": _cut_image,
    "images beside classes": _image("x.jpg", make_image()),
    "the output is another": lambda folder: _shards(_shards(folder).parent, shuffle=True),
    "an empty folder": lambda f: shardkit.convert(f / "empty", "wds", f / "out"),
    "images to Megatron": lambda f: shardkit.convert(f / "images", "megatron", f / "out"),
    "no row in the table": _no_row,
    "Latin-1": _text('{"text": "größe"}\n'.encode("latin-1")),
    "a line that is cut": _text(b'{"text": "a"}\n{"text": \n'),
    "a JSON object over lines": _text(b'{\n"text": "a"}\n'),
    "no size of batches": lambda f: Loader(_shards(f)),
    "a batch too large": lambda f: Loader(_shards(f), batch_size=100, last="drop"),
    "ranks that do not divide": lambda f: Loader(
        _shards(f), global_batch_size=5, rank=0, world_size=2
    ),
    "a state of another seed": _other_seed,
    "no such field": lambda f: Loader(
        _shards(f), batch_size=4, transforms={"img": shardkit.Decode()}
    ),
    "a scheme that is misspelt": lambda folder: shardkit.open("s4://bucket/shards"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_common_mistakes_are_there(mistake, tmp_path):
    write_images(tmp_path / "images")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ShardkitError) as raised:
        MISTAKES[mistake](tmp_path)
    assert _told(raised.value.what), raised.value.what
