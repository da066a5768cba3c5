"""Text corpora: `.txt` and `.md` files, JSON Lines, CSV and TSV; compressed or not."""

from __future__ import annotations

from shardkit.sources.text.scan import open_text

__all__ = ["open_text"]
