"""The command line: what people type, what they see, exit codes; help, examples, completion."""

import contextlib
import errno
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import shardkit
from shardkit.cli import COMMANDS, group, main, tables
from shardkit.cli.help import Command, Example
from shardkit.codecs import extension
from shardkit.formats import BUILT_IN, MEANT
from shardkit.storage import byte_source
from shardkit.testing import make_image
from tests.conftest import few, files_of, write_images


def run(*words: object, check: int | None = 0) -> subprocess.CompletedProcess[str]:
    """What the command does, in this process: another one would take a third of a second."""
    modules = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("default")
        patch.setattr(sys, "argv", ["shardkit", *map(str, words)])
        patch.setattr(sys.modules["__main__"], "__package__", "", raising=False)
        patch.setattr(sys, "path", [*sys.path])
        with _captured(patch) as texts, pytest.raises(SystemExit) as ended:
            main()
    for name in set(sys.modules) - modules:
        if not (getattr(sys.modules[name], "__file__", None) or sys.prefix).startswith(_KNOWN):
            del sys.modules[name]  # a user's own, in a folder of this test
    found = subprocess.CompletedProcess(words, ended.value.code, *texts)
    assert check in (None, found.returncode), found.stderr
    assert "Traceback" not in found.stderr
    return found


ROOT = Path(__file__).parent.parent
_KNOWN = (sys.prefix, sys.base_prefix, str(Path(shardkit.__file__).parents[1]))


@contextlib.contextmanager
def _captured(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is printed to stdout and stderr, by worker processes too; there at the end."""
    texts: list[str] = []
    kept = [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        try:
            for number, (name, file) in enumerate((("stdout", out), ("stderr", err)), 1):
                os.dup2(file.fileno(), number)
                patch.setattr(sys, name, file)
            yield texts
        finally:
            for number, (handle, file) in enumerate(zip(kept, (out, err), strict=True), 1):
                file.flush()
                os.dup2(handle, number)
                os.close(handle)
                file.seek(0)
                texts.append(file.read())


def test_too_few_open_files_for_a_module_is_no_traceback(monkeypatch):
    def load(*args, **options):  # as Python's import raises it
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "run.py")

    monkeypatch.setattr("shardkit.cli.group.main", load)
    error = run("inspect", "x", check=1).stderr
    assert error.startswith("shardkit: cannot open: Too many open files")
    assert "run.py" in error
    assert "ulimit -n" in error


def test_help_names_every_command_and_formats_every_format():
    text = run("--help").stdout
    for name, summary in COMMANDS.items():
        assert f"{name} " in text
        assert summary in text
    assert shardkit.__version__ in run("--version").stdout
    assert "WebDataset" in run("formats").stdout
    assert "abilities" in json.loads(run("formats", "--json").stdout)["wds"]


def started(*words: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """The command in an interpreter of its own."""
    command = [sys.executable, "-m", "shardkit", *map(str, words)]
    return subprocess.run(command, check=False, **{"stderr": subprocess.PIPE, **options})


@pytest.mark.parametrize(("command", "errors"), [("formats", False), ("formats --json", True)])
def test_output_that_nobody_reads_ends_a_command_quietly(command, errors):
    """As `shardkit inspect X | head`: with the exit code that SIGPIPE gives other tools."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        ended = started(*command.split(), stdout=closed, **({"stderr": closed} if errors else {}))
    assert ended.returncode == 141
    assert not ended.stderr


@pytest.mark.parametrize("command", ["formats", "cat {} 0"])
def test_output_that_finds_no_space_is_an_error(command, tmp_path):
    """X1: no traceback, whether writing fails or what was gathered is written at the end."""
    shardkit.convert([{"__key__": "a", "label": 1}], "wds", tmp_path / "x", workers=0)
    with open("/dev/full", "wb") as full:
        ended = started(*command.format(tmp_path / "x").split(), stdout=full)
    assert ended.returncode == 1
    assert ended.stderr == b"shardkit: cannot write the output: No space left on device\n"
    # One that is closed is none.
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "shardkit", "formats"]
    if command == "formats":
        ended = subprocess.run(shell, capture_output=True, timeout=120, check=False)
        assert (ended.returncode, ended.stderr) == (0, b"")


def test_the_version_says_which_extensions_there_are(monkeypatch):
    for missing, reads, words in (
        (None, True, ["reading: yes\n", "JPEGs: yes\n", "\nPillow ", "\npython "]),
        (None, None, ["reading: no\n", "JPEGs: yes\n", "gcc"]),
        ("not built", True, ["reading: yes\n", "JPEGs: no", "not built", "gcc"]),
    ):
        monkeypatch.setattr(extension, "MISSING", missing)
        monkeypatch.setattr(byte_source, "reads", reads)
        shown = CliRunner().invoke(group, ["--version"])
        assert shown.exit_code == 0
        assert f"shardkit {shardkit.__version__}\n" in shown.output
        assert all(word in shown.output for word in words)
        assert ("fix:" in shown.output) is ("gcc" in words)


def test_a_build_without_the_extensions_says_so(tmp_path):
    """And is no failure: setuptools goes on."""
    folders = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    built = subprocess.run(
        [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_ext", *folders],
        cwd=ROOT, env={**os.environ, "CC": "false"}, capture_output=True, text=True, check=True,
        start_new_session=True,  # without a terminal, on which the notice is shown too
    )  # fmt: skip
    for purpose in ("fast loading of JPEGs", "fast reading"):
        assert f"installed WITHOUT its extension for {purpose}\n" in built.stderr
    assert "libjpeg-dev" in built.stderr
    assert not list(tmp_path.rglob("*.so"))
    for said in (built.stderr, extension.FIX):  # a command that pip takes: it says what to install
        options = said.partition("pip install ")[2].partition("\n")[0].split()
        assert options == ["--force-reinstall", "--no-deps", "."]


def test_convert_says_what_it_made_or_nothing_or_one_object(images, tmp_path):
    words = ["convert", images, "--to", "wds"]
    found = run(*words)
    assert "12 samples in 3 classes" in found.stdout
    assert "1 shard" in found.stdout
    assert found.stderr.startswith("shardkit: converting: 0 of 12 samples")
    assert len(shardkit.open(tmp_path / "images-wds")) == 12
    assert "The output was already complete" in run(*words).stdout
    words += ["--workers", 0]
    found = run(*words, "--quiet", "--overwrite")
    assert (found.stdout, found.stderr) == ("", "")
    report = json.loads(run(*words, "--json").stdout)
    assert report["samples"] == 12
    assert report["splits"][""]["shards"] == 1
    assert report["splits"][""]["fields"]["image"]["count"] == 12
    report = json.loads(run("inspect", tmp_path / "images-wds", "--json").stdout)
    assert report["samples"] == 12
    failed = run(*words, "--json", "--shuffle", check=2)
    assert json.loads(failed.stdout)["error"] == "OutputError"


def test_a_plan_tells_what_is_at_the_output(tmp_path):
    source = write_images(tmp_path / "images", kilobytes=2)
    words = ["convert", source, "--to", "wds", "-o", tmp_path / "out", "--shard-size", "5kB"]
    words += ["--workers", 0]

    def state(*more):
        before = files_of(tmp_path)
        found = str(json.loads(run(*words, *more, "--plan", "--json").stdout)["state"])
        assert found in run(*words, *more, "--plan").stdout
        assert files_of(tmp_path) == before
        return found

    about = run(*words, "--plan").stdout
    assert "Would convert" in about
    assert "12 in 3 classes: image, label" in about
    assert json.loads(run(*words, "--plan", "--json").stdout)["tasks"] > 1
    assert state() == ""
    bad = source / "class2/003.jpg"
    good = bad.read_bytes()
    bad.write_bytes(b"text")
    run(*words, check=1)
    assert state() == "unfinished: the run continues where it stopped"
    bad.write_bytes(good)
    assert state() == "unfinished, with other options or another source: the run is refused"
    assert state("--overwrite") == ""
    (tmp_path / "out.partial/job.json").write_text("{")
    assert state() == "unfinished, and its description is damaged: the run is refused"
    run(*words, "--overwrite")
    assert state() == "already complete: there is nothing to do"
    assert state("--overwrite") == "a dataset, which is replaced"
    assert state("--shuffle") == "another dataset, which is not replaced without --overwrite"
    run(*words, "--plan", "--part", "1/2")


def test_every_option_reaches_the_conversion(images, tmp_path):
    (images / "class1/000.jpg").write_bytes(b"text")
    classes = tmp_path / "classes.txt"
    classes.write_text("class2\nclass1\nclass0\n", "utf-8")
    run(
        "convert", images, "--to", "wds", "-o", tmp_path / "out", "--shard-samples", "3",
        "--shuffle", "--seed", "7", "--workers", "2", "--limit", "9", "--classes", classes,
        "--rename", "image=jpg", "--rename", "label=cls", "--on-error", "skip",
        "--max-errors", "1", "--split", "a=0.5,b=0.5",
    )  # fmt: skip
    shardkit.convert(
        images, "wds", tmp_path / "same", shard_samples=3, shuffle=True, seed=7, limit=9,
        classes=["class2", "class1", "class0"], rename={"image": "jpg", "label": "cls"},
        on_error="skip", split="a=0.5,b=0.5", workers=0,
    )  # fmt: skip
    assert files_of(tmp_path / "out") == files_of(tmp_path / "same")


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory):
    """A folder with what commands may be wrong about."""
    folder = tmp_path_factory.mktemp("mistaken")
    (folder / "empty").mkdir()
    for name in ("images", "bad"):
        write_images(folder / name)
    (folder / "bad/class0/000.jpg").write_text("text")
    shardkit.convert([{"text": "x" * 2000}], "wds", folder / "out")
    whole = (folder / "out/shard-000000.tar").read_bytes()
    (folder / "cut.tar").write_bytes(whole[:1000])
    return folder


def test_exit_codes_and_messages(mistaken, monkeypatch):
    monkeypatch.chdir(mistaken)
    for words, code, message in (
        ("convert nothing --to wds", 2, "there is no such file or folder"),
        ("convert images --to zip", 2, "there is no format 'zip'"),
        ("convert images", 2, "Missing option '--to'"),
        ("convert images --to wds --shard-size big", 2, "invalid size"),
        ("convert images --to wds --rename x", 2, "OLD=NEW"),
        ("convert images --to wds --rename image=", 2, "empty name"),
        ("convert images --to wds -o images/x", 2, "must not contain each other"),
        ("convert empty --to wds", 1, "there are no images"),
        ("convert bad --to wds", 1, "the value is not an image"),
        ("inspect empty", 1, "not a dataset or shard"),
        ("inspect cut.tar", 1, "truncated"),
        ("inspect nothing.tar", 2, "there is no such file or folder"),
        ("nonsense", 2, "No such command"),
    ):
        assert message in run(*words.split(), check=code).stderr, words


def test_inspect_shows_a_dataset_a_shard_foreign_data_splits(images, tmp_path):
    (images / "class0/000.txt").write_text("a\ncaption")
    (images / "class2/000.png").write_bytes(make_image(3, "PNG", (20, 10)))
    shardkit.convert(images, "wds", tmp_path / "out", workers=0, shard_samples=7)
    foreign = tmp_path / "foreign.tar"
    foreign.write_bytes((tmp_path / "out/shard-000001.tar").read_bytes())

    found = run("inspect", tmp_path / "out").stdout
    for words in ("13 in 2 shards", "Text, 1 value", "class2", "jpeg 8 x 6", "a caption"):
        assert words in found
    found = run("inspect", tmp_path / "out/shard-000001.tar", "--full").stdout
    for words in ("6 in 1 shard", "image", "png", "8 / 8 / "):
        assert words in found
    found = run("inspect", foreign, "--samples", "1", "--full").stdout
    for words in ("made by another tool", "jpg", "cls", "Classes: 2", "class1/003"):
        assert words in found
    report = json.loads(run("inspect", foreign, "--json").stdout)
    sizes = sorted(len(make_image(n)) for n in (103, 200, 201, 202, 203))
    stats = report["fields"]["jpg"]["stats"]
    assert [stats[name] for name in ("count", "bytes", "min", "max")] == [
        5, sum(sizes), sizes[0], sizes[-1],
    ]  # fmt: skip
    assert [(each["label"], each["samples"]) for each in report["classes"]] == [(1, 1), (2, 5)]
    assert {each["name"] for each in report["classes"]} == {None}
    (tmp_path / "splits").mkdir()
    for name in ("train", "val"):
        shardkit.convert(images, "wds", tmp_path / "splits" / name, workers=0)
    found = run("inspect", tmp_path / "splits").stdout
    assert "splits/train" in found
    assert "splits/val" in found


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_that_is_printed_without_rich_is_the_same(capsys, monkeypatch, terminal):
    rows = [("a", "1 sample", "x"), ("  longer", "", "yy"), ("b", "z" * 60)]
    for name, value in {"COLUMNS": "100", "TERM": "xterm", "COLORTERM": "truecolor"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if terminal:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    tables.print_table("A title", rows)
    simple = capsys.readouterr().out
    monkeypatch.setattr(tables, "_is_simple", lambda *_: False)
    tables.print_table("A title", rows)
    expected = [click.unstyle(line).rstrip() for line in simple.splitlines()]
    shown = capsys.readouterr().out
    assert expected == [click.unstyle(line).rstrip() for line in shown.splitlines()]
    assert ("\x1b[36m" in simple) == ("\x1b[36m" in shown) == terminal


def test_starting_imports_no_extra_and_little_else():
    script = "import sys, shardkit.cli, shardkit; print(*sorted(sys.modules))"
    loaded = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    heavy = {"numpy", "torch", "rich", "pyarrow", "cv2", "PIL", "webdataset", "lmdb", "tokenizers"}
    assert not heavy & {*loaded}


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("mine", 'exec("raise KeyboardInterrupt")'),
        pytest.param("click", "raise KeyboardInterrupt", marks=pytest.mark.large),
    ],
)
def test_ctrl_c_while_modules_are_imported(tmp_path, module, text):
    """X1: no traceback, and the exit code is the one that it always has."""
    (tmp_path / f"{module}.py").write_text(text)
    source = write_images(tmp_path / "in", classes=1, each=1)
    command = ["convert", source, "--to", "wds", "-o", tmp_path / "out", "--transform", "mine:f"]
    done = started(*command, cwd=tmp_path, text=True)
    assert done.returncode == 130
    assert done.stderr.strip().startswith("shardkit: interrupted")
    assert "Traceback" not in done.stderr


def command(name: str) -> Command:
    found = importlib.import_module(f"shardkit.cli.{name.replace('-', '_')}").command
    assert isinstance(found, Command)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_and_option_has_help(name):
    page = run(name, "--help").stdout
    shown = " ".join(page.split())
    assert len(str(command(name).help)) > 20
    for param in command(name).params:
        if isinstance(param, click.Option):
            assert param.help, f"{name} {param.opts[0]}"
            assert " ".join(param.help.split()) in shown
    if name == "convert":  # it has them in groups
        groups = [
            "Input",
            "Choosing and splitting",
            "Images",
            "Text and tables",
            "Audio",
            "Output",
            "Run",
        ]
        positions = [page.index(f"\n{title}:\n") for title in groups]
        assert positions == sorted(positions)
        assert "\nOptions:\n" not in page
        assert page.count("--help") == 1


def examples() -> Iterator[Example]:
    for name in COMMANDS:
        found = command(name).examples
        assert len(found) == 2, f"{name} has {len(found)} examples"
        yield from found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A folder with what examples are about."""
    folder = tmp_path_factory.mktemp("prepared")
    shutil.copytree(ROOT / "sample_data" / "images", folder / "photos")
    shutil.copytree(ROOT / "sample_data" / "text", folder / "texts")
    for name in ("shards", "more"):
        shardkit.convert(folder / "photos", "wds", folder / name, workers=0)
    return folder


SLOW = ("shardkit bench", "shardkit doctor")


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(e, id=e.line, marks=[pytest.mark.large] if e.line.startswith(SLOW) else [])
        for e in examples()
        if not e.not_run
    ],
)
def test_each_example_runs(example, prepared, tmp_path, monkeypatch):
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder)
    monkeypatch.chdir(folder)
    program, name, *words = example.line.split()
    assert program == "shardkit"
    if {"|", ">"} & {*words}:  # a shell's
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        line = ["bash", "-euo", "pipefail", "-c", example.line]
        subprocess.run(line, check=True, env={**os.environ, "PATH": path})
    else:
        run(name, *words)
    assert f"    {example.line}\n" in run(name, "--help").stdout  # in one piece


def test_names_lead_to_formats_and_an_example_that_no_test_runs_says_why():
    assert {example.not_run for example in examples() if example.not_run} <= {"needs a bucket"}
    assert set(MEANT.values()) <= set(BUILT_IN)
    assert not set(MEANT) & set(BUILT_IN)


def test_a_mistyped_word_is_told_what_may_have_been_meant(prepared, monkeypatch):
    monkeypatch.chdir(prepared)
    (prepared / "t.csv").write_text("file,label\ncircle/00.jpg,1\n")
    (prepared / "sha la").mkdir()
    for words, meant in (
        ("convrt", "did you mean convert?"),
        ("convert photos --to wds --shufle", "'--shuffle'"),
        ("convert photos --to bton", "did you mean beton?"),
        *[
            (f"convert photos --to {name}", f"did you mean {meant} (")
            for name, meant in (
                *(("tar", "wds"), ("webdataset", "wds"), ("WebDatset", "wds"), ("ffcv", "beton")),
                *(("tfrecords", "tfrecord"), ("jsonl", "parquet"), ("streaming", "mds")),
            )
        ],
        ("convert photos --to wds --fields labl", "did you mean label?"),
        ("convert photos --to wds --rename imge=x", "did you mean image?"),
        ("convert photos --to wds --where labl==1", "did you mean label?"),
        ("convert photos --to wds --include-class circel", "did you mean circle?"),
        ("convert texts/notes.jsonl --to wds --text-field txt", "did you mean text?"),
        ("convert texts/notes.jsonl --to wds --label-column idd", "did you mean id?"),
        ("convert texts/notes.jsonl --to wds --text-field text --drop idd", "did you mean id?"),
        ("convert photos --to wds --metadata t.csv --file-column fil", "did you mean file?"),
        ("bench shards --measure lod", "did you mean load?"),
        ("pack photos", "type `shardkit convert`"),
        ("ls shards", "type `shardkit inspect`"),
        ("help", "type `shardkit --help`"),
        ("photos --to wds", "type `shardkit convert photos --to FORMAT`"),
        ("convert photos", "Example: shardkit convert photos --to wds"),
        ("convert photos --format wds", "write --to FORMAT"),
        ("convert photos --TO wds", "write --to VALUE, in lower case"),
        ("convert photos -t wds", "write --to FORMAT"),
        ("convert photos --to WDS", "did you mean wds?"),
        ("convert photos \N{EN DASH}to wds", "type two hyphens, --to"),
        ("convert photos --to wds -o=out", "as in -o out"),
        ("convert --input photos --to wds", "give the path or URL first"),
        ("convert photos --to wds --output x", "write --out PATH"),
        ("convert photos --to wds --num-workers 2", "write --workers N"),
        ("convert photos --to wds --force", "write --overwrite\n"),
        ("convert photos --to wds --text-column x", "write --text-field NAME"),
        ("convert photos --to wds --resize 2x2", "--resize: Reduce images to this size in pixels"),
        ("doctor photos --num-workers 2", "write --threads N"),
        ("head shards --limit 3", "write -n N"),
        ("convert fotos --to wds", "did you mean photos?"),
        ("convert Photos/x --to wds", "did you mean photos?"),
        ("convert photos/circel --to wds", f"did you mean {Path('photos/circle')}?"),
        ("head shrads", "did you mean shards?"),
        ("convert photos --to wds --metadata c.csv", "did you mean t.csv?"),
        ("convert texts --to wds --tokenizer texts/nots.json", "notes.jsonl?"),
        ("convert sha --to wds", "fix: put a path with blanks in quotes: 'sha la'"),
        ("convert ~/photos --to wds", f"outside quotes: give {Path.home() / 'photos'}"),
        ("convert photos --to wds -o ~/a", f"outside quotes: give {Path.home() / 'a'}"),
        ("convert photos --to wds -o a/b/c", f"mkdir -p {prepared / 'a' / 'b'}"),
        ("convert s3:bucket/a --to wds -o a", "write s3://bucket/a"),
        ("convert someone/mnist --to wds", "write hf://datasets/someone/mnist"),
        ("convert hf://datasets/mnist --to wds", "give hf://datasets/OWNER/NAME"),
        ("inspect https://huggingface.co/datasets/a/b", "give hf://datasets/a/b\n"),
        ("convert photos --to wds -o s3://", "does not name a bucket"),
        ("convert photos/*.jpg --to wds -o a", "or the whole folder, photos"),
    ):
        assert meant in run(*words.split(), check=None).stderr, words


PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def completed(line: str) -> list[str]:
    """The words that bash offers for the last one of a line."""
    words = line.split(" ")
    script = """
    source <(_SHARDKIT_COMPLETE=bash_source shardkit)
    compopt() { COMPREPLY+=("paths: $2"); }  # outside of a completion bash refuses it
    COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    _shardkit_completion shardkit
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    found = subprocess.run(
        ["bash", "-c", script, "bash", *words],
        capture_output=True, text=True, check=True, env={**os.environ, "PATH": PATH},
    )  # fmt: skip
    assert found.stderr == ""
    return found.stdout.split("\n")[:-1]


CASES = {
    "shardkit con": ["convert"],
    "shardkit ": list(COMMANDS),
    "shardkit convert photos --resi": ["--resize", "--resize-mode"],
    "shardkit convert photos --to be": ["beton"],
    "shardkit convert photos --to ": sorted(BUILT_IN),
    "shardkit convert photos --image-format ": ["keep", "jpeg", "png", "webp", "raw"],
    "shardkit convert photos --to wds --dedup n": ["near"],
    "shardkit inspect sha": ["paths: default"],  # bash's own completion of paths
    "shardkit convert photos --metadata ta": ["paths: default"],
}


@pytest.mark.parametrize("line", few(CASES, "shardkit convert photos --to be"))
def test_bash_completes(line):
    assert sorted(completed(line)) == sorted(CASES[line])
    if line == "shardkit ":  # options before a command, though it is not known
        assert "--version" in completed("shardkit cnvert --")
