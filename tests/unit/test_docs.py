"""Pages about internals say what the code says, and name only what exists."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from keepstep.cli.main import cli
from keepstep.sim.plans.scenario import find_plan

ROOT = Path(__file__).parents[2]
INTERNALS = ROOT / "docs" / "internals"
GUARANTEES = (INTERNALS / "guarantees.md").read_text()
REFERENCE = re.compile(r"`([\w./-]+)::([^`…]+)`")


def test_protocol_page_is_what_the_code_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(INTERNALS)
    generate = importlib.import_module("generate")
    assert generate.PAGE.read_text() == generate.page(), "run `make docs`"


def test_the_page_of_commands_is_what_help_prints() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    boxes = re.findall(
        r"^## keepstep ([^\n]+)\n\n```text\n(.*?)```", page, re.DOTALL | re.MULTILINE
    )
    assert len(boxes) > 20
    for name, box in boxes:
        words = [*name.split(), "--help"]
        said = CliRunner().invoke(cli, words, terminal_width=90, prog_name="keepstep")
        assert said.output == box, f"put what `keepstep {' '.join(words)}` prints into {name}"


@cache
def names(path: Path) -> frozenset[str]:
    """Functions and classes of a file, methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
    return frozenset(found)


def missing(where: str, name: str) -> bool:
    if where == "sim":
        find_plan(0, name)  # refuses what is no story and no cell
        return False
    paths = [path for path in (ROOT / where, ROOT / "src" / "keepstep" / where) if path.exists()]
    if not paths:
        return True
    if paths[0].name == "mutants.py":
        return f'    "{name}": ' not in paths[0].read_text()
    return name not in names(paths[0])


def test_every_name_on_the_page_of_guarantees_exists() -> None:
    found = REFERENCE.findall(GUARANTEES)
    assert len(found) > 100
    assert not [f"{where}::{name}" for where, name in found if missing(where, name)]


def test_every_guarantee_names_what_holds_it() -> None:
    promised = GUARANTEES.split("## Whatever fails")[1].split("## What is not guaranteed")[0]
    bullets = re.split(r"^\* ", promised, flags=re.MULTILINE)[1:]
    assert bullets
    assert not [bullet for bullet in bullets if not REFERENCE.search(bullet)]


@pytest.mark.parametrize(
    ("where", "name"),
    [
        ("sim/rules/check.py", "Checker.nobody"),
        ("sim/none.py", "x"),
        ("tests/sim/mutants.py", "no: such"),
    ],
)
def test_a_name_that_does_not_exist_is_found(where: str, name: str) -> None:
    assert missing(where, name)
