"""From a flapping link to a graceful migration: plugin, agent, policy and a real training job."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from keepstep.model.network import PathView
from tests.network.rig import rig
from tests.support.job import Job
from tests.support.torchrun import differences, run_plain

ARGS = ["--epochs", "4", "--steps-per-epoch", "25", "--evaluate-every", "10", "--slow", "yes"]


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("can_make_networks")
def test_a_flapping_path_moves_the_rank_before_anything_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch, jobs: list[Job]
) -> None:
    monkeypatch.setenv("KEEPSTEP_NET_FLAPS", "3")
    words = ("--local-nodes", "2", "--spare-nodes", "1", "--nproc-per-node", "1", "--net=tcp")
    job = Job(*words, script_args=ARGS, world=2)
    jobs.append(job)
    with rig(folder, switched=True, rate_mbit=50) as made:
        job.until_step(2)
        job.spare_parked()
        # What the ranks' plugins would be told by their agents; here two harnesses speak for them.
        agents = [psutil.Process(job.rank(r).pid).environ()["KEEPSTEP_NET_AGENT"] for r in (0, 1)]
        assert agents[0] != agents[1]
        handle, stop = str(folder / "handle"), folder / "stop"
        common = ("--size", "65536", "--stop", str(stop))
        quick = {"KEEPSTEP_NET_HOLD_MS": "20"}
        a, b = made.machines
        receiver = made.start(b, "--listen", handle, *common, KEEPSTEP_NET_AGENT=agents[1], **quick)
        sender = made.start(a, "--connect", handle, *common, KEEPSTEP_NET_AGENT=agents[0], **quick)
        receiver.ready()
        sender.ready()
        job.until(lambda s: all(len(node.paths) == 2 for node in s.nodes[:2]), "paths to be shown")
        flaps = 0
        end = time.monotonic() + 60
        while not job.live_incidents():
            assert time.monotonic() < end, f"{flaps} flaps and no incident: {job.status()}"
            made.link(b, 1, False)
            time.sleep(0.2)  # the length of a flap
            made.link(b, 1, True)
            time.sleep(0.3)
            flaps += 1
        job.until(lambda s: s.ranks[1].node == "n2", "rank 1 to be on the spare node")
        shown = job.cli_as(dict[str, list[PathView]], "net", "status", "--job", job.job)
        assert {path.interface for path in shown["n1"]} == {"p0", "p1"}
        assert sum(path.received_bytes for path in shown["n1"]) > 0
        stop.touch()
        sender.result().assert_clean()
        receiver.result().assert_clean()
        job.finish()
        incidents = job.incidents()
        assert [(i.trigger, i.cause, i.victims) for i in incidents] == [
            ("pre-emptive", "taint", [1])
        ], incidents
        assert incidents[0].outcome == "RESOLVED" and incidents[0].steps_lost == 0
        assert "p1 failed 3 times" in incidents[0].reason
        expected = run_plain(folder / "plain", 2, [*ARGS[:-2]])
        assert differences(job.results(), expected) == []
