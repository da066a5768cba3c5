"""`--part I/N`: one of several processes, on any machines, that share the work."""

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
        """Parse I/N. Raises UsageError unless I is from 1 to N."""
        found = _WORDS.fullmatch(text) if isinstance(text, str) else None
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
        """Parse the text that the property `name` returned; None if it is something else."""
        found = _NAME.fullmatch(name)
        return None if found is None else cls(int(found[1]), int(found[2]))

    @property
    def name(self) -> str:
        """The part, for use in file names."""
        return f"{self.number}-of-{self.total}"

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"

    def has(self, number: int) -> bool:
        """Whether task `number`, from 0 on, belongs to this part: every `total`-th task does."""
        return number % self.total == self.number - 1


WHOLE = PartOf(1, 1)
