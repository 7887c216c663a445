"""Kubernetes as a source of machines, by its API.

A lease is a set of pods, one in each of its places, and a pod that the scheduler has bound to a
node is what holds it. Its container cannot start yet: it mounts a Secret that is not there. Telling
the agent to start is making that Secret, with the command and the token in it. So a place can be
held without anything running in it, pods need no rights of their own, and no token is in a pod's
description (decision 24).

How a place is asked for is in kubernetes_requests.py, how one is fenced in kubernetes_taints.py.
"""

from __future__ import annotations

import contextlib
import time

import msgspec

from keepstep.adapters.schedule import kubernetes_objects as objects
from keepstep.adapters.schedule.kubernetes_api import (
    Api,
    Conflict,
    Mirror,
    NotThere,
    Object,
)
from keepstep.adapters.schedule.kubernetes_lease import LeaseElection
from keepstep.adapters.schedule.kubernetes_owners import Owners
from keepstep.adapters.schedule.kubernetes_pods import LOOK_S, Pods
from keepstep.adapters.schedule.kubernetes_records import Records
from keepstep.adapters.schedule.kubernetes_requests import (
    AT_ONCE_S,
    PlaceRequests,
    Settings,
    why_pending,
)
from keepstep.adapters.schedule.kubernetes_taints import Taints
from keepstep.errors import NoSpare, TransientError, UsageError
from keepstep.model.schedule import (
    START,
    AgentStart,
    Ask,
    Capabilities,
    Constraints,
    Kind,
    Lease,
    Level,
    Place,
    Spare,
)
from keepstep.ports.ledger import LedgerMember

NO_TAINT = (
    "without the right to patch nodes none is tainted: a lost node is given up only when its ranks "
    "must have ended themselves"
)
NO_RECORDS = "migrations are not recorded: the custom resources of deploy/kubernetes are missing"


class KubernetesScheduler:
    name = "kubernetes"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._api = Api(settings.kubeconfig, settings.context)
        self._pods = Pods(self._api)
        self._owners = Owners(self._api, self._pods)
        self._records = Records(self._api, settings.namespace)
        self._taints = Taints(self._api, self._pods)
        self._requests = PlaceRequests(self._api, self._pods, self._owners, settings)
        self._mirrors: tuple[Mirror, Mirror] | None = None
        self._seen: dict[str, Place] = {}
        self._shown: dict[str, dict[str, str]] = {}

    @property
    def server(self) -> str:
        return self._api.server

    def election(self, me: LedgerMember, secret: str, lease_s: float) -> LeaseElection:
        """Among the orchestrators of this namespace."""
        name = f"{me.id}_{me.instance}"
        space = self.settings.namespace
        return LeaseElection(self._api, space, name, secret=secret, lease_s=lease_s)

    # ----------------------------------------------------------------------- looking

    def capabilities(self) -> Capabilities:
        taint = self._api.may("patch", "nodes")
        lacks = [] if taint else [NO_TAINT]
        lacks += [] if self._records.can_write() else [NO_RECORDS]
        preempt = self._has_class(self.settings.preempting_class)
        return Capabilities(taint=taint, preempt=preempt, shrink=True, lacks=lacks)

    def _has_class(self, name: str) -> bool:
        try:
            self._api.call(self._api.scheduling.read_priority_class, name)
        except NotThere:
            return False
        return True

    def check(self, constraints: Constraints, kinds: list[Kind], count: int = 1) -> None:
        space = self._space(constraints)
        try:
            self._api.call(self._api.core.read_namespace, space)
        except NotThere as error:
            raise UsageError(
                f"Kubernetes has no namespace {space}", hint="see kubectl get namespaces"
            ) from error
        known = self._pods.machines()
        pool, wanted = constraints.reservation, constraints.gpu_type.lower()
        pools = sorted({one.pool for one in known.values()} - {""})
        if pool and pool not in pools:
            raise UsageError(
                f"Kubernetes has no pool {pool}: no node has the taint {objects.SPARE}={pool}",
                hint=f"pools: {', '.join(pools) or 'none'}",
            )
        types = sorted({one.place.gpu_type for one in known.values()} - {""})
        if wanted and wanted not in types:
            raise UsageError(
                f"no node has GPUs of type {wanted}", hint=f"types: {', '.join(types) or 'none'}"
            )
        fit = [one for one in known.values() if one.fits(constraints)]
        if len(fit) < count:
            raise UsageError(
                f"{count} nodes are wanted, and there are {len(fit)} that will do",
                hint="see kubectl get nodes --show-labels",
            )
        if constraints.owner:
            self._owners.read(space, constraints.owner)
        self._check_rights(space, kinds)

    def _check_rights(self, space: str, kinds: list[Kind]) -> None:
        for verb, what in (("create", "pods"), ("delete", "pods"), ("create", "secrets")):
            if not self._api.may(verb, what, space):
                raise UsageError(
                    f"Kubernetes does not let us {verb} {what} in namespace {space}",
                    hint="see deploy/kubernetes/rbac.yaml for the rights",
                )
        names = [self.settings.priority_class]
        names += [self.settings.preempting_class] if "preempt" in kinds else []
        for name in names:
            if not self._has_class(name):
                raise UsageError(
                    f"Kubernetes has no priority class {name}",
                    hint="apply deploy/kubernetes, or name another one",
                )

    def _space(self, limits: Constraints) -> str:
        return limits.partition or self.settings.namespace

    def places(self) -> list[Place]:
        return [one.place for one in self._pods.machines().values()]

    def watch(self) -> list[Place]:
        if self._mirrors is None:
            core = self._api.core
            self._mirrors = (
                Mirror(self._api, core.list_node),
                Mirror(self._api, core.list_pod_for_all_namespaces),
            )
        nodes, pods = (mirror.look() for mirror in self._mirrors)
        known = objects.machines(nodes, pods, self._pods.devices.look())
        self._records.pools(known)
        now = {name: one.place for name, one in known.items()}
        self._taints.fence_again(now)
        news = [place for name, place in now.items() if self._seen.get(name) != place]
        news += [
            msgspec.structs.replace(place, state="down", reason="it is no node any more")
            for name, place in self._seen.items()
            if name not in now
        ]
        self._seen = now
        return news

    def leases(self, job: str = "") -> list[Lease]:
        return objects.leases(self._pods.find(job), job)

    def spares(self, ask: Ask) -> list[Spare]:
        known = self._pods.machines()
        theirs = self._owners.spares(ask, self._space(ask.constraints), known)
        return [Spare(place=pod["spec"]["nodeName"], kind="reserved") for pod in theirs] + [
            Spare(place=one, kind=kind)
            for kind in ask.kinds
            for one in self._requests.free(known, ask, kind)
        ]

    # ----------------------------------------------------------------------- leases

    def acquire(self, ask: Ask, timeout_s: float) -> Lease:
        end = time.monotonic() + timeout_s
        before, space = self._pods.find(ask.job, ask.op), self._space(ask.constraints)
        theirs = bool(ask.constraints.owner)
        if any(map(objects.is_foreign, before)) or (theirs and ask.op == START):
            return self._owners.adopt(ask, space, timeout_s)
        if before:
            if any(objects.HELD in pod["metadata"].get("annotations", {}) for pod in before):
                return self._given(ask)
            self._pods.delete(before)  # it waits for somebody who was killed
        if theirs and self._owners.take(ask, space, self._pods.machines()):
            return self._given(ask)
        tried: list[str] = []
        for kind in ask.kinds:
            limit_s = max(LOOK_S, end - time.monotonic())
            why = self._requests.attempt(ask, kind, self._space(ask.constraints), limit_s)
            if not why:
                return self._given(ask)
            tried.append(f"{kind}: {why}")
        if theirs and self._owners.take(ask, space, self._pods.machines()):
            return self._given(ask)  # their controller was faster
        raise NoSpare(f"Kubernetes has no place for job {ask.job} ({'; '.join(tried)})")

    def _given(self, ask: Ask) -> Lease:
        (lease,) = objects.leases(self._pods.find(ask.job, ask.op))
        to = ", ".join(lease.places)
        self._records.migration(ask.job, ask.op, "Acquired", kind=lease.kind, to=to)
        return lease

    def release(self, lease: Lease) -> None:
        pods = self._pods.find(lease.job, lease.op)
        self._pods.delete([pod for pod in pods if not objects.is_foreign(pod)])
        self._owners.let_go(pods)

    def abort_swap(self, job: str, op: str) -> None:
        if pods := self._pods.find(job, op):
            self._pods.delete(pods)
            self._records.migration(job, op, "Aborted")

    def commit_swap(self, job: str, place: str, op: str = "") -> None:
        gone = [pod for pod in self._pods.find(job) if pod["spec"].get("nodeName") == place]
        self._pods.delete(gone)
        for pod in self._pods.find(job, op) if op else []:
            if pod["metadata"].get("annotations", {}).get(objects.INSTEAD) != place:
                # The mark comes last: whoever is killed before it says all of it again.
                to, above = pod["spec"]["nodeName"], self._owners.root(pod)
                words = f"job {job}: {to} has taken the place of {place}"
                self._records.migration(job, op, "Done", above, to=to, **{"from": place})
                for one in filter(None, (pod, above)):
                    self._records.event(one, "Swapped", words)
                self._pods.note(pod, {objects.INSTEAD: place})

    # ----------------------------------------------------------------------- agents

    def start_agent(self, place: str, agent: AgentStart) -> None:
        pods = [one for one in self._pods.find(agent.job) if one["spec"].get("nodeName") == place]
        if not pods:
            raise TransientError(f"job {agent.job} has no pod on {place}")
        pod = pods[0]
        (lease,) = objects.leases([pod])
        if objects.is_foreign(pod):  # it asks by itself
            self._records.migration(agent.job, lease.op, "Started", node=agent.node)
            return
        phase = pod.get("status", {}).get("phase")
        told = pod["metadata"].get("annotations", {}).get(objects.NODE)
        if told == agent.node and phase == "Running":
            return
        if phase in ("Failed", "Succeeded"):
            pod = self._renew(pod)
        space, secret = pod["metadata"]["namespace"], objects.start_secret(pod, agent)
        core = self._api.core
        try:
            self._api.call(core.create_namespaced_secret, space, secret)
        except Conflict:  # told before, but it has not begun: the token may be too old by now
            self._api.call(core.patch_namespaced_secret, pod["metadata"]["name"], space, secret)
        self._pods.note(pod, {objects.NODE: agent.node}, {objects.NODE: objects.label(agent.node)})
        self._records.migration(agent.job, lease.op, "Started", node=agent.node)

    def stop_agent(self, job: str, node: str) -> None:
        for pod in self._pods.find(job):
            if pod["metadata"].get("annotations", {}).get(objects.NODE) == node:
                self._renew(pod)

    def _renew(self, old: Object) -> Object:
        """The same place is held by a pod in which nothing runs."""
        meta = old["metadata"]
        (lease,) = objects.leases([old])
        pod = objects.renewed(old)
        self._pods.delete([old])
        self._pods.make(meta["namespace"], pod)
        end = time.monotonic() + AT_ONCE_S
        while True:
            now = self._api.call(
                self._api.core.read_namespaced_pod, meta["name"], meta["namespace"]
            )
            if now["spec"].get("nodeName"):
                return now
            if time.monotonic() > end:
                raise TransientError(f"{lease.places[0]} cannot be had again: {why_pending([now])}")
            time.sleep(LOOK_S)

    # ----------------------------------------------------------------------- taints

    def taint(self, place: str, level: Level, reason: str) -> None:
        self._taints.add(place, level, reason)

    def untaint(self, place: str) -> bool:
        return self._taints.remove(place)

    # ----------------------------------------------------------------------- showing

    def show(self, job: str, ranks: dict[str, list[int]]) -> None:
        """kubectl get pods -L keepstep.dev/rank"""
        wanted = {place: objects.ranks_label(found) for place, found in ranks.items()}
        if self._shown.get(job) == wanted:
            return
        for pod in self._pods.find(job):
            text = wanted.get(pod["spec"].get("nodeName", ""))
            if pod["metadata"]["labels"].get(objects.RANK) != text:
                with contextlib.suppress(NotThere):
                    self._pods.note(pod, {}, {objects.RANK: text})
        self._shown[job] = wanted
