"""TARs of other tools that probably mean something else than WebDataset's rules make of them."""

import warnings

import pytest

import shardkit
from shardkit.errors import SampleError
from shardkit.testing import make_image
from tests.formats.test_wds_foreign import pack

BESIDE = b"\x00\x05\x16\x07" + bytes(40)  # what macOS stores beside a file


def test_what_macos_adds_is_passed_over_and_counted(tmp_path):
    names = ["d/._a.jpg", "d/a.jpg", "d/._a.txt", "d/a.txt", "d/._b.jpg", "d/b.jpg", "d/b.txt"]
    image = make_image(1)
    kinds = {"jpg": image, "txt": b"caption"}
    members = [(n, BESIDE if "._" in n else kinds[n.rpartition(".")[2]]) for n in names]
    members.insert(2, ("./d/.DS_Store", b"Bud1"))
    result = shardkit.convert(pack(tmp_path / "a.tar", members), "arrow", tmp_path / "out")
    assert result.ignored == {"TAR member that macOS adds (._NAME, .DS_Store)": 4}
    samples = [*shardkit.open(tmp_path / "out")]
    assert samples == [{"__key__": f"d/{k}", "jpg": image, "txt": "caption"} for k in "ab"]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([f"img_0.{n:02d}.png" for n in range(9)], "9 fields occur in one sample each, such as"),
        (["a.seg.png", "a.depth.png", "a.jpg", "b.jpg"], None),
        (["part/a.jpg", "part/b.jpg"], None),
    ],
)
def test_what_was_probably_not_meant_is_said(tmp_path, members, words):
    path = pack(tmp_path / "a.tar", [(name, make_image(1)) for name in members])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shardkit.open(path)
    found = [str(one.message) for one in said]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


def test_a_number_that_json_does_not_have_can_be_left_out(tmp_path):
    members = [("a.txt", b"a"), ("a.json", b'{"x": 1}'), ("b.txt", b"b"), ("b.json", b'{"x": NaN}')]
    path = pack(tmp_path / "a.tar", members)
    with pytest.raises(SampleError, match="no number NaN") as error:
        shardkit.convert(path, "wds", tmp_path / "out", workers=0)
    assert "--drop json" in str(error.value.fix)
    shardkit.convert(path, "wds", tmp_path / "out", drop=["json"], overwrite=True)
    assert [sample["txt"] for sample in shardkit.open(tmp_path / "out")] == ["a", "b"]


@pytest.mark.parametrize("format", ["wds", "arrow", "lmdb"])
def test_a_key_that_is_not_unicode_can_be_encoded(tmp_path, format):
    image = make_image(1)
    path = pack(tmp_path / "a.tar", [("caf\udce9.jpg", image)])
    with pytest.raises(SampleError, match="not valid Unicode") as error:
        shardkit.convert(path, format, tmp_path / "out", workers=0)
    assert "--safe-keys" in str(error.value.fix)
    shardkit.convert(path, format, tmp_path / "out", safe_keys=True, overwrite=True)
    assert shardkit.open(tmp_path / "out")[0] == {"__key__": "caf%ED%B3%A9", "jpg": image}
