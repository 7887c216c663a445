"""What every scheduler must do, asked of each of them."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from keepstep.errors import NoSpare, TransientError, UsageError
from keepstep.model.schedule import AgentStart, Ask, Constraints, Kind
from tests.schedulers.cluster import RACKS, until
from tests.schedulers.labs import GPUS, Lab, ask, start


def agent(folder: Path, node: str) -> AgentStart:
    """Says where its process is, and waits."""
    code = f"import os, time; open({str(folder / node)!r}, 'w').write(str(os.getpid()))\n"
    code += "time.sleep(600)"
    return AgentStart(
        job="job-1",
        node=node,
        command=[sys.executable, "-c", code],
        env={},
        directory=str(folder),
        log=str(folder / f"{node}.log"),
    )


def process(folder: Path, node: str) -> psutil.Process:
    file = folder / node
    until(lambda: file.exists() and file.read_text(), f"agent {node}")
    return psutil.Process(int(file.read_text()))


def ended(one: psutil.Process) -> None:
    until(lambda: not one.is_running() or one.status() == "zombie", "the end of an agent")


def test_the_same_operation_gives_the_same_lease(lab: Lab) -> None:
    first = start(lab)
    assert len(first.places) == 3 and len(set(first.places)) == 3
    assert lab.again().acquire(ask("start", "queue", count=3), 20) == first
    spare = lab.scheduler.acquire(ask("spare-1"), 20)
    assert spare.kind == "idle" and not set(spare.places) & set(first.places)
    found = {lease.op: lease for lease in lab.again().leases("job-1")}
    assert found == {"start": first, "spare-1": spare}
    assert lab.again().leases("job-2") == []
    lab.scheduler.abort_swap("job-1", "spare-1")
    lab.scheduler.abort_swap("job-1", "spare-1")
    assert [lease.op for lease in lab.scheduler.leases()] == ["start"]
    lab.scheduler.release(first)
    assert lab.scheduler.leases() == []
    until(lambda: all(place.state == "free" for place in lab.scheduler.places()), "free places")


def test_a_swap_holds_both_places_until_it_is_committed(lab: Lab, tmp_path: Path) -> None:
    first = start(lab)
    old, head = first.places[1], first.places[0]
    lab.scheduler.start_agent(old, agent(tmp_path, "n1"))
    leaver = process(tmp_path, "n1")
    spare = lab.scheduler.acquire(ask("spare-1", avoid=[old]), 20)
    lab.scheduler.start_agent(spare.places[0], agent(tmp_path, "n3"))
    newcomer = process(tmp_path, "n3")
    assert leaver.is_running()
    for _ in range(2):  # whoever was killed in between says it again
        lab.scheduler.commit_swap("job-1", old, "spare-1")
    ended(leaver)
    assert newcomer.is_running()
    left = {lease.op: lease for lease in lab.scheduler.leases("job-1")}
    assert old not in left["start"].places and len(left["start"].places) == 2
    assert left["spare-1"].instead_of == old
    # The first place is one as any other, and a lease may lose its last one.
    lab.scheduler.commit_swap("job-1", head)
    lab.scheduler.commit_swap("job-1", first.places[2])
    assert [lease.op for lease in lab.scheduler.leases("job-1")] == ["spare-1"]
    assert newcomer.is_running()
    lab.scheduler.release(left["spare-1"])
    ended(newcomer)


def test_an_agent_is_started_once_and_found_again(lab: Lab, tmp_path: Path) -> None:
    first = start(lab)
    lab.scheduler.start_agent(first.places[0], agent(tmp_path, "n0"))
    one = process(tmp_path, "n0")
    (tmp_path / "n0").unlink()
    lab.again().start_agent(first.places[0], agent(tmp_path, "n0"))
    assert one.is_running() and not (tmp_path / "n0").exists()
    lab.again().stop_agent("job-1", "n0")
    ended(one)
    until(lambda: _starts(lab, first.places[0], tmp_path), "a second agent")
    outside = next(name for name in lab.places if name not in first.places)
    with pytest.raises(TransientError):
        lab.scheduler.start_agent(outside, agent(tmp_path, "n9"))


def _starts(lab: Lab, place: str, folder: Path) -> bool:
    lab.scheduler.start_agent(place, agent(folder, "n0"))
    return (folder / "n0").exists()


def test_taints_of_others_are_left_alone(lab: Lab) -> None:
    ours, theirs, *_ = lab.places
    lab.taint(theirs)
    lab.scheduler.watch()
    lab.scheduler.taint(ours, "degraded", "ECC errors")
    news = until(lab.scheduler.watch, "news")
    assert [(place.name, place.state) for place in news] == [(ours, "degraded")]
    assert lab.scheduler.watch() == []
    lab.scheduler.taint(theirs, "degraded", "ours now?")
    assert lab.state(theirs).reason.endswith("theirs")
    assert not lab.scheduler.untaint(theirs) and lab.state(theirs).state == "degraded"
    assert "ECC errors" in lab.state(ours).reason and lab.state(ours).ours
    assert lab.again().untaint(ours) and not lab.again().untaint(ours)
    until(lambda: lab.state(ours).state == "free", "a free place")


def test_spares_come_from_the_cheapest_kind(lab: Lab) -> None:
    reserved = lab.places[0]
    name = lab.reserve(reserved)
    first = start(lab)
    assert reserved not in first.places
    free = [one for one in lab.places[:5] if one not in first.places and one != reserved]
    limits = Constraints(gpus=4, gpu_type="h200", reservation=name)
    kinds: list[Kind] = ["reserved", "idle", "preempt"]
    wanted = [Ask(job="job-1", op=f"s{i}", constraints=limits, kinds=kinds) for i in range(4)]
    offers = lab.scheduler.spares(wanted[0])
    assert [(one.place, one.kind) for one in offers][:2] == [
        (reserved, "reserved"),
        (free[0], "idle"),
    ]
    got = lab.scheduler.acquire(wanted[0], 20)
    assert (got.kind, got.places) == ("reserved", [reserved])
    lab.occupy(free, low=True)
    got = lab.scheduler.acquire(wanted[1], 60)  # whoever is preempted takes its time to end
    assert got.kind == "preempt" and got.places == free[:1]
    with pytest.raises(NoSpare, match="job-1"):
        lab.scheduler.acquire(wanted[2], 1.0)
    assert sorted(lease.op for lease in lab.scheduler.leases()) == ["s0", "s1", "start"]


def test_a_place_is_within_the_domain_that_is_asked_for(lab: Lab) -> None:
    (first,) = start(lab, count=1).places
    racks = dict(zip(lab.places, RACKS.values(), strict=True))
    assert {place.name: place.labels["rack"] for place in lab.scheduler.places()} == racks
    left = [name for name in lab.places[:5] if name != first]
    free = {rack: [name for name in left if racks[name] == rack] for rack in ("r1", "r2")}
    near = {"near": {"rack": "r2"}}
    inside = msgspec.structs.replace(ask("s0"), **near)
    assert [one.place for one in lab.scheduler.spares(inside)] == free["r2"]
    apart = msgspec.structs.replace(ask("s0"), apart={"rack": "r1"})
    assert [one.place for one in lab.scheduler.spares(apart)] == free["r2"] + free["r1"]
    got = lab.scheduler.acquire(inside, 20)
    assert got.places == free["r2"][:1]
    rest = free["r2"][1:]
    second = msgspec.structs.replace(ask("s1"), avoid=rest, **near)
    with pytest.raises(NoSpare):
        lab.scheduler.acquire(second, 1.0)
    if not rest:
        return
    lab.occupy([free["r1"][0], *rest], low=True)
    preempt = msgspec.structs.replace(ask("s1", "idle", "preempt"), **near)
    got = lab.scheduler.acquire(preempt, 60)
    assert (got.kind, got.places) == ("preempt", rest)


def test_somebody_of_higher_priority_is_not_preempted(lab: Lab) -> None:
    first = start(lab)
    lab.occupy([one for one in lab.places[:5] if one not in first.places], low=False)
    with pytest.raises(NoSpare):
        lab.scheduler.acquire(ask("s0", "idle", "preempt"), 1.0)
    assert [lease.op for lease in lab.scheduler.leases()] == ["start"]


def test_what_does_not_exist_is_refused_before_anything_is_asked_for(lab: Lab) -> None:
    for limits, word in (
        (Constraints(partition="nowhere"), "nowhere"),
        (Constraints(reservation="nobodys"), "nobodys"),
        (Constraints(gpus=1, gpu_type="b300"), "b300"),
    ):
        with pytest.raises(UsageError, match=word) as refused:
            lab.scheduler.check(limits, ["reserved", "idle"])
        assert refused.value.hint
    lab.scheduler.check(GPUS, ["idle"])


def test_nothing_runs_in_a_fenced_place(lab: Lab, tmp_path: Path) -> None:
    # The last test here: Slurm takes its time to use the other nodes of such a job again.
    first = start(lab)
    for index, place in enumerate(first.places[:2]):
        lab.scheduler.start_agent(place, agent(tmp_path, f"n{index}"))
    victim, other = process(tmp_path, "n0"), process(tmp_path, "n1")
    lab.scheduler.taint(first.places[0], "fenced", "does not answer")
    lab.scheduler.taint(first.places[0], "fenced", "does not answer")
    ended(victim)
    assert other.is_running() and lab.state(first.places[0]).state == "down"
    lab.scheduler.commit_swap("job-1", first.places[0])
    assert lab.scheduler.leases("job-1")[0].places == first.places[1:]
