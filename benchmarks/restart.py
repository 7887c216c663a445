"""The same kills, survived in two ways: restart from a checkpoint, or replace the rank.

One script (train/model.py), one schedule: rank 1 is killed from outside each time training first
reaches a step in the middle between two checkpoints, which is the average case for restarting.
torchrun restarts all ranks and the script loads its newest checkpoint, written every 20 steps;
Keepstep runs without checkpoints and with one spare. Both also run undisturbed. Parameters at the
end must be the same bits in all four runs.
"""

from __future__ import annotations

import itertools
import os
import signal
import statistics
import time
from typing import Any

from benchmarks import report
from benchmarks.drive import Keepstep, Launched, Torchrun

WORLD = 2
VICTIM, WITNESS = 1, 0
CHECKPOINT_EVERY = 20


def until_step(job: Launched, step: int) -> None:
    job.until(lambda: job.step(WITNESS) >= step, f"step {step}", 600)


def kill_on_schedule(job: Launched, schedule: list[int]) -> list[float]:
    """Kill the victim whenever the witness first reaches the next step of the schedule. Returns
    how long each time until the witness was two steps beyond the one it had reached."""
    back_s = []
    for step in schedule:
        until_step(job, step)
        victim = job.last_commit(VICTIM)
        assert victim is not None
        job.descendants()
        began = time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)
        # Two and not one: the step in flight may still commit on the witness.
        until_step(job, job.step(WITNESS) + 2)
        back_s.append(time.monotonic() - began)
    return back_s


def measure(kind: str, steps: int, schedule: list[int]) -> dict[str, Any]:
    arguments = ["--steps", str(steps)]
    job: Launched
    if kind == "torchrun":
        arguments += ["--checkpoint-every", str(CHECKPOINT_EVERY)]
        options = ("--max-restarts", str(len(schedule)))
        job = Torchrun(WORLD, "model.py", arguments, options)
    else:
        options_ = ["--nproc-per-node", str(WORLD), "--spares", "1", "--quiet"]
        job = Keepstep(options_, "model.py", arguments)
    with job:
        if isinstance(job, Keepstep):
            job.client()
        back_s = kill_on_schedule(job, schedule)
        completion_s = job.wait(1800)
        log = [commit.at_ns for commit in job.commits(WITNESS)]
        result: dict[str, Any] = {
            "median_step_ms": statistics.median(b - a for a, b in itertools.pairwise(log)) / 1e6,
            "kills": len(schedule),
            "completion_s": completion_s,
            "back_to_new_steps_s": back_s,
            "steps_committed_twice": repeated(job),
            "sha256": sorted({rank["sha256"] for rank in job.results(WORLD)}),
        }
        if isinstance(job, Keepstep):
            found = job.recorded_incidents()
            result["incidents"] = [
                {k: one[k] for k in ("outcome", "pause_ms", "steps_lost", "steps_recomputed")}
                for one in found
            ]
            result["interrupted_attempts"] = sum(one["steps_recomputed"] for one in found)
        else:
            result["interrupted_attempts"] = len(schedule)  # each kill tears the step in flight
    return result


def repeated(job: Launched) -> int:
    """Steps that the witness committed more than once: training that was thrown away."""
    steps = [commit.step for commit in job.commits(WITNESS)]
    return len(steps) - len(set(steps))


def run(quick: bool, rounds: int | None = None) -> list[str]:
    provenance = report.Provenance()
    kills = 2 if quick else 5
    schedule = [CHECKPOINT_EVERY * (2 * k + 1) + CHECKPOINT_EVERY // 2 for k in range(kills)]
    steps = schedule[-1] + CHECKPOINT_EVERY
    rounds = rounds or (1 if quick else 3)
    runs: dict[str, list[dict[str, Any]]] = {}
    for number in range(rounds):
        for name, kind, when in (
            ("torchrun, undisturbed", "torchrun", []),
            ("keepstep, undisturbed", "keepstep", []),
            ("torchrun, killed", "torchrun", schedule),
            ("keepstep, killed", "keepstep", schedule),
        ):
            report.say(f"restart: round {number + 1} of {rounds}, {name}")
            runs.setdefault(name, []).append(measure(kind, steps, when))
    same = len({d for several in runs.values() for one in several for d in one["sha256"]}) == 1
    summary = {name: condense(several) for name, several in runs.items()}
    body = {
        "ranks": WORLD,
        "parameters": 6 * (2048 * 2048 + 2048),
        "steps": steps,
        "schedule": schedule,
        "checkpoint_every": CHECKPOINT_EVERY,
        "rounds": rounds,
        "bit_identical": same,
        "summary": summary,
        "runs": runs,
    }
    path = report.write("restart", quick, provenance.close(), body)
    verdict = f"bit-identical at the end: {'yes' if same else 'NO'}"
    return [restart_table(summary, steps), verdict, f"written: {path.name}"]


def condense(several: list[dict[str, Any]]) -> dict[str, Any]:
    back_s = [s for one in several for s in one["back_to_new_steps_s"]]
    names = ("completion_s", "median_step_ms", "steps_committed_twice", "interrupted_attempts")
    return {
        "kills": several[0]["kills"],
        **{name: statistics.median(one[name] for one in several) for name in names},
        "back_to_new_steps_s": report.summary(back_s),
    }


def restart_table(results: dict[str, Any], steps: int) -> str:
    """The median step tells whether rows that ran minutes apart can be compared at all."""
    rows = []
    for name, one in results.items():
        still = results[f"{name.partition(',')[0]}, undisturbed"]["completion_s"]
        kills = one["kills"]
        rows.append(
            [
                name,
                kills,
                one["median_step_ms"],
                one["completion_s"],
                f"{(one['completion_s'] - still) / kills:.1f}" if kills else "-",
                one["back_to_new_steps_s"].get("p50", "-"),
                one["steps_committed_twice"],
                one["interrupted_attempts"],
            ]
        )
    names = (
        f"job of {steps} steps",
        "kills",
        "step, ms",
        "completion, s",
        "lost per kill, s",
        "kill to new steps, s",
        "steps run twice",
        "interrupted attempts",
    )
    return report.table("", names, rows)
