"""Views as tables for people. With --json the same views are printed word for word."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep.model.labels import joined
from keepstep.model.network import PathView
from keepstep.model.views import CheckpointsView, IncidentView, JobView, PlanView
from keepstep.orchestrator.requests import JobLine, NodeLine, SpareLine

PIPE_COLUMNS = 400


def print_json(value: Any) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def print_checks(rows: Sequence[tuple[str, str, bool]]) -> None:
    table = [[what, found, "ok" if good else "NO"] for what, found, good in rows]
    _table(_console(), ("", "found", ""), table)


def words(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def print_jobs(views: Sequence[JobView]) -> None:
    console = _console()
    for view in views:
        head = f"{view.job}  {view.state}  step {view.committed_step}"
        head += f"  generation {view.generation}  {view.steps_per_s:.1f} steps/s"
        if view.exit_code is not None:
            head += f"  exit code {view.exit_code}"
        console.print(Text(head, style="bold"), soft_wrap=True)
        for line in (
            view.control,
            view.reason,
            view.protection,
            view.checkpoint and f"checkpoint {view.checkpoint}",
            view.checkpoints and checkpoints_text(view.checkpoints),
        ):
            if line:
                console.print(Text(f"  {line}"), soft_wrap=True)
        rows: list[list[Any]] = [
            [f"rank {r.rank}", r.pid, r.node, r.slot, r.generation, r.committed_step, r.state]
            for r in view.ranks
        ]
        for s in view.spares:
            rows.append(["spare", s.pid, s.node, s.slot, "", "", s.state])
            for one in s.understudies:
                state = f"understudy of rank {one.rank}, {one.state}"
                rows.append(["", one.pid, s.node, s.slot, "", "", state])
        _table(console, ("", "pid", "node", "slot", "generation", "step", "state"), rows)
        for straggler in view.stragglers:
            console.print(Text(f"  straggler: {straggler}"), soft_wrap=True)
        for note in view.notes:
            console.print(Text(f"  note {_clock(note.at_ns)} {note.text}"), soft_wrap=True)
        for node in view.nodes:
            if node.taints or node.state != "connected":
                taints = f" tainted: {'; '.join(node.taints)}" if node.taints else ""
                console.print(Text(f"  node {node.node} {node.state}{taints}"), soft_wrap=True)


def checkpoints_text(view: CheckpointsView) -> str:
    """How often, what for, and how far back the newest one is."""
    text = f"checkpoints every {view.interval_s:.0f} s (failures every {view.mttf_h:.0f} h"
    text += f", one costs {view.cost_ms:.1f} ms" if view.cost_ms else ""
    newest = f"the newest of step {view.step}: {view.newest}" if view.newest else "none yet"
    put_off = f"; {view.put_off} put off by a slow disk" if view.put_off else ""
    return f"{text}), {newest}{', one is being written' if view.saving else ''}{put_off}"


def print_incidents(incidents: Sequence[IncidentView]) -> None:
    console = _console()
    rows = [
        [
            one.id,
            _clock(one.opened_at_ns),
            f"{one.trigger} {one.cause}",
            ", ".join(map(str, one.victims)),
            "; ".join(one.moves),
            f"{one.pause_ms:.0f} ms",
            one.steps_lost,
            one.steps_recomputed,
            one.outcome,
            one.reason,
        ]
        for one in incidents
    ]
    names = ("incident", "at", "cause", "ranks", "moves", "pause", "lost", "recomputed")
    _table(console, (*names, "outcome", "reason"), rows)


def print_job_lines(jobs: Sequence[JobLine]) -> None:
    rows = [
        [
            *(one.job, one.state, one.priority, one.step, f"{one.steps_per_s:.1f}"),
            *(
                one.ranks,
                one.spares,
                one.nodes,
                "yes" if one.protected else "no",
                one.last_incident,
                one.reason,
            ),
        ]
        for one in jobs
    ]
    names = ("job", "state", "priority", "step", "steps/s", "ranks", "spares", "nodes", "protected")
    _table(_console(), (*names, "last incident", "reason"), rows)


def print_nodes(nodes: Sequence[NodeLine]) -> None:
    rows = [
        [
            *(one.job, one.node, one.place, joined(one.labels), one.state, one.slots),
            *(", ".join(map(str, one.ranks)), one.spares or "", "; ".join(one.taints)),
        ]
        for one in nodes
    ]
    names = ("job", "node", "place", "labels", "state", "slots", "ranks", "spares", "tainted")
    _table(_console(), names, rows)


def print_plan(plan: PlanView) -> None:
    console = _console()
    console.print(Text(f"{plan.job}: {plan.asked} (nothing is changed)", style="bold"))
    rows = [[f"rank {m.rank}", m.origin, m.to or "?", m.cost, m.reason] for m in plan.moves]
    if rows:
        _table(console, ("move", "from", "to", "by", "why"), rows)
    else:
        console.print("  no rank moves")
    if plan.offers:
        offers = [[one.place, one.kind, one.reason] for one in plan.offers]
        _table(console, ("could be had", "kind", "why in this order"), offers)
    if plan.rejected:
        _table(console, ("not used", "why"), [[one.what, one.why] for one in plan.rejected])
    for line in plan.then:
        console.print(Text(f"then {line}"), soft_wrap=True)


def print_spares(spares: Sequence[SpareLine]) -> None:
    rows = [[s.job, s.slot, s.pid, s.state, s.parked_at, _ready(s)] for s in spares]
    _table(_console(), ("job", "slot", "pid", "state", "parked at", "understudies"), rows)


def print_paths(nodes: Mapping[str, Sequence[PathView]]) -> None:
    rows = [
        [
            *(node, path.interface, path.local, path.state, f"{path.comms_up}/{path.comms}"),
            *(f"{path.sent_bytes / 1e6:.1f}", f"{path.received_bytes / 1e6:.1f}"),
            *(f"{path.resent_bytes / 1e6:.1f}", path.faults, f"{path.stalled_ms} ms"),
        ]
        for node, paths in nodes.items()
        for path in paths
    ]
    names = ("node", "interface", "address", "state", "up", "sent MB", "received MB")
    _table(_console(), (*names, "resent MB", "faults", "stalled"), rows)


def _ready(spare: SpareLine) -> str:
    """Ranks that it could take over without building."""
    ready = [str(one.rank) for one in spare.understudies if one.state == "ready"]
    building = [str(one.rank) for one in spare.understudies if one.state != "ready"]
    said = f"ready for {', '.join(ready)}" if ready else ""
    return said + (f" (building {', '.join(building)})" if building else "")


def _clock(at_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_ns / 1e9))


def _console() -> Console:
    # Where nobody looks at a screen (a pipe, a file) lines are not folded to a screen's width.
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def _table(console: Console, names: Iterable[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        # Text, not markup: reasons hold whatever users wrote, square brackets included.
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)
