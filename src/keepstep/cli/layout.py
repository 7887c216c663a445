"""Which slots a job's nodes have, and the words of `keepstep run` turned into specs (pure)."""

from __future__ import annotations

import re

import msgspec

from keepstep.errors import UsageError
from keepstep.model.job import POINTS, InjectSpec, NodeSpec

RANKS_MAX = 4096


class JobLayout(msgspec.Struct, frozen=True, kw_only=True):
    world: int
    local_world: int
    spares: int
    nodes: list[NodeSpec]


def lay_out(*, local_nodes: int, nproc: int, spares: int, spare_nodes: int) -> JobLayout:
    """Ranks fill the first `local_nodes` nodes; spare slots go round-robin from the last of them,
    so that the spare is on another node than most ranks and node 0 gets one last."""
    slots = [nproc] * local_nodes
    for i in range(spares):
        slots[(local_nodes - 1 - i) % local_nodes] += 1
    slots += [nproc] * spare_nodes
    return JobLayout(
        world=local_nodes * nproc,
        local_world=nproc,
        spares=spares + spare_nodes * nproc,
        nodes=[NodeSpec(name=f"n{i}", slots=count) for i, count in enumerate(slots)],
    )


def check_counts(*, nproc: int, spares: int, spare_nodes: int, understudies: int = 0) -> None:
    """What every launcher is told about ranks and spares."""
    check_count("--nproc-per-node", nproc, 1)
    check_count("--spares", spares, 0)
    check_count("--understudies", understudies, 0)
    check_count("--spare-nodes", spare_nodes, 0)
    if understudies and not spares and not spare_nodes:
        raise UsageError(
            f"--understudies {understudies} without a spare",
            hint="understudies are kept beside spares: add --spares 1, or --spare-nodes 1",
        )


def check_count(name: str, value: int, least: int) -> None:
    if not least <= value <= RANKS_MAX:
        raise UsageError(f"{name} is {value}", hint=f"{least} to {RANKS_MAX} are possible")


def count_nodes(*, nnodes: int, local_nodes: int | None, external: bool = False) -> int:
    """Of `keepstep run`: how many nodes get ranks, here or on other machines."""
    check_count("--nnodes", nnodes, 1)
    check_count("--local-nodes", 1 if local_nodes is None else local_nodes, 1)
    if nnodes > 1 and local_nodes is None and not external:
        raise UsageError(
            f"--nnodes {nnodes} needs an orchestrator that the other machines can reach",
            hint="--orchestrator URL, and `keepstep agent` on each machine; "
            f"or --local-nodes {nnodes} to run {nnodes} agents here as if they were nodes",
        )
    if nnodes > 1 and local_nodes not in (None, nnodes):
        raise UsageError(f"--nnodes {nnodes} and --local-nodes {local_nodes} contradict each other")
    return local_nodes or nnodes


INJECT_HINT = (
    "for example --inject kill:rank=2,step=5,point=in_backward or --inject kill-node:node=n1,step=9"
)


def parse_inject(text: str, id: str) -> InjectSpec:
    """`action:key=value,...` as in --inject."""
    action, _, rest = text.partition(":")
    fields: dict[str, object] = {"id": id, "action": action}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals or key in ("id", "action"):
            raise UsageError(f"--inject {text}: {part!r} is no key=value", hint=INJECT_HINT)
        fields[key] = value
    try:
        spec = msgspec.convert(fields, InjectSpec, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"--inject {text}: {error}", hint=INJECT_HINT) from error
    return check_inject(spec)


def check_inject(spec: InjectSpec) -> InjectSpec:
    if spec.point not in POINTS:
        raise UsageError(f"no such point: {spec.point}", hint=f"points: {', '.join(POINTS)}")
    if spec.action == "kill-node":
        # The step of a node's death is watched on one of its ranks, so either may name it.
        if not spec.node and spec.rank < 0:
            raise UsageError(
                "kill-node needs a node", hint="--node n1, or --rank of one of its ranks"
            )
    elif spec.rank < 0:
        raise UsageError(f"{spec.action} needs a rank", hint="--rank R")
    if spec.seconds < 0:
        raise UsageError("seconds cannot be negative")
    return spec


def compose_job_id(script: str, stamp: str, tail: str) -> str:
    """`train-20261115-021455-a1b2`: says what runs, sorts by time, does not collide."""
    stem = script.rpartition("/")[2].removesuffix(".py")
    word = re.sub(r"[^A-Za-z0-9]+", "-", stem).strip("-")[:40] or "job"
    return f"{word}-{stamp}-{tail}"
