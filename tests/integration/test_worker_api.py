"""The worker API in one script (scripts/worker_api.py): plain, protected, and with kills.

The numbers of every run are one sha256 per rank over parameters, optimizer, scheduler, RNG,
registered state, and the chain of all its losses and sample ids.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from keepstep.worker.script.batches import Batches, Loop
from keepstep.worker.script.position import Tracker
from keepstep.worker.script.tree import MISSING
from tests.support.commands import PLAIN, SCRIPTS, Job, command

SCRIPT = "worker_api.py"
WORLD = 3
LOOPS_END, LAST = 13, 20  # steps; see the script
UNPROTECTED = "keepstep: not started by `keepstep run`, so this training is not protected"
ZIP_VICTIM, ZIP_STEP = 1, 8  # in the second epoch; the zip of the first was left by `break`
WHILE_VICTIM, WHILE_STEP = 2, 16  # by the time of this one, a new spare is warm
RANK_FIELDS = {"rank", "pid", "node", "slot", "generation", "committed_step", "state"}
PLACE = ("rank", "pid", "node", "slot")
INCIDENT_FIELDS = {
    "id", "trigger", "victims", "phases", "source", "pause_ms", "steps_lost",
    "steps_recomputed", "outcome", "reason",
}  # fmt: skip

Ends = dict[int, dict[str, Any]]


def ends(output: str) -> Ends:
    """What each rank said at its end, exactly once."""
    said = [json.loads(text) for text in re.findall(r"END (\{.*\})$", output, re.MULTILINE)]
    found = {one["rank"]: one for one in said}
    assert len(found) == len(said), output
    return found


def digests(found: Ends) -> dict[int, str]:
    return {rank: one["sha256"] for rank, one in sorted(found.items())}


def passed(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    """Under torchrun: the numbers and the environment that everything is held against."""
    base = tmp_path_factory.mktemp("plain")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    launcher += ["--log-dir", str(base / "logs")]
    done = passed(command([*launcher, PLAIN, SCRIPT], base, cwd=SCRIPTS))
    assert done.stderr.count(UNPROTECTED) == 1  # one line for the job, not one per rank
    return ends(done.stdout)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Any, Any]]:
    """A job with two kills: itself, and status and incidents between them."""
    base = tmp_path_factory.mktemp("killed")
    gate = base / "gate"
    options = ["--nproc-per-node", str(WORLD), "--spares", "1", "--job-id", "killed"]
    options += ["--inject", f"kill:rank={ZIP_VICTIM},step={ZIP_STEP},point=in_backward"]
    options += ["--inject", f"kill:rank={WHILE_VICTIM},step={WHILE_STEP},point=before_fence"]
    job = Job(base, *options, SCRIPT, "--gate", str(gate), cwd=SCRIPTS)
    try:
        job.until(lambda: job.out.count("LOOPS") == WORLD, "all ranks have left the loops")

        def settled() -> Any:
            (view,) = job.cli_json("status")
            steps = {one["committed_step"] for one in view["ranks"]}
            parked = [one["state"] for one in view["spares"]] == ["parked"]
            return view if steps == {LOOPS_END} and parked else None

        during = job.until(settled, "all ranks reported their steps, and a new spare is parked")
        incidents = job.cli_json("incidents")
        gate.touch()
        job.end(0)
        yield job, during, incidents
    finally:
        gate.touch()
        job.kill()


# --------------------------------------------------------------------------- same numbers


def test_plain_python_says_one_line_and_computes_the_same(tmp_path: Path) -> None:
    without = passed(command([SCRIPT, "--bare"], tmp_path, cwd=SCRIPTS))
    unprotected = passed(command([SCRIPT], tmp_path, cwd=SCRIPTS))
    assert unprotected.stderr.splitlines() == [UNPROTECTED]
    assert "PROTECTED False" in unprotected.stdout
    assert ends(unprotected.stdout)[0]["newcomer"] is False
    expected = digests(ends(without.stdout))
    assert list(expected) == [0] and digests(ends(unprotected.stdout)) == expected

    job = Job(tmp_path / "one", SCRIPT, cwd=SCRIPTS)
    try:
        job.end(0)
        assert "[rank 0] PROTECTED True" in job.out
        assert digests(ends(job.out)) == expected
    finally:
        job.kill()


def test_undisturbed_as_a_module_computes_the_same_as_torchrun(tmp_path: Path, plain: Ends) -> None:
    options = ["--nproc-per-node", str(WORLD), "-m", SCRIPT.removesuffix(".py")]
    job = Job(tmp_path, *options, cwd=SCRIPTS)
    try:
        job.end(0)
        found = ends(job.out)
        assert job.out.count("PROTECTED True") == WORLD
        assert digests(found) == digests(plain)
        assert {(one["step"], one["newcomer"], one["name"]) for one in found.values()} == {
            (LAST, False, "__main__")
        }
        check_environment(found, plain)
        assert job.cli_json("incidents") == []
    finally:
        job.kill()


def check_environment(found: Ends, plain: Ends) -> None:
    """As under torchrun; only the address of the rendezvous is Keepstep's own."""
    for rank, one in found.items():
        mine, theirs = dict(one["env"]), dict(plain[rank]["env"])
        assert mine.pop("MASTER_ADDR") == "127.0.0.1"
        assert 0 < int(mine.pop("MASTER_PORT")) < 65536
        del theirs["MASTER_ADDR"], theirs["MASTER_PORT"]
        assert mine == theirs
    assert len({one["env"]["MASTER_PORT"] for one in found.values()}) == 1


def test_killed_computes_the_same_as_torchrun(killed: tuple[Job, Any, Any], plain: Ends) -> None:
    found = ends(killed[0].out)
    assert digests(found) == digests(plain)
    assert {one["step"] for one in found.values()} == {LAST}
    assert {rank: one["newcomer"] for rank, one in found.items()} == {
        rank: rank in (ZIP_VICTIM, WHILE_VICTIM) for rank in range(WORLD)
    }


def test_environment_of_a_newcomer_is_that_of_its_rank(
    killed: tuple[Job, Any, Any], plain: Ends
) -> None:
    """Except for LOCAL_RANK: that names the place (the device) where it really runs."""
    found = ends(killed[0].out)
    for victim, slot in ((ZIP_VICTIM, "3"), (WHILE_VICTIM, "1")):
        mine, theirs = found.pop(victim)["env"], plain[victim]["env"]
        assert mine["LOCAL_RANK"] == slot
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            assert mine[name] == theirs[name]
    check_environment(found, plain)


# --------------------------------------------------------------------------- what can be seen


def test_status_during_the_job(killed: tuple[Job, Any, Any]) -> None:
    _, view, _ = killed
    assert (view["job"], view["state"], view["exit_code"]) == ("killed", "running", None)
    assert (view["world"], view["committed_step"]) == (WORLD, LOOPS_END)
    assert view["generation"] >= 1
    assert view["node_loss_protected"] is False and "n0, whose loss" in view["protection"]
    assert view["injects_fired"] == ["inject-1"]
    assert [one["rank"] for one in view["ranks"]] == list(range(WORLD))
    for one in view["ranks"]:
        assert one.keys() >= RANK_FIELDS
        assert (one["node"], one["state"]) == ("n0", "running")
        assert (one["generation"], one["committed_step"]) == (view["generation"], LOOPS_END)
    (spare,) = view["spares"]
    assert spare.keys() >= {"pid", "node", "slot", "state"}
    # The newcomer has the old spare's slot, and the new spare the victim's.
    slots = [one["slot"] for one in view["ranks"]]
    assert slots == ["n0/0", "n0/3", "n0/2"] and spare["slot"] == "n0/1"
    pids = [one["pid"] for one in (*view["ranks"], spare)]
    assert len(set(pids)) == WORLD + 1 and all(pid > 1 for pid in pids)


def test_status_after_the_job(killed: tuple[Job, Any, Any]) -> None:
    job, during, _ = killed
    (view,) = job.cli_json("status")
    assert (view["state"], view["exit_code"]) == ("done", 0)
    assert view["committed_step"] == LAST
    assert view["generation"] > during["generation"]
    assert view["injects_fired"] == ["inject-1", "inject-2"]
    for now, then in zip(view["ranks"], during["ranks"], strict=True):
        assert now.keys() == then.keys()
        assert (now["state"], now["committed_step"]) == ("done", LAST)
        assert now["generation"] == view["generation"]
        if now["rank"] != WHILE_VICTIM:
            assert [now[name] for name in PLACE] == [then[name] for name in PLACE]
    moved, spare = view["ranks"][WHILE_VICTIM], during["spares"][0]
    assert (moved["slot"], moved["pid"]) == (spare["slot"], spare["pid"])
    assert job.cli_json("status", "--job", "killed") == [view]
    text = job.cli("status")
    assert f"step {LAST}" in text and all(f"rank {rank}" in text for rank in range(WORLD))
    assert "ok" in job.cli("ledger", "verify")


def test_incidents_during_and_after_the_job(killed: tuple[Job, Any, Any]) -> None:
    job, view, during = killed
    (first,) = during
    second, again = job.cli_json("incidents")  # newest first
    assert again == first
    assert first["id"] == view["last_incident"] != second["id"]
    check_incident(first, ZIP_VICTIM, f"rank {ZIP_VICTIM}: n0/1 -> n0/3")
    check_incident(second, WHILE_VICTIM, f"rank {WHILE_VICTIM}: n0/2 -> n0/1")
    assert first["generation"] == view["generation"] < second["generation"]
    assert f"rank {ZIP_VICTIM}: n0/1 -> n0/3" in job.cli("incidents")


def check_incident(incident: dict[str, Any], victim: int, move: str) -> None:
    assert incident.keys() >= INCIDENT_FIELDS
    assert incident["job"] == "killed"
    assert (incident["trigger"], incident["cause"]) == ("unplanned", "process-exit")
    assert (incident["victims"], incident["moves"]) == ([victim], [move])
    assert (incident["outcome"], incident["decision"]) == ("RESOLVED", "RETRY")
    assert (incident["steps_lost"], incident["steps_recomputed"]) == (0, 1)
    assert "signal 9" in incident["reason"]
    assert "side state from own-agent" in incident["source"]
    names = [phase["phase"] for phase in incident["phases"]]
    order = ("RESERVE", "HOLD", "COPY", "COMMIT", "REWIRE", "RESUME", "RETIRE")
    assert set(names) <= set(order) and {"COPY", "REWIRE", "RESUME"} <= set(names)
    starts = [phase["start_ns"] for phase in incident["phases"]]
    assert starts == sorted(starts) and starts[0] >= 0
    assert all(phase["duration_ms"] >= 0 for phase in incident["phases"])
    assert incident["pause_ms"] > 0


# --------------------------------------------------------------------------- a zip that is over


class Rank:
    """A script's control flow alone: which batches its steps get, and where it stands."""

    def __init__(self, position: Any = None) -> None:
        self.tracker = Tracker()
        self.performed: list[str] = []
        self.positions: list[Any] = []
        if position is not None:
            self.tracker.walk_to(position)

    def batches(self, *items: str) -> Iterator[str]:
        return Batches(Loop(self.tracker, list(items)), lambda: None)

    def step(self, batch: str) -> None:
        if self.tracker.begin("step", True) is MISSING:
            self.positions.append(self.tracker.position("step", True))
            self.tracker.commit("step", True, None)
            self.performed.append(batch)

    def script(self) -> list[str]:
        for a, b in zip(self.batches("a0", "a1", "a2"), self.batches("b0", "b1"), strict=False):
            self.step(a + b)
        for c in self.batches("c0", "c1", "c2", "c3"):
            self.step(c)
        return self.performed


@pytest.mark.parametrize(
    "steps",
    [
        *(1, 2, 3),
        *(4, 5, 6),
    ],
)
def test_newcomer_walks_past_a_zip_that_is_over(steps: int) -> None:
    """Silent if it goes wrong: the newcomer trains on batches that the job has had already."""
    whole = Rank()
    expected = whole.script()
    assert expected == ["a0b0", "a1b1", "c0", "c1", "c2", "c3"]
    assert Rank(whole.positions[steps - 1]).script() == expected[steps:]
