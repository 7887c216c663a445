"""A kubelet for tests: `kubelet.py NODE SERVER TOKEN CA FOLDER GPU RACK`. It runs no containers.

A pod that is bound to its node becomes a process here, in no namespace and without an image: the
command of its first container, once the Secrets that it names exist, with a folder of files in
place of a mount. A container without a command does nothing. All else is as a real one does it:
the node is registered, its lease renewed, phases of pods are reported, deleted pods are ended in
their grace period and then removed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

BEAT_S = 1.0
GPUS = "4"


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Kubelet:
    def __init__(
        self, node: str, server: str, token: str, ca: str, folder: str, gpu: str, rack: str
    ) -> None:
        self.node, self.folder = node, Path(folder)
        self._labels = {"kubernetes.io/hostname": node, "nvidia.com/gpu.product": gpu}
        self._labels["topology.kubernetes.io/rack"] = rack
        self._http = httpx.Client(
            base_url=server,
            verify=ssl.create_default_context(cafile=ca),
            headers={"Authorization": f"Bearer {token}"},
            timeout=10,
            trust_env=False,
        )
        self._pods: dict[str, Pod] = {}

    def ask(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        kind = "application/strategic-merge-patch+json" if method == "PATCH" else "application/json"
        done = self._http.request(
            method,
            path,
            content=json.dumps(body) if body is not None else None,
            headers={"Content-Type": kind},
            params=query,
        )
        done.raise_for_status()
        return done.json()

    # ----------------------------------------------------------------------- the node

    def register(self) -> None:
        with contextlib.suppress(httpx.HTTPStatusError):  # it was there before
            self.ask(
                "POST", "/api/v1/nodes", {"metadata": {"name": self.node, "labels": self._labels}}
            )
        self.beat()

    def beat(self) -> None:
        lease = {
            "metadata": {"name": self.node, "namespace": "kube-node-lease"},
            "spec": {
                "holderIdentity": self.node,
                "leaseDurationSeconds": 5,
                "renewTime": now(),
            },
        }
        path = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        try:
            self.ask("PATCH", f"{path}/{self.node}", lease)
        except httpx.HTTPStatusError:
            self.ask("POST", path, lease)
        room = {"cpu": "16", "memory": "64Gi", "pods": "20", "nvidia.com/gpu": GPUS}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        ready["lastHeartbeatTime"] = now()
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        self.ask("PATCH", f"/api/v1/nodes/{self.node}/status", {"status": status})

    def keep_beating(self) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                self.beat()
            time.sleep(BEAT_S)

    # ----------------------------------------------------------------------- pods

    def run(self) -> None:
        while True:
            try:
                self._follow()
            except (httpx.HTTPError, KeyError, ValueError):
                time.sleep(0.2)  # the server is away, or the watch has expired

    def _follow(self) -> None:
        mine = {"fieldSelector": f"spec.nodeName={self.node}"}
        listed = self.ask("GET", "/api/v1/pods", **mine)
        there = {pod["metadata"]["uid"]: pod for pod in listed["items"]}
        for gone in self._pods.keys() - there.keys():
            self._pods.pop(gone).end(0)
        for pod in there.values():
            self._see(pod)
        query = {**mine, "watch": "1", "timeoutSeconds": "300"}
        query["resourceVersion"] = listed["metadata"]["resourceVersion"]
        with self._http.stream("GET", "/api/v1/pods", params=query, timeout=None) as events:
            for line in events.iter_lines():
                event = json.loads(line)
                pod = event["object"]
                if event["type"] == "DELETED":
                    if (known := self._pods.pop(pod["metadata"]["uid"], None)) is not None:
                        known.end(0)
                else:
                    self._see(pod)

    def _see(self, pod: Any) -> None:
        uid, phase = pod["metadata"]["uid"], pod["status"].get("phase")
        if uid not in self._pods:
            self._pods[uid] = Pod(self, pod)
            if phase == "Running":  # of a kubelet that was here before
                self._pods[uid].say("Failed")
            elif phase == "Pending" and "deletionTimestamp" not in pod["metadata"]:
                threading.Thread(target=self._pods[uid].run, daemon=True).start()
        if "deletionTimestamp" in pod["metadata"]:
            grace = pod["metadata"].get("deletionGracePeriodSeconds") or 0
            threading.Thread(target=self._pods[uid].finish, args=(grace,), daemon=True).start()


class Pod:
    def __init__(self, kubelet: Kubelet, pod: Any) -> None:
        self._kubelet = kubelet
        self._meta, self._spec = pod["metadata"], pod["spec"]
        self._path = f"/api/v1/namespaces/{self._meta['namespace']}/pods/{self._meta['name']}"
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()

    def say(self, phase: str) -> None:
        ready = {"type": "Ready", "status": "True" if phase == "Running" else "False"}
        body = {"metadata": {"uid": self._meta["uid"]}}
        with contextlib.suppress(httpx.HTTPError):
            self._kubelet.ask(
                "PATCH",
                f"{self._path}/status",
                {**body, "status": {"phase": phase, "startTime": now(), "conditions": [ready]}},
            )

    def run(self) -> None:
        container = self._spec["containers"][0]
        command = container.get("command")
        if not command:
            self.say("Running")
            return
        wait = 0.05
        while (folder := self._mounts(container)) is None:
            if self._ended.wait(wait):
                return
            wait = min(2 * wait, 2.0)  # as a real one: the longer it takes, the less it looks
        while (env := self._env(container)) is None:
            if self._ended.wait(wait):
                return
        where, files = folder
        words = [*command, *(container.get("args") or [])]
        for name, value in env.items():
            words = [word.replace(f"$({name})", value) for word in words]
        with (self._kubelet.folder / f"{self._meta['name']}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [word.replace(where, str(files)) if where else word for word in words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "NODE_NAME": self._kubelet.node, **env},
            )
        if self._ended.is_set():  # in this moment
            self.end(0)
        self.say("Running")
        code = self._process.wait()
        shutil.rmtree(files, ignore_errors=True)
        if not self._ended.is_set():
            self.say("Failed" if code else "Succeeded")

    def _env(self, container: Any) -> dict[str, str] | None:
        """None: a Secret is not there yet."""
        found: dict[str, str] = {}
        for one in container.get("env") or []:
            source = one.get("valueFrom") or {}
            value = str(one.get("value", ""))
            if "fieldRef" in source:
                part, _, name = source["fieldRef"]["fieldPath"].partition(".")
                value = str({"spec": self._spec, "metadata": self._meta}[part][name])
            if "secretKeyRef" in source:
                path = f"{self._path.rpartition('/pods/')[0]}/secrets"
                secret = source["secretKeyRef"]
                try:
                    data = self._kubelet.ask("GET", f"{path}/{secret['name']}")["data"]
                except httpx.HTTPError:
                    return None
                value = base64.b64decode(data[secret["key"]]).decode()
            found[one["name"]] = value
        return found

    def _mounts(self, container: Any) -> tuple[str, Path] | None:
        """Where the Secret is mounted, and a folder with its files; None: it is not there yet."""
        secrets = {
            volume["name"]: volume["secret"]["secretName"]
            for volume in self._spec.get("volumes") or []
            if "secret" in volume
        }
        for mount in container.get("volumeMounts") or []:
            if mount["name"] in secrets:
                path = self._path.rpartition("/pods/")[0]
                try:
                    found = self._kubelet.ask("GET", f"{path}/secrets/{secrets[mount['name']]}")
                except httpx.HTTPError:
                    return None
                files = self._kubelet.folder / self._meta["uid"]
                files.mkdir(exist_ok=True)
                for name, data in (found.get("data") or {}).items():
                    (files / name).write_bytes(base64.b64decode(data))
                return mount["mountPath"], files
        return "", self._kubelet.folder / self._meta["uid"]

    def end(self, grace_s: float) -> None:
        self._ended.set()
        if self._process is None:
            return
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            all_of_it = [*root.children(recursive=True), root]
            if grace_s:
                root.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
            for one in all_of_it:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()

    def finish(self, grace_s: float) -> None:
        if self._ended.is_set() and grace_s:
            return  # somebody is at it
        self.end(grace_s)
        with contextlib.suppress(httpx.HTTPError):
            gone = {"gracePeriodSeconds": 0, "preconditions": {"uid": self._meta["uid"]}}
            self._kubelet.ask("DELETE", self._path, gone)


if __name__ == "__main__":
    kubelet = Kubelet(*sys.argv[1:8])
    kubelet.register()
    threading.Thread(target=kubelet.keep_beating, daemon=True).start()
    kubelet.run()
