"""What launching a job on nodes of a scheduler has in common, whichever it is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from keepstep import native
from keepstep.adapters.schedule.kubernetes import Settings
from keepstep.cli import guard, show
from keepstep.cli.checkpoints import check_periodic, check_resume
from keepstep.cli.find import Reached, external
from keepstep.cli.home import home
from keepstep.cli.layout import Layout, check_counts, lay_out
from keepstep.cli.output import Output
from keepstep.cli.policies import check_policy, hold_ns
from keepstep.cli.run import attend, embed, new_job_id
from keepstep.core.operator import check_spec
from keepstep.errors import KeepstepError, UsageError
from keepstep.model.job import JobSpec
from keepstep.model.schedule import START, Ask, Constraints, Kind, Lease, Policy, Provision
from keepstep.orchestrator.registry import check_id, prepare_home
from keepstep.orchestrator.requests import Info
from keepstep.ports.schedule import Scheduler

FOR_EVER_S = 1e6
BACK_S = 60.0  # what is well again for so long may stay so


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


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The command line."""

    nodes: int | None
    adopt: str
    nproc: int
    spare_nodes: int
    partition: str
    account: str
    qos: str
    features: str
    gpus: str
    reservation: str
    idle: bool
    preempt: bool
    spare_s: float
    back: Literal["immediately", "quiet", "never"] | None
    back_s: float
    quiet_s: float
    replenish: bool
    within: tuple[str, ...]
    priority: int
    yields: bool
    grace_s: float
    rebalance: Literal["never", "when-free"]
    stragglers: Literal["off", "report", "move"]
    straggler_factor: float
    straggler_s: float
    on_divergence: Literal["hold", "fall-back", "continue"]
    queue_s: float | None
    stall_s: float
    orchestrator: str | None
    host: str
    resume: str | None
    checkpoint_dir: str | None
    interval: str
    log_dir: str | None
    job_id: str | None
    quiet: bool
    module: bool
    owner: str = ""

    def provision(self, scheduler: str) -> Provision:
        """Which nodes will do, and where spares may come from; it has none yet."""
        count, gpu_type = _gpus(self.gpus)
        allowed: dict[Kind, object] = {
            "reserved": self.reservation or self.owner,
            "idle": self.idle,
            "preempt": self.preempt,
        }
        return Provision(
            scheduler=scheduler,
            places={},
            kinds=[kind for kind, wanted in allowed.items() if wanted],
            patience_ns=int(self.spare_s * 1e9),
            back_after_ns=int((self.back_s or (BACK_S if self.back else 0)) * 1e9),
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

    def policy(self) -> Policy:
        return Policy(
            priority=self.priority,
            dedicated=self.spare_nodes if self.replenish else 0,
            within=list(self.within),
            yields=self.yields,
            grace_ns=int(self.grace_s * 1e9),
            back=self.back or "immediately",
            quiet_ns=int(self.quiet_s * 1e9),
            rebalance=self.rebalance,
            stragglers=self.stragglers,
            straggler_factor=self.straggler_factor,
            straggler_after_ns=int(self.straggler_s * 1e9),
            on_divergence=self.on_divergence,
            hold_ns=hold_ns(self.stall_s),
        )


def check_times(options: Options) -> None:
    for name, value, least in (
        ("stall-timeout", options.stall_s, 1e-9),
        ("spare-timeout", options.spare_s, 1e-9),
        ("back-after", options.back_s, 0.0),
        ("grace", options.grace_s, 0.0),
    ):
        if not least <= value < 1e9:
            raise UsageError(f"--{name} is {value:g}: seconds, and not below {least:g}")
    check_policy(options.straggler_factor, options.straggler_s, options.quiet_s)
    if options.replenish and not options.spare_nodes:
        raise UsageError("--replenish: there are no spare nodes", hint="--spare-nodes 1")


def start(cluster: Cluster, script: list[str], options: Options) -> None:
    """`script`: with -m and arguments, as it will be run. Ends this process with its exit code."""
    scheduler = cluster.scheduler
    layout = _lay_out(options)
    provision = options.provision(scheduler.name)
    cluster.check(provision, len(layout.nodes))
    for sentence in scheduler.capabilities().lacks:
        show.words(f"note: {sentence}")
    where = home()
    prepare_home(where)
    job = options.job_id or new_job_id(script[1 if options.module else 0])
    check_id(job)
    resume = check_resume(options.resume, layout.world)
    periodic = check_periodic(options.checkpoint_dir, options.interval, None, job, resume)
    native.store_host_path()
    named = options.orchestrator
    there = _named(where, named, cluster) if named is not None else None
    log_dir = Path(options.log_dir).absolute() if options.log_dir else where / "jobs" / job
    spec = JobSpec(
        job=job,
        world=layout.world,
        local_world=layout.local_world,
        nodes=layout.nodes,
        spares=layout.spares,
        stall_timeout_ns=int(options.stall_s * 1e9),
        script=script,
        directory=str(log_dir),
        resume=resume,
        checkpoints=periodic.directory,
        checkpoint_interval_ns=periodic.interval_ns,
        provision=provision,
        policy=options.policy(),
    )
    check_spec(spec)
    cluster.before(where)
    watcher = guard.begin(where, job, cluster.settings) if there is None else None
    try:
        names = [node.name for node in layout.nodes]
        lease = cluster.adopt(job, len(names))
        lease = lease or _acquire(cluster, provision, job, len(names), options)
        places = dict(zip(names, lease.places[: len(names)], strict=True))
        provision = msgspec.structs.replace(provision, places=places)
        spec = msgspec.structs.replace(spec, provision=provision)
        output = Output(quiet=options.quiet)
        sys.exit(asyncio.run(_run(spec, where, there, options.host, output, cluster)))
    finally:
        with contextlib.suppress(KeepstepError):
            done = [release(scheduler, left) for left in scheduler.leases(job)]
            if watcher is not None and all(done):
                watcher.dismiss()


def release(scheduler: Scheduler, lease: Lease) -> bool:
    try:
        scheduler.release(lease)
    except KeepstepError as error:
        show.words(f"{lease.id} is not given back: {error.message}")
        return False
    return True


def _lay_out(options: Options) -> Layout:
    nodes = options.nodes or 1
    check_counts(
        nnodes=nodes,
        nproc=options.nproc,
        spares=0,
        local_nodes=None,
        spare_nodes=options.spare_nodes,
        external=True,
    )
    return lay_out(
        local_nodes=nodes, nproc=options.nproc, spares=0, spare_nodes=options.spare_nodes
    )


def _gpus(words: str) -> tuple[int, str]:
    match = re.fullmatch(r"(?:([A-Za-z_][\w.-]*):)?(\d{1,4})", words)
    if words and match is None:
        raise UsageError(f"--gpus-per-node is {words}", hint="for example 8, or h200:8")
    return (int(match[2]), match[1] or "") if match else (0, "")


def _named(where: Path, orchestrator: str, cluster: Cluster) -> Reached:
    there = external(where, orchestrator, os.environ.pop("KEEPSTEP_TOKEN", ""))
    name = cluster.scheduler.name
    if there.client().get("/v1/orchestrator", Info).scheduler != name:
        raise UsageError(
            f"orchestrator {orchestrator} knows no {cluster.title}",
            hint=f"start it with keepstep orchestrator --scheduler {name}",
        )
    return there


def _acquire(
    cluster: Cluster, provision: Provision, job: str, count: int, options: Options
) -> Lease:
    show.words(f"waiting for {count} nodes of {cluster.title}")
    began = time.monotonic()
    limits = provision.constraints
    ask = Ask(job=job, op=START, constraints=limits, kinds=["queue"], count=count)
    lease = cluster.scheduler.acquire(ask, options.queue_s or FOR_EVER_S)
    waited = time.monotonic() - began
    held = cluster.held_by.format(lease.id)
    show.words(f"{held} on {', '.join(lease.places)} after {waited:.1f} s")
    return lease


async def _run(
    spec: JobSpec,
    where: Path,
    there: Reached | None,
    host: str,
    output: Output,
    cluster: Cluster,
) -> int:
    if there is not None:
        return await attend(spec, where, there, output, agents=False)
    host = host or cluster.own_address()
    embedded = await embed(spec.job, where, host=host, scheduler=cluster.scheduler)
    try:
        there = await asyncio.to_thread(external, where, spec.job, "")
        return await attend(spec, where, there, output, embedded=embedded, agents=False)
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
