"""Valid samples that an option or a transform drops."""

from __future__ import annotations


class Filtered(Exception):  # noqa: N818 - not an error
    """A sample is dropped. `reason` is the same for all such samples, `found` is for this one."""

    def __init__(self, reason: str, found: str, key: str) -> None:
        super().__init__(f"{reason}: {found}")
        self.reason = reason
        self.found = found
        self.key = key

    def to_json(self) -> dict[str, str]:
        """Return the entry for a line of filtered.jsonl."""
        return {"key": self.key, "reason": self.reason, "found": self.found}
