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

from zoo_harness import Case, Run, run_script

SAMPLE = 4
# Drawn are scripts that have come out as expected in the newest report. The others are for
# --zoo-all: nobody has seen them pass, and a sample would fail by chance.
REPORT = Path(__file__).parents[2] / "benchmarks" / "results" / "zoo.json"
report: dict[str, dict[str, Any]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--zoo-all", action="store_true", help="every script, not a sample")
    parser.addoption("--zoo-report", default="", help="write a JSON report here")
    parser.addoption("--zoo-beside", type=int, default=1, help="so many scripts at a time")
    parser.addoption("--zoo-seed", default="", help="draw the sample by this, not by the commit id")


def _git(config: pytest.Config, *words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=config.rootpath)
    return done.stdout.strip()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path == Path(__file__).parent / "test_zoo.py"]
    for item in mine:
        item.add_marker(pytest.mark.chaos)
    jobs = [item for item in mine if "outcome" in getattr(item, "fixturenames", ())]
    chosen_by_hand = config.getoption("-k") or any("::" in arg for arg in config.args)
    if config.getoption("--zoo-all") or chosen_by_hand:
        return
    seed = config.getoption("--zoo-seed") or _git(config, "rev-parse", "HEAD") or "no-commit"
    seen = json.loads(REPORT.read_text())["scripts"]
    good = {name for name, one in seen.items() if one["outcome"] == one["expected"]}
    known = [item for item in jobs if item.callspec.id in good]  # type: ignore[attr-defined]
    kept = random.Random(seed).sample(known, min(SAMPLE, len(known)))
    dropped = [item for item in jobs if item not in kept]
    items[:] = [item for item in items if item not in dropped]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
    print(f"zoo: {len(kept)} of {len(jobs)} scripts, seed {seed[:12]}")


@pytest.fixture
def outcome() -> dict[str, dict[str, Any]]:
    """Where a test notes what came out of its script."""
    return report


@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], Run]]:
    """Runs a script; those of the tests that follow run beside it."""
    ahead: dict[str, Future[Run]] = {}
    waiting: list[Case] = [
        item.callspec.params["case"]  # type: ignore[attr-defined]
        for item in request.session.items
        if "outcome" in getattr(item, "fixturenames", ())
    ]
    with ThreadPoolExecutor(request.config.getoption("--zoo-beside")) as pool:

        def get(case: Case) -> Run:
            if not ahead:
                ahead.update((one.name, pool.submit(run_script, one)) for one in waiting)
            return ahead[case.name].result()

        yield get
        pool.shutdown(cancel_futures=True)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--zoo-report")
    if not path or not report:
        return
    import numpy
    import torch

    kinds = [entry["outcome"] for entry in report.values()]
    summary = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": _git(session.config, "describe", "--always", "--dirty"),
        "command": "pytest tests/zoo --zoo-all",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "outcomes": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "kills": sum(entry["kills"] for entry in report.values()),
        "exit_status": int(exitstatus),
        "scripts": dict(sorted(report.items())),
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(summary, indent=1) + "\n")
