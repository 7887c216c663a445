"""What a real API server refuses, forgets or does not answer is retried or reported."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from keepstep.adapters.schedule.kubernetes import KubernetesScheduler
from keepstep.adapters.schedule.kubernetes_api import Mirror
from keepstep.adapters.schedule.kubernetes_requests import Settings
from keepstep.cli.orchestrator_command import orchestrator
from keepstep.errors import NoRight, NoSpare, TransientError, UsageError
from tests.schedulers.cluster import until
from tests.schedulers.control_plane import NAMESPACE, ControlPlane, deployed
from tests.schedulers.kubernetes_lab import TEMPLATE, KubernetesLab
from tests.schedulers.labs import ask, start

ROLE = "/apis/rbac.authorization.k8s.io/v1/clusterroles/keepstep"


@pytest.fixture
def lab(plane: ControlPlane) -> KubernetesLab:
    return KubernetesLab(plane)


def test_a_taint_is_written_again_if_somebody_was_faster(
    lab: KubernetesLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, reads = lab.places[0], []
    core: Any = lab.scheduler._api.core  # type: ignore[attr-defined]
    read = core.read_node

    def slow(name: str, **named: Any) -> Any:
        found = read(name, **named)
        if not reads:
            lab.taint(place)  # between the look and the change
        reads.append(name)
        return found

    monkeypatch.setattr(core, "read_node", slow)
    lab.scheduler.taint(place, "degraded", "ECC errors")
    keys = {one["key"] for one in lab.plane.node(place)["spec"]["taints"]}
    assert len(reads) == 2 and keys == {"gpu.health/xid", "keepstep.dev/degraded"}
    assert not lab.scheduler.untaint(place)  # theirs is why nobody may use it


def test_a_fence_that_an_old_node_controller_has_overwritten_is_put_up_again(
    lab: KubernetesLab,
) -> None:
    place = start(lab, 1).places[0]
    lab.plane.crash_node(place)
    lab.scheduler.taint(place, "fenced", "it is lost")
    assert lab.state(place).state == "down"
    theirs = {"key": "example.com/theirs", "effect": "NoSchedule"}
    lab.plane.change_node(place, {"taints": [theirs]})  # as it knew the list, without looking
    until(lambda: lab.scheduler.watch() is not None and lab.state(place).ours, "the fence again")
    keys = {one["key"] for one in lab.plane.node(place)["spec"]["taints"]}
    assert keys >= {"keepstep.dev/fenced", "example.com/theirs"}
    assert lab.scheduler.untaint(place)
    lab.scheduler.watch()
    assert not lab.state(place).ours  # taken away on purpose, it stays away
    lab.plane.start_node(place)


def test_a_node_is_not_blamed_for_a_pod_that_somebody_took(lab: KubernetesLab) -> None:
    place = start(lab, 1).places[0]
    (pod,) = lab.plane.pods("keepstep.dev/job")
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}"
    lab.plane.ask("DELETE", path)
    until(lambda: not lab.plane.pods("keepstep.dev/job"), "the end of the pod")
    lab.scheduler.taint(place, "fenced", "its agent is lost")
    assert lab.state(place).state == "free"


def test_a_quota_that_is_used_up_is_reported(lab: KubernetesLab) -> None:
    meta = {"name": "none", "namespace": NAMESPACE}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": meta}
    lab.plane.apply({**quota, "spec": {"hard": {"pods": "1"}}})
    path = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas/none"
    until(lambda: "hard" in lab.plane.ask("GET", path).get("status", {}), "the quota")
    with pytest.raises(NoSpare, match="exceeded quota"):
        lab.scheduler.acquire(ask("start", "idle", count=3), 20)
    assert lab.plane.pods() == []
    assert lab.scheduler.acquire(ask("spare-1"), 20).places


def test_without_the_right_to_taint_everything_else_works(lab: KubernetesLab) -> None:
    rules = lab.plane.ask("GET", ROLE)["rules"]
    less = [
        {**rule, "verbs": [verb for verb in rule["verbs"] if verb != "patch"]}
        if "nodes" in rule["resources"]
        else rule
        for rule in rules
    ]
    lab.plane.ask("PATCH", ROLE, {"rules": less})
    try:
        until(lambda: not lab.scheduler.capabilities().taint, "fewer rights")
        assert "without the right to patch nodes" in lab.scheduler.capabilities().lacks[0]
        with pytest.raises(NoRight, match="forbidden") as refused:
            lab.scheduler.taint(lab.places[0], "degraded", "x")
        assert "rbac.yaml" in refused.value.hint
        start(lab)
    finally:
        lab.plane.ask("PATCH", ROLE, {"rules": rules})
    until(lambda: lab.scheduler.capabilities().taint, "the right")


def test_whoever_may_nothing_is_told_so(plane: ControlPlane) -> None:
    file = str(plane.kubeconfig("nobody"))
    scheduler = KubernetesScheduler(Settings(kubeconfig=file, template=TEMPLATE))
    for tried in (scheduler.places, lambda: scheduler.check(ask("x").constraints, ["idle"])):
        with pytest.raises(NoRight, match="forbidden") as refused:
            tried()
        assert refused.value.hint


def test_a_template_that_the_server_refuses_is_an_error_at_once(plane: ControlPlane) -> None:
    template = {"spec": {"containers": [{"name": "Not A Name", "image": "i"}]}}
    file = str(plane.kubeconfig())
    scheduler = KubernetesScheduler(Settings(kubeconfig=file, template=template))
    with pytest.raises(UsageError, match="Not A Name"):
        scheduler.acquire(ask("start", "queue"), 20)
    assert plane.pods() == []


def test_a_pool_says_how_much_of_it_is_free(lab: KubernetesLab) -> None:
    pool = lab.reserve(lab.places[0])
    meta = {"name": pool}
    lab.plane.apply(
        {"apiVersion": "keepstep.dev/v1alpha1", "kind": "SparePool", "metadata": meta, "spec": {}}
    )
    path = f"/apis/keepstep.dev/v1alpha1/sparepools/{pool}"

    def says(free: int) -> bool:
        lab.scheduler.watch()
        return lab.plane.ask("GET", path).get("status") == {"nodes": 1, "free": free}

    until(lambda: says(1), "a free node of the pool")
    limits = ask("x").constraints
    taken = ask("spare-1", "reserved")
    taken = type(taken)(
        job=taken.job,
        op=taken.op,
        kinds=["reserved"],
        constraints=type(limits)(gpus=4, gpu_type="h200", reservation=pool),
    )
    assert lab.scheduler.acquire(taken, 20).kind == "reserved"
    until(lambda: says(0), "a pool that is used up")


def test_pods_of_a_job_controller_are_adopted_and_evicted(lab: KubernetesLab) -> None:
    limits = {"nvidia.com/gpu": "4"}
    container = {"name": "c", "image": "none", "resources": {"limits": limits}}
    spec = {"containers": [container], "restartPolicy": "Never"}
    template = {"metadata": {"labels": {"keepstep.dev/job": "job-1"}}, "spec": spec}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "train", "namespace": NAMESPACE},
        "spec": {"parallelism": 2, "completions": 2, "template": template},
    }
    path = f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/train"
    lab.plane.apply(job)
    try:
        until(lambda: len(lab.plane.pods("job-name=train")) == 2, "pods of theirs")
        first = start(lab, 2)
        assert (
            first.adopted and len(set(first.places)) == 2 and lab.again().leases("job-1") == [first]
        )
        before = lab.plane.ask("GET", path)["spec"]["template"]
        lab.scheduler.show("job-1", {first.places[0]: [0], first.places[1]: [1]})
        labels = [one["metadata"]["labels"] for one in lab.plane.pods("job-name=train")]
        assert sorted(one["keepstep.dev/rank"] for one in labels) == ["0", "1"]
        lab.scheduler.release(first)  # they are not ours to end
        assert lab.scheduler.leases("job-1") == [first]
        old = {one["metadata"]["uid"] for one in lab.plane.pods("job-name=train")}
        lab.scheduler.commit_swap("job-1", first.places[0])
        until(lambda: len(_live(lab, old)) == 1, "another pod of theirs")
        assert lab.plane.ask("GET", path)["spec"]["template"] == before
    finally:
        lab.plane.ask("DELETE", path, propagationPolicy="Background")


def _live(lab: KubernetesLab, but: set[str]) -> list[str]:
    uids = {one["metadata"]["uid"] for one in lab.plane.pods("job-name=train")}
    return sorted(uids - but)


def test_the_server_takes_the_manifests_and_we_take_their_options(plane: ControlPlane) -> None:
    for one in deployed(everything=True):
        plane.apply(one, dryRun="All")
        if one["kind"] == "StatefulSet":
            (container,) = one["spec"]["template"]["spec"]["containers"]
            words = [*container["command"], *container["args"]]
            assert words[:2] == ["keepstep", "orchestrator"]
            names = {"help_option_names": ["-h", "--help"]}
            given = orchestrator.make_context("orchestrator", words[2:], **names).params
            assert (given["scheduler"], given["namespace"]) == ("kubernetes", NAMESPACE)
        if one["kind"] == "ConfigMap":
            assert yaml.safe_load(one["data"]["pod.yaml"])["spec"]["containers"][0]["image"]


def test_our_rights_are_few(lab: KubernetesLab) -> None:
    api = lab.scheduler._api  # type: ignore[attr-defined]
    allowed = [("create", "pods"), ("create", "secrets"), ("patch", "nodes"), ("list", "pods")]
    denied = [("get", "secrets"), ("list", "secrets"), ("delete", "nodes"), ("create", "pods/exec")]
    assert [api.may(verb, what, NAMESPACE) for verb, what in allowed] == [True] * 4
    assert [api.may(verb, what, NAMESPACE) for verb, what in denied] == [False] * 4
    assert not api.may("create", "pods", "default")


def test_a_server_that_is_away_is_waited_for(
    lab: KubernetesLab, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start(lab)
    lab.scheduler.watch()
    lab.plane.stop_server()
    try:
        for tried in (lab.scheduler.places, lambda: lab.scheduler.acquire(ask("spare-1"), 1)):
            with pytest.raises(TransientError, match="does not answer"):
                tried()
        until(lambda: _is_lost(lab), "a watch that has noticed")
    finally:
        lab.plane.start_server()
    until(lambda: not _is_lost(lab), "the watch")
    assert lab.scheduler.leases("job-1") == [first]
    until(lambda: lab.plane.ready() == set(lab.places), "ready nodes")
    until(lambda: all(one.state != "down" for one in lab.scheduler.places()), "well nodes")
    assert lab.scheduler.acquire(ask("spare-1"), 20).kind == "idle"
    _expire_a_watch(lab, monkeypatch)


def _expire_a_watch(lab: KubernetesLab, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has just started remembers nothing: a watch since the beginning is refused."""
    list_now = Mirror._list

    def long_ago(mirror: Mirror) -> str:
        version = list_now(mirror)
        return version if mirror.restarts else "1"

    monkeypatch.setattr(Mirror, "_list", long_ago)
    scheduler: Any = lab.again()
    scheduler.watch()
    until(lambda: all(one.restarts for one in scheduler._mirrors), "a watch that expires")
    lab.scheduler.taint(lab.places[5], "degraded", "x")
    until(lambda: [one.name for one in scheduler.watch()] == [lab.places[5]], "the change")


def _is_lost(lab: KubernetesLab) -> bool:
    try:
        lab.scheduler.watch()
    except (TransientError, NoRight):  # its rights are not loaded yet
        return True
    return False
