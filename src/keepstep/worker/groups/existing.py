"""The process groups that exist, and how to make another backend of each."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed.distributed_c10d as c10d

from keepstep.errors import UsageError
from keepstep.worker.groups import frontend, nccl

FAKE = "fake"  # torch's backend without connections: collectives return at once


class NamedGroup(NamedTuple):
    name: str
    pg: Any


class Recipe(NamedTuple):
    """Of a backend. Not the backend itself: whoever holds one keeps it from being dropped."""

    kind: Any
    backend: str
    rank: int
    size: int
    timeout: timedelta
    options: Any  # of NCCL


def all_groups() -> list[NamedGroup]:
    """Without those that have no connection: they need no replacement, on no rank."""
    world = c10d._world
    found = (NamedGroup(str(world.pg_names[pg]), pg) for pg in list(world.pg_map))
    return sorted(group for group in found if not _is_fake(group.pg))


def _is_fake(pg: Any) -> bool:
    backends = frontend.ext.backends(pg)
    return bool(backends) and all(str(backend.name()) == FAKE for _, backend in backends)


def backends(pg: Any) -> list[tuple[Any, Any]]:
    found = frontend.ext.backends(pg)
    return [(kind, backend) for kind, backend in found if str(backend.name()) != FAKE]


def require_known(groups: list[NamedGroup]) -> None:
    for name, pg in groups:
        kinds = [str(backend.name()) for _, backend in backends(pg)]
        for kind in kinds or [str(c10d._world.pg_map[pg][0])]:  # one that is a group by itself
            if not kinds or kind not in ("gloo", "nccl"):
                raise UsageError(
                    f"backend {kind} of group {name} is not supported",
                    hint='use init_process_group("nccl") or init_process_group("gloo")',
                )


def alone(wanted: Recipe) -> Any:
    if wanted.backend == "nccl":
        return frontend.ext.SoloBackend(wanted.rank, wanted.size, "nccl", wanted.options)
    return frontend.solo_backend("gloo", wanted.rank, wanted.size, wanted.timeout)


def recipes(pg: Any) -> list[Recipe]:
    """How to make another one of each backend of the group, in the same order on all ranks."""
    found = []
    for kind, backend in sorted(backends(pg), key=lambda entry: int(entry[0])):
        name, timeout = str(backend.name()), _timeout(backend)
        options = nccl.options(timeout, backend.options) if name == "nccl" else None
        found.append(Recipe(kind, name, pg.rank(), pg.size(), timeout, options))
    return found


def _timeout(backend: Any) -> timedelta:
    with contextlib.suppress(AttributeError):
        return backend.options._timeout  # type: ignore[no-any-return]
    return timedelta(minutes=30)
