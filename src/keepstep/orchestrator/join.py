"""How a node becomes one: a token and a signing request in, a certificate out.

The certificate is for one node of one live job, and the name is given here: a node that is
connected cannot be taken over by whoever has a join token, and two agents that ask for any name at
the same time get different ones. An agent that comes back uses the certificate it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from keepstep.adapters.identity.authority import Authority
from keepstep.adapters.identity.tokens import KeptToken, Tokens, job_secret, node_secret
from keepstep.core.operator import check_node
from keepstep.errors import UsageError
from keepstep.model.messages import Address
from keepstep.model.views import JobView
from keepstep.orchestrator.absent import Gone, NotFound
from keepstep.orchestrator.requests import JoinedBody, JoinRequest, Peer

PROMISE_NS = 60_000_000_000  # how long a name is kept for an agent that has not connected yet


class Desk:
    def __init__(
        self,
        authority: Authority,
        *,
        own_token: str,
        stream: Address,
        tokens: Tokens,
        peers: Callable[[], list[Peer]] = list,
        jobs: Callable[[], list[JobView]],
        ended: Callable[[str], bool] = lambda job: False,
        awaited: Callable[[str, str], tuple[str, int]] = lambda job, place: ("", 0),
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.authority = authority
        self.tokens = tokens
        self._peers = peers  # all that share the store
        self._own_token = own_token
        self._stream = stream
        self._jobs = jobs  # live ones
        self._ended = ended
        self._awaited = awaited  # job, place -> the node whose agent is to run there, and its slots
        self._wall_ns = wall_ns
        self._promised: dict[tuple[str, str], int] = {}

    def is_operator(self, bearer: str) -> bool:
        return self.tokens.check(bearer, "operator", self._wall_ns()) is not None

    def may_join(self, token: str) -> KeptToken | None:
        return self.tokens.check(token, "join", self._wall_ns())

    def join(self, asked: JoinRequest, kept: KeptToken | None) -> JoinedBody:
        """`kept` is the join token that was shown; None: an operator asks."""
        if kept is not None and kept.node and asked.node not in ("", kept.node):
            raise UsageError(
                f"this token is for node {kept.node}", hint=f"--node {kept.node}, or another token"
            )
        wanted = asked.node or (kept.node if kept is not None else "")
        job = self._job(asked.job, wanted)
        slots = {one.node: one.slots for one in job.nodes}
        node = wanted
        if not node and asked.place:
            node, slots[node] = self._awaited(job.job, asked.place)
            if not node:
                raise NotFound(
                    f"job {job.job} needs no agent at {asked.place} now",
                    hint="with --wait the agent waits until it does",
                )
        node = node or self._free_name(job)
        check_node(node, 1)
        if any(one.node == node and one.state == "connected" for one in job.nodes):
            raise UsageError(
                f"node {node} of job {job.job} is connected already",
                hint="give the new node another name",
            )
        certificate = self.authority.sign_node(asked.request, job.job, node)
        self._promised[job.job, node] = self._wall_ns()
        return JoinedBody(
            job=job.job,
            node=node,
            certificate=certificate,
            ca=self.authority.certificate,
            token=node_secret(self._own_token, job.job, node),
            job_token=job_secret(self._own_token, job.job),
            stream=self._stream,
            directory=job.directory,
            stall_timeout_ns=job.stall_timeout_ns,
            slots=slots.get(node, 0),
            peers=self._peers(),
        )

    def _job(self, named: str, node: str) -> JobView:
        if named and self._ended(named):
            raise Gone(f"job {named} has ended", hint="nobody is to join it any more")
        live = [view for view in self._jobs() if named in ("", view.job)]
        if len(live) > 1 and node:
            live = [view for view in live if _waits_for(view, node)] or live
        if len(live) == 1:
            return live[0]
        names = ", ".join(view.job for view in self._jobs()) or "none"
        what = f"no live job {named}".rstrip() if not live else f"{len(live)} jobs are live"
        raise (UsageError if live else NotFound)(what, hint=f"live jobs: {names}; see --job")

    def _free_name(self, job: JobView) -> str:
        now = self._wall_ns()
        for key in [k for k, at in self._promised.items() if now > at + PROMISE_NS]:
            del self._promised[key]
        missing = [one.node for one in job.nodes if _waits_for(job, one.node)]
        taken = {one.node for one in job.nodes}
        invented = (f"n{i}" for i in range(len(taken) + len(self._promised) + 1))
        return next(
            name
            for name in [*missing, *(name for name in invented if name not in taken)]
            if (job.job, name) not in self._promised
        )


def _waits_for(job: JobView, node: str) -> bool:
    """It is in the job's spec and no agent of that name has been seen yet."""
    return any(
        one.node == node and one.state == "disconnected" and one.pid == 0 for one in job.nodes
    )
