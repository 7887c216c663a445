"""What objects of Kubernetes mean to us. Their shapes are those of real servers and controllers."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.adapters.schedule import kubernetes_objects as objects
from keepstep.adapters.schedule.kubernetes_api import Conflict, NotThere, refusal
from keepstep.errors import NoRight, TransientError, UsageError
from keepstep.model.schedule import AgentStart, Constraints

READY = {"type": "Ready", "status": "True", "reason": "KubeletReady"}


def node(*, taints: Any = None, labels: Any = None, conditions: Any = (), **spec: Any) -> Any:
    return {
        "metadata": {
            "name": "k1",
            "resourceVersion": "7",
            "labels": {"nvidia.com/gpu.product": "NVIDIA-H200", **(labels or {})},
        },
        "spec": {**spec, "taints": taints} if taints else spec,
        "status": {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [READY, *conditions]},
    }


def pod(*, labels: Any = None, annotations: Any = None, gpus: int = 8, **meta: Any) -> Any:
    container = {"name": "c", "resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}
    return {
        "metadata": {
            "name": "p",
            "namespace": "default",
            "uid": "u",
            "labels": labels or {},
            "annotations": annotations or {},
            **meta,
        },
        "spec": {"nodeName": "k1", "containers": [container if gpus else {"name": "c"}]},
        "status": {"phase": "Running"},
    }


@pytest.mark.parametrize(
    "given, state, reason",
    [
        (node(), "free", ""),
        (node(unschedulable=True), "degraded", "cordoned"),
        (
            node(taints=[{"key": "gpu.health/xid", "value": "79", "effect": "NoSchedule"}]),
            "degraded",
            "gpu.health/xid=79",
        ),
        (node(taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]), "free", ""),
        (node(taints=[{"key": "team", "value": "a", "effect": "NoSchedule"}]), "free", ""),
        (
            node(taints=[{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]),
            "down",
            "node.kubernetes.io/out-of-service",
        ),
        (
            node(labels={"dgxc.nvidia.com/nvsentinel-state": "quarantined"}),
            "degraded",
            "NVSentinel: quarantined",
        ),
        (node(labels={"dgxc.nvidia.com/nvsentinel-state": "remediation-succeeded"}), "free", ""),
        (
            node(conditions=[{"type": "GpuXidError", "status": "True", "message": "XID 79"}]),
            "degraded",
            "GpuXidError: XID 79",
        ),
        (node(conditions=[{"type": "GpuXidError", "status": "False"}]), "free", ""),
        (node(conditions=[{"type": "KernelDeadlock", "status": "True"}]), "degraded", "Kernel"),
    ],
)
def test_what_others_say_of_a_node_is_understood(given: Any, state: str, reason: str) -> None:
    place = objects.machines([given], [])["k1"].place
    assert (place.state, place.gpu_type, place.ours) == (state, "h200", False)
    assert place.reason.startswith(reason) and bool(place.reason) == bool(reason)


def test_where_a_node_stands_is_said_by_several_labels() -> None:
    said = {"topology.kubernetes.io/zone": "z", "nvidia.com/gpu.clique": "c.1"}
    place = objects.machines([node(labels={**said, "keepstep.dev/rack": "r7"})], [])["k1"].place
    assert place.labels == {"zone": "z", "nvlink": "c.1", "rack": "r7"}


def test_a_node_that_is_not_ready_is_degraded_and_silent() -> None:
    gone = node()
    gone["status"]["conditions"] = [{"type": "Ready", "status": "Unknown", "reason": "Lost"}]
    machine = objects.machines([gone], [])["k1"]
    assert (machine.place.state, machine.place.reason) == ("degraded", "not ready: Lost")
    assert machine.silent


def test_only_who_has_gpus_uses_a_node_that_has_some() -> None:
    states = [
        objects.machines([node()], [one])["k1"].place.state
        for one in (
            pod(),
            pod(gpus=0),
            pod(labels={objects.JOB: "j"}, gpus=0),
            {**pod(), "status": {"phase": "Succeeded"}},
        )
    ]
    assert states == ["used", "free", "used", "free"]


def test_on_a_node_without_gpus_daemons_do_not_count() -> None:
    plain = node()
    plain["status"]["allocatable"] = {"cpu": "4"}
    daemon = pod(gpus=0, ownerReferences=[{"kind": "DaemonSet"}])
    states = [objects.machines([plain], [one])["k1"].place.state for one in (pod(gpus=0), daemon)]
    assert states == ["used", "free"]


JOBSET, BATCH = "jobset.sigs.k8s.io", "batch.kubernetes.io"
KUBEFLOW = "training.kubeflow.org"


@pytest.mark.parametrize(
    "labels",
    [
        # A Job with indices, which are annotations on older servers.
        [{f"{BATCH}/job-completion-index": index} for index in ("0", "1", "10")],
        # A JobSet of one such Job, and one of a Job for each pod.
        [
            {f"{JOBSET}/job-global-index": "0", f"{BATCH}/job-completion-index": index}
            for index in ("0", "1", "10")
        ],
        [{f"{JOBSET}/job-global-index": index} for index in ("0", "1", "10")],
        # A PyTorchJob: its master is rank 0.
        [
            {f"{KUBEFLOW}/replica-type": kind, f"{KUBEFLOW}/replica-index": index}
            for kind, index in (("master", "0"), ("worker", "0"), ("worker", "1"))
        ],
        # A Job without indices: as they are named, which stays so.
        [{}, {}, {}],
    ],
)
def test_pods_of_training_jobs_are_in_the_order_that_their_controllers_say(labels: Any) -> None:
    pods = [pod(labels=one, name=f"p{index}") for index, one in enumerate(labels)]
    noted = [pod(annotations=one, name=f"p{index}") for index, one in enumerate(labels)]
    for given in (pods, noted):
        mixed = [given[1], given[2], given[0]]
        assert sorted(mixed, key=objects.order) == given


def test_a_claim_leaves_nothing_behind() -> None:
    theirs = pod(labels={"app": "x"}, annotations={"note": "y"})
    notes, labels = objects.claim(theirs, "llm", "spare-1", "reserved", 0)
    claimed = pod(labels={"app": "x", **labels}, annotations={"note": "y", **notes})
    (lease,) = objects.leases([claimed])
    assert (lease.job, lease.op, lease.kind, lease.adopted) == ("llm", "spare-1", "reserved", True)
    notes, labels = objects.unclaim(claimed)
    assert objects.leases([_changed(claimed, notes, labels)]) == []
    assert _changed(claimed, notes, labels) == theirs


def _changed(one: Any, notes: Any, labels: Any) -> Any:
    meta = dict(one["metadata"])
    for name, change in (("annotations", notes), ("labels", labels)):
        both = {**meta[name], **change}
        meta[name] = {key: value for key, value in both.items() if value is not None}
    return {**one, "metadata": meta}


def test_pods_that_somebody_else_made_are_the_first_lease_of_the_job_they_name() -> None:
    pods = [
        {
            **pod(labels={objects.JOB: "llm", "job-name": "train"}),
            "spec": {"nodeName": f"k{index}", "containers": []},
        }
        for index in (2, 0, 1)
    ]
    for one, index in zip(pods, "201", strict=True):
        one["metadata"]["annotations"] = {"batch.kubernetes.io/job-completion-index": index}
    (lease,) = objects.leases(pods, "llm")
    assert (lease.job, lease.op, lease.places) == ("llm", "start", ["k0", "k1", "k2"])
    assert objects.leases(pods, "other") == []


def test_names_and_labels_hold_any_id() -> None:
    assert objects.name_of("keepstep", "llm", "spare-1") == "keepstep-llm-spare-1"
    odd = [objects.name_of("keepstep", one) for one in ("A_b", "a_b", "a.b", "x" * 100)]
    assert len(set(odd)) == 4 and all(len(one) <= 63 for one in odd)
    assert objects.label("llm_7") == "llm_7"
    assert objects.label("_x").startswith("x-") and len(objects.label("x" * 100)) <= 63


def test_ranks_are_shown_as_runs() -> None:
    assert objects.ranks_label([3, 0, 1, 2]) == "0-3"
    assert objects.ranks_label([5, 1]) == "1_5" and objects.ranks_label([]) == ""
    long = objects.ranks_label(range(0, 100, 2))
    assert len(long) <= 63 and long.endswith("_etc")


def test_a_taint_of_ours_leaves_those_of_others() -> None:
    theirs = {"key": "team", "value": "a", "effect": "NoSchedule"}
    change = objects.with_taint(node(taints=[theirs]), objects.DEGRADED, "ECC")
    assert change["spec"]["taints"][0] == theirs and len(change["spec"]["taints"]) == 2
    assert change["metadata"]["resourceVersion"] == "7"
    back = node(taints=change["spec"]["taints"])
    assert objects.without_taints(back)["spec"]["taints"] == [theirs]


def test_an_agents_pod_keeps_what_the_template_says_and_waits_for_its_secret() -> None:
    template = {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "containers": [
                {"name": "main", "image": "i", "args": ["x"], "volumeMounts": [{"name": "home"}]},
                {"name": "side", "image": "s"},
            ],
            "volumes": [{"name": "home"}],
            "tolerations": [{"key": "team"}],
        },
    }
    made = objects.agent_pod(
        template,
        name="p",
        job="llm",
        op="spare-1",
        kind="reserved",
        index=0,
        priority_class="high",
        limits=Constraints(gpus=8),
        terms=objects.on(["k1", "k2"]),
        pool="spares",
    )
    main, side = made["spec"]["containers"]
    assert main["command"] == ["sh", "/keepstep/start"] and "args" not in main
    assert main["resources"]["limits"] == {"nvidia.com/gpu": "8"} and side["image"] == "s"
    assert made["metadata"]["labels"]["team"] == "a"
    volumes = made["spec"]["volumes"]
    assert [one["name"] for one in volumes] == ["home", "keepstep-start"]
    assert volumes[1]["secret"]["secretName"] == "p"
    assert not made["spec"]["automountServiceAccountToken"]
    keys = [one.get("key") for one in made["spec"]["tolerations"]]
    assert keys == ["team", None, "nvidia.com/gpu", "keepstep.dev/spare"]
    terms = made["spec"]["affinity"]["nodeAffinity"]
    assert len(terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]) == 2
    assert template["spec"]["containers"][0]["args"] == ["x"]  # it is used again


def test_what_an_agent_is_told_survives_the_shell() -> None:
    agent = AgentStart(
        job="llm",
        node="n0",
        command=["python", "-c", "print('it''s')"],
        env={"KEEPSTEP_TOKEN": "a $b"},
        directory="/with space",
        log="",
    )
    secret = objects.start_secret(pod(), agent)
    assert secret["stringData"]["start"].splitlines()[:2] == [
        "export KEEPSTEP_TOKEN='a $b'",
        "cd '/with space'",
    ]
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "u"


@pytest.mark.parametrize(
    "status, message, kind",
    [
        (403, 'pods is forbidden: User "x" cannot create', NoRight),
        (403, "pods is forbidden: exceeded quota: q", TransientError),
        (401, "Unauthorized", NoRight),
        (404, "not found", NotThere),
        (409, "the object has been modified", Conflict),
        (422, "invalid", UsageError),
        (500, "etcd", TransientError),
        (429, "too many", TransientError),
    ],
)
def test_refusals_are_told_apart(status: int, message: str, kind: type[Exception]) -> None:
    error = refusal(status, '{"message": "' + message.replace('"', "'") + '"}')
    assert type(error) is kind and message.replace('"', "'") in error.message
    assert refusal(status, b"<html>").message
