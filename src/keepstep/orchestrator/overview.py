"""Jobs, nodes and spares as lines of a table, out of the views of jobs."""

from __future__ import annotations

import msgspec

from keepstep.model.views import JobView
from keepstep.orchestrator.requests import JobLine, NodeLine, SpareLine


def spare_lines(jobs: list[JobView]) -> list[SpareLine]:
    return [
        SpareLine(job=view.job, **msgspec.structs.asdict(spare))
        for view in jobs
        for spare in view.spares
    ]


def job_lines(jobs: list[JobView]) -> list[JobLine]:
    return [
        JobLine(
            job=view.job,
            state=view.state,
            priority=view.priority,
            step=view.committed_step,
            steps_per_s=view.steps_per_s,
            generation=view.generation,
            ranks=view.world,
            spares=sum(spare.state == "parked" for spare in view.spares),
            nodes=sum(node.state == "connected" for node in view.nodes),
            protected=view.node_loss_protected,
            last_incident=view.last_incident,
            reason=view.reason,
        )
        for view in jobs
    ]


def node_lines(jobs: list[JobView]) -> list[NodeLine]:
    return [
        NodeLine(
            job=view.job,
            node=node.node,
            place=node.place,
            labels=node.labels,
            state=node.state,
            slots=node.slots,
            ranks=[one.rank for one in view.ranks if one.node == node.node],
            spares=sum(spare.node == node.node for spare in view.spares),
            taints=node.taints,
        )
        for view in jobs
        for node in view.nodes
    ]
