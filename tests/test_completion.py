"""Completion in shells: bash itself completes; the scripts of others are read as text."""

from __future__ import annotations

import errno
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shardkit.cli import COMMANDS, completion
from shardkit.formats import BUILT_IN
from tests.conftest import few, files_of
from tests.test_cli import run

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def completed(line: str) -> list[str]:
    """The words that bash offers for the last one of a line."""
    words = line.split(" ")
    script = """
    source <(shardkit --show-completion bash)
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


@pytest.mark.large
def test_of_what_is_not_known_options_before_a_command_are_offered():
    assert "--install-completion" in completed("shardkit cnvert --")


@pytest.mark.large
def test_installed_it_completes_in_the_next_bash(tmp_path, images):
    """Typed into a terminal: a tab completes a format, and another one a path."""
    environ = {"HOME": str(tmp_path), "PATH": PATH, "TERM": "dumb", "PS1": "$ ", "LANG": "C.UTF-8"}
    install = ["shardkit", "--install-completion", "bash"]
    subprocess.run(install, env=environ, check=True, capture_output=True)
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        ["bash", "--noprofile", "-i"], stdin=theirs, stdout=theirs, stderr=theirs,
        env=environ, cwd=tmp_path, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    try:
        os.write(ours, b"shardkit convert ima\t")
        shown = _until(ours, rb"images/")
        os.write(ours, b" --to bet\t")
        shown = _until(ours, rb"--to beton ")
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)
    assert shown


def _until(handle: int, pattern: bytes) -> bytes:
    shown = b""
    while not re.search(pattern, shown):  # pytest's time limit ends it
        shown += os.read(handle, 65536)
    return shown


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_installing_changes_files_once_and_names_them(shell, tmp_path, monkeypatch):
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "a home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    settings = home / f".{shell}rc"
    home.mkdir()
    if shell != "fish":
        settings.write_text("alias x=y")  # without an end of line
    said = run("--install-completion").stderr
    files = files_of(home)
    scripts = {
        "fish": ".config/fish/completions/shardkit.fish",
        "bash": ".local/share/shardkit/completion.bash",
        "zsh": ".local/share/shardkit/completion.zsh",
    }
    script = files[scripts[shell]].decode()
    assert script.strip() == run("--show-completion", shell).stdout.strip()
    assert all(f"changed: {home / name}\n" in said and "unchanged" not in said for name in files)
    if shell != "fish":
        first, second = settings.read_text().splitlines()
        assert first == "alias x=y"
        assert second.endswith(f"source '{home / scripts[shell]}'  # completion of shardkit")
    again = run("--install-completion", shell).stderr
    assert all(f"unchanged: {home / name}\n" in again for name in files)
    assert files_of(home) == files


def test_settings_are_never_written_again(tmp_path, monkeypatch):
    """So that a full disk, or a kill, cannot take what a user has there."""
    monkeypatch.setenv("HOME", str(tmp_path))
    settings, before = tmp_path / ".bashrc", b"alias x=y\xff\r\n"
    settings.write_bytes(before)
    monkeypatch.setattr(Path, "write_bytes", _no_space_for(settings))
    completion.install("bash")
    assert settings.read_bytes().startswith(before + b"source ")


def _no_space_for(file: Path) -> Callable[[Path, bytes], int]:
    real = Path.write_bytes

    def write(path: Path, data: bytes) -> int:
        if path == file:
            path.open("wb").close()
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, data)

    return write


@pytest.mark.parametrize(
    ("shell", "parts"),
    [
        ("zsh", ["#compdef shardkit", "_SHARDKIT_COMPLETE=zsh_complete", "compdef _shardkit"]),
        ("fish", ["_SHARDKIT_COMPLETE=fish_complete", "complete --no-files --command shardkit"]),
    ],
)
def test_scripts_of_other_shells(shell, parts):
    """And where the shell is installed it finds no mistake in them."""
    script = run("--show-completion", shell).stdout
    assert all(part in script for part in parts)
    if program := shutil.which(shell):
        subprocess.run([program, "-n"], input=script, text=True, check=True)


def test_a_shell_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setenv("SHELL", "/bin/sh")
    assert "completion is not available" in run("--install-completion", check=2).stderr
    assert "'tcsh' is not one of" in run("--show-completion", "tcsh", check=2).stderr
