"""Shell completion: click's scripts, printed or installed for the user's shell."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from click.shell_completion import get_completion_class

from shardkit import storage
from shardkit.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
_ZSH = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }; "


def chosen(shell: str) -> str:
    """The given shell; for "auto", the user's login shell."""
    found = Path(os.environ.get("SHELL", "")).name if shell == "auto" else shell
    if found not in SHELLS:
        raise UsageError(
            "completion is not available for this shell",
            expected=", ".join(SHELLS),
            found=repr(found),
            fix="name the shell: shardkit --install-completion bash",
        )
    return found


def script(shell: str) -> str:
    """The script that a shell reads."""
    from shardkit.cli import group

    kind = get_completion_class(shell)
    assert kind is not None
    return kind(group, {}, "shardkit", "_SHARDKIT_COMPLETE").source()


def install(shell: str) -> dict[Path, bool]:
    """Install the completion of a shell. Return the files, and whether each was changed."""
    home = Path.home()
    if shell == "fish":  # loads files from this folder
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        file = config / "fish" / "completions" / "shardkit.fish"
        return {file: _written(file, script(shell))}
    data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
    file = data / "shardkit" / f"completion.{shell}"
    settings = (Path(os.environ.get("ZDOTDIR") or home) if shell == "zsh" else home) / f".{shell}rc"
    line = f"{_ZSH * (shell == 'zsh')}source {shlex.quote(str(file))}  # completion of shardkit\n"
    with storage.explained("read", settings):
        before = settings.read_text("utf-8", "surrogateescape") if settings.exists() else ""
    added = "" if line in before else "\n" * (before[-1:] not in ("", "\n")) + line
    changed = {file: _written(file, script(shell)), settings: bool(added)}
    with storage.explained("write", settings), settings.open("ab") as end:
        end.write(added.encode())  # only append, so that the existing contents cannot be lost
    return changed


def _written(file: Path, text: str) -> bool:
    """Write text to a file. Return whether its contents changed."""
    with storage.explained("write", file):
        if file.exists() and file.read_bytes() == text.encode():
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    return True
