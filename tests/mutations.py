"""Do the tests notice? Sixty small faults in the source, each of which some test must catch.

    .venv/bin/python tests/mutations.py [--root CHECKOUT] [--jobs 2] [--check] [WORD ...]

Each fault is put into a copy of the checkout, and the few files of tests that should catch it are
run there. WORDs choose those with such a number, or with the word in file or text; `--check` only
looks whether all of them can be applied. Ends with 1 where a fault survives, and where its text is
no longer found: then choose another place for it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

_MEMORY = Path("/dev/shm")
_SECONDS = 900  # for the tests of one fault


class Mutation(NamedTuple):
    """`old` stands once in the file, which is in shardkit/; `tests` are files in tests/."""

    file: str
    old: str
    new: str
    tests: str


MUTATIONS = [
    # --- the top ---
    Mutation("clock.py", "self._spent[before] =", "self._spent[stage] =", "stream/test_profile.py"),
    Mutation("order.py", "x >> np.uint64(27)", "x >> np.uint64(28)", "stream/test_order.py"),
    Mutation(
        "sizes.py", "self.max = max(self.max, other.max)", "self.max = other.max", "test_base.py"
    ),
    Mutation("sizes.py", "if 2 * passed >= self.count", "if passed >= self.count", "test_base.py"),
    Mutation(
        "sample.py", 'base.replace(".", "_")', "base", "test_base.py sources/test_image_folder.py"
    ),
    Mutation("schema.py", "elif not kind.optional:", "elif False:", "test_base.py"),
    Mutation(
        "errors.py", "**{**where, **self.where},", "**{**self.where, **where},", "test_base.py"
    ),
    Mutation(
        "views.py",
        "shard = bisect_right(self._starts, index) - 1",
        "shard = max(bisect_right(self._starts, index - 1) - 1, 0)",
        "test_dataset.py",
    ),
    Mutation(
        "manifest.py",
        "if not _is_as_written(",
        "if False and not _is_as_written(",
        "test_base.py test_verify.py",
    ),
    Mutation("pieces.py", " if self._room < PIECE else b", " if True else b", "test_pieces.py"),
    Mutation("storage.py", "for number in self._rewritten:", "for number in ():", "test_pieces.py"),
    Mutation(
        "remote/store.py",
        "if info.pieces.wrong(memoryview(piece), number):",
        "if False:",
        "remote/test_pieces.py",
    ),
    Mutation(
        "verification/shards.py",
        "(spans[:, 0] < stop) & (spans[:, 1] > start)",
        "(spans[:, 0] < stop) & (spans[:, 0] >= start)",
        "test_verify.py",
    ),
    Mutation("storage.py", ")[written:]", ")[written + 1 :]", "test_base.py"),
    Mutation(
        "storage.py",
        "if size == path.stat().st_size:",
        "if size >= 0:",
        "test_base.py conversion/test_crash.py",
    ),
    Mutation(
        "byte_source.py",
        "length - len(data), offset + len(data)",
        "length - len(data), offset",
        "test_byte_source.py",
    ),
    Mutation(
        "page_cache.py",
        "next_use(*self._last[-1]) <= keep:",
        "next_use(*self._last[-1]) < keep:",
        "remote/test_page_cache.py",
    ),
    Mutation(
        "page_cache.py",
        "if xxhash.xxh3_64_digest(data) != checksum:",
        "if False:",
        "remote/test_page_cache.py",
    ),
    Mutation(
        "remote/store.py", "if len(data) != stop - start:", "if False:", "remote/test_reading.py"
    ),
    # --- codecs ---
    Mutation(
        "codecs/header.py",
        "if self.orientation >= 5 else (self.width, self.height)",
        "if self.orientation >= 6 else (self.width, self.height)",
        "codecs/test_header.py",
    ),
    Mutation("codecs/header.py", "8 + size + size % 2", "8 + size", "codecs/test_header.py"),
    Mutation("codecs/array.py", "if said != size:", "if said > size:", "codecs/test_array.py"),
    Mutation(
        "codecs/array.py", '"F" if header.fortran', '"C" if header.fortran', "codecs/test_array.py"
    ),
    Mutation("codecs/color.py", "_SAME = 2 ", "_SAME = 60 ", "codecs/test_color.py"),
    Mutation("codecs/crop.py", "of or (pixels", "(pixels", "codecs/test_resize.py"),
    Mutation(
        "codecs/damage.py",
        "image.verify()",
        "pass",
        "test_verify.py",
    ),
    Mutation(
        "codecs/tokenizers/bytelevel.py",
        "if order < before:",
        "if False:",
        "codecs/test_tokenizers.py",
    ),
    Mutation(
        "codecs/tokenizers/bytelevel.py",
        "not first.isdisjoint(content[1:])",
        "False",
        "codecs/test_tokenizers.py",
    ),
    # --- sources ---
    Mutation(
        "sources/tables.py",
        "if len(set(head)) != len(head):",
        "if False:",
        "sources/test_image_folder.py",
    ),
    Mutation("sources/columns.py", "str(number) != text or", "", "sources/test_image_folder.py"),
    Mutation("sources/metadata.py", "kept[bad] = False", "", "sources/test_labels.py"),
    Mutation("sources/metadata.py", "kept = rows >= 0", "", "sources/test_labels.py"),
    Mutation("sources/labels.py", "least <= found <", "found <", "sources/test_labels.py"),
    Mutation(
        "sources/text/classes.py",
        'yield f"{_stray(files)!r} is next to them"',
        "pass",
        "sources/test_labels.py",
    ),
    Mutation(
        "sources/text/lines.py",
        "while found >= 0 and found % len(character):",
        "while False:",
        "sources/test_text.py sources/test_text_damage.py sources/test_text_scan.py",
    ),
    Mutation(
        "codecs/compression.py",
        "if decoder is not None and not decoder.eof:",
        "if False:",
        "sources/test_text_damage.py sources/test_text.py",
    ),
    Mutation(
        "sources/text/encodings.py",
        '"utf-16-le" if odd else "utf-16-be"',
        '"utf-16-be" if odd else "utf-16-le"',
        "sources/test_text_scan.py sources/test_text.py "
        "sources/test_text_damage.py conversion/test_text.py",
    ),
    # --- preprocess ---
    Mutation(
        "preprocess/geometry.py",
        "(2 * length * side + old) // (2 * old)",
        "length * side // old",
        "preprocess/test_geometry.py",
    ),
    Mutation(
        "preprocess/masks.py",
        "Resampling.NEAREST",
        "Resampling.BILINEAR",
        "preprocess/test_masks.py",
    ),
    Mutation(
        "preprocess/packing.py",
        "bisect_left(rooms, (length, 0))",
        "bisect_left(rooms, (length + 1, 0))",
        "preprocess/test_packing.py",
    ),
    # --- conversion ---
    Mutation(
        "conversion/work.py",
        "storage.sync(unfinished)",
        "pass",
        "conversion/test_crash.py",
    ),
    Mutation(
        "conversion/pool.py",
        "if self._killed or is_finished(work.folder):",
        "if self._killed:",
        "conversion/test_crash.py conversion/test_kill.py",
    ),
    Mutation(
        "conversion/pool.py",
        "if again:",
        "if False:",
        "conversion/test_kill.py",
    ),
    Mutation(
        "conversion/commit.py",
        "if not self._replaced.exists() or self._out.exists():",
        "if True:",
        "conversion/test_crash.py",
    ),
    Mutation(
        "conversion/lock.py",
        "else fcntl.LOCK_EX | fcntl.LOCK_NB",
        "else fcntl.LOCK_SH | fcntl.LOCK_NB",
        "conversion/test_convert.py conversion/test_create.py",
    ),
    Mutation(
        "conversion/part_lock.py",
        "        unlock(self._lock)\n        self._lock = None\n        until",
        "        until",
        "conversion/test_part_lock.py",
    ),
    Mutation(
        "conversion/part_lock.py",
        "if found in (None, UNLOCKED) or not self._is_ours():",
        "if found in (None, UNLOCKED):",
        "conversion/test_part_lock.py",
    ),
    Mutation(
        "conversion/store_partial.py",
        "if found is None or is_over(found[0]):\n                return",
        "return",
        "remote/test_part_claims.py",
    ),
    Mutation(
        "conversion/store_commit.py",
        "for names in reversed(self._by_rank(old)):",
        "for names in self._by_rank(old):",
        "remote/test_writing.py",
    ),
    Mutation(
        "conversion/claim.py",
        "if not self._lost and _now() - self._renewed > 2 * BEAT:",
        "if False:",
        "remote/test_writing.py",
    ),
    Mutation(
        "conversion/publish.py",
        "if keys[0] == keys[1]:",
        "if False:",
        "conversion/test_one_shard.py",
    ),
    Mutation(
        "conversion/shares.py",
        "self.start <= key_fraction(key) < self.stop",
        "self.start < key_fraction(key) <= self.stop + 0.1",
        "conversion/test_convert.py conversion/test_text.py",
    ),
    Mutation(
        "conversion/shards.py",
        "if key in self._keys:",
        "if False:",
        "conversion/test_create.py conversion/test_convert.py",
    ),
    # --- formats ---
    Mutation(
        "formats/wds/members.py",
        "if stored not in (unsigned, signed):",
        "if False:",
        "formats/test_wds_foreign.py formats/test_wds.py",
    ),
    Mutation(
        "formats/wds/foreign.py",
        "and mark.size > 0",
        "",
        "formats/test_wds_foreign.py",
    ),
    Mutation(
        "formats/lmdb/layout.py",
        "from bisect import bisect_right",
        "from bisect import bisect_left as bisect_right",
        "formats/test_lmdb.py formats/test_lmdb_foreign.py",
    ),
    Mutation(
        "formats/lmdb/layout.py",
        "max(found, key=lambda meta: meta[0])",
        "found[0]",
        "formats/test_lmdb.py formats/test_lmdb_foreign.py",
    ),
    Mutation(
        "formats/beton/layout.py",
        "if at % page + size <= page else",
        "if at % page + size <= page + 9 else",
        "formats/test_beton.py",
    ),
    Mutation(
        "formats/beton/join.py",
        'rows["sample_id"] += np.uint64(part.samples)',
        "pass",
        "formats/test_beton.py conversion/test_one_shard.py formats/test_beton_ffcv.py",
    ),
    Mutation(
        "formats/arrow/parquet.py",
        "(value >> 1) ^ -(value & 1)",
        "value >> 1",
        "formats/test_parquet.py formats/test_arrow_foreign.py",
    ),
    Mutation(
        "formats/arrow/writer.py",
        "if self._rows and self._pending + size > _LARGEST:",
        "if False:",
        "formats/test_arrow.py formats/test_parquet.py",
    ),
    Mutation(
        "formats/megatron/index.py",
        "| (ends > self.sequences)",
        "",
        "formats/test_megatron.py",
    ),
    # --- stream ---
    Mutation(
        "stream/order.py",
        "part * whole + min(part, rest)",
        "part * whole",
        "stream/test_order.py",
    ),
    Mutation(
        "stream/schedule.py",
        "size = max(left, self._world)",
        "size = left",
        "stream/test_schedule.py",
    ),
    Mutation(
        "stream/batching.py",
        "if len(lengths) and lengths.max() > most:",
        "if False:",
        "stream/test_batching.py",
    ),
    Mutation(
        "stream/collate.py",
        "else next(iter(rows)))]",
        "else list(rows)[-1])]",
        "stream/test_collate.py",
    ),
    Mutation(
        "stream/state.py",
        "if version != ORDER_VERSION:",
        "if False:",
        "stream/test_loader.py stream/test_torch.py stream/test_order.py",
    ),
    # --- transforms ---
    Mutation(
        "codecs/window.py",
        "self.columns - width - left if self.flip else left",
        "left",
        "transforms/test_steps.py transforms/test_images.py transforms/test_transforms.py",
    ),
    Mutation(
        "transforms/draws.py",
        "_UNUSED = np.uint64(11)",
        "_UNUSED = np.uint64(12)",
        "transforms/test_draws.py",
    ),
    Mutation(
        "transforms/steps.py",
        "0x7FFF + (bits >> 16 & 1)",
        "0x7FFF",
        "transforms/test_steps.py transforms/test_transforms.py",
    ),
    # --- verification ---
    Mutation("verification/values.py", "found.dtype != expected.dtype or", "", "test_verify.py"),
    Mutation("verification/keys.py", "if first != number:", "if False:", "test_verify.py"),
    # --- performance ---
    Mutation(
        "performance/runs.py",
        "[len(runs) // 2]",
        "[0]",
        "performance/test_doctor.py",
    ),
    Mutation(
        "performance/machine.py",
        "return stayed / total if total else 0.0",
        "return 0.0",
        "performance/test_machine.py",
    ),
    Mutation(
        "performance/checks.py",
        "if gain < LEAST:",
        "if gain < 0:",
        "performance/test_checks.py",
    ),
    # --- the command line ---
    Mutation(
        "words.py",
        "if number < 999.5:",
        "if number < 1000.5:",
        "test_docs.py",
    ),
]


def apply(mutation: Mutation, root: Path) -> str:
    """The file's text with the fault; raises ValueError where that is not to be had."""
    text = (root / "shardkit" / mutation.file).read_text("utf-8")
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation.old!r} stands {text.count(mutation.old)} times in the file")
    for name in mutation.tests.split():
        if not (root / "tests" / name).is_file():
            raise ValueError(f"there is no tests/{name}")
    return text.replace(mutation.old, mutation.new)


def copied(root: Path, place: Path) -> Path:
    """A copy of a checkout, with what is built in it."""
    ignored = shutil.ignore_patterns(
        ".git", ".venv", "build", "__pycache__", ".*_cache", "*.egg-info"
    )
    return Path(shutil.copytree(root, place, ignore=ignored))


def tested(mutation: Mutation, place: Path) -> str:
    """What became of a fault: "caught by TEST", "SURVIVED", or why neither can be said."""
    path = place / "shardkit" / mutation.file
    before = path.read_bytes()
    try:
        path.write_text(apply(mutation, place), "utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *(f"tests/{name}" for name in mutation.tests.split())],
            cwd=place, env={**os.environ, "PYTHONPATH": str(place), "CI": ""}, timeout=_SECONDS,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except ValueError as error:
        return f"NOT APPLIED: {error}"
    except subprocess.TimeoutExpired:
        return "NOT KNOWN: the tests take too long"
    finally:
        path.write_bytes(before)
    if done.returncode == 0:
        return "SURVIVED"
    if failed := re.search(r"^(?:FAILED|ERROR) (.{1,150})", done.stdout, re.MULTILINE):
        return f"caught by {failed[1]}"
    return (
        f"NOT KNOWN: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-500:]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("words", nargs="*")
    options = parser.parse_args()
    chosen = [
        (number, mutation)
        for number, mutation in enumerate(MUTATIONS, 1)
        if not options.words
        or str(number) in options.words
        or any(word in " ".join(mutation) for word in options.words if not word.isdigit())
    ]
    results: dict[int, str] = {}
    room = _MEMORY if os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=room) as folder:
        places: SimpleQueue[Path] = SimpleQueue()
        for number in range(0 if options.check else options.jobs):
            places.put(copied(options.root, Path(folder, str(number))))

        def run(number: int, mutation: Mutation) -> None:
            if options.check:
                try:
                    apply(mutation, options.root)
                except (ValueError, OSError) as error:
                    results[number] = f"NOT APPLIED: {error}"
                else:
                    results[number] = "can be applied"
            else:
                place, began = places.get(), time.monotonic()
                results[number] = f"{tested(mutation, place)}  ({time.monotonic() - began:.0f} s)"
                places.put(place)
            print(f"{number:2} {mutation.file}: {mutation.old!r}: {results[number]}", flush=True)

        with ThreadPoolExecutor(options.jobs) as threads:
            list(threads.map(lambda pair: run(*pair), chosen))
    bad = {n: result for n, result in results.items() if result.startswith(("SURVIVED", "NOT"))}
    good = "applicable" if options.check else "caught"
    print(f"\n{len(results)} faults, {len(results) - len(bad)} {good}; the others: {sorted(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
