"""How long a script that knows nothing of Keepstep stands still when it moves with its GPU state.

Each job is one process with a given amount of state, moved into another node's nest on the same
machine and the same GPU; the bytes take the way that they take between machines. All jobs start
at once, because starting takes longer than moving, and are moved one after the other. *Pause* is
the longest time between two steps that the script logs. Needs one GPU, CRIU and root.

*fast*: the rank moves what torch has allocated itself. *driver*: everything is in the snapshot of
CUDA's driver, which takes it into host memory first; the largest size is moved the fast way only.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import torch

from benchmarks import report
from benchmarks.drive import ASK_S, Keepstep

OPTIONS = ["--mode", "transparent", "--local-nodes", "1", "--nproc-per-node", "1"]
OPTIONS += ["--spare-nodes", "1", "--quiet"]
CASES = [(8.0, "fast"), (0.5, "fast"), (8.0, "driver"), (40.0, "fast"), (0.5, "driver")]
QUICK = [(0.5, "fast"), (0.5, "driver")]
STEPS_MIN = 5
PARTS = ("gpu-offload", "gpu-lock", "gpu-checkpoint", "gpu-stow", "dump", "stream", "restore")
PARTS += ("gpu-fetch", "gpu-restore", "copy")


def start(gigabytes: float, way: str, device: str) -> Keepstep:
    arguments = ["--bytes", str(gigabytes * 1e9), "--device", device]
    environ = {"KEEPSTEP_OFFLOAD": "0"} if way == "driver" else {}
    return Keepstep(OPTIONS, "gpu_state.py", arguments, environ)


def move(job: Keepstep) -> dict[str, Any]:
    job.until(lambda: job.step() > STEPS_MIN, "its first steps")
    job.until(job.calm, "a rank that trains, and a spare", every_s=ASK_S)
    before, known = job.step(), len(job.incidents())
    job.post("migrate", {"ranks": [0], "reason": "benchmark"})
    job.until(
        lambda: (
            len(found := job.incidents()) > known and all(i["outcome"] != "OPEN" for i in found)
        ),
        "the end of the move",
        every_s=ASK_S,
    )
    incident = job.incidents()[known]  # if it was undone, others follow
    if incident["outcome"] != "RESOLVED":
        raise RuntimeError(f"the move failed: {incident['reason']}")
    job.until(lambda: job.step() > before + 3, "the next steps")
    (job.out / "check").touch()
    job.until((job.out / "checked").exists, "the check of its state")
    right = (job.out / "checked").read_text() == "True"
    (job.out / "checked").unlink()
    if not right:
        raise RuntimeError("the state of the GPU is not what it was")
    times = [commit.at_ns for commit in job.commits(0) if commit.step >= before]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return {
        "pause_s": max(gaps) / 1e9,
        "timings_ms": incident["timings_ms"],
        "phases": incident["phases"],
    }


def run(quick: bool, rounds: int | None = None, device: str = "cuda") -> list[str]:
    if device == "cuda" and not torch.cuda.is_available():
        return ["transparent: skipped, there is no GPU on this machine"]
    provenance = report.Provenance()
    results: list[dict[str, Any]] = []
    with ExitStack() as stack:
        cases = QUICK if quick else CASES
        jobs = [stack.enter_context(start(*case, device)) for case in cases]
        for (gigabytes, way), job in zip(cases, jobs):
            for number in range(rounds or 1):
                report.say(f"transparent: {gigabytes} GB, {way}, move {number + 1}")
                case = {"gigabytes": gigabytes, "way": way}
                try:
                    results.append({**case, **move(job)})
                except (RuntimeError, TimeoutError) as error:
                    results.append({**case, "error": str(error)[-2000:]})
                    report.say(results[-1]["error"])
                    break
                report.say(f"  {results[-1]['pause_s']:.2f} s: {results[-1]['timings_ms']}")
        card = torch.cuda.get_device_name() if device == "cuda" else "none"
        body = {"gpu": card, "moves": results}
        path = report.write("transparent", quick, provenance.close(), body)
    rows = [
        (
            f"{one['gigabytes']:g} GB {one['way']}",
            f"{one['pause_s']:.2f}",
            *(f"{one['timings_ms'].get(part, 0.0) / 1e3:.2f}" for part in PARTS),
        )
        for one in results
        if "pause_s" in one
    ]
    names = ("state", "pause s", *PARTS)
    return [report.table("Transparent moves, seconds", names, rows), f"written: {path.name}"]
