"""Views of a job and of an incident as operators see them."""

from __future__ import annotations

from keepstep.model.views import IncidentView, JobView


def view(job: str, state: str = "done", **more: object) -> JobView:
    base: dict[str, object] = {
        "job": job,
        "state": state,
        "reason": "",
        "exit_code": 0,
        "generation": 1,
        "world": 1,
        "committed_step": 7,
        "steps_per_s": 0.0,
        "script": "train.py",
        "directory": "/nowhere",
        "node_loss_protected": False,
        "protection": "",
        "ranks": [],
        "spares": [],
        "nodes": [],
        "last_incident": "",
        "injects_fired": [],
    }
    return JobView(**{**base, **more})  # type: ignore[arg-type]


def incident(id: str, job: str, opened_at_ns: int) -> IncidentView:
    return IncidentView(
        id=id,
        job=job,
        trigger="unplanned",
        cause="process-exit",
        victims=[2],
        moves=["rank 2: n0/2 -> n0/4"],
        generation=2,
        opened_at_ns=opened_at_ns,
        phases=[],
        timings_ms={},
        source="rank 0 + side state from own-agent",
        decision="RETRY",
        pause_ms=812.0,
        steps_lost=0,
        steps_recomputed=1,
        outcome="RESOLVED",
        reason="exit by signal 9",
    )
