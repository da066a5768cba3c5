"""docs/reference is what the code says, and lacks no command, option or public name."""

from __future__ import annotations

import re

import click
import pytest

import shardkit
from shardkit.cli import COMMANDS, group
from tests import reference


@pytest.fixture(scope="module")
def pages():
    return reference.pages()


def test_it_is_fresh(pages):
    for name, text in pages.items():
        stored = (reference.FOLDER / name).read_text("utf-8")
        assert stored == text, f"{name} is not what the code says: python -m tests.reference"


def test_every_option_of_a_command_is_there(pages):
    first, *parts = pages["cli.md"].split("\n## shardkit ")
    context = click.Context(group)
    for name, part in zip(["", *COMMANDS], [first, *parts], strict=True):
        assert part.startswith(f"{name}\n" if name else "#")
        command = group.get_command(context, name) if name else group
        options = [option for option in command.params if isinstance(option, click.Option)]
        names = [n for o in options for n in (*o.opts, *o.secondary_opts) if not o.hidden]
        assert [n for n in names if not re.search(rf"[`, /]{n}[`, ]", part)] == []


def test_every_public_name_is_there(pages):
    headings = set(re.findall(r"^### (\S+)$", pages["api.md"], re.MULTILINE))
    names = {f"shardkit.{name}" for name in shardkit.__all__ if name != "__version__"}
    assert names <= headings
    assert {"shardkit.torch.Loader", "shardkit.stream.Loader", "shardkit.tensorflow.dataset"} <= (
        headings
    )


def test_it_has_nothing_of_this_machine(pages):
    for text in pages.values():
        assert not re.search(r" at 0x[0-9a-f]+|PosixPath", text)
