"""From the decision to take a spare to its agent's process, on a real Kubernetes control plane.

    dedicated   a free node of a pool
    floating    a node that a pod of lower priority has, which ends at once when it is told to: what
                is left is the scheduler's own time, which looks again after a second or two

Measured is what the adapter does: look, make the pod, wait until it is bound, make the Secret; and
what the cluster does until the agent's first instruction. The kubelet is simulated (no image, no
container), and all of it shares this machine's processors.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks import report

sys.path.insert(0, str(report.ROOT / "tests" / "schedulers"))

from cluster import until
from control_plane import ControlPlane
from control_plane_build import missing
from kubernetes_lab import KubernetesLab

from keepstep.model.schedule import AgentStart, Ask, Constraints, Kind

NAMES = ("spare", "node held, ms", "agent running, ms")
CASES: dict[str, Kind] = {"dedicated": "reserved", "floating": "preempt"}


def run(quick: bool, rounds: int | None = None) -> list[str]:
    if reason := missing():
        return [f"kubernetes: skipped, {reason}"]
    rounds = rounds or (2 if quick else 10)
    begun = report.Provenance()
    raw: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    plane = ControlPlane()
    try:
        for number in range(rounds):
            report.say(f"kubernetes: round {number + 1} of {rounds}")
            for name, kind in CASES.items():
                with plane.clean():
                    raw[name].append(_one(KubernetesLab(plane), kind, f"spare-{number}"))
    finally:
        plane.remove()
    summary = {
        name: {part: report.summary([one[part] for one in seen]) for part in seen[0]}
        for name, seen in raw.items()
    }
    report.write("kubernetes", quick, begun.close(), {"raw": raw, "summary": summary})
    rows = [
        [name, *(f"{1e3 * summary[name][part]['p50']:.0f}" for part in ("held", "running"))]
        for name in CASES
    ]
    return [report.table("kubernetes: decision to agent, p50", NAMES, rows)]


def _one(lab: KubernetesLab, kind: Kind, op: str) -> dict[str, float]:
    place = lab.places[0]
    pool = lab.reserve(place) if kind == "reserved" else ""
    if kind == "preempt":
        lab.occupy(lab.places[:5], low=True)
    limits = Constraints(gpus=4, gpu_type="h200", reservation=pool)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "running"
        command = ["sh", "-c", f"date +%s%N > {file}.new; mv {file}.new {file}; exec sleep 600"]
        agent = AgentStart(
            job="bench", node="n9", command=command, env={}, directory=folder, log=""
        )
        decided = time.time()
        lease = lab.scheduler.acquire(Ask(job="bench", op=op, constraints=limits, kinds=[kind]), 60)
        held = time.time()
        lab.scheduler.start_agent(lease.places[0], agent)
        until(file.exists, "an agent")
        running = int(file.read_text()) / 1e9
    return {"held": held - decided, "running": running - decided}
