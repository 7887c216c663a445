"""What a commit changes in tests, so that a new or changed case runs at once and not by chance.

Compared are syntax trees, of the working tree and of the commit's parent: comments, docstrings,
imports and moved lines change nothing. A function has changed with its own text, its decorators
and parameters included, or with a helper, constant or fixture of its module that it names. Strings
that are new tell which of its parameter sets are meant.

In a shallow clone there is no parent, and nothing can be told.
"""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

from tests.support.scripts import ROOT

NAMED_MIN = 3  # characters of a string that is looked for in ids


def git(*words: str) -> str:
    """What git says; empty if it does not know."""
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT)
    return done.stdout if done.returncode == 0 else ""


def has_parent() -> bool:
    return bool(git("rev-parse", "--verify", "--quiet", "HEAD~1"))


def in_parent(path: Path) -> str:
    """Its text in the parent of this commit; empty if it was not there."""
    return git("show", f"HEAD~1:{path.relative_to(ROOT)}")


def differing(folder: Path) -> set[Path]:
    """Files that are new or not as in the commit's parent."""
    names = git("diff", "--name-only", "HEAD~1", "--", str(folder))
    names += git("ls-files", "--others", "--exclude-standard", "--full-name", "--", str(folder))
    return {ROOT / name for name in names.splitlines()}


def changed(old: str, new: str) -> dict[str, set[str]]:
    """Names of `new` that are not as in `old`, each with the strings that are new about it."""
    before, after = _parts(old), _parts(new)
    found = {
        name: _strings(parts) - _strings(before.get(name, []))
        for name, parts in after.items()
        if _dump(parts) != _dump(before.get(name, []))
    }
    while True:
        hanging = {
            name: set().union(*(found[other] for other in names))
            for name, parts in after.items()
            if name not in found and (names := _names(parts) & found.keys())
        }
        if not hanging:
            return found
        found |= hanging


def _parts(text: str) -> dict[str, list[ast.stmt]]:
    """Top-level definitions by name."""
    found: dict[str, list[ast.stmt]] = {}
    for node in ast.parse(text).body:
        for name in _defines(node):
            found.setdefault(name, []).append(node)
    for inner in ast.walk(ast.Module([node for nodes in found.values() for node in nodes], [])):
        body = getattr(inner, "body", None)
        if isinstance(body, list) and body and _is_text(body[0]) and len(body) > 1:
            del body[0]  # a docstring
    return found


def _defines(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign():
            targets = (one for target in node.targets for one in ast.walk(target))
            return [one.id for one in targets if isinstance(one, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _dump(parts: list[ast.stmt]) -> list[str]:
    return [ast.dump(part) for part in parts]


def _strings(parts: list[ast.stmt]) -> set[str]:
    constants = (one for part in parts for one in ast.walk(part) if isinstance(one, ast.Constant))
    return {one.value for one in constants if isinstance(one.value, str)}


def _names(parts: list[ast.stmt]) -> set[str]:
    """That a definition uses; a fixture is an argument."""
    nodes = [one for part in parts for one in ast.walk(part)]
    used = {one.id for one in nodes if isinstance(one, ast.Name)}
    return used | {one.arg for one in nodes if isinstance(one, ast.arg)}
