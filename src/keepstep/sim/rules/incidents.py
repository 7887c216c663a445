"""Incidents and what opens them: lost nodes, taints, signals, numbers that differ.

Nobody is called lost or hung who is well; not too many move at once; no two planned moves of one
rank; an incident in which numbers differed is called DIVERGED.
"""

from __future__ import annotations

from keepstep.model import records as r
from keepstep.sim.ground.violation import ensure, violated
from keepstep.sim.rules.reader import Reader
from keepstep.sim.times import SECOND
from keepstep.sim.world.world import World


class Incidents(Reader):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._joined: set[str] = set()
        self._closed: set[str] = set()
        self._preempted: list[tuple[int, int]] = []  # when, how many ranks
        self._doubtful: set[str] = set()  # incidents in which numbers differed
        self._accepted_ticks: set[int | None] = set()

    def _on_AttemptStarted(self, record: r.AttemptStarted) -> None:
        ensure(record.incident not in self._closed, f"an attempt for closed {record.incident}")

    def _on_NodeJoined(self, record: r.NodeJoined) -> None:
        self._joined.add(record.node)

    def _on_NodeLost(self, record: r.NodeLost) -> None:
        node = self.world.nodes.get(record.node)
        well = node is None or not node.alive or not self.world.plan.only_processes
        well = well or record.node not in self._joined  # a late one, of which nobody has heard
        ensure(well, f"{record.node} is called lost, and nothing ails it")
        for worker in self.book.placed:
            if worker.startswith(f"{record.node}."):
                self.book.ended.add(worker)

    def _on_Tainted(self, record: r.Tainted) -> None:
        self.book.tainted.add(record.target)

    def _on_Untainted(self, record: r.Untainted) -> None:
        self.book.tainted.discard(record.target)

    def _on_SignalSeen(self, record: r.SignalSeen) -> None:
        """While one rank hangs, no healthy one is blamed for it."""
        if record.signal != "hang":
            return
        blamed = self.world.ranks[record.worker]
        owners = [self.world.ranks[worker] for worker in self.book.owners.values()]
        hung = [p.id for p in owners if p.alive and (p.hung or p.stopped)]
        guilty = blamed.hung or blamed.stopped or blamed.slow > 1
        ill = self.world.net.disturbed or any(p.slow > 1 for p in owners)
        if guilty or ill:
            return
        if hung:
            violated(f"{record.worker} is blamed for a hang of {', '.join(hung)}")
        if all(fault.kind in ("crash", "migrate", "drain") for fault in self.world.plan.faults):
            violated(f"{record.worker} is blamed for a hang, and nobody hangs")

    def _on_IncidentOpened(self, record: r.IncidentOpened) -> None:
        for other in self.book.open_incidents.values():
            both = set(other.victims) & set(record.victims)
            planned = other.trigger != "unplanned" and record.trigger != "unplanned"
            ensure(not (both and planned), f"{record.incident} and {other.incident} move {both}")
        self.book.open_incidents[record.incident] = record
        self.book.victims[record.incident] = set(record.victims)
        if record.trigger == "pre-emptive":
            self._preempted.append((record.at_ns, len(record.victims)))
            minute = [n for at, n in self._preempted if at > record.at_ns - 60 * SECOND]
            most = max(self.world.plan.ranks // 5, self.world.plan.per_node)
            storm = len(minute) > 1 and sum(minute) > most
            ensure(not storm, f"{sum(minute)} ranks told to move in one minute: a storm")

    def _on_IncidentWidened(self, record: r.IncidentWidened) -> None:
        self.book.victims[record.incident] |= set(record.victims)

    def _on_IncidentClosed(self, record: r.IncidentClosed) -> None:
        ensure(record.view.id not in self._closed, f"{record.view.id} is closed twice")
        self._closed.add(record.view.id)
        self.book.open_incidents.pop(record.view.id, None)
        ensure(bool(record.view.reason), f"{record.view.id} closed without a reason")
        differed = record.view.id in self._doubtful
        named = differed == (record.view.outcome == "DIVERGED")
        ensure(named, f"{record.view.id} is called {record.view.outcome}")
        gave_up = record.view.outcome == "ABORTED" and "gave up after" in record.view.reason
        hit = len(self.world.fired_faults)
        deserved = hit >= 3 or self.world.plan.step_ns > 60 * SECOND
        ensure(not gave_up or deserved, f"a move was given up after {hit} faults")

    def _on_DivergenceFound(self, record: r.DivergenceFound) -> None:
        ensure(self.world.ills.differs_at == record.tick, f"nobody found {record.text}")
        ensure(not self.book.stands, f"found again: {record.text}")
        self._doubtful |= {record.incident, record.move} - {""}
        self.book.stands = record.text

    def _on_DivergenceAccepted(self, record: r.DivergenceAccepted) -> None:
        self.book.stands = ""
        self._accepted_ticks.add(record.tick if record.tick >= 0 else self.world.ills.differs_at)

    def went_on(self, worker: str) -> None:
        """It was told so only after it was on record that it may be."""
        accepted = self.world.ranks[worker].tick in self._accepted_ticks
        ensure(accepted, f"{worker} goes on, and nobody has accepted what differs")
