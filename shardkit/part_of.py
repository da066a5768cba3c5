"""`--part I/N`: one of several processes that share the work, on any machines."""

from __future__ import annotations

import re
from typing import NamedTuple

from shardkit.errors import UsageError

_WORDS = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
_NAME = re.compile(r"([0-9]{1,6})-of-([0-9]{1,6})")


class PartOf(NamedTuple):
    """Process `number` out of `total`, from 1 on."""

    number: int
    total: int

    @classmethod
    def parse(cls, text: str) -> PartOf:
        """Raises UsageError for anything but I/N with I from 1 to N."""
        found = _WORDS.fullmatch(text)
        part = None if found is None else cls(int(found[1]), int(found[2]))
        if part is None or not 1 <= part.number <= part.total:
            raise UsageError(
                "invalid part",
                expected="--part I/N with I from 1 to N, such as 2/8",
                found=repr(text),
            )
        return part

    @classmethod
    def named(cls, name: str) -> PartOf | None:
        """What `name` gave the name of, if that is one."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(int(found[1]), int(found[2]))

    @property
    def name(self) -> str:
        """In the name of a file."""
        return f"{self.number}-of-{self.total}"

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    def has(self, number: int) -> bool:
        """Whether task `number`, from 0 on, is this part's: every `total`-th is."""
        return number % self.total == self.number - 1


WHOLE = PartOf(1, 1)
