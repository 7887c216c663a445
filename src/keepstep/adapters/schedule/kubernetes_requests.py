"""How a place of Kubernetes is asked for: pods that only fit there, until they are bound.

A place is taken by name wherever that is possible, so that nobody is preempted by accident: two
priority classes of equal rank are used, of which only one may preempt.
"""

from __future__ import annotations

import contextlib
import time

import msgspec

from keepstep.adapters.schedule import kubernetes_objects as objects
from keepstep.adapters.schedule.kubernetes_api import Api, NotThere, Object
from keepstep.adapters.schedule.kubernetes_objects import Machine
from keepstep.adapters.schedule.kubernetes_owners import Owners
from keepstep.adapters.schedule.kubernetes_pods import LOOK_S, Pods
from keepstep.errors import KeepstepError, NoRight, TransientError, UsageError
from keepstep.model.schedule import Ask, Kind

AT_ONCE_S = 5.0  # what is free or reserved is given at once, or somebody was faster


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    kubeconfig: str = ""
    context: str = ""
    namespace: str = "keepstep"
    template: Object = {}  # of a pod: image, volumes and whatever else agents need
    priority_class: str = "keepstep-train"
    preempting_class: str = "keepstep-preempt"


class PlaceRequests:
    """Creates pods for one request, and takes them back if it comes to nothing."""

    def __init__(self, api: Api, pods: Pods, owners: Owners, settings: Settings) -> None:
        self._api = api
        self._pods = pods
        self._owners = owners
        self._settings = settings

    def free(self, known: dict[str, Machine], ask: Ask, kind: Kind) -> list[str]:
        """Places that this kind would take, best first."""
        ok = {name: one for name, one in known.items() if one.suits(ask)}
        # Those first that share no failure domain with what they replace.
        shared = {n: len(ask.apart.items() & one.place.labels.items()) for n, one in ok.items()}
        ok = dict(sorted(ok.items(), key=lambda item: shared[item[0]]))
        pool = ask.constraints.reservation
        if kind == "reserved":
            return [n for n, one in ok.items() if pool and one.pool == pool and _is_free(one)]
        ok = {name: one for name, one in ok.items() if not one.pool}
        if kind in ("idle", "queue"):
            return [name for name, one in ok.items() if _is_free(one)]
        ours = self._priority() if ok else 0
        lower = {
            name: one
            for name, one in ok.items()
            if one.place.state == "used"
            and not any(other.ours or other.priority >= ours for other in one.others)
        }
        cost = {
            name: (max(o.priority for o in one.others), len(one.others))
            for name, one in lower.items()
        }
        return sorted(lower, key=lambda name: cost[name])

    def _priority(self) -> int:
        try:
            name = self._settings.preempting_class
            return int(self._api.call(self._api.scheduling.read_priority_class, name)["value"])
        except NotThere:
            return 0  # there is nobody whom nobody may preempt

    def attempt(self, ask: Ask, kind: Kind, space: str, limit_s: float) -> str:
        """Why it came to nothing; empty if it is held now."""
        known = self._pods.machines()
        free = self.free(known, ask, kind)
        if kind == "queue":
            wanted = ask.constraints.gpu_type.lower()
            bad = [
                name
                for name, one in known.items()
                if one.place.state in ("degraded", "down")
                or not ask.near.items() <= one.place.labels.items()
            ]
            types = [
                (key, one.labels[key])
                for one in known.values()
                if wanted and one.place.gpu_type == wanted
                for key in objects.GPU_TYPES
                if key in one.labels
            ]
            avoid = sorted({*ask.avoid, *bad})
            terms = objects.elsewhere(ask.constraints, sorted(set(types)), avoid)
        elif len(free) < ask.count:
            return {"reserved": "all of its nodes are used", "idle": "no node is idle"}.get(
                kind, "nobody of lower priority has one"
            )
        else:
            terms = objects.on(free[: ask.count])
        if kind in ("reserved", "idle"):
            limit_s = min(AT_ONCE_S, limit_s)
        try:
            self._create(ask, kind, space, terms)
            why = self._await_bound(ask, limit_s)
        except (NoRight, UsageError):
            self._take_back(ask)
            raise
        except TransientError as error:
            why = error.message
        except BaseException:  # Ctrl-C
            self._take_back(ask)
            raise
        if why:
            self._take_back(ask)
        return why

    def _take_back(self, ask: Ask) -> None:
        with contextlib.suppress(KeepstepError):  # whoever cleans up later finds it by its marks
            self._pods.delete(self._pods.find(ask.job, ask.op))

    def _create(self, ask: Ask, kind: Kind, space: str, terms: list[Object]) -> None:
        preempts = kind == "preempt"
        named = ask.constraints.qos or self._settings.priority_class
        owner = ask.constraints.owner
        above = self._owners.read(space, owner) if owner else None
        for index in range(ask.count):
            pod = objects.agent_pod(
                self._settings.template,
                name=objects.name_of("keepstep", ask.job, ask.op, str(index)),
                job=ask.job,
                op=ask.op,
                kind=kind,
                index=index,
                priority_class=self._settings.preempting_class if preempts else named,
                limits=ask.constraints,
                terms=terms,
                pool=ask.constraints.reservation if kind == "reserved" else "",
                owner=above,
            )
            self._pods.make(space, pod)

    def _await_bound(self, ask: Ask, limit_s: float) -> str:
        end = time.monotonic() + limit_s
        while True:
            pods = self._pods.find(ask.job, ask.op)
            if len(pods) < ask.count:
                return "it was cancelled"
            if all(pod["spec"].get("nodeName") for pod in pods):
                break
            if time.monotonic() > end:
                return f"nothing within {limit_s:g} s: {why_pending(pods)}"
            time.sleep(LOOK_S)
        for pod in pods:
            self._pods.note(pod, {objects.HELD: "true"})
        return ""


def _is_free(one: Machine) -> bool:
    return one.place.state == "free"


def why_pending(pods: list[Object]) -> str:
    for pod in pods:
        for condition in pod.get("status", {}).get("conditions") or []:
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return str(condition.get("message") or condition.get("reason") or "")
    return "its scheduler has said nothing"
