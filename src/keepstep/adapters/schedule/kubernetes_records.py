"""What Keepstep does, as objects for people who look at the cluster. Nothing depends on them.

Migrations and spare pools are custom resources; where they are not installed, or we have no right
to write them, nothing is written.
"""

from __future__ import annotations

import contextlib
import logging
from datetime import UTC, datetime
from typing import Any

from keepstep.adapters.schedule.kubernetes_api import (
    GROUP,
    VERSION,
    Api,
    Conflict,
    NotThere,
    Object,
)
from keepstep.adapters.schedule.kubernetes_objects import Machine, name_of, reference
from keepstep.errors import KeepstepError, NoRight
from keepstep.model.schedule import START

log = logging.getLogger("keepstep.kubernetes")


class Records:
    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._space = namespace
        self._pools: dict[str, Object] = {}

    def can_write(self) -> bool:
        try:
            self._migrations("list_namespaced_custom_object", self._space)
        except (NotThere, NoRight):
            return False
        return self._api.may("create", "migrations", self._space, GROUP)

    def _migrations(self, verb: str, space: str, *given: Any) -> Object:
        call = getattr(self._api.custom, verb)
        return self._api.call(call, GROUP, VERSION, space, "migrations", *given)

    def migration(
        self, job: str, op: str, phase: str, owner: Object | None = None, **fields: str
    ) -> None:
        """For people who look; nothing depends on it."""
        if op == START:
            return
        space, name = self._space, name_of(job, op)
        body = {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "Migration",
            "metadata": {"name": name},
            "spec": {"job": job, "op": op},
        }
        status = {**fields, "phase": phase, phase.lower(): _now()}
        if owner is not None:
            status["owner"] = f"{owner['kind']}/{owner['metadata']['name']}"
        try:
            with contextlib.suppress(Conflict):
                self._migrations("create_namespaced_custom_object", space, body)
            self._migrations(
                "patch_namespaced_custom_object_status", space, name, {"status": status}
            )
        except KeepstepError as error:
            log.info("migration %s is not recorded: %s", name, error.message)

    def event(self, one: Object, reason: str, message: str) -> None:
        meta = one["metadata"]
        # In a list objects do not say what they are.
        about = reference({"apiVersion": "v1", "kind": "Pod", **one})
        body = {
            "metadata": {"generateName": f"{meta['name']}.", "namespace": meta["namespace"]},
            "involvedObject": {**about, "namespace": meta["namespace"]},
            "reason": reason,
            "message": message,
            "type": "Normal",
            "source": {"component": "keepstep"},
            "firstTimestamp": _now(),
            "lastTimestamp": _now(),
            "count": 1,
        }
        try:
            self._api.call(self._api.core.create_namespaced_event, meta["namespace"], body)
        except KeepstepError as error:
            log.info("an event was not written: %s", error.message)

    def pools(self, known: dict[str, Machine]) -> None:
        """Status of each SparePool that there are nodes of."""
        now: dict[str, Object] = {}
        for one in known.values():
            if one.pool:
                status = now.setdefault(one.pool, {"nodes": 0, "free": 0})
                status["nodes"] += 1
                status["free"] += one.place.state == "free"
        custom = self._api.custom
        for name, status in now.items():
            if self._pools.get(name) == status:
                continue
            try:
                patch = custom.patch_cluster_custom_object_status
                self._api.call(patch, GROUP, VERSION, "sparepools", name, {"status": status})
            except (NotThere, NoRight):
                pass  # only nodes say that there is such a pool
            self._pools[name] = status


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
