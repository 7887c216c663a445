"""Which tests a commit has changed, and which of them a sample takes in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import changes, sampling

OLD = '''
"""A module."""
import json

POINTS = ["early", "late"]
ROWS = [("one", 1)]


def helper(point):
    return point


@fixture
def brain():
    return 1


@parametrize("point", POINTS)
def test_points(point):
    """At each of them."""
    assert helper(point)


@parametrize("row", ROWS)
def test_rows(row, brain):
    assert row
'''


def names(new: str, old: str = OLD) -> set[str]:
    return set(changes.changed(old, new))


def test_words_around_the_code_change_nothing() -> None:
    new = OLD.replace('"""A module."""\nimport json', "# about\nimport json, os")
    assert names("\n\n" + new.replace("At each of them", "Everywhere")) == set()


def test_a_function_changes_with_its_body_and_its_decorators() -> None:
    assert names(OLD.replace("assert row", "assert row[0]")) == {"test_rows"}
    assert names(OLD.replace('"row", ROWS', '"row", ROWS[:1]')) == {"test_rows"}


def test_it_changes_with_what_it_names() -> None:
    assert names(OLD.replace("return point", "return point + point")) == {"helper", "test_points"}
    assert names(OLD.replace("return 1", "return 2")) == {"brain", "test_rows"}


def test_strings_that_are_new_tell_which_parameters_are_meant() -> None:
    found = changes.changed(OLD, OLD.replace('"late"]', '"late", "between"]'))
    assert found == {"POINTS": {"between"}, "test_points": {"between"}}


def test_a_new_file_is_new_altogether() -> None:
    assert {"test_points", "test_rows"} <= names(OLD, old="")


# ---------------------------------------------------------------- samples


class Cell:
    def __init__(self, name: str, cost: float, always: bool) -> None:
        self.name = name
        self._marks = {"cost": SimpleNamespace(args=[cost]), "always": always or None}

    def get_closest_marker(self, name: str) -> Any:
        return self._marks[name]


def cell(name: str, cost: float, *, always: bool = False) -> Any:
    return Cell(name, cost, always)


def test_a_sample_has_what_is_always_in_it_and_fits() -> None:
    cells = [cell("sure", 40, always=True), *(cell(f"cell {n}", 30) for n in range(9))]
    drawn = sampling.draw(cells, "a commit", 110)
    assert cells[0] in drawn and len(drawn) == 3
    assert drawn == sampling.draw(cells, "a commit", 110)
    assert len({tuple(c.name for c in sampling.draw(cells, str(n), 110)) for n in range(9)}) > 1


class Config:
    def __init__(self) -> None:
        self.stash = pytest.Stash()


def changed_by(
    monkeypatch: pytest.MonkeyPatch, cells: list[Any], parent: bool = True
) -> tuple[list[str], list[str]]:
    """Names in the sample when `cells` have changed, and what is said."""
    config: Any = Config()
    drawn = cell("drawn", 30)
    monkeypatch.setattr(changes, "has_parent", lambda: parent)
    monkeypatch.setattr(sampling, "changed_cells", lambda items, seed: list(items))
    kept = sampling.with_changed(config, "chaos", [drawn], cells, "a commit")
    return [one.name for one in kept], config.stash.get(sampling.said, [])


def test_what_has_changed_runs_besides_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, said = changed_by(monkeypatch, [cell("new", 100)])
    assert kept == ["drawn", "new"] and "1 cells have changed" in said[0]
    assert changed_by(monkeypatch, []) == (["drawn"], [])


def test_too_many_changed_cells_are_bounded_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, said = changed_by(monkeypatch, [cell(f"new {n}", 100) for n in range(5)])
    assert kept == ["drawn", "new 0", "new 1"]
    assert "5 cells have changed" in said[0] and "3 more would take 300 s" in said[0]


def test_without_the_parent_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, said = changed_by(monkeypatch, [cell("new", 100)], parent=False)
    assert kept == ["drawn"] and "the commit's parent is not here" in said[0]
