"""ARCHITECTURE.md names files that exist, and its walks go where the code goes.

A walk is a fenced block of hops; what follows them on a line is a comment. `↓`: the file before
imports this one. `↑`: this one imports the file before. `~`: over a wire of the table of wires,
whose ends have imported the same definition. `·`: a branch, from a file that the walk has passed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "keepstep"
PAGE = (ROOT / "ARCHITECTURE.md").read_text()
LINES_MAX = 160
NAMED = re.compile(r"(?<![\w./-])(?:[a-z_]+/)+[a-z_0-9]+\.(?:py|h)\b")
HOP = re.compile(r" *([↓↑~·]?) ((?:[a-z_]+/)+[a-z_0-9]+\.py)(?=\s)")
WALKS = re.findall(r"^```walk\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
ENDS = re.findall(r"^\| \w+ \| `([\w/.]+)`, `([\w/.]+)` \|", PAGE, re.MULTILINE)
WIRES = {frozenset(ends) for ends in ENDS}


@cache
def modules() -> dict[str, str]:
    """Dotted name of every module -> its path below src/keepstep."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = ".".join(["keepstep", *path.relative_to(SOURCE).with_suffix("").parts])
        found[name.removesuffix(".__init__")] = str(path.relative_to(SOURCE))
    return found


@cache
def imports(file: str) -> frozenset[str]:
    """The files that a file imports itself."""
    names = set()
    for node in ast.walk(ast.parse((SOURCE / file).read_text())):
        if isinstance(node, ast.Import):
            names |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{one.name}" for one in node.names)}
    return frozenset(modules()[name] for name in names if name in modules())


def hops(walk: str) -> Iterator[tuple[str, str]]:
    """(mark, file) of each; the first one of a walk has no mark."""
    for line in walk.splitlines():
        at = HOP.match(line + " ")
        assert at, f"no file in this line of a walk: {line!r}"
        yield at[1], at[2]
        while (at := HOP.match(line + " ", at.end())) and at[1]:
            yield at[1], at[2]


def wrong_hops(walk: str) -> list[str]:
    """What does not hold in a walk, in words."""
    passed: list[str] = []
    wrong = []
    for mark, file in hops(walk):
        before = passed[-1] if passed else ""
        if not (SOURCE / file).exists():
            return [*wrong, f"{file} does not exist"]
        holds = {
            "": not before,
            "·": file in passed,
            "↓": file in imports(before) if before else False,
            "↑": before in imports(file),
            "~": frozenset((before, file)) in WIRES,
        }
        if not holds[mark]:
            wrong.append(f"{before} {mark or 'without a mark'} {file}")
        passed.append(file)
    return wrong


def test_it_stays_short() -> None:
    assert len(PAGE.splitlines()) <= LINES_MAX


def test_every_file_that_is_named_exists() -> None:
    named = set(NAMED.findall(PAGE))
    assert len(named) > 60
    missing = [one for one in named if not (SOURCE / one).exists() and not (ROOT / one).exists()]
    assert not missing


@pytest.mark.parametrize("walk", WALKS, ids=lambda walk: walk.split()[0])
def test_a_walk_follows_the_imports(walk: str) -> None:
    assert not wrong_hops(walk)


@pytest.mark.parametrize("ends", ENDS, ids=" - ".join)
def test_the_ends_of_a_wire_import_the_same_definition(ends: tuple[str, str]) -> None:
    one, other = ends
    common = (imports(one) & imports(other)) - {"errors.py"}
    assert common, f"{one} and {other} have nothing in common"


def test_a_walk_that_is_wrong_is_found() -> None:
    lines = [
        "  core/decide.py ↓ core/faults.py  core/none.py is a comment",
        "↑ core/phases.py ~ core/decide.py",
        "· core/move_plan.py",
    ]
    assert wrong_hops("\n".join(lines)) == [
        "core/faults.py ↑ core/phases.py",
        "core/phases.py ~ core/decide.py",
        "core/decide.py · core/move_plan.py",
    ]
    assert wrong_hops("  core/none.py") == ["core/none.py does not exist"]
