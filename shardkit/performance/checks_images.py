"""Findings on stored images: far larger than they are used, or in a format slow to decode."""

from __future__ import annotations

import statistics

from shardkit.options import ImageOptions
from shardkit.performance.checks_files import convert_command
from shardkit.performance.findings import Finding
from shardkit.performance.images import StoredImages, Tried
from shardkit.stream.stream import Stream

_WORTH = 0.8  # of the time: what is above is not worth a conversion
_LARGER = 1.25  # times the size that is needed: below that, little can be gained
_QUALITIES = (90, 95)


def stored_size(stream: Stream) -> Finding | None:
    """Images that are far larger than what the transforms make of them."""
    images = StoredImages.of(stream)
    needed = None if images is None else images.needed
    if images is None or needed is None:
        return None
    sizes = [header.upright for header in images.headers]
    if statistics.median(map(min, sizes)) < _LARGER * needed:
        return None
    options = ImageOptions(resize=needed, format="jpeg", quality=90)
    flags = [f"--resize {needed}", "--image-format jpeg", "--quality 90"]
    if images.loss(options) is None:  # some would be harmed: they stay in their formats
        options = ImageOptions(resize=needed, quality=90)
        del flags[1]
    tried = images.tried(options)
    if tried is None or tried.share >= _WORTH:
        return None
    width, height = (statistics.median(side) for side in zip(*sizes, strict=True))
    return Finding(
        "decode",
        seen=f"images are {width:,.0f} x {height:,.0f} pixels in the median of {len(sizes)}, "
        f"where {images.words} needs {needed:,} on the shorter side",
        do=f"store them with {needed:,} pixels on the shorter side: {_words(tried)}; random crops "
        "then see images of that size, so that small parts of them are less sharp",
        stage="decode",
        share=tried.share,
        samples=tried.samples,
        command=convert_command(stream, *flags),
    )


def png(stream: Stream) -> Finding | None:
    """Photos in formats without loss, such as PNG, where a JPEG looks the same."""
    images = StoredImages.of(stream)
    if images is None:
        return None
    formats = [header.format for header in images.headers if header.lossless]
    if 2 * len(formats) < len(images.headers):
        return None
    for quality in _QUALITIES:
        options = ImageOptions(format="jpeg", quality=quality)
        loss = images.loss(options)
        if loss is not None:
            break
    else:
        return None
    tried = images.tried(options)
    if tried is None or tried.share >= _WORTH or tried.after >= tried.before:
        return None
    return Finding(
        "decode",
        seen=f"{len(formats)} of {len(images.headers)} images are stored without loss, as "
        + ", ".join(sorted({format.upper() for format in formats})),
        do=f"store them as JPEG of quality {quality}: {_words(tried)}; no difference is visible, "
        f"as the brightness of each of them keeps a PSNR of {loss:.0f} dB or more",
        stage="decode",
        share=tried.share,
        samples=tried.samples,
        command=convert_command(stream, "--image-format jpeg", f"--quality {quality}"),
    )


def _words(tried: Tried) -> str:
    return (
        f"{tried.after / 1000:,.1f} kB each instead of {tried.before / 1000:,.1f}, decoded in "
        f"{tried.share:.0%} of the time"
    )
