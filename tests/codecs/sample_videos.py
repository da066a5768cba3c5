"""Encoded videos that tests share: a textured square that moves over a gradient."""

import io
import struct
from fractions import Fraction
from functools import cache

import av
import numpy as np

MATRIX = (1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)  # of an MP4 that is not turned


@cache
def encode(codec="libx264", format="mp4", frames=40, size=(96, 64), times=(), number=0, **options):
    """A video of 25 frames a second, or with such times in milliseconds."""
    width, height = size
    y, x = np.mgrid[:height, :width]
    square = np.random.default_rng(number).integers(0, 256, (height // 3, height // 3, 3), np.uint8)
    file, rate = io.BytesIO(), Fraction(1, 1000 if times else 25)
    with av.open(file, "w", format=format) as container:
        stream = container.add_stream(codec, rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.time_base = rate
        for index in range(frames):
            pixels = np.stack([x + 3 * index, 2 * y + index, x * y // 32], axis=-1).astype(np.uint8)
            top, left = (5 * index + number) % (height * 2 // 3), 3 * index % (width // 2)
            pixels[top : top + len(square), left : left + len(square)] = square
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = times[index] if times else index, rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def turned(data, matrix):
    """An MP4 with another matrix, (a, b, c, d), in the header of its track."""
    at = data.index(struct.pack(">9i", *MATRIX), data.index(b"tkhd"))
    a, b, c, d = (int(value * (1 << 16)) for value in matrix)
    return data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]
