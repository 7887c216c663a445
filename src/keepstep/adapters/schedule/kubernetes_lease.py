"""Election by a Lease object (coordination.k8s.io), as controllers of Kubernetes have it.

Its holder renews it, and who sees it unchanged for its whole time takes it. Times in it are other
machines' and never compared with ours: what counts is how long we have seen nothing new, by our own
steady clock. Of two who take it at once the server refuses the second: both name the version that
they have read.

The client library's own election is a loop that owns its thread, ends when it loses and knows one
condition; ours has to be asked between two looks at the store, hence these few lines.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from keepstep.adapters.schedule.kubernetes_api import GROUP, Api, Conflict, NotThere, Object
from keepstep.errors import KeepstepError, TransientError, UsageError

log = logging.getLogger("keepstep.kubernetes")

NAME = "keepstep"
STORE = f"{GROUP}/store"  # a digest of what all who share a store know


class LeaseElection:
    def __init__(
        self,
        api: Api,
        namespace: str,
        me: str,
        *,
        secret: str,
        lease_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`secret`: of all who share the store."""
        self._api = api
        self._space = namespace
        self._me = me
        self._store = hashlib.sha256(f"lease:{secret}".encode()).hexdigest()[:16]
        self._lease_s = lease_s
        self._monotonic = monotonic
        self._seen: Object = {}
        self._since = 0.0
        self._resigned = False
        self._lock = threading.Lock()  # what is under way must not undo a resignation

    def campaign(self) -> str:
        with self._lock:
            if self._resigned:
                raise TransientError("we have resigned")
            return self._campaign()

    def _campaign(self) -> str:
        try:
            found = self._ask("read_namespaced_lease", NAME, self._space)
        except NotThere:
            return self._create()
        self._check(found)
        spec = found.get("spec") or {}
        if spec != self._seen:
            self._seen, self._since = spec, self._monotonic()
        holder = str(spec.get("holderIdentity") or "")
        if holder not in ("", self._me):
            limit_s = float(spec.get("leaseDurationSeconds") or self._lease_s)
            if self._monotonic() < self._since + limit_s:
                return holder
        return self._write(found, spec, holder)

    def _create(self) -> str:
        meta = {"name": NAME, "annotations": {STORE: self._store}}
        body = {"metadata": meta, "spec": self._spec({}, "")}
        try:
            self._ask("create_namespaced_lease", self._space, body)
        except Conflict as error:
            raise TransientError(f"somebody else has just made the Lease {NAME}") from error
        return ""

    def _write(self, found: Object, spec: Object, holder: str) -> str:
        body = {"metadata": found["metadata"], "spec": self._spec(spec, holder)}
        try:
            self._ask("replace_namespaced_lease", NAME, self._space, body)
        except (Conflict, NotThere) as error:
            raise TransientError(f"somebody else has just changed the Lease {NAME}") from error
        if holder != self._me:
            log.info("the Lease %s/%s is ours now", self._space, NAME)
        return ""

    def _spec(self, spec: Object, holder: str) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        kept = {"acquireTime": now, **spec} if holder == self._me else {"acquireTime": now}
        changes = int(spec.get("leaseTransitions") or 0) + (holder != self._me and bool(spec))
        return {
            **kept,
            "holderIdentity": self._me,
            "leaseDurationSeconds": math.ceil(self._lease_s),
            "renewTime": now,
            "leaseTransitions": changes,
        }

    def _check(self, found: Object) -> None:
        whose = (found["metadata"].get("annotations") or {}).get(STORE, self._store)
        if whose != self._store:
            raise UsageError(
                f"the Lease {NAME} of namespace {self._space} belongs to orchestrators with another"
                " store",
                hint="give those of each store a namespace of their own, or delete the Lease if "
                "the others are no more",
            )

    def resign(self) -> None:
        with self._lock, contextlib.suppress(KeepstepError):
            self._resigned = True
            found = self._ask("read_namespaced_lease", NAME, self._space)
            if (found.get("spec") or {}).get("holderIdentity") == self._me:
                body = {**found, "spec": {**found["spec"], "holderIdentity": ""}}
                self._ask("replace_namespaced_lease", NAME, self._space, body)

    def _ask(self, verb: str, *given: object) -> Object:
        call = getattr(self._api.coordination, verb)
        return self._api.call(call, *given, _request_timeout=self._lease_s / 2)
