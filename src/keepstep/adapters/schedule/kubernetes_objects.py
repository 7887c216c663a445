"""What objects of Kubernetes mean to us, and the ones that we make. Pure: dictionaries in and out.

A place is a Node. Everything that we make carries the job and the operation, exactly in annotations
and, to be found by, in labels as far as those can hold them. Names follow from them, so that
whoever makes something twice meets it.
"""

from __future__ import annotations

import copy
import hashlib
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from keepstep.adapters.schedule.kubernetes_api import GROUP, Object
from keepstep.model.schedule import START, AgentStart, Ask, Constraints, Kind, Lease, Place

JOB, OP, KIND, RANK = f"{GROUP}/job", f"{GROUP}/op", f"{GROUP}/kind", f"{GROUP}/rank"
NODE = f"{GROUP}/node"  # of the job, whose agent runs in the pod
INDEX = f"{GROUP}/index"  # of the pod in its lease
HELD = f"{GROUP}/held"  # the lease was complete at one time
INSTEAD = f"{GROUP}/instead-of"
ADOPTED = f"{GROUP}/adopted"  # somebody else's pod, which a job uses
DEGRADED, FENCED = f"{GROUP}/degraded", f"{GROUP}/fenced"  # taints of ours
REASON = f"{GROUP}/reason"  # why; a taint's value is too short for it
SPARE = f"{GROUP}/spare"  # taint of nodes of a pool, by whoever made it
GPU = "nvidia.com/gpu"
GPU_TYPES = ("nvidia.com/gpu.product", "amd.com/gpu.product-name")
# Where a node stands: what we call it, and who says so, the first one that does.
DOMAINS = {
    "rack": (f"{GROUP}/rack", "topology.kubernetes.io/rack"),
    "switch": (f"{GROUP}/switch", "network.topology.nvidia.com/leaf"),
    "nvlink": (
        f"{GROUP}/nvlink",
        "nvidia.com/gpu.clique",
        "network.topology.nvidia.com/accelerator",
    ),
    "zone": (f"{GROUP}/zone", "topology.kubernetes.io/zone"),
}
MOUNT = "/keepstep"
TOLD = "start"  # the file that a container runs
SENTINEL = "dgxc.nvidia.com/nvsentinel-state"
WELL = ("", "remediation-succeeded")
OUT = "node.kubernetes.io/out-of-service"  # whoever sets it vouches that nothing runs there
FOLLOWS = re.compile(r"node\.kubernetes\.io/(unschedulable|not-ready|unreachable)$")

# Taints of these say that somebody is worried about the node; others only say whom it is for.
WORRIES = re.compile(
    r"node\.kubernetes\.io/|node\.cloudprovider\.kubernetes\.io/|gpu\.health/|nvidia\.com/(?!gpu$)"
    r"|karpenter\.sh/disrupt|ToBeDeletedByClusterAutoscaler$|aws-node-termination-handler/"
    r"|cloud\.google\.com/impending-node-termination$"
)
# Conditions that are bad when they are true (node-problem-detector, NVSentinel).
FAULTS = re.compile(r"KernelDeadlock$|ReadonlyFilesystem$|CorruptDockerOverlay2$|Gpu|GPU|SysLogs")


# -------------------------------------------------------------------------------------------- names


def label(text: str) -> str:
    """As a value of a label: the text itself if it can be one."""
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", text):
        return text
    clean = re.sub(r"[^A-Za-z0-9]+", "-", text)[:40].strip("-")
    return f"{clean}-{_digest(text)}".strip("-")


def name_of(*words: str) -> str:
    """Of an object, from what it is for."""
    text = "-".join(words)
    clean = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return clean if clean == text and len(clean) <= 50 else f"{clean[:50]}-{_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def ranks_label(ranks: Iterable[int]) -> str:
    """ "0-3" or "1_5"; shortened if there are too many."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    text = "_".join("-".join(map(str, run)) for run in runs)
    return text if len(text) <= 63 else f"{text[:56].rpartition('_')[0]}_etc"


# ------------------------------------------------------------------------------------------ reading


class Occupant(msgspec.Struct, frozen=True, kw_only=True):
    """What of a pod matters to its node."""

    node: str
    gpus: int
    priority: int
    ours: bool
    daemon: bool  # it is on every node, or part of it


def occupant(pod: Object) -> Occupant | None:
    meta, spec = pod["metadata"], pod["spec"]
    if not spec.get("nodeName") or not may_run(pod):
        return None
    owners = [owner.get("kind") for owner in meta.get("ownerReferences") or []]
    mirror = "kubernetes.io/config.mirror" in (meta.get("annotations") or {})
    return Occupant(
        node=spec["nodeName"],
        gpus=sum(
            int(amount)
            for container in spec.get("containers") or []
            for name, amount in (container.get("resources", {}).get("limits") or {}).items()
            if name.endswith(".com/gpu")
        ),
        priority=int(spec.get("priority") or 0),
        ours=JOB in (meta.get("labels") or {}),
        daemon=mirror or "DaemonSet" in owners or meta.get("namespace") == "kube-system",
    )


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A node, and who is there."""

    place: Place
    labels: dict[str, str]
    gpus: int
    pool: str  # whose spare it is
    others: list[Occupant]  # that matter, ours included
    silent: bool  # its kubelet is not heard of

    def fits(self, limits: Constraints) -> bool:
        return (
            self.gpus >= limits.gpus
            and limits.gpu_type.lower() in ("", self.place.gpu_type)
            and all(self.labels.get(k) == v for k, v in selector(limits.features).items())
        )

    def suits(self, ask: Ask) -> bool:
        return (
            self.fits(ask.constraints)
            and self.place.name not in ask.avoid
            and ask.only in ("", self.place.name)
            and ask.near.items() <= self.place.labels.items()
        )


def machines(
    nodes: list[Object], pods: list[Object], devices: dict[str, list[str]] | None = None
) -> dict[str, Machine]:
    """`devices`: node -> what is wrong with them."""
    there: dict[str, list[Occupant]] = defaultdict(list)
    for pod in pods:
        if (one := occupant(pod)) is not None:
            there[one.node].append(one)
    names = {node["metadata"]["name"]: node for node in nodes}
    bad = devices or {}
    return {name: _machine(node, there, bad.get(name, [])) for name, node in names.items()}


def _machine(node: Object, there: dict[str, list[Occupant]], devices: list[str]) -> Machine:
    meta, spec, status = node["metadata"], node.get("spec", {}), node.get("status", {})
    labels = meta.get("labels") or {}
    gpus = sum(
        int(amount)
        for name, amount in (status.get("allocatable") or {}).items()
        if name.endswith(".com/gpu")
    )
    # Where there are GPUs they are what is scarce; elsewhere a node is for one job at a time.
    others = [
        one for one in there[meta["name"]] if one.ours or (one.gpus > 0 if gpus else not one.daemon)
    ]
    taints = spec.get("taints") or []
    state, reason, ours = _health(meta, spec, status, devices)
    return Machine(
        place=Place(
            name=meta["name"],
            state=state or ("used" if others else "free"),
            reason=reason,
            ours=ours,
            gpu_type=gpu_type(labels),
            labels=domains(labels),
        ),
        labels=labels,
        gpus=gpus,
        pool=next((str(one.get("value", "")) for one in taints if one["key"] == SPARE), ""),
        others=others,
        silent=not _is_ready(status),
    )


def _health(meta: Object, spec: Object, status: Object, devices: list[str]) -> Any:
    """("", "", False) if nothing is wrong: how bad it is, why, and whether only we say so."""
    taints = spec.get("taints") or []
    keys = {one["key"] for one in taints}
    said = str((meta.get("annotations") or {}).get(REASON, ""))
    conditions = {one["type"]: one for one in status.get("conditions") or []}
    if FENCED in keys:
        return "down", f"keepstep: {said}", True
    if OUT in keys:
        return "down", OUT, False
    # Not ready is no fence: what runs there may go on.
    why = conditions.get("Ready", {}).get("reason", "it was never heard of")
    theirs = [] if _is_ready(status) else [f"not ready: {why}"]
    theirs += [
        f"{one['key']}={one['value']}" if one.get("value") else one["key"]
        for one in taints
        if WORRIES.match(one["key"]) and not FOLLOWS.match(one["key"])
    ]
    if spec.get("unschedulable"):
        theirs.insert(0, "cordoned")
    state = str((meta.get("labels") or {}).get(SENTINEL, ""))
    if state not in WELL:
        theirs.append(f"NVSentinel: {state}")
    theirs += [
        f"{kind}: {one.get('message') or one.get('reason') or 'true'}"
        for kind, one in conditions.items()
        if FAULTS.match(kind) and one.get("status") == "True"
    ]
    theirs += devices
    if theirs:
        return "degraded", "; ".join(theirs), False
    if DEGRADED in keys:
        return "degraded", f"keepstep: {said}", True
    return "", "", False


def _is_ready(status: Object) -> bool:
    conditions = status.get("conditions") or []
    return any((one["type"], one["status"]) == ("Ready", "True") for one in conditions)


def gpu_type(labels: dict[str, str]) -> str:
    """ "h200" of "NVIDIA-H200"."""
    for name in GPU_TYPES:
        if word := labels.get(name, ""):
            return word.lower().removeprefix("nvidia-").removeprefix("amd-")
    return ""


def domains(labels: dict[str, str]) -> dict[str, str]:
    found = {
        name: next((labels[key] for key in keys if labels.get(key)), "")
        for name, keys in DOMAINS.items()
    }
    return {name: value for name, value in found.items() if value}


def selector(features: str) -> dict[str, str]:
    """ "zone=a,rack=7"."""
    pairs = (word.partition("=") for word in features.split(",") if word)
    return {key.strip(): value.strip() for key, _, value in pairs}


def may_run(pod: Object) -> bool:
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def is_foreign(pod: Object) -> bool:
    """Somebody else made it, for a job that its label names: it starts its agent itself."""
    notes = pod["metadata"].get("annotations") or {}
    return OP not in notes or ADOPTED in notes


def leases(pods: list[Object], job: str = "") -> list[Lease]:
    found: dict[tuple[str, str], list[Object]] = defaultdict(list)
    for pod in pods:
        notes = pod["metadata"].get("annotations") or {}
        labels = pod["metadata"].get("labels") or {}
        of = notes.get(JOB) or labels.get(JOB, "")
        if of and job in ("", of):
            found[of, notes.get(OP, START)].append(pod)
    return [_lease(key, group) for key, group in found.items()]


def _lease(key: tuple[str, str], pods: list[Object]) -> Lease:
    pods = sorted(pods, key=order)
    notes = pods[0]["metadata"].get("annotations") or {}
    word = (pods[0]["metadata"].get("labels") or {}).get(KIND, "queue")
    return Lease(
        id=name_of(*key),
        job=key[0],
        op=key[1],
        kind=next((kind for kind in get_args(Kind) if kind == word), "queue"),
        places=[pod["spec"]["nodeName"] for pod in pods if pod["spec"].get("nodeName")],
        instead_of=notes.get(INSTEAD, ""),
        adopted=all(map(is_foreign, pods)),
    )


def order(pod: Object) -> tuple[int, int, str]:
    """Of pods of one lease: as we have said, else as their controllers number them."""
    meta = pod["metadata"]
    index = (meta.get("annotations") or {}).get(INDEX)
    return numbered(pod) if index is None else (int(index), 0, meta["name"])


def numbered(pod: Object) -> tuple[int, int, str]:
    """By its controller. A JobSet has one Job with an index for each pod, or several Jobs; a
    PyTorchJob has a master before its workers."""
    meta = pod["metadata"]
    said = {**(meta.get("labels") or {}), **(meta.get("annotations") or {})}
    if (replica := said.get("training.kubeflow.org/replica-index")) is not None:
        worker = said.get("training.kubeflow.org/replica-type") == "worker"
        return int(worker), int(replica), meta["name"]
    job = int(said.get("jobset.sigs.k8s.io/job-global-index", 0))
    within = int(said.get("batch.kubernetes.io/job-completion-index", 0))
    return job, within, meta["name"]


# ------------------------------------------------------------------------------------------- making


def agent_pod(
    template: Object,
    *,
    name: str,
    job: str,
    op: str,
    kind: Kind,
    index: int,
    priority_class: str,
    limits: Constraints,
    terms: list[Object],
    pool: str = "",
    owner: Object | None = None,
) -> Object:
    """A pod that holds a place. Its container starts when it is told what to run: until then a
    volume is missing."""
    meta = copy.deepcopy(template.get("metadata") or {})
    spec = copy.deepcopy(template.get("spec") or {})
    labels = {JOB: label(job), OP: label(op), KIND: kind}
    meta["labels"] = {**(meta.get("labels") or {}), **labels}
    marks = {JOB: job, OP: op, INDEX: str(index)}
    meta["annotations"] = {**(meta.get("annotations") or {}), **marks}
    meta["name"] = name
    if owner is not None:  # and goes with it
        meta["ownerReferences"] = [reference(owner)]
    container = (spec.get("containers") or [{}])[0]
    container.setdefault("name", "agent")
    container["command"] = ["sh", f"{MOUNT}/{TOLD}"]
    container.pop("args", None)
    mounts = container.setdefault("volumeMounts", [])
    mounts.append({"name": "keepstep-start", "mountPath": MOUNT, "readOnly": True})
    if limits.gpus:
        container.setdefault("resources", {}).setdefault("limits", {})[GPU] = str(limits.gpus)
    spec["containers"] = [container, *(spec.get("containers") or [])[1:]]
    told = {"secretName": name, "defaultMode": 0o400}
    spec["volumes"] = [
        *(spec.get("volumes") or []),
        {"name": "keepstep-start", "secret": told},
    ]
    # What is worried about a node must not end a rank before it has moved.
    tolerations = [{"operator": "Exists", "effect": "NoExecute"}]
    tolerations.append({"key": GPU, "operator": "Exists", "effect": "NoSchedule"})
    if pool:
        tolerations.append({"key": SPARE, "value": pool, "effect": "NoSchedule"})
    spec["tolerations"] = [*(spec.get("tolerations") or []), *tolerations]
    spec["restartPolicy"] = "Never"
    spec["priorityClassName"] = priority_class
    spec.setdefault("terminationGracePeriodSeconds", 10)
    spec.setdefault("automountServiceAccountToken", False)
    spec["affinity"] = _affinity(job, terms)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


def claim(pod: Object, job: str, op: str, kind: Kind, index: int) -> tuple[Object, Object]:
    """Annotations and labels that make somebody else's pod a place of a job."""
    notes = {OP: op, INDEX: str(index), HELD: "true", ADOPTED: "true"}
    if JOB not in (pod["metadata"].get("labels") or {}):  # their template has named no job
        notes[JOB] = job
    return notes, {JOB: label(job), OP: label(op), KIND: kind}


def unclaim(pod: Object) -> tuple[Object, Object]:
    ours = (JOB,) if JOB in pod["metadata"].get("annotations", {}) else ()
    notes = dict.fromkeys((OP, INDEX, HELD, ADOPTED, INSTEAD, *ours))
    return notes, dict.fromkeys((OP, KIND, RANK, *ours))


def renewed(old: Object) -> Object:
    """The same pod once more, pinned to where it was, and told nothing."""
    meta, spec = old["metadata"], copy.deepcopy(old["spec"])
    spec["affinity"] = _affinity(meta["annotations"][JOB], on([spec.pop("nodeName")]))
    gone = (NODE, RANK)
    kept: Object = {
        name: {key: value for key, value in meta[name].items() if key not in gone}
        for name in ("labels", "annotations")
    }
    if "ownerReferences" in meta:
        kept["ownerReferences"] = meta["ownerReferences"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": meta["name"], **kept},
        "spec": spec,
    }


def reference(one: Object) -> Object:
    meta = one["metadata"]
    return {
        "apiVersion": one["apiVersion"],
        "kind": one["kind"],
        "name": meta["name"],
        "uid": meta["uid"],
    }


def _affinity(job: str, terms: list[Object]) -> Object:
    apart = {
        "labelSelector": {"matchLabels": {JOB: label(job)}},
        "topologyKey": "kubernetes.io/hostname",
    }
    found: Object = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    if terms:
        found["nodeAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}
        }
    return found


def on(places: list[str]) -> list[Object]:
    """Terms: one of these nodes, whoever is there."""
    return [
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}
        for name in places
    ]


def elsewhere(limits: Constraints, types: list[tuple[str, str]], avoid: list[str]) -> list[Object]:
    """Terms: any node that will do. `types`: labels that say the type of GPU that is wanted."""
    labels = [
        {"key": key, "operator": "In", "values": [value]}
        for key, value in selector(limits.features).items()
    ]
    fields = [
        {"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in sorted(avoid)
    ]
    choices = [[{"key": key, "operator": "In", "values": [value]}] for key, value in types] or [[]]
    terms = [
        {
            name: value
            for name, value in (("matchExpressions", labels + choice), ("matchFields", fields))
            if value
        }
        for choice in choices
    ]
    return [term for term in terms if term]


def start_secret(pod: Object, agent: AgentStart) -> Object:
    """The file that the pod's container waits for. It goes with the pod."""
    meta = pod["metadata"]
    lines = [f"export {name}={shlex.quote(value)}" for name, value in agent.env.items()]
    lines += [f"cd {shlex.quote(agent.directory)}", f"exec {shlex.join(agent.command)}"]
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": meta["name"],
            "labels": {JOB: label(agent.job)},
            "ownerReferences": [
                {"apiVersion": "v1", "kind": "Pod", "name": meta["name"], "uid": meta["uid"]}
            ],
        },
        "stringData": {TOLD: "\n".join(lines) + "\n"},
    }


def with_taint(node: Object, key: str, reason: str) -> Object:
    """A change of the node as it was read: the server refuses it if it has changed since."""
    others = [one for one in node["spec"].get("taints") or [] if one["key"] != key]
    taint = {"key": key, "value": "true", "effect": "NoSchedule"}
    return _node_change(node, [*others, taint], reason)


def without_taints(node: Object) -> Object:
    taints = node["spec"].get("taints") or []
    return _node_change(node, [one for one in taints if one["key"] not in (DEGRADED, FENCED)], None)


def _node_change(node: Object, taints: list[Object], reason: str | None) -> Object:
    version = node["metadata"]["resourceVersion"]
    return {
        "metadata": {"resourceVersion": version, "annotations": {REASON: reason}},
        "spec": {"taints": taints},
    }
