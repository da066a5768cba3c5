"""Imports point one way: down the list of docs/architecture.md; those of others are declared."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from shardkit.errors import MissingLibraryError, UsageError
from shardkit.helpers.extras import extra
from tests.parsed import PACKAGE, ROOT, code


def listed(block: str) -> dict[str, int]:
    """The line of each folder or file in a list, from the top."""
    found: dict[str, int] = {}
    for number, line in enumerate(block.splitlines()):
        for word in line.strip().split("   ")[0].split():
            name = word.removesuffix("/").removesuffix(".py")
            assert name not in found, f"{name} is listed twice"
            found[name] = number
    return found


def part(module: str, folder: str) -> str | None:
    """What of a folder ("" is the package) a module belongs to: a file or a folder, or nothing."""
    start = f"shardkit.{folder}".rstrip(".") + "."
    if not f"{module}.".startswith(start):
        return None
    return module.removeprefix(start[:-1]).lstrip(".").partition(".")[0] or "__init__"


FILES = {path: path.relative_to(PACKAGE).as_posix() for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {
    f"shardkit.{file}".replace("/", ".").removesuffix(".py").removesuffix(".__init__"): file
    for file in FILES.values()
}


def upwards(folder: str, order: dict[str, int]) -> Iterator[str]:
    """The imports in a folder, late ones and those for types too, of anything that is not below."""
    modules = {file: module for module, file in MODULES.items()}
    for file, line, imported, _ in code().imports:
        one, other = part(modules[file], folder), part(imported, folder)
        if one is None or other is None or one == other or "__init__" in {one, other} - {*order}:
            continue
        if order[other] <= order[one]:
            yield f"{file}:{line} imports {imported}"


def test_no_import_leads_upwards():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    block = re.search(r"^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    order = listed(block[1])
    assert set(order) == {
        file.partition("/")[0].removesuffix(".py") for file in MODULES.values()
    } - {"__init__"}
    assert len(set(order.values())) <= 12
    assert not [*upwards("", order)]


FOLDERS = sorted({file.partition("/")[0] for file in MODULES.values() if "/" in file})


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_import_leads_upwards_in_a_folder(folder):
    """Each lists its files in the docstring of its `__init__.py`, if there are several."""
    text = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text("utf-8"))) or ""
    block = text.partition("Each imports only those on lines below its own:\n")[2]
    # A line that goes on is indented.
    order = listed(re.sub(r"\n {6}(?=\S)", " ", block))
    there = {part(module, folder) for module in MODULES} - {None}
    assert set(order) in (there, there - {"__init__"}) or len(there) < 4
    assert not [*upwards(folder, order)]


def test_no_two_files_import_each_other():
    modules = {file: module for module, file in MODULES.items()}
    imported: dict[str, set[str]] = {module: set() for module in MODULES}
    for file, _, module, _ in code().imports:
        if module in MODULES and module != modules[file]:
            imported[modules[file]].add(module)
    done: set[str] = set()
    while ready := {module for module, others in imported.items() if others <= done} - done:
        done |= ready
    assert imported.keys() == done


if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
# Modules that are not called like what installs them.
INSTALLED_BY = {
    "PIL": "pillow",
    "yaml": "pyyaml",
    "cv2": "opencv-python-headless",
    "megatron": "megatron-core",
    "lance": "pylance",
    "nvidia": "nvidia-dali-cuda130",
}
# Files that import an extra's library without a guard, and what stands before them.
WHOLLY = (
    "formats/arrow/",  # `get_format`
    "formats/lmdb/",
    "codecs/tokenizers/",  # its `__init__`
    "formats/tfrecord/",
    "formats/lance/",  # and that
    "stream/torch_loader.py",  # `torch.py`
    "stream/gpu_decoding.py",  # that, and `require_dali`
    "tensorflow.py",  # its `dataset`, before its other functions
    "formats/contract.py",  # pytest runs it, and `testing.py`
    "testing.py",
    "performance/",  # each looks for torch with `find_spec` before
    "verification/client_reader.py",  # `installed_clients`
    "codecs/_build.py",  # setuptools builds with it
)


def distribution(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match
    return match[0].lower().replace("_", "-")


CORE = {distribution(text) for text in PROJECT["dependencies"]}
EXTRAS = {
    name: {distribution(text) for text in texts}
    for name, texts in PROJECT["optional-dependencies"].items()
}


def by(module: str) -> str:
    return INSTALLED_BY.get(module, module).lower().replace("_", "-")


def others() -> Iterator[tuple[str, str, bool]]:
    """File, module and guard of each import of a library that others made."""
    for file, _, module, guarded in code().imports:
        name = module.partition(".")[0]
        if name not in {*sys.stdlib_module_names, "shardkit"}:
            yield file, name, guarded


def test_every_import_is_declared_and_guarded_where_it_is_an_extra():
    wrong = []
    for file, module, guarded in others():
        extras = {name for name, libraries in EXTRAS.items() if by(module) in libraries}
        if by(module) in CORE or (extras and (guarded or file.startswith(WHOLLY))):
            continue
        if guarded and module == "typing_extensions":  # of the type checker alone
            continue
        wrong.append(f"{file}: {module}, {'an extra' if extras else 'not declared'}")
    assert not wrong
    assert {by(module) for _, module, _ in others()} >= CORE  # none is installed in vain


def test_extras_that_errors_name_exist():
    """In messages, docs and calls of `extra`."""
    named, pattern = set(), r'(?:shardkit\[|\bextra\("|\bextra=")([\w-]+)'
    for path in [*(ROOT / "shardkit").rglob("*.py"), *(ROOT / "docs").glob("*.md")]:
        named |= {*re.findall(pattern, path.read_text("utf-8"))}
    assert named - {"name"} <= EXTRAS.keys()
    assert {"arrow", "zstd", "sentencepiece", "encodings", "array-record"} <= named
    # Metadata normalize names (PEP 685), and pip before 23.3 does not find another spelling.
    assert [name for name in EXTRAS if re.sub(r"[-_.]+", "-", name).lower() != name] == []


def test_a_missing_library_is_named_with_its_extra():
    with (
        pytest.raises(UsageError, match="reading it needs no_such_library") as error,
        extra("zstd", "reading it", ", or do without"),
    ):
        import no_such_library  # noqa: F401
    assert error.value.fix == 'pip install "shardkit[zstd]", or do without'
    with pytest.raises(ModuleNotFoundError), extra("zstd", "reading it"):
        import shardkit.no_such_module  # noqa: F401


# Runs the command as if nothing but the dependencies were installed.
BARE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
from shardkit.cli import main
main()
"""


def bare(*words: object) -> subprocess.CompletedProcess[str]:
    modules = {"webdataset", "lmdb", "pyarrow", "datasets", "ffcv", "megatron", "torch", "pandas"}
    modules |= {"zstandard", "sentencepiece", "ml_dtypes", "psutil", "msgpack", "tokenizers"}
    script = BARE.format(absent=modules)
    command = [sys.executable, "-c", script, *map(str, words)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.large
def test_without_extras_images_are_converted_and_the_rest_names_its_extra(tmp_path):
    images, text = ROOT / "sample_data/images", tmp_path / "a.txt.zst"
    text.write_bytes(b"\x28\xb5\x2f\xfd")
    for to in ("wds", "litdata", "beton"):
        done = bare("convert", images, "--to", to, "-o", tmp_path / to, "--workers", 0)
        assert done.returncode == 0, done.stderr
        assert bare("verify", tmp_path / to, "--against", images).returncode == 0
    for words, name in (
        (("convert", images, "--to", "parquet"), "arrow"),
        (("convert", images, "--to", "lmdb"), "lmdb"),
        (("convert", text, "--to", "wds"), "zstd"),
    ):
        done = bare(*words, "-o", tmp_path / "out", "--workers", 0)
        assert done.returncode == 2, done.stderr
        assert f'pip install "shardkit[{name}]"' in done.stderr
    done = bare("formats")
    assert done.returncode == 0
    assert done.stdout.count('pip install "shardkit[arrow]"') == 3


def test_importing_a_module_without_its_library_names_the_extra():
    code = "import sys; sys.modules['torch'] = None; from shardkit.torch import Loader"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "shardkit.torch needs torch, which is not installed" in ended.stderr
    assert issubclass(MissingLibraryError, ImportError)
