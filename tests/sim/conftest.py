"""`make test` draws worlds and mutants by the commit id; `--sim-all` runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import sampling


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = sampling.of_folder(items, Path(__file__).parent)
    if not mine or config.getoption("--sim-all"):
        return
    sampling.drop(config, items, [one for one in mine if one.get_closest_marker("all_worlds")])
    sampling.say(config, "sim: a sample of worlds and mutants; --sim-all runs every one")
