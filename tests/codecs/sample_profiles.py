"""Colour profiles that the tests of codecs share, by ICC.1:2001-04."""

import io
import struct

import numpy as np
from PIL import ImageCms

# Chromaticities (x, y) of red, green and blue, by IEC 61966-2-1 and Adobe RGB (1998) 4.3.1.1.
SRGB = ((0.64, 0.33), (0.30, 0.60), (0.15, 0.06))
ADOBE_RGB = ((0.64, 0.33), (0.21, 0.71), (0.15, 0.06))
ADOBE_GAMMA = 2 + 51 / 256
_D65 = np.array([0.3127, 0.3290, 0.3583])
_D50 = np.array([0.9642, 1.0, 0.8249])  # of the space that profiles connect to
_BRADFORD = np.array(
    [[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]]
)


def to_xyz(primaries):
    """The matrix from linear RGB to XYZ: equal parts of the primaries are D65's white."""
    columns = np.array([(x / y, 1, (1 - x - y) / y) for x, y in primaries]).T
    return columns * np.linalg.solve(columns, _D65 / _D65[1])


def srgb_of(linear):
    """What sRGB stores for linear light, both from 0 to 1, by IEC 61966-2-1."""
    linear = linear.clip(0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def rgb_profile(primaries=ADOBE_RGB, gamma=ADOBE_GAMMA):
    """Of a display; without a gamma its curve is that of sRGB."""
    cones = _BRADFORD @ _D50 / (_BRADFORD @ (_D65 / _D65[1]))  # from D65 to D50
    colours = (np.linalg.inv(_BRADFORD) @ np.diag(cones) @ _BRADFORD @ to_xyz(primaries)).T
    tags = dict(zip((b"rXYZ", b"gXYZ", b"bXYZ"), map(_xyz, colours), strict=True))
    return _profile(b"RGB ", tags | dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), _curve(gamma)))


def grey_profile(gamma):
    return _profile(b"GRAY", {b"kTRC": _curve(gamma)})


def cmyk_profile():
    """Of a printer whose inks are as dark and colourful as its table says, with two points each."""
    ink = np.stack(np.meshgrid(*[[0.0, 1.0]] * 4, indexing="ij"), axis=-1).reshape(-1, 4)
    light = 100 * (1 - ink[:, 3]) * (1 - ink[:, :3] @ [0.3, 0.4, 0.1])
    red_green = (1 - ink[:, 3]) * (ink[:, :3] @ [-35, 70, 0])
    blue_yellow = (1 - ink[:, 3]) * (ink[:, :3] @ [-45, 0, 85])
    lab = np.stack([light * 2.55, red_green + 128, blue_yellow + 128], axis=1)
    as_it_is = bytes(range(256))
    table = b"mft1" + struct.pack(">4xBBBx", 4, 3, 2) + _fixed(np.eye(3).ravel())
    table += as_it_is * 4 + lab.round().astype(np.uint8).tobytes() + as_it_is * 3
    return _profile(b"CMYK", {b"A2B0": table}, kind=b"prtr", space=b"Lab ")


def by_littlecms(image, profile, flags=ImageCms.Flags.NONE):
    """An image's pixels in sRGB, as Pillow's users get them."""
    given, srgb = ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB")
    made = ImageCms.profileToProfile(image, given, srgb, outputMode="RGB", flags=flags)
    return np.array(made)


def _fixed(values):
    return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))


def _xyz(values):
    return b"XYZ \0\0\0\0" + _fixed(values)


def _curve(gamma):
    if gamma is not None:
        return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(gamma * 256))
    linear = np.linspace(0, 1, 1 << 16)
    inverse = np.interp(np.linspace(0, 1, 1024), srgb_of(linear), linear)
    points = (inverse * 0xFFFF).round().astype(">u2")
    return b"curv\0\0\0\0" + struct.pack(">I", len(points)) + points.tobytes()


def _profile(colour, tags, kind=b"mntr", space=b"XYZ "):
    tags = {
        b"desc": b"desc\0\0\0\0" + struct.pack(">I5s78x", 5, b"test"),
        b"cprt": b"text\0\0\0\0none\0",
        b"wtpt": _xyz(_D50),
        **tags,
    }
    table, content = struct.pack(">I", len(tags)), b""
    start = 128 + 4 + 12 * len(tags)
    for name, value in tags.items():
        table += struct.pack(">4sII", name, start + len(content), len(value))
        content += value + bytes(-len(value) % 4)
    fields = start + len(content), 0x02400000, kind, colour, space, b"acsp", _fixed(_D50)
    return struct.pack(">I4xI4s4s4s12x4s28x12s48x", *fields) + table + content
