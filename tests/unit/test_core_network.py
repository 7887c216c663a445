"""What follows from the network plugin's words: records, taints, and who takes the blame."""

from __future__ import annotations

from keepstep.core.agent.network import SECOND, Limits, PathWatch
from keepstep.model.agent_messages import PathNoticed
from keepstep.model.network import PathEvent

LIMITS = Limits(flaps=3, window_ns=60 * SECOND, down_ns=20 * SECOND)


class Node:
    def __init__(self) -> None:
        self.watch = PathWatch(LIMITS)
        self.now = 100 * SECOND
        self.said: list[PathNoticed] = []

    def hear(self, event: str, interface: str = "eth1", pid: int = 7, **more: object) -> None:
        fields = {"event": event, "interface": interface, "pid": pid, **more}
        self.said += self.watch.heard(self.now, PathEvent(**fields))  # type: ignore[arg-type]

    def after(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)
        self.said += self.watch.look(self.now)

    def alive(self, seconds: float, pid: int = 7) -> None:
        """Time passes, and the process goes on to send its counts."""
        for _ in range(int(seconds)):
            self.hear("stats", pid=pid, comms=4, comms_up=4)
            self.after(1)

    def flap(self, seconds: float = 0.2) -> None:
        self.hear("link-down")
        self.hear("path-down", comm="c1", reason="link down", remote="10.0.0.9")
        self.after(seconds)
        self.hear("link-up")
        self.hear("path-up", comm="c1")

    def taints(self) -> list[str]:
        return [one.reason for one in self.said if one.taint]


def test_a_short_fault_is_only_a_line_in_the_record() -> None:
    node = Node()
    node.flap()
    node.alive(30)
    assert node.taints() == []
    assert [one.reason for one in node.said] == [
        "eth1 failed for 0.20 s (link down); traffic went around it"
    ]


def test_flapping_is_a_taint_and_is_said_once() -> None:
    node = Node()
    for _ in range(6):
        node.flap()
        node.after(1)
    assert node.taints() == ["eth1 failed 3 times within 60 s (link down)"]
    assert len(node.said) == 2  # one line for the record beside it, not one for each flap


def test_faults_far_apart_are_not_flapping() -> None:
    node = Node()
    for _ in range(5):
        node.flap()
        node.alive(40)
    assert node.taints() == []


def test_a_path_that_stays_down_is_a_taint() -> None:
    node = Node()
    node.hear("link-down")
    node.alive(19)
    assert node.taints() == []
    node.alive(3)
    assert len(node.taints()) == 1 and "eth1 is down for" in node.taints()[0]


def test_a_fault_that_one_peer_alone_shows_is_not_this_nodes() -> None:
    node = Node()
    for _ in range(6):
        node.hear("path-down", comm="c1", reason="no acknowledgement", remote="10.0.0.9")
        node.after(0.5)
        node.hear("path-up", comm="c1")
    assert node.taints() == [] and node.said


def test_a_silent_fault_towards_several_peers_is_this_nodes() -> None:
    node = Node()
    for _ in range(3):
        for comm, remote in (("c1", "10.0.0.8"), ("c2", "10.0.0.9")):
            node.hear("path-down", comm=comm, reason="no acknowledgement", remote=remote)
        node.after(0.5)
        for comm in ("c1", "c2"):
            node.hear("path-up", comm=comm)
    assert node.taints() == ["eth1 failed 3 times within 60 s (no acknowledgement)"]


def test_many_processes_that_lose_one_link_are_one_fault() -> None:
    node = Node()
    for pid in range(20):
        node.hear("link-down", pid=pid)
        node.hear("path-down", pid=pid, comm="c")
    node.after(0.1)
    for pid in range(20):
        node.hear("link-up", pid=pid)
        node.hear("path-up", pid=pid, comm="c")
    assert node.taints() == [] and len(node.said) == 1


def test_a_process_that_ended_takes_its_losses_along() -> None:
    node = Node()
    node.hear("stats", comms=4, comms_up=3)
    node.hear("path-down", comm="c1", reason="closed by the peer")
    assert [view.state for view in node.watch.views(node.now)] == ["degraded"]
    node.alive(60, pid=8)
    assert node.taints() == []
    assert [view.processes for view in node.watch.views(node.now)] == [1]


def test_a_communicator_that_is_closed_takes_its_losses_along() -> None:
    """Its process lives, and has new ones, or none."""
    node = Node()
    for comms in (0, 4):
        for comm, remote in (("c1", "10.0.0.8"), ("c2", "10.0.0.9")):
            node.hear("path-down", path=1, comm=comm, reason="reset", remote=remote)
        node.hear("stats", path=1, comms=4, comms_up=2)
        node.hear("stats", path=0, comms=4, comms_up=4)  # over the same interface
        node.after(1)
        assert not node.said
        for _ in range(40):
            node.hear("stats", path=1, comms=comms, comms_up=comms)
            node.after(1)
        assert node.said and not node.taints()
        node.said.clear()
        node.alive(60)


def test_views_sum_over_processes() -> None:
    node = Node()
    node.hear("stats", pid=1, comms=2, comms_up=2, sent_bytes=10, local="10.0.0.1")
    node.hear("stats", pid=2, comms=2, comms_up=0, received_bytes=5)
    (view,) = node.watch.views(node.now)
    assert (view.state, view.comms, view.comms_up) == ("degraded", 4, 2)
    assert (view.sent_bytes, view.received_bytes, view.local) == (10, 5, "10.0.0.1")


def test_words_nobody_knows_are_left_alone() -> None:
    node = Node()
    node.hear("sunspots")
    node.hear("path-down", interface="")
    assert node.said == []
