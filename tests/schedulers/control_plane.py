"""A real, private Kubernetes control plane on this machine, with nodes that are processes.

etcd, the API server, the scheduler and the controllers are real (make k8s-control-plane); kubelets
are not (see kubelet.py). All listen on loopback, with files in a folder that is removed at the end
(see guard.py). Nodes share this machine's network and files.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tests.schedulers.cluster import GUARD, RACKS, free_ports, until
from tests.schedulers.control_plane_build import folder as programs

NODES = 6
NAMESPACE = "keepstep"
DEPLOY = Path(__file__).parents[2] / "deploy" / "kubernetes"
KUBELET = Path(__file__).parent / "kubelet.py"
ME = "system:serviceaccount:keepstep:keepstep"  # as deploy/kubernetes names it
START_S = 90.0


class ControlPlane:
    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="keepstep-k8s-"))
        self.nodes = [f"k{i}" for i in range(1, NODES + 1)]
        for name in ("log", "certs", "pods"):
            (self.folder / name).mkdir()
        self._port, self._etcd, self._peer = free_ports(3)
        self.url = f"https://127.0.0.1:{self._port}"
        self._ca = self.folder / "certs" / "apiserver.crt"
        self._tokens = {
            user: secrets.token_hex(16)
            for user in ("admin", "system:kube-scheduler", "system:kube-controller-manager", ME)
        }
        self._tokens["nobody"] = secrets.token_hex(16)
        self._pids: dict[str, int] = {}
        self._guard = subprocess.Popen(
            [sys.executable, str(GUARD), str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._write_files()
            self._start_all()
        except BaseException:
            self.remove()
            raise

    # ----------------------------------------------------------------------- programs

    def _start(self, name: str, *command: str) -> None:
        assert self._guard.stdin is not None and self._guard.stdout is not None
        log = str(self.folder / "log" / f"{name}.out")
        env = {"ETCD_UNSUPPORTED_ARCH": "arm64", "OMP_NUM_THREADS": "1"}
        asked = {"command": command, "env": env, "log": log, "user": None}
        self._guard.stdin.write(json.dumps(asked) + "\n")
        self._guard.stdin.flush()
        self._pids[name] = int(self._guard.stdout.readline())

    def _start_all(self) -> None:
        client, peer = f"http://127.0.0.1:{self._etcd}", f"http://127.0.0.1:{self._peer}"
        command = ["--name", "k", "--data-dir", str(self.folder / "etcd")]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"k={peer}", "--unsafe-no-fsync"]
        self._start("etcd", str(programs() / "etcd"), *command)
        self.start_server()
        self._http = httpx.Client(
            base_url=self.url,
            verify=self._trust(),
            headers={"Authorization": f"Bearer {self._tokens['admin']}"},
            timeout=20,
            trust_env=False,
        )
        self._start_part("kube-scheduler", "system:kube-scheduler")
        more = ["--use-service-account-credentials=true", "--controllers=*,-ttl"]
        more += [f"--service-account-private-key-file={self.folder / 'sa.key'}"]
        more += ["--node-monitor-period=1s", "--node-monitor-grace-period=5s"]
        self._start_part("kube-controller-manager", "system:kube-controller-manager", *more)
        self.apply(*deployed())
        for node in self.nodes:
            self.start_node(node)
        until(lambda: self.ready() == set(self.nodes), "ready nodes", START_S)
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        until(lambda: self._is_there(account), "a service account", START_S)

    def _start_part(self, name: str, user: str, *more: str) -> None:
        file = str(self.kubeconfig(user))
        command = [f"--kubeconfig={file}", "--leader-elect=false", "--port=0", "--secure-port=0"]
        command += [f"--authentication-kubeconfig={file}", f"--authorization-kubeconfig={file}"]
        self._start(name, str(programs() / name), *command, *more)

    def start_server(self) -> None:
        where = self.folder
        command = [f"--etcd-servers=http://127.0.0.1:{self._etcd}", "--bind-address=127.0.0.1"]
        command += [f"--secure-port={self._port}", "--insecure-port=0", f"--cert-dir={where}/certs"]
        command += ["--service-cluster-ip-range=10.96.0.0/16", "--authorization-mode=RBAC"]
        command += [f"--token-auth-file={where}/tokens.csv"]
        command += ["--service-account-issuer=https://kubernetes.default.svc"]
        command += [f"--service-account-key-file={where}/sa.key"]
        command += [f"--service-account-signing-key-file={where}/sa.key"]
        self._start("kube-apiserver", str(programs() / "kube-apiserver"), *command)
        until(self._is_up, "the API server", START_S)

    def _is_up(self) -> bool:
        with contextlib.suppress(OSError, httpx.HTTPError):
            headers = {"Authorization": f"Bearer {self._tokens['admin']}"}
            url = f"{self.url}/readyz"
            said = httpx.get(url, verify=self._trust(), headers=headers, trust_env=False)
            return said.status_code == 200
        return False

    def _trust(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self._ca)  # the server has made it

    def stop_server(self) -> None:
        self._kill("kube-apiserver")

    def start_node(self, node: str) -> None:
        gpu = "NVIDIA-A100" if node == self.nodes[-1] else "NVIDIA-H200"
        command = [node, self.url, self._tokens["admin"], str(self._ca)]
        command += [str(self.folder / "pods"), gpu, list(RACKS.values())[self.nodes.index(node)]]
        self._start(f"kubelet-{node}", sys.executable, str(KUBELET), *command)

    def crash_node(self, node: str) -> None:
        """As if its power were cut: its kubelet and all that it has started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            kubelet = psutil.Process(self._pids[f"kubelet-{node}"])
            kubelet.suspend()  # or it would tell what happens to its pods
            for process in [*kubelet.children(recursive=True), kubelet]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def _kill(self, name: str) -> None:
        process = psutil.Process(self._pids[name])
        process.kill()
        until(lambda: not process.is_running() or process.status() == "zombie", f"end of {name}")

    def remove(self) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait(60)

    # ----------------------------------------------------------------------- asking

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        said = self._http.request(
            method, path, json=body, params=query, headers={"Content-Type": kind}
        )
        assert said.is_success, f"{method} {path}: {said.text}"
        return said.json()

    def _is_there(self, path: str) -> bool:
        return self._http.get(path).is_success

    def apply(self, *objects: Any, **query: str) -> None:
        """Made, or left alone where they are."""
        for one in objects:
            path = path_of(one)
            until(lambda path=path: self._is_there(path), f"{path} to be served")
            said = self._http.post(path, json=one, params=query)
            assert said.is_success or said.status_code == 409, f"{path}: {said.text}"

    def ready(self) -> set[str]:
        found = set()
        for node in self.ask("GET", "/api/v1/nodes")["items"]:
            for one in node["status"].get("conditions") or []:
                if (one["type"], one["status"]) == ("Ready", "True") and "allocatable" in node[
                    "status"
                ]:
                    found.add(node["metadata"]["name"])
        return found

    def node(self, name: str) -> Any:
        return self.ask("GET", f"/api/v1/nodes/{name}")

    def change_node(self, name: str, spec: Any, labels: Any = None) -> None:
        body = {"spec": spec, "metadata": {"labels": labels or {}}}
        self.ask("PATCH", f"/api/v1/nodes/{name}", body)

    def change_condition(self, name: str, kind: str, status: str, message: str) -> None:
        """As those do who watch over nodes; others keep theirs."""
        said = {"type": kind, "status": status, "reason": "Test", "message": message}
        done = self._http.patch(
            f"/api/v1/nodes/{name}/status",
            json={"status": {"conditions": [said]}},
            headers={"Content-Type": "application/strategic-merge-patch+json"},
        )
        assert done.is_success, done.text

    def pods(self, selector: str = "", space: str = NAMESPACE) -> list[Any]:
        path = f"/api/v1/namespaces/{space}/pods"
        found: list[Any] = self.ask("GET", path, labelSelector=selector)["items"]
        return found

    def kubeconfig(self, user: str = ME) -> Path:
        file = self.folder / f"{user.rpartition(':')[2]}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self._ca)}
        file.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "k", "cluster": cluster}],
                    "users": [{"name": "u", "user": {"token": self._tokens[user]}}],
                    "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
                    "current-context": "c",
                }
            )
        )
        file.chmod(0o600)
        return file

    @contextlib.contextmanager
    def clean(self) -> Iterator[None]:
        """Afterwards all nodes are ready and empty, whatever was done to them."""
        try:
            yield
        finally:
            for node in self.nodes:
                pid = self._pids[f"kubelet-{node}"]
                if not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie":
                    self.start_node(node)
                known = self.node(node)
                labels = {
                    key: None for key in known["metadata"]["labels"] if key.startswith("dgxc.")
                }
                self.change_node(node, {"taints": None, "unschedulable": None}, labels)
            for kind in ("deployments", "replicasets"):
                self._http.delete(f"/apis/apps/v1/namespaces/default/{kind}")
            for space in (NAMESPACE, "default"):
                path = f"/api/v1/namespaces/{space}"
                self._http.request(
                    "DELETE", f"{path}/pods", json={"gracePeriodSeconds": 0}
                ).raise_for_status()
                self._http.delete(f"{path}/resourcequotas")
                until(lambda space=space: not self.pods(space=space), "empty nodes")
            self._http.delete(f"/apis/keepstep.dev/v1alpha1/namespaces/{NAMESPACE}/migrations")
            until(lambda: self.ready() == set(self.nodes), "ready nodes")

    def _write_files(self) -> None:
        lines = [f'{token},{user},{user},""' for user, token in self._tokens.items()]
        lines[0] = f'{self._tokens["admin"]},admin,admin,"system:masters"'
        file = self.folder / "tokens.csv"
        file.write_text("\n".join(lines) + "\n")
        file.chmod(0o600)
        key = ["openssl", "genrsa", "-out", str(self.folder / "sa.key"), "2048"]
        subprocess.run(key, check=True, capture_output=True)


def deployed(everything: bool = False) -> list[Any]:
    """The objects of deploy/kubernetes, in its order; the orchestrator itself is a process here."""
    listed = yaml.safe_load((DEPLOY / "kustomization.yaml").read_text())["resources"]
    return [
        one
        for name in listed
        for one in yaml.safe_load_all((DEPLOY / name).read_text())
        if everything or one["kind"] != "StatefulSet"
    ]


PLURALS = {
    "PriorityClass": "priorityclasses",
    "CustomResourceDefinition": "customresourcedefinitions",
}
WIDE = ("Namespace", "CustomResourceDefinition", "PriorityClass", "ClusterRole")
WIDE += ("ClusterRoleBinding", "SparePool", "ResourceSlice", "DeviceTaintRule")


def path_of(one: Any) -> str:
    """Of the collection that it belongs to."""
    version, kind = one["apiVersion"], one["kind"]
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    if kind not in WIDE:
        root += f"/namespaces/{one['metadata'].get('namespace', NAMESPACE)}"
    return f"{root}/{PLURALS.get(kind, kind.lower() + 's')}"
