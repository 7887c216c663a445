"""Sampling and reporting.

`make test` runs a sample of this suite, drawn by the commit id: another commit runs other cells,
and over a few commits all are seen. `--chaos-all` runs every cell and `--chaos-report FILE` keeps
what happened: faults injected, incidents, pauses, verdicts.
"""

from __future__ import annotations

import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from harness import SCRIPT, Job, Verdict, ending, report, run_plain

# Of cells in a sample, by their own estimates on two cores.
SAMPLE_COST_S = 150
LAYOUTS_COST_S = 100


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-all", action="store_true", help="every cell, not a sample")
    parser.addoption("--chaos-part", default="1/1", help="I/N: every Nth cell, from the Ith on")
    parser.addoption("--chaos-report", default="", help="write a JSON report here")
    parser.addoption("--chaos-seed", default="", help="instead of the commit id")


def _seed(config: pytest.Config) -> str:
    if config.getoption("--chaos-seed"):
        return str(config.getoption("--chaos-seed"))
    return _git("rev-parse", "HEAD") or "no-commit"


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    return done.stdout.strip()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in mine:
        item.add_marker(pytest.mark.chaos)
    chosen_by_hand = config.getoption("-k") or any("::" in arg for arg in config.args)
    if config.getoption("--chaos-all") or chosen_by_hand:
        first, parts = map(int, config.getoption("--chaos-part").split("/"))
        part = items[first - 1 :: parts]
        if len(part) < len(items):
            config.hook.pytest_deselected(items=[item for item in items if item not in part])
            items[:] = part
        return
    seed = _seed(config)
    layouts = [item for item in mine if item.path.name == "test_layouts.py"]
    others = [item for item in mine if item not in layouts]
    kept = {*_sample(others, seed, SAMPLE_COST_S), *_sample(layouts, seed, LAYOUTS_COST_S)}
    spent = sum(map(_cost, kept))
    dropped = [item for item in mine if item not in kept]
    items[:] = [item for item in items if item not in dropped]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    print(f"chaos: {len(kept)} of {len(mine)} cells, seed {seed[:12]}, about {spent:.0f} s")


def _sample(items: list[pytest.Item], seed: str, cost_s: float) -> list[pytest.Item]:
    kept = [item for item in items if item.get_closest_marker("always")]
    rest = [item for item in items if item not in kept]
    random.Random(seed).shuffle(rest)
    spent = sum(map(_cost, kept))
    for item in rest:
        if spent + _cost(item) <= cost_s:
            spent += _cost(item)
            kept.append(item)
    return kept


def _cost(item: pytest.Item) -> float:
    marker = item.get_closest_marker("cost")
    return float(marker.args[0]) if marker else 25.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cost(seconds): estimate on two cores")
    config.addinivalue_line("markers", "always: in every sample")


def _without_waiting(script_args: tuple[str, ...]) -> tuple[str, ...]:
    """Options that only take time, or a life, change no number: the plain run has none of them."""
    words = iter(script_args)
    waiting = ("--step-ms", "--build-s", "--evaluate-s", "--gate", "--slow", "--die", "--reset")
    waiting += ("--slow-s", "--drag")
    return tuple(w for w in words if not (w in waiting and next(words)))


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """What plain torchrun computes for the same arguments; once per set of arguments."""
    known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def get(world: int, *script_args: str, script: Path = SCRIPT) -> list[dict[str, Any]]:
        key = (world, script, *_without_waiting(script_args))
        if key not in known:
            folder = tmp_path_factory.mktemp("plain")
            known[key] = run_plain(folder, world, list(key[2:]), script)
        return known[key]

    return get


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Job]]:
    with ending(request) as jobs:

        def begin(*options: str, **kwargs: Any) -> Job:
            jobs.append(Job(*options, **kwargs))
            return jobs[-1]

        yield begin


@pytest.fixture
def verdict(request: pytest.FixtureRequest) -> Verdict:
    return Verdict(request.node.name)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--chaos-report")
    if not path or not report:
        return
    import torch

    summary = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "make test-all",
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _git("describe", "--always", "--dirty"),
        "cells": len(report),
        "faults": sum(e["faults"] for e in report),
        "bit_identical": sum(1 for e in report if not e["different"]),
        "exit_status": int(exitstatus),
        "report": report,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(summary, indent=1) + "\n")
