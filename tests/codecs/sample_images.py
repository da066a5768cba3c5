"""Images that the tests of codecs share."""

import io

import numpy as np
import PIL.Image

from tests.codecs.sample_profiles import rgb_profile  # noqa: F401 (for tests/transforms)


def photo(mode="RGB", size=(24, 16)):
    noise = np.random.default_rng(1).integers(0, 256, (2, 3, 3), np.uint8)
    return PIL.Image.fromarray(noise).resize(size, PIL.Image.Resampling.BICUBIC).convert(mode)


def photo_like(seed, width=480, height=360):
    """Pixels whose statistics are those of photos, with some hard edges.

    Contrast, falling off of the spectrum (1/f^1.2) and step from pixel to pixel are the averages of
    ImageNet's photos.
    """
    random = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width))
    frequency[0, 0] = np.inf

    def noise():
        phases = np.exp(2j * np.pi * random.random((height, width)))
        made = np.fft.ifft2(phases / frequency**1.2).real
        return made / made.std()

    light = noise()
    pixels = 128 + 50 * np.stack([light + noise() / 3 for _ in range(3)], axis=-1)
    for _ in range(4):
        top, left = random.integers(height), random.integers(width)
        pixels[top : top + height // 3, left : left + width // 4] += random.normal(0, 60, 3)
    return pixels.clip(0, 255).round().astype(np.uint8)


def encoded(image, format, **options):
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def opened(data):
    """By Pillow; to be used in a `with`."""
    return PIL.Image.open(io.BytesIO(data))


def damaged(data, draw, head, start=0):
    """A few bytes of a file changed, removed, repeated or cut off, by a `random.Random`; half of
    them in its header, which is of so many bytes."""
    made = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        at = draw.randrange(len(made))
        if draw.random() < 0.5:
            at = min(start + draw.randrange(head), len(made) - 1)
        length = draw.randrange(1, 100)
        match draw.randrange(6):
            case 0 | 1:
                made[at] = draw.randrange(256)
            case 2:
                made[at : at + 4] = draw.choice((bytes(4), b"\xff" * 4, b"\x7f\xff\xff\xff"))
            case 3:
                made[at : at + length] = bytes(length)
            case 4:
                del made[at : at + length]
            case _:
                made[at:at] = made[at : at + length]
        made = made or bytearray(1)
    return bytes(made[: draw.randrange(len(made))] if draw.random() < 0.05 else made)


def exif(orientation):
    made = PIL.Image.Exif()
    made[0x010F] = "a camera"
    made[0x0112] = orientation
    return made
