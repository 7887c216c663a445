"""The verdict on a job that was hurt: what every case of chaos, gpu and transparent must show.

A case cannot forget to look whether its faults came: `Verdict` knows the jobs of the case and what
was injected into each, and fails when one of those faults did not fire. A case that asks for a
verdict and gives none fails, too.
"""

from __future__ import annotations

from typing import Any

from keepstep.model.views import IncidentView
from tests.support.job import Job, Result
from tests.support.torchrun import differences

GOOD = ("RESOLVED", "ABORTED")
report: list[dict[str, Any]] = []  # written at the end of the session: see reporting.py


class Verdict:
    """Holds the finished jobs of a case against the reference and writes the report."""

    def __init__(self, name: str, jobs: list[Job]) -> None:
        self.name = name
        self.jobs = jobs
        self.given = False

    def identical(
        self, job: Job, expected: list[Result], *, faults: int, incidents: int | None = None
    ) -> list[IncidentView]:
        """All resolved, nothing lost, every injected fault fired, every bit equal."""
        seen = job.incidents()
        entry = {
            "cell": self.name,
            "faults": faults,
            "incidents": [
                {
                    "trigger": one.trigger,
                    "cause": one.cause,
                    "victims": one.victims,
                    "decision": one.decision,
                    "outcome": one.outcome,
                    "attempts": one.attempts,
                    "pause_ms": round(one.pause_ms, 1),
                    "lost": one.steps_lost,
                }
                for one in seen
            ],
            "different": differences(job.results(), expected),
        }
        report.append(entry)
        assert entry["different"] == [], entry
        assert all(one.outcome in GOOD for one in seen), seen
        assert sum(one.steps_lost for one in seen) == 0
        if incidents is not None:
            assert len(seen) == incidents, [(one.cause, one.victims, one.reason) for one in seen]
        job.verify_ledger()
        self._faults_fired(faults)
        return seen

    def note(self, faults: int, what: str) -> None:
        """Of a case that ends otherwise, which has looked at its end itself."""
        report.append({"cell": self.name, "faults": faults, "result": what, "different": []})
        self._faults_fired(faults)

    def must_be_given(self) -> None:
        assert self.given or not self.jobs, "the case gives no verdict"

    def _faults_fired(self, faults: int) -> None:
        self.given = True
        injected = sum(len(job.injected) for job in self.jobs)
        assert faults >= injected, f"{injected} faults were injected, and {faults} are counted"
        for job in self.jobs:
            missing = job.unfired()
            assert not missing, f"injected and never fired: {missing}"
