"""Reports of what was run, where, and how it ended. Of suites whose long runs are not repeated by
every `make test`, such files are kept under benchmarks/results.

`--suite-report FILE` has the outcome of each test. `--chaos-report` and `--gpu-report` tell
what was done to each job and what came of it.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support import verdict
from tests.support.changes import git


def provenance() -> dict[str, Any]:
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": git("describe", "--always", "--dirty").strip(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.release()}",
        "python": platform.python_version(),
    }


def write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def write_verdicts(path: str, exit_status: int, **about: Any) -> None:
    """What became of each job, if somebody wants it and there were any."""
    entries = verdict.report
    if not path or not entries:
        return
    counted = {
        "cells": len(entries),
        "faults": sum(one["faults"] for one in entries),
        "bit_identical": sum(not one["different"] for one in entries),
    }
    end = {"exit_status": int(exit_status), "report": entries}
    write(Path(path), provenance() | about | counted | end)


class Suite:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._began = time.time()
        self._load = os.getloadavg()
        self._outcomes: dict[str, str] = {}
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.when == "call" or report.outcome != "passed":
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self._outcomes[name] = f"{report.outcome}: {why}" if why else report.outcome

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        kinds = [outcome.partition(":")[0] for outcome in self._outcomes.values()]
        summary = {
            **provenance(),
            "load": {"before": self._load[0], "after": os.getloadavg()[0]},
            "minutes": round((time.time() - self._began) / 60, 1),
            "outcomes": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
            "exit_status": int(exitstatus),
            "tests": {
                name: [outcome, round(self._seconds[name], 1)]
                for name, outcome in sorted(self._outcomes.items())
            },
        }
        write(self._path, summary)
