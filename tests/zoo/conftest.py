"""Sampling and reporting, as in the chaos suite.

`make test` runs a sample drawn by the commit id. `--zoo-all` runs every script and
`--zoo-report FILE` writes what came out, from which `page.py` makes docs/reference/zoo.md.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import changes, reporting, sampling
from tests.support.zoo import Mutant, Run, changed_names, run_mutant, run_script

SAMPLE = 4
CHANGED = {"outcome": 6, "death": 3}  # at the most, of those that the commit has changed
NO_PARENT = ", changed ones only if drawn: the commit's parent is not here"
# Drawn are scripts that have come out as expected in the newest report. The others are for
# --zoo-all: nobody has seen them pass, and a sample would fail by chance.
REPORT = Path(__file__).parents[2] / "benchmarks" / "results" / "zoo.json"
DEATHS, DEATHS_SAMPLE = REPORT.with_name("mutants.json"), 2
SORTS = (
    ("scripts", "outcome", REPORT, SAMPLE),
    ("mutants", "death", DEATHS, DEATHS_SAMPLE),
)
outcomes: dict[str, dict[str, Any]] = {}
deaths: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = sampling.of_folder(items, Path(__file__).parent)
    for item in mine:
        item.add_marker(pytest.mark.chaos)
    if config.getoption("--zoo-all") or sampling.chosen_by_hand(config):
        return
    seed = sampling.seed_of(config, "--zoo-seed")
    new = changed_names() if changes.has_parent() else None
    for kind, fixture, report, size in SORTS:
        jobs = {_name(item): item for item in mine if fixture in getattr(item, "fixturenames", ())}
        seen = json.loads(report.read_text())["scripts"] if report.exists() else {}
        right = {name: one for name, one in seen.items() if one["outcome"] == one["expected"]}
        good = {name for name, one in right.items() if one.get("by") != "failed"}  # they hang
        known = [name for name in jobs if name in good]
        choose = random.Random(seed)
        kept = choose.sample(known, min(size, len(known)))
        changed = [name for name in jobs if name in (new or ())]
        kept += choose.sample(changed, min(CHANGED[fixture], len(changed)))
        sampling.drop(config, items, [item for name, item in jobs.items() if name not in kept])
        if jobs:
            told = f"zoo: {len(set(kept))} of {len(jobs)} {kind}, drawn by {seed[:12]}"
            told += f", {len(changed)} have changed" if new is not None else NO_PARENT
            sampling.say(config, f"{told}; --zoo-all runs every one")


def _name(item: pytest.Item) -> str:
    return str(item.callspec.id)  # type: ignore[attr-defined]


@pytest.fixture
def outcome() -> dict[str, dict[str, Any]]:
    """Where a test notes what came out of its script."""
    return outcomes


@pytest.fixture
def death() -> dict[str, dict[str, Any]]:
    """Where a test notes what a mutant died of."""
    return deaths


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(request.config.getoption("--zoo-beside")) as pool:
        yield pool
        pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest, pool: ThreadPoolExecutor) -> Callable[[Any], Run]:
    """Runs a script or a mutant; those of the tests that follow run beside it."""
    ahead: dict[str, Future[Run]] = {}
    waiting = [
        item.callspec.params["case"]
        for item in request.session.items
        if hasattr(item, "callspec") and "case" in item.callspec.params
    ]

    def get(case: Any) -> Run:
        if not ahead:
            for one in waiting:
                call = run_mutant if isinstance(one, Mutant) else run_script
                ahead[one.name] = pool.submit(call, one)
        return ahead[case.name].result()

    return get


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    for option, found in (("--zoo-report", outcomes), ("--mutants-report", deaths)):
        path = session.config.getoption(option)
        if path and found:
            reporting.write(Path(path), _summary(found, exitstatus))


def _summary(found: dict[str, dict[str, Any]], exitstatus: int) -> dict[str, Any]:
    import numpy
    import torch

    kinds = [entry["outcome"] for entry in found.values()]
    made = {
        "command": "pytest tests/zoo --zoo-all",
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "outcomes": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "kills": sum(entry["kills"] for entry in found.values()),
        "exit_status": int(exitstatus),
        "scripts": dict(sorted(found.items())),
    }
    text = json.dumps(reporting.provenance() | made)
    short: dict[str, Any] = json.loads(text.replace(f"{sys.prefix}/", ""))
    return short
