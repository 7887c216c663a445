"""Sampling and reporting.

`make test` runs a sample of this suite, drawn by the commit id, and the cells that the commit has
changed. `--chaos-all` runs every cell and `--chaos-report FILE` keeps what happened: faults
injected, incidents, pauses, verdicts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import reporting, sampling
from tests.support.job import Job
from tests.support.torchrun import Reference, once_each

# Of cells in a sample, by their own estimates on two cores.
SAMPLE_COST_S = 150
LAYOUTS_COST_S = 100
# Options that only take time, or a life, change no number: the plain run has none of them.
WAITING = {"--step-ms", "--build-s", "--evaluate-s", "--gate", "--slow", "--slow-s", "--die"}
WAITING |= {"--reset", "--drag"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = sampling.of_folder(items, Path(__file__).parent)
    for item in mine:
        item.add_marker(pytest.mark.chaos)
    if config.getoption("--chaos-all") or sampling.chosen_by_hand(config):
        first, parts = map(int, config.getoption("--chaos-part").split("/"))
        part = set(mine[first - 1 :: parts])
        sampling.drop(config, items, [item for item in mine if item not in part])
        return
    seed = sampling.seed_of(config, "--chaos-seed")
    layouts = [item for item in mine if item.path.name == "test_layouts.py"]
    others = [item for item in mine if item not in layouts]
    drawn = sampling.draw(others, seed, SAMPLE_COST_S)
    drawn += sampling.draw(layouts, seed, LAYOUTS_COST_S)
    kept = sampling.with_changed(config, "chaos", drawn, mine, seed)
    sampling.drop(config, items, [item for item in mine if item not in kept])
    if mine:
        count = (
            f"chaos: {len(kept)} of {len(mine)} cells, {len(drawn)} of them drawn by {seed[:12]}"
        )
        time = f"about {sampling.total(kept):.0f} s"
        sampling.say(config, f"{count}, {time}; --chaos-all runs every one")


def _without_waiting(script_args: tuple[str, ...]) -> list[str]:
    words = iter(script_args)
    return [word for word in words if not (word in WAITING and next(words))]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What plain torchrun computes for the same arguments."""
    return once_each(tmp_path_factory, _without_waiting)


@pytest.fixture
def start(jobs: list[Job]) -> Callable[..., Job]:
    def begin(*options: str, **kwargs: Any) -> Job:
        jobs.append(Job(*options, **kwargs))
        return jobs[-1]

    return begin


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--chaos-report")
    if path:
        import torch

        about = {"command": "make test-all", "torch": torch.__version__}
        reporting.write_verdicts(path, exitstatus, **about)
