"""The API server of Kubernetes: asked through the official client, answered in plain dictionaries.

Plain, because servers are older and newer than the client's models: whatever a server says is kept,
and what it does not say is missing instead of an error. What it refuses becomes one of our errors.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from keepstep.errors import KeepstepError, NoRight, TransientError, UsageError

log = logging.getLogger("keepstep.kubernetes")

Object = dict[str, Any]
CALL_S = 15.0
WATCH_S = 240  # the server ends a watch after this time, and it is begun again
AGAIN_S = 1.0
SURE_S = (0.5, 1.5)  # a server that has just started refuses what it will allow in a moment
GROUP, VERSION = "keepstep.dev", "v1alpha1"


class NotThere(TransientError):
    """No such object (404)."""


class Conflict(TransientError):
    """Somebody was faster: it exists, or it has changed since it was read (409)."""


class Expired(TransientError):
    """The server no longer knows what happened since then (410)."""


class Api:
    """One server, as one user. `kubeconfig` empty: the usual files, or the pod that we are in."""

    def __init__(self, kubeconfig: str = "", context: str = "") -> None:
        try:
            library: Any = importlib.import_module("kubernetes")
            http: Any = importlib.import_module("urllib3")
        except ImportError as error:
            raise UsageError(
                "the client library of Kubernetes is not installed",
                hint="pip install 'keepstep[kubernetes]'",
            ) from error
        client, config = library.client, library.config
        settings = client.Configuration()
        self._failures: tuple[type[Exception], ...] = (OSError, http.exceptions.HTTPError)
        self._refused: type[Exception] = client.exceptions.ApiException
        try:
            in_pod = "KUBERNETES_SERVICE_HOST" in os.environ and "KUBECONFIG" not in os.environ
            if in_pod and not kubeconfig and not context:
                config.load_incluster_config(client_configuration=settings)
            else:
                config.load_kube_config(
                    kubeconfig or None, context=context or None, client_configuration=settings
                )
        except Exception as error:  # whatever is wrong with a file that is not ours
            raise UsageError(
                f"no cluster of Kubernetes can be found: {error}",
                hint="name a file with --kubeconfig or KUBECONFIG",
            ) from error
        settings.retries = False
        self.server: str = settings.host
        self._http = client.ApiClient(settings)
        self.core = client.CoreV1Api(self._http)
        self.scheduling = client.SchedulingV1Api(self._http)
        self.authorization = client.AuthorizationV1Api(self._http)
        self.custom = client.CustomObjectsApi(self._http)
        self.coordination = client.CoordinationV1Api(self._http)
        self._groups = client.ApisApi(self._http)

    def call(self, function: Callable[..., Any], *given: Any, **named: Any) -> Object:
        named.setdefault("_request_timeout", CALL_S)
        for wait_s in (*SURE_S, None):
            try:
                response = self._ask(function, *given, **named)
                break
            except NoRight:
                if wait_s is None:
                    raise
                time.sleep(wait_s)
        said: Object = json.loads(response.data or b"{}")
        return said

    def items(self, function: Callable[..., Any], *given: Any, **named: Any) -> list[Object]:
        return list(self.call(function, *given, **named).get("items") or [])

    def stream(self, function: Callable[..., Any], since: str) -> Iterator[tuple[str, Object]]:
        """Kinds of changes and what changed, until the server ends it."""
        response = self._ask(
            function,
            watch=True,
            resource_version=since,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_S,
            _request_timeout=(CALL_S, WATCH_S + CALL_S),
        )
        rest = b""
        try:
            for chunk in response.stream(None, decode_content=False):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise refusal(int(event["object"].get("code", 0)), line)
                    yield event["type"], event["object"]
        except self._failures as error:
            raise TransientError(f"{self.server} does not answer: {error}") from error
        finally:
            response.close()
            response.release_conn()

    def may(self, verb: str, resource: str, namespace: str = "", group: str = "") -> bool:
        """Does the server say that we may?"""
        asked = {"verb": verb, "group": group, "namespace": namespace}
        asked["resource"], _, asked["subresource"] = resource.partition("/")
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }
        create = self.authorization.create_self_subject_access_review
        return bool(self.call(create, body).get("status", {}).get("allowed"))

    def preferred(self, group: str) -> str:
        """The version of an API group that the server likes best; empty if it has none."""
        for one in self.call(self._groups.get_api_versions).get("groups") or []:
            if one["name"] == group:
                return str(one["preferredVersion"]["version"])
        return ""

    def served(self, group: str) -> dict[str, str]:
        """Resources of an API group, and the best version that has each."""
        found: dict[str, str] = {}
        for one in self.call(self._groups.get_api_versions).get("groups") or []:
            for version in one["versions"] if one["name"] == group else ():
                name = version["version"]
                said = self.call(self.custom.get_api_resources, group, name)
                for resource in said.get("resources") or []:
                    found.setdefault(resource["name"], name)
        return found

    def _ask(self, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
        try:
            response = function(*given, _preload_content=False, **named)
        except self._refused as error:
            status, body = getattr(error, "status", None), getattr(error, "body", None)
            if not status:
                raise TransientError(f"{self.server} does not answer: {error}") from error
            raise refusal(int(status), body or b"") from error
        except self._failures as error:
            raise TransientError(f"{self.server} does not answer: {error}") from error
        if not 200 <= response.status < 300:
            raise refusal(response.status, response.data)
        return response


def refusal(status: int, body: bytes | str) -> KeepstepError:
    try:
        words = str(json.loads(body).get("message") or body)
    except (ValueError, AttributeError):
        words = str(body)[:300]
    if status in (401, 403) and "exceeded quota" not in words:
        return NoRight(
            f"Kubernetes refuses it: {words}", hint="see deploy/kubernetes/rbac.yaml for the rights"
        )
    kinds = {404: NotThere, 409: Conflict, 410: Expired}
    if status in (400, 422):
        return UsageError(f"Kubernetes refuses the request: {words}")
    return kinds.get(status, TransientError)(f"Kubernetes: {words}")


class Mirror:
    """All objects of one kind as they are now, by a thread that lists once and then watches."""

    def __init__(self, api: Api, function: Callable[..., Any]) -> None:
        self._api = api
        self._function = function
        self._objects: dict[tuple[str, str], Object] = {}
        self._lock = threading.Lock()
        self._listed = threading.Event()
        self._trouble: KeepstepError | None = None
        self.restarts = 0  # lists after the first one
        threading.Thread(target=self._run, daemon=True, name="keepstep-watch").start()

    def look(self) -> list[Object]:
        """Raises what keeps it from knowing."""
        self._listed.wait(CALL_S)
        with self._lock:
            if self._trouble is not None:
                raise self._trouble
            return list(self._objects.values())

    def _run(self) -> None:
        wait = threading.Event()
        while True:
            trouble: KeepstepError | None = None
            try:
                self._follow(self._list())
            except KeepstepError as error:
                # What an expired watch has missed is in the next list.
                trouble = None if isinstance(error, Expired) else error
            except Exception as error:  # this thread must not end
                log.exception("a watch failed")
                trouble = TransientError(f"a watch failed: {error}")
            if trouble is not None:
                with self._lock:
                    self._trouble = trouble
                self._listed.set()
                wait.wait(AGAIN_S)
            self.restarts += 1

    def _list(self) -> str:
        found = self._api.call(self._function)
        with self._lock:
            self._objects = {_key(one): one for one in found.get("items") or []}
            self._trouble = None
        self._listed.set()
        return str(found["metadata"]["resourceVersion"])

    def _follow(self, since: str) -> None:
        while True:
            for kind, found in self._api.stream(self._function, since):
                since = str(found["metadata"]["resourceVersion"])
                with self._lock:
                    if kind == "DELETED":
                        self._objects.pop(_key(found), None)
                    elif kind != "BOOKMARK":
                        self._objects[_key(found)] = found


def _key(found: Object) -> tuple[str, str]:
    meta = found["metadata"]
    return str(meta.get("namespace", "")), str(meta["name"])
