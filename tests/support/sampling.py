"""Samples of long matrices: which cells a run takes unless it is told to take all.

`make test` draws by the commit id, so that over a few commits all cells are seen, and adds what the
commit itself has changed. What is left out is said, with the option that runs it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import changes

CHANGED_COST_S = 240.0  # of changed cells in one run, by their own estimates
COST_S = 25.0  # of a cell that gives no estimate
said = pytest.StashKey[list[str]]()


def seed_of(config: pytest.Config, option: str) -> str:
    return str(config.getoption(option)) or changes.git("rev-parse", "HEAD").strip() or "no-commit"


def chosen_by_hand(config: pytest.Config) -> bool:
    return bool(config.option.keyword) or any("::" in arg for arg in config.args)


def say(config: pytest.Config, line: str) -> None:
    """At the end of collection."""
    config.stash.setdefault(said, []).append(line)


def cost(item: pytest.Item) -> float:
    marker = item.get_closest_marker("cost")
    return float(marker.args[0]) if marker else COST_S


def total(items: Sequence[pytest.Item]) -> float:
    return sum(map(cost, items))


def drop(config: pytest.Config, items: list[pytest.Item], dropped: Sequence[pytest.Item]) -> None:
    gone = set(dropped)
    items[:] = [item for item in items if item not in gone]
    if gone:
        config.hook.pytest_deselected(items=list(dropped))


def draw(items: Sequence[pytest.Item], seed: str, cost_s: float) -> list[pytest.Item]:
    """Those marked `always`, and as many others as the cost allows."""
    kept = [item for item in items if item.get_closest_marker("always")]
    rest = [item for item in items if item not in kept]
    random.Random(seed).shuffle(rest)
    return kept + fitting(rest, cost_s - total(kept))


def fitting(items: Sequence[pytest.Item], cost_s: float) -> list[pytest.Item]:
    kept = []
    for item in items:
        if cost(item) <= cost_s:
            cost_s -= cost(item)
            kept.append(item)
    return kept


def changed_cells(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    """Cells that are not as in the commit's parent, those that its new strings name first."""
    found: list[tuple[bool, pytest.Item]] = []
    for path in dict.fromkeys(item.path for item in items):
        parts = changes.changed(changes.in_parent(path), path.read_text())
        for item in (item for item in items if item.path == path):
            strings = parts.get(getattr(item, "originalname", item.name))
            if strings is not None:
                named = any(len(s) >= changes.NAMED_MIN and s in item.name for s in strings)
                found.append((not named, item))
    random.Random(seed).shuffle(found)
    return [item for _, item in sorted(found, key=lambda one: one[0])]


def with_changed(
    config: pytest.Config, what: str, kept: Sequence[pytest.Item], cells: Sequence[pytest.Item],
    seed: str,
) -> list[pytest.Item]:  # fmt: skip
    """The sample, and what the commit has changed, as far as it fits."""
    if not changes.has_parent():
        say(config, f"{what}: the commit's parent is not here: changed cells run only if drawn")
        return list(kept)
    new = changed_cells(cells, seed)
    fit = fitting(new, CHANGED_COST_S)
    if new:
        more = f"; {len(new) - len(fit)} more would take {total(new) - total(fit):.0f} s"
        line = f"{what}: {len(new)} cells have changed since the commit's parent, {len(fit)} run"
        say(config, line + (more if len(fit) < len(new) else ""))
    return list(dict.fromkeys([*kept, *fit]))


def of_folder(items: Sequence[pytest.Item], folder: Path) -> list[pytest.Item]:
    return [item for item in items if item.path.parent == folder]
