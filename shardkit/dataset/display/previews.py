"""Previews of values: small images, waveforms, excerpts of text, summaries of arrays."""

from __future__ import annotations

import base64
import json
import math
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np

from shardkit.codecs.header import read_header
from shardkit.codecs.image import NotAnImageError, is_mask_name
from shardkit.codecs.media import format_of, media_info
from shardkit.codecs.media_info import MediaInfo, NotMediaError
from shardkit.codecs.pixels import encode, to_rgb
from shardkit.dataset.display.markup import Markup, join, lines, tag
from shardkit.errors import MissingLibraryError, ShardkitError
from shardkit.schema import (
    Array,
    Audio,
    Bytes,
    Encoded,
    Image,
    Images,
    Video,
    holds_keypoints,
    images_in,
    numbers_of,
)

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.codecs.tokenizers import Tokenizer
    from shardkit.dataset.views import Views

_MAX_PIXELS = 1 << 26  # pixels of an image up to which it is decoded
_IMAGES = 3  # of a list
_TOKENS = 64
_LINES = 8  # of a text
_SHOWN = 6  # numbers of an array, class names
_COLUMNS = 160  # of a waveform
_TEXT, _FEW_TOKENS = 60, 12  # characters and tokens in a one-line description
_SECONDS, _FRAMES = 60, 1 << 22  # of audio
# By dataset. Each is loaded once, as a tokenizer with a large vocabulary takes a second to load.
_TOKENIZERS: WeakKeyDictionary[Views, Tokenizer] = WeakKeyDictionary()


class Previews:
    """Values as HTML: images of at most `pixels` a side, and text of at most `words` characters."""

    def __init__(self, dataset: Views, pixels: int, words: int) -> None:
        self.dataset, self._pixels, self._words = dataset, pixels, words

    def is_media(self, name: str, value: Any) -> bool:
        """Return whether a value is shown as an image."""
        kind = self.dataset.schema[name]
        return isinstance(kind, Encoded | Images) or as_pixels(value) is not None

    def show(self, name: str, value: Any, of: str) -> Markup:
        """A preview of a value, or its error if it cannot be shown. `of`: the key of the sample."""
        kind = self.dataset.schema[name]
        try:
            if isinstance(kind, Image | Images):
                return self._images(name, images_in(kind, value), of)
            if isinstance(kind, Audio | Video):
                show = self._audio if isinstance(kind, Audio) else self._video
                return show(value, of)
            return self._value(name, value, of)
        except NotAnImageError as error:
            what = "no image" if isinstance(kind, Image | Images) else error.what
            return tag("p", f"{what}: {error}", class_="sk-bad")
        except ShardkitError as error:  # for example, a library is not installed
            return _note(
                "; ".join(
                    filter(None, (describe(self.dataset, name, value), error.what, error.fix))
                )
            )

    def _images(self, name: str, images: Any, of: str) -> Markup:
        shown = []
        for image in images[:_IMAGES]:
            info = read_header(image)
            about = ", ".join([f"{info.format} {info.width} x {info.height}", *info.details])
            if info.width * info.height > _MAX_PIXELS:
                shown.append(_note(f"{about}, too large for a preview"))
                continue
            ratio = self._pixels / max(info.width, info.height)
            pixels = to_rgb(image, (int(info.width * ratio) + 1, int(info.height * ratio) + 1))
            peak = int(pixels.max(initial=0))
            if is_mask_name(name) and 0 < peak < 64:  # class indices, which look nearly black
                pixels, about = pixels * np.uint8(255 // peak), f"{about}, brightened"
            shown.append(self._picture(pixels, f"{name} of {of}: {about}"))
            if len(images) == 1:
                shown.append(_note(about))
        if len(images) != 1:
            shown.append(_note(f"{len(images):,} images" if len(images) else "no image"))
        return join(shown)

    def _picture(self, pixels: npt.NDArray[np.uint8], alt: str) -> Markup:
        """A thumbnail of pixels (height, width, 3); tiny images are enlarged without blurring."""
        import PIL.Image

        image = PIL.Image.fromarray(np.ascontiguousarray(pixels))
        image.thumbnail((self._pixels, self._pixels))
        data = base64.b64encode(encode(np.array(image), "webp", quality=75)).decode()
        return tag(
            "img",
            src=f"data:image/webp;base64,{data}",
            alt=alt,
            width=image.width,
            height=image.height,
            class_="sk-tiny" if max(image.size) <= 64 else None,
        )

    def _audio(self, data: bytes, of: str) -> Markup:
        from shardkit.codecs import sound

        about = media_in_words(data)
        with sound.opened(data) as file:
            most = min(int(file.file.frames), _SECONDS * file.rate, _FRAMES // file.channels)
            samples = file.read(0, most) if most else np.zeros((1, 1), np.float32)
        samples = np.clip(np.nan_to_num(samples), -1, 1)
        starts = np.arange(_COLUMNS) * len(samples) // _COLUMNS
        starts = np.unique(starts)
        low = np.minimum.reduceat(samples.min(axis=1), starts)
        high = np.maximum.reduceat(samples.max(axis=1), starts)
        across = starts * _COLUMNS / len(samples) + 0.5
        line = "".join(
            f"M{x:.4g} {20 - 19 * top:.3g}V{20.2 - 19 * bottom:.3g}"
            for x, top, bottom in zip(across.tolist(), high.tolist(), low.tolist(), strict=True)
        )
        part = f", showing the first {most / file.rate:,.3g} s" if most < file.file.frames else ""
        wave = tag(
            "svg",
            tag("path", d=line),
            viewBox=f"0 0 {_COLUMNS} 40",
            preserveAspectRatio="none",
            role="img",
            aria_label=f"waveform of {of}",
            class_="sk-wave",
        )
        return join([wave, _note(f"{about}{part}")])

    def _video(self, data: bytes, of: str) -> Markup:
        from shardkit.codecs import frames

        (first,) = frames.read_frames(data, lambda count: [0])
        image = self._picture(frames.pixels_of(first), f"first frame of {of}")
        return join([image, _note(media_in_words(data))])

    def _value(self, name: str, value: Any, of: str) -> Markup:
        if (pixels := as_pixels(value)) is not None:
            about = f"{value.dtype} {value.shape}"
            return join([self._picture(pixels, f"{name} of {of}: {about}"), _note(about)])
        names = self.dataset.class_names.get(name)
        numbered = not holds_keypoints(self.dataset.schema.get(name))
        if names is not None and numbered and isinstance(value, int | np.ndarray):
            return tag("span", self.classes(value, names))
        if isinstance(value, np.ndarray):
            return self._array(name, value)
        if isinstance(value, bytes):
            return tag("span", f"{len(value):,} bytes")
        if isinstance(value, float):
            return tag("span", f"{value:.6g}")
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        size = [_note(f"{len(text):,} characters")] if len(text) > self._words else []
        return join([self._excerpt(text), *size])

    def classes(self, value: Any, names: tuple[str, ...]) -> str:
        """Return the names of one class or several."""
        every = numbers_of(value)
        named = [names[n] if 0 <= n < len(names) else f"{n}" for n in every[:_SHOWN]]
        return ", ".join(short(one, self._words) for one in named) + more(len(every), _SHOWN)

    def _excerpt(self, text: str) -> Markup:
        """Return the beginning of a text, with its line breaks."""
        rows = text[: self._words].splitlines()
        cut = " ..." if len(rows) > _LINES or len(text) > self._words else ""
        shown = "\n".join(rows[:_LINES]).strip()
        return tag("div", lines(shown + cut), class_="sk-text", dir="auto")

    def _array(self, name: str, value: npt.NDArray[Any]) -> Markup:
        about = f"{value.dtype} {value.shape}"
        if name == "tokens" and value.ndim == 1:
            text = _decoded_if_known(self.dataset, value[:_TOKENS].tolist())
            if text is not None:
                return join([self._excerpt(text), _note(f"{len(value):,} tokens")])
        if value.size <= _SHOWN or value.dtype.kind not in "biuf":
            few = value if value.size <= _SHOWN else value.ravel()[:_SHOWN]
            shown = np.array2string(few, precision=4, separator=", ")
            return tag("span", f"{about}: {short(shown, self._words)}")
        numbers = value[np.isfinite(value)] if value.dtype.kind == "f" else value
        if not numbers.size:
            return tag("span", f"{about}, no finite number")
        with np.errstate(over="ignore"):
            low, mean, high = numbers.min(), numbers.mean(dtype=np.float64), numbers.max()
        return tag("span", f"{about}: {low:.4g} / {mean:.4g} / {high:.4g} (min / mean / max)")


def more(count: int, shown: int) -> str:
    return f" and {count - shown:,} more" if count > shown else ""


def describe(dataset: Views, name: str, value: Any) -> Any:
    """Return a short description of a value; numbers are returned unchanged."""
    kind = dataset.schema[name]
    if isinstance(kind, Image | Images):
        return "; ".join(map(image_in_words, images_in(kind, value))) or "none"
    if isinstance(kind, Bytes):
        return media_in_words(value) if isinstance(kind, Encoded) else f"{len(value):,} bytes"
    if isinstance(kind, Array):
        about = f"{value.dtype} {value.shape}"
        if name != "tokens":
            return about
        first = value[:_FEW_TOKENS].tolist()
        text = _decoded_if_known(dataset, first)
        return f"{about}: {first if text is None else repr(text)}"
    text = " ".join(value.split()) if isinstance(value, str) else str(value)
    finite = not isinstance(value, float) or math.isfinite(value)
    if len(text) <= _TEXT and finite and not isinstance(value, str):
        return value
    return short(text, _TEXT)


def decoded(dataset: Views, tokens: list[int]) -> str | None:
    """Tokens as text; None for a dataset without a tokenizer.

    Raises ShardkitError if the tokenizer is damaged, if its library is not installed, or if it does
    not have these ids.
    """
    path, manifest = getattr(dataset, "tokenizer_path", None), getattr(dataset, "manifest", None)
    if path is None or manifest is None:
        return None
    if dataset not in _TOKENIZERS:
        from shardkit.codecs.tokenizers import open_copy

        _TOKENIZERS[dataset] = open_copy(path, manifest.tokenizer)
    return _TOKENIZERS[dataset].decode(tokens)


def _decoded_if_known(dataset: Views, tokens: list[int]) -> str | None:
    try:
        return decoded(dataset, tokens)
    except ShardkitError:
        return None


def image_in_words(image: bytes) -> str:
    """Format, width, height and bytes of an encoded image, or why it is not an image."""
    try:
        found = read_header(image)
    except NotAnImageError as error:
        return f"no image: {error}"
    size = f"{found.format} {found.width} x {found.height}"
    return ", ".join([size, *found.details, f"{len(image):,} bytes"])


def media_in_words(data: bytes) -> str:
    """Return the properties in the headers of audio or video, or why it is neither."""
    try:
        info = media_info(data)
    except MissingLibraryError:
        info = MediaInfo(str(format_of(data)))
    except NotMediaError as error:
        return f"damaged: {error}"
    parts = [f"{info.format} {info.codec}" if info.codec else info.format]
    if info.width is not None:
        parts[0] += f" {info.width} x {info.height}"
    if info.frames is not None:
        rate = f" at {info.frames / info.duration:.4g} Hz" if info.duration else ""
        parts.append(f"{info.frames:,} frames{rate}")
    if info.sampling_rate is not None:
        parts.append(f"{info.sampling_rate:,} Hz x {info.channels}")
    if info.duration is not None:
        parts.append(f"{info.duration:,.2f} s")
    return ", ".join([*parts, f"{len(data):,} bytes"])


def as_pixels(value: Any) -> npt.NDArray[np.uint8] | None:
    """An array that can be shown as an image, as (height, width, 3); None for other arrays."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or not value.size:
        return None
    if value.ndim == 3 and value.shape[0] in (1, 3) and value.shape[2] not in (1, 3):
        value = value.transpose(1, 2, 0)
    if value.ndim == 2:
        value = value[:, :, None]
    if value.ndim != 3 or value.shape[2] not in (1, 3) or not 3 < value.size <= 3 * _MAX_PIXELS:
        return None
    return np.broadcast_to(value, (*value.shape[:2], 3))


def short(value: Any, words: int) -> str:
    """Return a value as text of at most `words` characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= words else text[: words - 3] + "..."


def _note(words: str) -> Markup:
    return tag("small", words)
