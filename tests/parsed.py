"""What the code of shardkit says: parsed once, for all tests that look at it."""

import ast
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "shardkit"


class Import(NamedTuple):
    """One imported module; of `from shardkit.a import b`, it is `shardkit.a.b` if that is one."""

    file: str  # below PACKAGE
    line: int
    module: str
    guarded: bool  # only for types, or what surrounds it says what to do without it


class Code(NamedTuple):
    imports: list[Import]
    # All texts; of f-strings and sums of texts, what stands between their values.
    texts: set[str]
    attributes: list[tuple[str, str]]  # of names: file, and such as `warnings.warn`


def _module(module: str, name: str) -> str:
    """The module that `from module import name` is about: the name may be one of a folder."""
    path = ROOT.joinpath(*module.split("."), name)
    here = path.is_dir() or path.with_suffix(".py").exists()
    return f"{module}.{name}" if here or module == "shardkit" else module


@cache
def code() -> Code:
    found = Code([], set(), [])
    for path in sorted(PACKAGE.rglob("*.py")):
        _look(ast.parse(path.read_text("utf-8")), path.relative_to(PACKAGE).as_posix(), found)
    return found


def _look(node: ast.AST, file: str, found: Code, guarded: bool = False) -> None:
    match node:
        case ast.Constant(value=str() as text):
            found.texts.add(text)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            found.attributes.append((file, f"{name}.{attribute}"))
        case ast.Import(names=names):
            modules = [alias.name for alias in names]
            found.imports.extend(Import(file, node.lineno, name, guarded) for name in modules)
        case ast.ImportFrom(names=names, module=str() as module, level=0):
            modules = sorted({_module(module, alias.name) for alias in names})
            found.imports.extend(Import(file, node.lineno, name, guarded) for name in modules)
        case ast.If(test=test):
            guarded = guarded or "TYPE_CHECKING" in ast.unparse(test)
        case ast.With(items=[item, *_]):
            guarded = guarded or ast.unparse(item).startswith("extra(")
        case ast.Try(handlers=handlers):
            guarded = guarded or any(
                each.type is None or "ImportError" in ast.unparse(each.type) for each in handlers
            )
    for child in ast.iter_child_nodes(node):
        _look(child, file, found, guarded)
