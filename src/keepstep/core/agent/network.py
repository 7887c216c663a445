"""From what the network plugin says to what the orchestrator should know: pure.

    signals = watch.heard(now_ns, event)    # and watch.look(now_ns) from time to time

Theory of operation. Many processes on a node, each with many communicators, use the same few
interfaces, and one broken cable makes all of them speak at once. So what counts is the interface:
it has a *fault* from the first communicator that loses its path over it until the last one has it
back. A fault that ends soon is only a line in the record. Several within a window (flapping), or
one that lasts, are a reason to leave the node: a taint.

Both ends of a path lose it, and only one of them has the broken part. A node takes the blame for a
fault if its own link went down, or if paths to several peers broke together over this interface.
Otherwise the fault is on record and the other end may know better: migrating the wrong node would
pause the job and heal nothing, while the plugin already goes around the path.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from keepstep.model.agent_messages import PathNoticed
from keepstep.model.network import PathEvent, PathView

SECOND = 1_000_000_000
SILENT_NS = 5 * SECOND  # a process that says nothing for so long is gone
NOTE_NS = 60 * SECOND  # a flapping interface has a line in the record so often, not for each flap
PEERS_TO_BLAME = 2


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    flaps: int = 5  # so many faults ...
    window_ns: int = 300 * SECOND  # ... within that time
    down_ns: int = 60 * SECOND  # or one that lasts so long


@dataclass
class _Interface:
    name: str
    local: str = ""
    # Whoever has lost it: (process, path, communicator) -> the peer, where it is known.
    lost: dict[tuple[int, int, str], str] = field(default_factory=dict)
    link_down: set[int] = field(default_factory=set)  # processes that see its link down
    since_ns: int = 0  # of the current fault
    ours: bool = False  # the current fault is this node's
    reason: str = ""
    faults: deque[int] = field(default_factory=deque)  # ours, when they began
    noted_ns: int = -NOTE_NS
    tainted: bool = False
    stats: dict[tuple[int, int], PathEvent] = field(default_factory=dict)  # process, path

    def forget(self, process: int, path: int | None = None) -> None:
        """Losses of communicators that are gone; without a path the process is."""
        gone = [key for key in self.lost if key[0] == process and path in (None, key[1])]
        for key in gone:
            del self.lost[key]

    @property
    def failing(self) -> bool:
        return bool(self.lost or self.link_down)


class PathWatch:
    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._interfaces: dict[str, _Interface] = {}
        self._heard_ns: dict[int, int] = {}

    def heard(self, now_ns: int, event: PathEvent) -> list[PathNoticed]:
        self._heard_ns[event.pid] = now_ns
        if event.event in ("all-down", "gave-up"):
            said = {"all-down": "no path to a peer works", "gave-up": "gave a peer up"}
            return [PathNoticed(kind="network", reason=f"{said[event.event]} (pid {event.pid})")]
        if not event.interface:
            return []
        it = self._interfaces.setdefault(event.interface, _Interface(event.interface))
        it.local = event.local or it.local
        who = (event.pid, event.path, event.comm)
        before = it.failing
        match event.event:
            case "path-down" | "path-suspect":
                it.lost[who] = event.remote
                it.reason = event.reason
            case "path-up":
                it.lost.pop(who, None)
            case "link-down":
                it.link_down.add(event.pid)
                it.reason = "link down"
            case "link-up":
                it.link_down.discard(event.pid)
            case "stats":
                it.stats[event.pid, event.path] = event
                if event.comms_up == event.comms:  # what it had lost is closed
                    it.forget(event.pid, event.path)
        return self._changed(now_ns, it, before)

    def look(self, now_ns: int) -> list[PathNoticed]:
        signals = []
        silent = [pid for pid, at in self._heard_ns.items() if now_ns - at > SILENT_NS]
        for pid in silent:
            del self._heard_ns[pid]
        for it in self._interfaces.values():
            before = it.failing
            for pid in silent:
                it.link_down.discard(pid)
                it.stats = {key: stats for key, stats in it.stats.items() if key[0] != pid}
                it.forget(pid)
            signals += self._changed(now_ns, it, before)
        return signals

    def views(self, now_ns: int) -> list[PathView]:
        return [self._view(now_ns, it) for it in self._interfaces.values() if it.stats]

    # ---------------------------------------------------------------------------- an interface

    def _changed(self, now_ns: int, it: _Interface, before: bool) -> list[PathNoticed]:
        if it.failing and not before:
            it.since_ns = now_ns
            it.ours = False
        peers = {peer for peer in it.lost.values() if peer}
        if it.failing and not it.ours and (it.link_down or len(peers) >= PEERS_TO_BLAME):
            it.ours = True
            it.faults.append(it.since_ns)
        self._forget(now_ns, it)
        signals = self._note(now_ns, it) if before and not it.failing else []
        reason = self._reason_to_leave(now_ns, it)
        if not reason:
            it.tainted = it.tainted and bool(it.faults)  # quiet for a whole window: anew
        elif not it.tainted:
            it.tainted = True
            signals.append(PathNoticed(kind="network", reason=reason, taint=True))
        return signals

    def _forget(self, now_ns: int, it: _Interface) -> None:
        while it.faults and now_ns - it.faults[0] > self._limits.window_ns:
            it.faults.popleft()

    def _reason_to_leave(self, now_ns: int, it: _Interface) -> str:
        if len(it.faults) >= self._limits.flaps:
            window = self._limits.window_ns / SECOND
            return f"{it.name} failed {len(it.faults)} times within {window:g} s ({it.reason})"
        if it.failing and it.ours and now_ns - it.since_ns >= self._limits.down_ns:
            return f"{it.name} is down for {(now_ns - it.since_ns) / SECOND:.0f} s ({it.reason})"
        return ""

    def _note(self, now_ns: int, it: _Interface) -> list[PathNoticed]:
        if now_ns - it.noted_ns < NOTE_NS:
            return []
        it.noted_ns = now_ns
        lasted = (now_ns - it.since_ns) / SECOND
        reason = f"{it.name} failed for {lasted:.2f} s ({it.reason}); traffic went around it"
        return [PathNoticed(kind="network", reason=reason)]

    def _view(self, now_ns: int, it: _Interface) -> PathView:
        self._forget(now_ns, it)
        stats = list(it.stats.values())
        comms, up = sum(s.comms for s in stats), sum(s.comms_up for s in stats)
        down = bool(it.link_down) or up == 0 < comms
        degraded = "degraded" if up < comms else "up"
        return PathView(
            interface=it.name,
            state="down" if down else degraded,
            local=it.local,
            processes=len({process for process, _ in it.stats}),
            comms=comms,
            comms_up=up,
            sent_bytes=sum(s.sent_bytes for s in stats),
            received_bytes=sum(s.received_bytes for s in stats),
            resent_bytes=sum(s.resent_bytes for s in stats),
            faults=len(it.faults),
            stalled_ms=sum(s.stalled_ms for s in stats),
        )
