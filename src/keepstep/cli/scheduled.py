"""What launching a job on nodes of a scheduler has in common, whichever it is."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Literal, Protocol

import click
import msgspec

from keepstep.adapters.schedule.kubernetes_requests import Settings
from keepstep.cli import jobspec, options, release_guard, show
from keepstep.cli.find import Reached, external
from keepstep.cli.jobspec import nanoseconds
from keepstep.cli.layout import check_count
from keepstep.cli.options import JobOptions, grouped
from keepstep.cli.output import Output
from keepstep.cli.run import attend, embed
from keepstep.cli.surroundings import Surroundings, surroundings
from keepstep.errors import KeepstepError, UsageError
from keepstep.model.job import JobSpec
from keepstep.model.schedule import START, Ask, Constraints, Kind, Lease, Policy, Provision
from keepstep.orchestrator.requests import Info
from keepstep.ports.schedule import Scheduler

FOR_EVER_S = 1e6
BACK_NS = 60_000_000_000  # what is well again for so long may stay so
# What no launcher of a scheduler can honour, and who can.
CANNOT = {
    (
        "mode",
        "transparent",
    ): "keepstep run --mode transparent, with `keepstep agent` on each machine"
}


class Cluster(Protocol):
    """What differs between schedulers."""

    title: str  # as its users write it
    held_by: str  # what holds a node there

    @property
    def scheduler(self) -> Scheduler: ...

    @property
    def settings(self) -> Settings | None:
        """Of its guard."""

    def check(self, provision: Provision, count: int) -> None:
        """Everything that can be known to be wrong, before anything is asked for."""

    def before(self, where: Path) -> None:
        """The last moment before nodes are asked for."""

    def adopt(self, job: str, count: int) -> Lease | None:
        """Nodes that are there already; None: ask for them."""

    def own_address(self) -> str:
        """Where its nodes reach this machine."""


class PlaceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says about nodes of a scheduler. It is a table, as JobOptions."""

    nodes: int | None
    adopt: str
    partition: str
    account: str
    qos: str
    features: str
    gpus: str
    reservation: str
    owner: str
    idle: bool
    preempt: bool
    spare_s: float
    replenish: bool
    priority: int
    yields: bool
    grace_s: float
    back: Literal["immediately", "quiet", "never"] | None
    back_s: float
    queue_s: float | None
    host: str

    def provision(self, scheduler: str) -> Provision:
        """Which nodes will do, and where spares may come from; it has none yet."""
        count, gpu_type = _gpus(self.gpus)
        allowed: dict[Kind, object] = {
            "reserved": self.reservation or self.owner,
            "idle": self.idle,
            "preempt": self.preempt,
        }
        back_ns = nanoseconds("--back-after", self.back_s, zero=True)
        return Provision(
            scheduler=scheduler,
            places={},
            kinds=[kind for kind, wanted in allowed.items() if wanted],
            patience_ns=nanoseconds("--spare-timeout", self.spare_s),
            back_after_ns=back_ns or (BACK_NS if self.back else 0),
            constraints=Constraints(
                partition=self.partition,
                reservation=self.reservation,
                account=self.account,
                qos=self.qos,
                features=self.features,
                gpus=count,
                gpu_type=gpu_type,
                owner=self.owner,
            ),
        )

    def policy(self, spare_nodes: int) -> Policy:
        if self.replenish and not spare_nodes:
            raise UsageError("--replenish: there are no spare nodes", hint="--spare-nodes 1")
        return Policy(
            priority=self.priority,
            dedicated=spare_nodes if self.replenish else 0,
            yields=self.yields,
            grace_ns=nanoseconds("--grace", self.grace_s, zero=True),
            back=self.back or "immediately",
        )


# What means the same on every scheduler. Which nodes those are is each one's own to ask.
PLACES = (
    grouped(
        options.NODES, "--queue-timeout", "queue_s", type=float, default=None, metavar="S",
        help="Give up if the scheduler gives no nodes within this time [default: wait].",
    ),
    grouped(
        options.NODES, "--host", default="", metavar="ADDRESS",
        help="Where nodes reach the embedded orchestrator [default: as they reach the scheduler].",
    ),
    grouped(
        options.FURTHER, "--idle/--no-idle", default=True,
        help="Then take idle nodes [default: idle].",
    ),
    grouped(
        options.FURTHER, "--preempt", is_flag=True,
        help="Then take nodes from jobs of lower priority.",
    ),
    grouped(
        options.FURTHER, "--spare-timeout", "spare_s", type=float, default=120.0, show_default=True,
        metavar="S", help="How long one request for a spare may take.",
    ),
    grouped(
        options.FURTHER, "--replenish", is_flag=True, help="Replace spare nodes that were used."
    ),
    grouped(
        options.FURTHER, "--priority", type=int, default=0, show_default=True,
        help="Among the jobs of one orchestrator: who gets spares first.",
    ),
    grouped(
        options.FURTHER, "--yield/--no-yield", "yields", default=True,
        help="Give nodes up to jobs of higher priority that may --preempt [default: yield].",
    ),
    grouped(
        options.FURTHER, "--grace", "grace_s", type=float, default=30.0, show_default=True,
        metavar="S", help="Before that, look for another node for so long.",
    ),
    grouped(
        options.FURTHER, "--back", type=click.Choice(("immediately", "quiet", "never")),
        default=None,
        help="Whether and when to move back to a node that was lost [default: see --back-after].",
    ),
    grouped(
        options.FURTHER, "--back-after", "back_s", type=float, default=0.0, metavar="S",
        help="Move back to a node that was lost when it has been idle for so long "
        "[default: never].",
    ),
)  # fmt: skip
place_options = options.with_options(PLACES)


def start(cluster: Cluster, job: JobOptions, wanted: PlaceOptions) -> None:
    """Ends this process with the job's exit code."""
    around = surroundings()
    spec, there = prepare(cluster, job, wanted, around)
    cluster.before(around.home)
    watcher = (
        release_guard.begin(around.home, spec.job, cluster.settings) if there is None else None
    )
    try:
        names = [node.name for node in spec.nodes]
        lease = cluster.adopt(spec.job, len(names)) or _acquire(cluster, spec, wanted.queue_s)
        places = dict(zip(names, lease.places[: len(names)], strict=True))
        provision = msgspec.structs.replace(_provision(spec), places=places)
        spec = msgspec.structs.replace(spec, provision=provision)
        output = Output(quiet=job.quiet)
        sys.exit(asyncio.run(_run(spec, around, there, wanted.host, output, cluster)))
    finally:
        with contextlib.suppress(KeepstepError):
            done = [release(cluster.scheduler, left) for left in cluster.scheduler.leases(spec.job)]
            if watcher is not None and all(done):
                watcher.dismiss()


def prepare(
    cluster: Cluster, job: JobOptions, wanted: PlaceOptions, around: Surroundings
) -> tuple[JobSpec, Reached | None]:
    """The job, and the orchestrator that is named; nothing has been asked for yet."""
    options.refuse(f"keepstep {cluster.scheduler.name} launch", job, CANNOT)
    nodes = 1 if wanted.nodes is None else wanted.nodes
    check_count("--nodes", nodes, 1)
    policy = wanted.policy(job.spare_nodes)
    checked = jobspec.check(job, nodes, watched=around.watched, policy=policy)
    provision = wanted.provision(cluster.scheduler.name)
    cluster.check(provision, len(checked.layout.nodes))
    for sentence in cluster.scheduler.capabilities().lacks:
        show.words(f"note: {sentence}")
    there = _named(around, job.orchestrator, cluster) if job.orchestrator is not None else None
    return jobspec.build(checked, around.home, provision), there


def release(scheduler: Scheduler, lease: Lease) -> bool:
    try:
        scheduler.release(lease)
    except KeepstepError as error:
        show.words(f"{lease.id} is not given back: {error.message}")
        return False
    return True


def _gpus(words: str) -> tuple[int, str]:
    match = re.fullmatch(r"(?:([A-Za-z_][\w.-]*):)?(\d{1,4})", words)
    if words and match is None:
        raise UsageError(f"--gpus-per-node is {words}", hint="for example 8, or h200:8")
    return (int(match[2]), match[1] or "") if match else (0, "")


def _named(around: Surroundings, orchestrator: str, cluster: Cluster) -> Reached:
    there = external(around.home, orchestrator, around.token)
    name = cluster.scheduler.name
    if there.client().get("/v1/orchestrator", Info).scheduler != name:
        raise UsageError(
            f"orchestrator {orchestrator} knows no {cluster.title}",
            hint=f"start it with keepstep orchestrator --scheduler {name}",
        )
    return there


def _provision(spec: JobSpec) -> Provision:
    assert spec.provision is not None, "it was built with one"
    return spec.provision


def _acquire(cluster: Cluster, spec: JobSpec, queue_s: float | None) -> Lease:
    count = len(spec.nodes)
    show.words(f"waiting for {count} nodes of {cluster.title}")
    began = time.monotonic()
    limits = _provision(spec).constraints
    ask = Ask(job=spec.job, op=START, constraints=limits, kinds=["queue"], count=count)
    lease = cluster.scheduler.acquire(ask, queue_s or FOR_EVER_S)
    waited = time.monotonic() - began
    held = cluster.held_by.format(lease.id)
    show.words(f"{held} on {', '.join(lease.places)} after {waited:.1f} s")
    return lease


async def _run(
    spec: JobSpec,
    around: Surroundings,
    there: Reached | None,
    host: str,
    output: Output,
    cluster: Cluster,
) -> int:
    if there is not None:
        return await attend(spec, around, there, output, agents=False)
    where = around.home
    host = host or cluster.own_address()
    embedded = await embed(spec.job, where, host=host, scheduler=cluster.scheduler)
    try:
        there = await asyncio.to_thread(external, where, spec.job, "")
        return await attend(spec, around, there, output, embedded=embedded, agents=False)
    finally:
        shutil.rmtree(where / "authorities" / spec.job, ignore_errors=True)


def address_towards(host: str, port: int) -> str:
    """Of this machine, on the interface that leads there."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"cannot find this machine's address: {error}", hint="name it with --host"
        ) from error
