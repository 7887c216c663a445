"""Taints of nodes of Kubernetes: what must not begin there, and what must not run there.

Taints are NoSchedule, never NoExecute: a rank has to move before its pod may end. Deleting the pods
of a node by force, behind a taint, is the fence (decision 24).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

from keepstep.adapters.schedule import kubernetes_objects as objects
from keepstep.adapters.schedule.kubernetes_api import Api, Conflict, Object
from keepstep.adapters.schedule.kubernetes_pods import LOOK_S, Pods
from keepstep.errors import TransientError, UsageError
from keepstep.model.schedule import Level, Place

FENCE_S = 2.0  # a kubelet that lives has ended a pod by then
CONFLICTS_MAX = 10
LOST_S = 120.0  # the node controller has noticed by then that a kubelet is silent


class Taints:
    def __init__(self, api: Api, pods: Pods) -> None:
        self._api = api
        self._pods = pods
        self._fenced: dict[str, tuple[str, float]] = {}  # lately: why, and until when it counts

    def add(self, place: str, level: Level, reason: str) -> None:
        now = self._pods.machines().get(place)
        if now is None:
            raise UsageError(f"Kubernetes has no node {place}", hint="see kubectl get nodes")
        words = " ".join(reason.split())[:200]
        if level == "degraded":
            if now.place.state not in ("degraded", "down"):
                self._change(place, lambda node: objects.with_taint(node, objects.DEGRADED, words))
            return
        there = [pod for pod in self._pods.find() if pod["spec"].get("nodeName") == place]
        if not now.silent and not any(map(objects.may_run, there)):
            return  # its kubelet has ended them: the agent has failed, or somebody took its pod
        if not now.place.ours or now.place.state != "down":
            self._change(place, lambda node: objects.with_taint(node, objects.FENCED, words))
            self._fenced[place] = (words, time.monotonic() + LOST_S)
        with contextlib.suppress(TransientError):
            self._pods.delete(there, grace_s=1, limit_s=FENCE_S)
        self._pods.delete(there, grace_s=0)

    def remove(self, place: str) -> bool:
        self._fenced.pop(place, None)
        now = self._pods.machines().get(place)
        if now is None or not now.place.ours:
            return False
        self._change(place, objects.without_taints)
        return True

    def fence_again(self, now: dict[str, Place]) -> None:
        """The node controller of older servers (1.20) writes the list of taints as it has read it,
        whatever was added since: ours may be gone when it notices that a kubelet is silent. Whoever
        takes ours away on purpose comes later."""
        for name, (words, until) in list(self._fenced.items()):
            if time.monotonic() > until or name not in now:
                self._fenced.pop(name, None)
            elif now[name].state != "down":
                fence = partial(objects.with_taint, key=objects.FENCED, reason=words)
                with contextlib.suppress(TransientError):
                    self._change(name, fence)

    def _change(self, place: str, change: Callable[[Object], Object]) -> None:
        """Read, change, write; again if somebody was faster. Taints are one list: two who write it
        without looking would lose one of theirs."""
        core = self._api.core
        for attempt in range(CONFLICTS_MAX):
            node = self._api.call(core.read_node, place)
            try:
                self._api.call(core.patch_node, place, change(node))
                return
            except Conflict:
                time.sleep(LOOK_S * attempt)
        raise TransientError(f"node {place} changes too often to be tainted")
