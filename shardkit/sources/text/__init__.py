"""Text corpora: `.txt` and `.md` files, JSON Lines, CSV and TSV; compressed or not."""

from __future__ import annotations

from shardkit.sources.text.scan import is_text, open_text

__all__ = ["is_text", "open_text"]
