"""For tests of other loaders: samples of more types, and values as their scripts print them."""

import inspect

import numpy as np

from shardkit.formats.testing_samples import EVERYTHING, everything, make_audio, make_image
from shardkit.schema import Array, Audio, Image, Images, Int, Schema

_MORE = {
    "more": (Image(optional=True), lambda n: make_image(9) if n % 2 else None),
    "frames": (Images(), lambda n: [make_image(number) for number in range(n % 4)]),
    "pair": (Images(), lambda n: [make_image(n), make_image(n + 1, "PNG")]),
    "sound": (Audio(), make_audio),
    "row": (Array("<u2", (None,)), lambda n: np.arange(n, dtype="<u2") * 7000),
    "fixed": (Array("<i8", (2, 2)), lambda n: np.array([[n, -1], [2**62, -(2**63)]], "<i8")),
    "pixels": (Array("|u1", (None, None, 3)), lambda n: np.full((n, 2, 3), [n, 1, 2], "|u1")),
    "double": (Array("<f8", (2,)), lambda n: np.array([0.1, n], "<f8")),
    "scalar": (Array("<f8", ()), lambda n: np.array(n / 3, "<f8")),
    "flags": (Array("|b1", (2,)), lambda n: np.array([True, n % 2 == 0])),
    "big": (Array(">i4", (2,)), lambda n: np.array([n, -1], ">i4")),
    "names": (Array("<U3", (2,)), lambda n: np.array(["a", f"{n}"], "<U3")),
    "any": (Array(), lambda n: np.full((1, n), n, "<f8")),
    "count": (Int(optional=True), lambda n: -n if n % 2 else None),
    "maybe": (Array("<f4", (2,), optional=True),
              lambda n: np.array([1, n], "<f4") if n % 2 else None),
}  # fmt: skip


def rich(names):
    """The schema EVERYTHING with these fields, and what gives its samples by number."""

    def sample(number):
        more = {name: _MORE[name][1](number) for name in names.split()}
        more = {name: value for name, value in more.items() if value is not None}
        return {**everything(number), **more}

    return Schema({**EVERYTHING, **{name: _MORE[name][0] for name in names.split()}}), sample


def plain(value):
    """A value as JSON can have it: of arrays and images type, shape and bytes."""
    if hasattr(value, "numpy") or hasattr(value, "getbands"):  # of PyTorch, of Pillow
        value = np.asarray(value)
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, np.ndarray):
        value = value.astype(value.dtype.newbyteorder("<"))
        return [value.dtype.str, list(value.shape), value.tobytes().hex()]
    if isinstance(value, bytes | memoryview):
        return value.hex()
    return str(value) if hasattr(value, "as_tuple") else getattr(value, "item", lambda: value)()


PLAIN = inspect.getsource(plain)
