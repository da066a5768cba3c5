"""Text corpora: `.txt` and `.md` files, JSON Lines, CSV and TSV; compressed or not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardkit.metadata.recipe import Recipe
from shardkit.sources.candidate import Candidate, Splits
from shardkit.sources.text_files import parse_name


def recognise_file(candidate: Candidate) -> Splits | None:
    """Return a file of text or a table."""
    if candidate.is_folder or parse_name(candidate.path.name) is None:
        return None
    return of_files(candidate.path, candidate.recipe, candidate.strict)


def recognise_folder(candidate: Candidate) -> Splits | None:
    """Return a folder of text or tables."""
    if not candidate.is_folder or not candidate.contents.text_files:
        return None
    path, recipe = candidate.path, candidate.recipe
    return candidate.noted(of_files(path, recipe, candidate.strict, subset=candidate.subset))


def of_files(
    path: Path, recipe: Recipe, strict: bool, files: Sequence[Path] = (), subset: str = ""
) -> Splits:
    """Return the splits of a file or a folder, or of some `files` or a `subset` of it."""
    from shardkit.sources.text.scan import open_text  # slow to import, and not needed for images

    return open_text(path, recipe, strict, files, subset)
