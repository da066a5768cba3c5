"""Headers of audio files.

Layouts: RIFF/WAVE and EBU Tech 3306 (RF64), AIFF-C, RFC 9639 (FLAC), ISO 11172-3 with the headers
of Xing, LAME and Fraunhofer (MP3), RFC 3533, 7845 and Vorbis I (Ogg).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping

from shardkit.codecs.media_info import CutMediaError, MediaInfo, NotMediaError

_UNKNOWN = 0xFFFFFFFF  # a size that RF64 stores in ds64, or a stream up to the end of the file
_JUNK = 1 << 16  # bytes before the first frame of an MP3


def chunks(data: bytes, at: int, stop: int, order: str = "<") -> Iterator[tuple[bytes, int, int]]:
    """Yield name, start and size of each chunk of an IFF file; the last may exceed the file."""
    while at + 8 <= min(stop, len(data)):
        name, size = struct.unpack_from(f"{order}4sI", data, at)
        yield name, at + 8, size
        at += 8 + size + size % 2


def _wav(data: bytes, format: str) -> MediaInfo:
    about: tuple[int, ...] | None = None
    long_size = None
    for name, start, size in chunks(data, 12, len(data)):
        if name == b"ds64":
            (long_size,) = struct.unpack_from("<8xQ", data, start)
        elif name == b"fmt ":
            about = struct.unpack_from("<HHIIH", data, start)
        elif name == b"data" and about is not None:
            tag, channels, rate, per_second, block = about
            there = len(data) - start
            length = size
            if size == _UNKNOWN:
                length = there if long_size is None else long_size
            if length > there:
                raise CutMediaError(f"a wav file with {there:,} of {length:,} bytes of sound")
            if not (channels and rate and block):
                raise NotMediaError(f"a wav header that says {channels} channels at {rate} Hz")
            if tag not in (1, 3, 6, 7, 0xFFFE) and per_second:  # compressed: blocks of samples
                return MediaInfo(format, length / per_second, rate, channels)
            return MediaInfo(format, length // block / rate, rate, channels)
    raise CutMediaError("a wav file without sound")


def _aiff(data: bytes, format: str) -> MediaInfo:
    found = None
    for name, start, size in chunks(data, 12, len(data), ">"):
        if name == b"COMM":
            channels, frames, _, exponent, mantissa = struct.unpack_from(">hIhHQ", data, start)
            rate = round(mantissa * 2.0 ** ((exponent & 0x7FFF) - 16446)) if exponent < 16446 else 0
            if not (rate and channels > 0):
                raise NotMediaError(f"an aiff header that says {channels} channels at {rate} Hz")
            found = MediaInfo(format, frames / rate, rate, channels)
        elif name == b"SSND" and start + size > len(data):
            raise CutMediaError(f"an aiff file with {len(data) - start:,} of {size:,} bytes")
    if found is None:
        raise NotMediaError("an aiff file without an audio header (COMM)")
    return found


def _flac(data: bytes, format: str) -> MediaInfo:
    at, found = 4, None
    while True:
        head, size = data[at], int.from_bytes(data[at + 1 : at + 4], "big")
        if found is None:
            if head & 0x7F or size < 34:
                raise NotMediaError("a flac file that does not begin with STREAMINFO")
            found = _streaminfo(data, at + 4, format)
        at += 4 + size
        if head >> 7:
            break
    if at >= len(data):
        raise CutMediaError("a flac file that ends before its sound")
    if data[at] != 0xFF or data[at + 1] & 0xFC != 0xF8:
        raise NotMediaError(f"a flac file without a frame at byte {at}")
    if not _ends(data, at):
        raise CutMediaError("a flac file without its last frame")
    return found


_LAST = 1 << 18  # bytes at the end of a file to search for the last frame


def _ends(data: bytes, first: int) -> bool:
    """Whether the last frame begins in the file; True if the header does not state the length.

    Whether that frame is complete is not checked: a tenth of a second may be missing.
    """
    block, most, bits = struct.unpack_from(">H3x3s2xQ", data, 8)
    total, at = bits & (1 << 36) - 1, len(data)
    longest = int.from_bytes(most, "big") or _LAST
    while total and (at := data.rfind(b"\xff", max(first, len(data) - 2 * longest), at)) >= 0:
        if data[at + 1 : at + 2] in (b"\xf8", b"\xf9") and _frame_end(data, at, block) == total:
            return True
    return not total


def _frame_end(data: bytes, at: int, block: int) -> int:
    """Return the number of the sample after a FLAC frame; 0 if there is no frame."""
    head = data[at : at + 16].ljust(16, b"\0")
    if not head[2] >> 4:
        return 0
    code, rate, more = head[2] >> 4, head[2] & 15, 8 - (head[4] ^ 0xFF).bit_length()
    behind = 4 + max(more, 1)  # the number is coded like UTF-8, with up to 36 bits
    number = head[4] & (0x7F >> more)
    for byte in head[5:behind]:
        number = number << 6 | byte & 0x3F
    extra = {6: 1, 7: 2}.get(code, 0)
    size = int.from_bytes(head[behind : behind + extra], "big") + 1
    if not extra:
        size = 192 if code == 1 else 576 << code - 2 if code < 6 else 256 << code - 8
    behind += extra + {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if _crc8(head[:behind]) != head[behind]:
        return 0
    return number * (1 if head[1] & 1 else block) + size


def _crc8(data: bytes) -> int:
    crc = 0
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc << 1 ^ 7 * (crc >> 7)) & 0xFF
    return crc


def _streaminfo(data: bytes, at: int, format: str) -> MediaInfo:
    (bits,) = struct.unpack_from(">Q", data, at + 10)
    rate, channels, samples = bits >> 44, (bits >> 41 & 7) + 1, bits & (1 << 36) - 1
    if not rate:
        raise NotMediaError("a flac header that says 0 Hz")
    return MediaInfo(format, samples / rate if samples else None, rate, channels)


# --- MP3 -----------------------------------------------------------------------------------------

_BITRATES = {  # kbit/s, by (is version 1, layer)
    (True, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (True, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (True, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (False, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (False, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_BITRATES[False, 3] = _BITRATES[False, 2]


def _frame(data: bytes, at: int) -> tuple[int, int, int, int] | None:
    """Return size in bytes, samples, rate and channels of the frame at an offset; None if none.

    The frame may extend past the end of the file.
    """
    if at + 4 > len(data) or data[at] != 0xFF or data[at + 1] < 0xE0:
        return None
    version, layer = data[at + 1] >> 3 & 3, 4 - (data[at + 1] >> 1 & 3)
    bitrate, rate = data[at + 2] >> 4, data[at + 2] >> 2 & 3
    if version == 1 or layer == 4 or bitrate in (0, 15) or rate == 3:
        return None
    first = version == 3
    hertz = (44100, 48000, 32000)[rate] // (1 if first else 2 if version == 2 else 4)
    samples = 384 if layer == 1 else 576 if layer == 3 and not first else 1152
    bits = _BITRATES[first, layer][bitrate - 1] * 1000
    padding = data[at + 2] >> 1 & 1
    if layer == 1:
        size = (12 * bits // hertz + padding) * 4
    else:
        size = samples // 8 * bits // hertz + padding
    return size, samples, hertz, 1 if data[at + 3] >> 6 == 3 else 2


def _mp3(data: bytes, format: str) -> MediaInfo:
    at = 0
    while data[at : at + 3] == b"ID3":  # a tag: its size has 4 x 7 bits; a footer is optional
        a, b, c, d = struct.unpack_from("4B", data, at + 6)
        at += 10 + (a << 21 | b << 14 | c << 7 | d) + 10 * (data[at + 5] >> 4 & 1)
    if at >= len(data):
        raise CutMediaError("an mp3 file that ends before its sound")
    start = _first_frame(data, at)
    frame = _frame(data, start)
    assert frame is not None
    size, samples, rate, channels = frame
    said = _announced(data, start, size, rate, channels)
    if said is None:
        return MediaInfo(format, _walk(data, start) / rate, rate, channels)
    frames, length, skipped = said
    if length > len(data) - start:
        raise CutMediaError(f"an mp3 file with {len(data) - start:,} of {length:,} bytes")
    return MediaInfo(format, max(frames * samples - skipped, 0) / rate, rate, channels)


def _first_frame(data: bytes, at: int) -> int:
    """Return the offset of the first frame that is followed by another or the end of the file."""
    stop = min(at + _JUNK, len(data))
    while (at := data.find(b"\xff", at, stop)) >= 0:
        frame = _frame(data, at)
        if frame is not None:
            behind = at + frame[0]
            following = _frame(data, behind)
            if behind == len(data) or data[behind : behind + 3] == b"TAG":
                return at
            if following is not None and following[2] == frame[2]:
                return at
        at += 1
    raise NotMediaError("an mp3 file without two frames of sound in a row")


def _announced(
    data: bytes, at: int, size: int, rate: int, channels: int
) -> tuple[int, int, int] | None:
    """Return the contents of a header of Xing, LAME or Fraunhofer in the first frame.

    These are the number of frames, of bytes including that frame (0 if not stated), and of padding
    samples at both ends.
    """
    first = data[at + 1] >> 3 & 3 == 3
    side = (17 if channels == 1 else 32) if first else (9 if channels == 1 else 17)
    xing, vbri = at + 4 + side, at + 36
    if data[xing : xing + 4] in (b"Xing", b"Info"):
        (flags,) = struct.unpack_from(">I", data, xing + 4)
        if not flags & 1:
            return None
        (frames,) = struct.unpack_from(">I", data, xing + 8)
        length = struct.unpack_from(">I", data, xing + 12)[0] if flags & 2 else 0
        lame = xing + 8 + 4 * (flags & 1) + 2 * (flags & 2) + 25 * (flags & 4) + (flags & 8) // 2
        delay = data[lame + 21 : lame + 24] if data[lame : lame + 4].isalpha() else b""
        both = int.from_bytes(delay, "big")
        return frames, length, (both >> 12) + (both & 0xFFF)
    if data[vbri : vbri + 4] == b"VBRI":
        length, frames = struct.unpack_from(">II", data, vbri + 10)
        return frames, length, 0
    return None


def _walk(data: bytes, at: int) -> int:
    """Return the number of samples in the complete frames from `at` on."""
    total, known = 0, dict[bytes, tuple[int, int]]()
    while True:
        head = data[at : at + 4]
        if head not in known:
            frame = _frame(data, at)
            if frame is None:
                return total
            known[head] = frame[:2]
        size, samples = known[head]
        if at + size > len(data):
            return total
        at, total = at + size, total + samples


# --- Ogg -----------------------------------------------------------------------------------------


def _ogg(data: bytes, format: str) -> MediaInfo:
    packet = 27 + data[26]
    head = data[packet : packet + 64]
    skipped = 0
    if head[:7] == b"\x01vorbis":
        channels, rate = struct.unpack_from("<BI", head, 11)
    elif head[:8] == b"OpusHead":
        channels, skipped = struct.unpack_from("<BH", head, 9)
        rate = 48000
    elif head[:5] == b"\x7fFLAC":
        found = _streaminfo(head, 17, format)
        channels, rate = found.channels or 0, found.sampling_rate or 0
    elif head[:8] == b"Speex   ":
        rate, channels = struct.unpack_from("<I8xI", head, 36)
    else:
        raise NotMediaError("an ogg file of neither Vorbis, Opus, FLAC nor Speex")
    if not (rate and channels):
        raise NotMediaError(f"an ogg header that says {channels} channels at {rate} Hz")
    samples = _last_position(data)
    return MediaInfo(format, max(samples - skipped, 0) / rate, rate, channels)


def _last_position(data: bytes) -> int:
    """Return the position, in samples, at which the last page of an Ogg file ends."""
    at = data.rfind(b"OggS")
    while at > 0 and data[at + 4 : at + 5] != b"\0":  # inside a page
        at = data.rfind(b"OggS", 0, at)
    flags, position = struct.unpack_from("<5xBq", data, at)
    stop = at + 27 + data[at + 26] + sum(data[at + 27 : at + 27 + data[at + 26]])
    if stop > len(data) or not flags & 4:
        raise CutMediaError("an ogg file without its last page")
    return max(int(position), 0)


PROBES: Mapping[str, Callable[[bytes, str], MediaInfo]] = {
    "wav": _wav,
    "aiff": _aiff,
    "flac": _flac,
    "mp3": _mp3,
    "ogg": _ogg,
    "opus": _ogg,
}
