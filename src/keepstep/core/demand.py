"""Who needs a spare, and which nodes will do for it.

Nodes have labels (rack, switch, nvlink, ...), as their agents say. A job may name labels *within*
which its ranks stay: a spare has the same value there as the node that the rank is on. If that
node has no such label, the job has no such domain there, and any node will do. All other labels
are failure domains: what has hit a node may hit its neighbours, so a spare that shares none of
them is preferred, and one that does is better than none.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepstep.core.facts import Node
from keepstep.core.state import Job


def victims(job: Job) -> list[int]:
    """Ranks that need a spare and have none yet."""
    attempt = job.attempt
    if attempt is None or attempt.kind == "planned":
        taken = set(attempt.newcomers) if attempt is not None and not attempt.committed else set()
        waiting = (i.pending for i in job.incidents if i.wants_spares)
        return [rank for pending in waiting for rank in pending if rank not in taken]
    if attempt.committed or attempt.incident.give_up:
        return []
    return [rank for rank in attempt.moving if rank not in attempt.newcomers]


def mismatch(within: Sequence[str], victim: Node | None, node: Node) -> str:
    """Why `node` is outside the domain of `victim`; empty if it is not."""
    for label in within:
        here = victim.labels.get(label, "") if victim is not None else ""
        there = node.labels.get(label, "")
        if here and here != there:
            return f"in {label} {there or '(none)'}, and the job stays within {label} {here}"
    return ""


def shared(within: Sequence[str], victim: Node | None, node: Node) -> list[str]:
    """Failure domains that both are in."""
    if victim is None or not victim.labels:
        return []
    return [
        label
        for label, value in victim.labels.items()
        if label not in within and node.labels.get(label) == value
    ]


def helps(job: Job, node: str) -> bool:
    """A spare there could stand in for somebody who needs one."""
    within = job.spec.policy.within
    if not within:
        return True
    needy = victims(job)
    homes = {owner.node for rank in needy if (owner := job.owner(rank)) is not None}
    there = job.nodes[node]
    return not homes or any(not mismatch(within, job.nodes[home], there) for home in homes)


def unmet(job: Job, needy: list[int], room: list[str]) -> list[int]:
    """Those for whom `room` (a node for each place there is) has nothing."""
    within = job.spec.policy.within
    if not within:
        return needy[len(room) :]
    left: list[int] = []
    for rank in needy:
        owner = job.owner(rank)
        home = job.nodes[owner.node] if owner is not None else None
        fit = next((n for n in room if not mismatch(within, home, job.nodes[n])), None)
        if fit is None:
            left.append(rank)
        else:
            room.remove(fit)
    return left


def domains(job: Job, rank: int) -> tuple[dict[str, str], dict[str, str]]:
    """Of the node that the rank is on: those to stay within, and those better left."""
    owner, within = job.owner(rank), job.spec.policy.within
    labels = job.nodes[owner.node].labels if owner is not None else {}
    near = {label: labels[label] for label in within if label in labels}
    return near, {label: value for label, value in labels.items() if label not in within}
