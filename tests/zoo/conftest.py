"""Sampling and reporting, as in the chaos suite.

`make test` runs a sample drawn by the commit id. `--zoo-all` runs every script and
`--zoo-report FILE` writes what came out, from which `page.py` makes docs/reference/zoo.md.
"""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from zoo_harness import Mutant, Run, run_mutant, run_script

SAMPLE = 4
# Drawn are scripts that have come out as expected in the newest report. The others are for
# --zoo-all: nobody has seen them pass, and a sample would fail by chance.
REPORT = Path(__file__).parents[2] / "benchmarks" / "results" / "zoo.json"
DEATHS, DEATHS_SAMPLE = REPORT.with_name("mutants.json"), 2
outcomes: dict[str, dict[str, Any]] = {}
deaths: dict[str, dict[str, Any]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--zoo-all", action="store_true", help="every script, not a sample")
    parser.addoption("--zoo-report", default="", help="write a JSON report here")
    parser.addoption("--mutants-report", default="", help="write a JSON report of mutants here")
    parser.addoption("--zoo-beside", type=int, default=1, help="so many scripts at a time")
    parser.addoption("--zoo-seed", default="", help="draw the sample by this, not by the commit id")


def _git(config: pytest.Config, *words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=config.rootpath)
    return done.stdout.strip()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.parent == Path(__file__).parent]
    for item in mine:
        item.add_marker(pytest.mark.chaos)
    chosen_by_hand = config.getoption("-k") or any("::" in arg for arg in config.args)
    if config.getoption("--zoo-all") or chosen_by_hand:
        return
    seed = config.getoption("--zoo-seed") or _git(config, "rev-parse", "HEAD") or "no-commit"
    for fixture, report, size in (("outcome", REPORT, SAMPLE), ("death", DEATHS, DEATHS_SAMPLE)):
        jobs = [item for item in mine if fixture in getattr(item, "fixturenames", ())]
        seen = json.loads(report.read_text())["scripts"] if report.exists() else {}
        right = {name: one for name, one in seen.items() if one["outcome"] == one["expected"]}
        good = {name for name, one in right.items() if one.get("by") != "failed"}  # they hang
        known = [item for item in jobs if item.callspec.id in good]  # type: ignore[attr-defined]
        kept = random.Random(seed).sample(known, min(size, len(known)))
        dropped = [item for item in jobs if item not in kept]
        items[:] = [item for item in items if item not in dropped]
        if dropped:
            config.hook.pytest_deselected(items=dropped)
        print(f"{fixture}s: {len(kept)} of {len(jobs)} jobs, seed {seed[:12]}")


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
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(_summary(session, found, exitstatus), indent=1)
            Path(path).write_text(text.replace(f"{sys.prefix}/", "") + "\n")


def _summary(
    session: pytest.Session, found: dict[str, dict[str, Any]], exitstatus: int
) -> dict[str, Any]:
    import numpy
    import torch

    kinds = [entry["outcome"] for entry in found.values()]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git(session.config, "describe", "--always", "--dirty"),
        "command": "pytest tests/zoo --zoo-all",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "outcomes": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "kills": sum(entry["kills"] for entry in found.values()),
        "exit_status": int(exitstatus),
        "scripts": dict(sorted(found.items())),
    }
