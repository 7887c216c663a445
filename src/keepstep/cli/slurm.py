"""`keepstep slurm launch`: a job on nodes that Slurm gives, and takes back."""

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
from typing import Any, Literal

import click
import msgspec

from keepstep import native
from keepstep.adapters.schedule import slurm_cli
from keepstep.adapters.schedule.slurm import SlurmScheduler
from keepstep.cli import show, slurm_guard
from keepstep.cli.checkpoints import AUTO, check_periodic, check_resume
from keepstep.cli.find import Reached, external
from keepstep.cli.home import home
from keepstep.cli.layout import Layout, check_counts, lay_out
from keepstep.cli.output import Output
from keepstep.cli.run import STALL_S_DEFAULT, attend, check_script, embed, new_job_id
from keepstep.core.operator import check_spec
from keepstep.errors import KeepstepError, UsageError
from keepstep.model.job import JobSpec
from keepstep.model.schedule import START, Ask, Constraints, Kind, Lease, Policy, Provision
from keepstep.orchestrator import registry
from keepstep.orchestrator.registry import check_id, prepare_home
from keepstep.orchestrator.requests import Info

FOR_EVER_S = 1e6
BACK_S = 60.0  # what is well again for so long may stay so
QUIET_S = 600.0
GRACE_S = 30.0


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

    def provision(self) -> Provision:
        """Which nodes will do, and where spares may come from; it has none yet."""
        count, gpu_type = _gpus(self.gpus)
        allowed: dict[Kind, object] = {
            "reserved": self.reservation,
            "idle": self.idle,
            "preempt": self.preempt,
        }
        return Provision(
            scheduler=SlurmScheduler.name,
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
        )


@click.group()
def slurm() -> None:
    """Run jobs on a Slurm cluster."""


@slurm.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--nodes", "-N", type=int, default=None,
    help="Nodes with ranks [default: 1, or all that --adopt has].",
)  # fmt: skip
@click.option(
    "--adopt", default="", metavar="JOBID",
    help="Use this allocation of yours instead of a new one, and leave it when the job ends.",
)  # fmt: skip
@click.option(
    "--nproc-per-node", "nproc", type=int, default=1, show_default=True, help="Ranks on each node."
)
@click.option(
    "--spare-nodes", type=int, default=0, show_default=True,
    help="Nodes of the allocation that are warm spares.",
)  # fmt: skip
@click.option("--partition", "-p", default="", help="As of sbatch.")
@click.option("--account", "-A", default="", help="As of sbatch.")
@click.option("--qos", default="", help="As of sbatch.")
@click.option("--constraint", "-C", "features", default="", help="A feature of all nodes.")
@click.option("--gpus-per-node", "gpus", metavar="[TYPE:]N", default="", help="As of sbatch.")
@click.option(
    "--spare-reservation", "reservation", default="", metavar="NAME",
    help="Take further spares from this reservation first.",
)  # fmt: skip
@click.option("--idle/--no-idle", default=True, help="Then take idle nodes [default: idle].")
@click.option("--preempt", is_flag=True, help="Then take nodes from jobs of lower priority.")
@click.option(
    "--spare-timeout", "spare_s", type=float, default=120.0, show_default=True, metavar="S",
    help="How long one request for a spare may take.",
)  # fmt: skip
@click.option("--replenish", is_flag=True, help="Replace spare nodes that were used.")
@click.option(
    "--within", multiple=True, metavar="LABEL",
    help="Take spares in the same rack, switch or nvlink domain only (repeatable).",
)  # fmt: skip
@click.option(
    "--priority", type=int, default=0, show_default=True,
    help="Among the jobs of one orchestrator: who gets spares first.",
)  # fmt: skip
@click.option(
    "--yield/--no-yield", "yields", default=True,
    help="Give nodes up to jobs of higher priority that may --preempt [default: yield].",
)  # fmt: skip
@click.option(
    "--grace", "grace_s", type=float, default=GRACE_S, show_default=True, metavar="S",
    help="Before that, look for another node for so long.",
)  # fmt: skip
@click.option(
    "--back", type=click.Choice(("immediately", "quiet", "never")), default=None,
    help="Whether and when to move back to a node that was lost [default: see --back-after].",
)  # fmt: skip
@click.option(
    "--quiet-after", "quiet_s", type=float, default=QUIET_S, show_default=True, metavar="S",
    help="It is quiet when nothing has happened for so long.",
)  # fmt: skip
@click.option(
    "--back-after", "back_s", type=float, default=0.0, metavar="S",
    help="Move back to a node that was lost when it has been idle for so long [default: never].",
)  # fmt: skip
@click.option(
    "--queue-timeout", "queue_s", type=float, default=None, metavar="S",
    help="Give up if Slurm gives no nodes within this time [default: wait].",
)  # fmt: skip
@click.option(
    "--stall-timeout", "stall_s", type=float, default=STALL_S_DEFAULT, show_default=True,
    metavar="S", help="A step that stands still that long is a hang.",
)  # fmt: skip
@click.option(
    "--orchestrator", metavar="URL|ID",
    help="Use this one, which runs with --scheduler slurm; do not embed one.",
)  # fmt: skip
@click.option(
    "--host", default="", metavar="ADDRESS",
    help="Where nodes reach the embedded one [default: as they reach slurmctld's].",
)  # fmt: skip
@click.option("--resume", metavar="DIR", help="As of run.")
@click.option("--checkpoint-dir", metavar="DIR", help="As of run.")
@click.option(
    "--checkpoint-interval", "interval", default=AUTO, metavar="S|auto", help="As of run."
)
@click.option("--log-dir", metavar="DIR", help="As of run; all nodes must see it.")
@click.option("--job-id", metavar="ID", help="Name the job instead of inventing an id.")
@click.option("--quiet", "-q", is_flag=True, help="Only ranks' output and errors.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(script: str, args: tuple[str, ...], **given: Any) -> None:
    """Start SCRIPT with ARGS on nodes of Slurm; when some are lost, take others."""
    options = Options(**given)
    check_script(script, options.module)
    for name, value in (("stall", options.stall_s), ("spare", options.spare_s)):
        if not 0 < value < 1e9:
            raise UsageError(f"--{name}-timeout is {value:g}: it must be above 0")
    for name, value in (
        ("back-after", options.back_s),
        ("quiet-after", options.quiet_s),
        ("grace", options.grace_s),
    ):
        if not 0 <= value < 1e9:
            raise UsageError(f"--{name} is {value:g}: seconds, and not below 0")
    if options.replenish and not options.spare_nodes:
        raise UsageError("--replenish: there are no spare nodes", hint="--spare-nodes 1")
    scheduler = SlurmScheduler()
    if options.adopt:
        options = _adopting(options)
    layout = _lay_out(options)
    provision = options.provision()
    _check(scheduler, provision, len(layout.nodes))
    where = home()
    prepare_home(where)
    job = options.job_id or new_job_id(script)
    check_id(job)
    resume = check_resume(options.resume, layout.world)
    periodic = check_periodic(options.checkpoint_dir, options.interval, None, job, resume)
    native.store_host_path()
    named = options.orchestrator
    there = _named(where, named) if named is not None else None
    log_dir = Path(options.log_dir).absolute() if options.log_dir else where / "jobs" / job
    spec = JobSpec(
        job=job,
        world=layout.world,
        local_world=layout.local_world,
        nodes=layout.nodes,
        spares=layout.spares,
        stall_timeout_ns=int(options.stall_s * 1e9),
        script=(["-m", script] if options.module else [script]) + list(args),
        directory=str(log_dir),
        resume=resume,
        checkpoints=periodic.directory,
        checkpoint_interval_ns=periodic.interval_ns,
        provision=provision,
        policy=options.policy(),
    )
    check_spec(spec)
    release_orphans(scheduler, where)
    guard = slurm_guard.begin(where, job) if there is None else None
    lease = _allocate(scheduler, provision.constraints, job, len(layout.nodes), options)
    names = [node.name for node in layout.nodes]
    places = dict(zip(names, lease.places[: len(names)], strict=True))
    provision = msgspec.structs.replace(provision, places=places)
    spec = msgspec.structs.replace(spec, provision=provision)
    try:
        output = Output(quiet=options.quiet)
        sys.exit(asyncio.run(_run(spec, where, there, options.host, output, scheduler)))
    finally:
        with contextlib.suppress(KeepstepError):
            done = [_release(scheduler, left) for left in scheduler.leases(job)]
            if guard is not None and all(done):
                guard.dismiss()


def _adopting(options: Options) -> Options:
    """Unless it is said, all nodes that are there and are no spares get ranks."""
    found = slurm_cli.read_job(options.adopt)
    count = len(slurm_cli.expand(found.get("NodeList", "")))
    nodes = options.nodes or max(1, count - options.spare_nodes)
    return msgspec.structs.replace(options, nodes=nodes)


def release_orphans(scheduler: SlurmScheduler, where: Path) -> None:
    """Allocations of launchers that have ended on this machine, guard and all (it was rebooted)."""
    for entry in registry.dead_embedded(where):
        for lease in scheduler.leases(entry.id):
            show.words(f"allocation {lease.id} of job {entry.id}, which is no more, goes back")
            _release(scheduler, lease)


def _release(scheduler: SlurmScheduler, lease: Lease) -> bool:
    try:
        scheduler.release(lease)
    except KeepstepError as error:
        show.words(f"allocation {lease.id} is not given back: {error.message}")
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


def _check(scheduler: SlurmScheduler, provision: Provision, count: int) -> None:
    """Everything that can be known to be wrong, before anything is asked for."""
    scheduler.check(provision.constraints, provision.kinds, count)
    can = scheduler.capabilities()
    if "preempt" in provision.kinds and not can.preempt:
        raise UsageError(
            "--preempt: this cluster does not preempt", hint="PreemptType in slurm.conf"
        )
    for sentence in can.lacks:
        show.words(f"note: {sentence}")


def _named(where: Path, orchestrator: str) -> Reached:
    there = external(where, orchestrator, os.environ.pop("KEEPSTEP_TOKEN", ""))
    if there.client().get("/v1/orchestrator", Info).scheduler != "slurm":
        raise UsageError(
            f"orchestrator {orchestrator} knows no Slurm",
            hint="start it with keepstep orchestrator --scheduler slurm",
        )
    return there


def _allocate(
    scheduler: SlurmScheduler, limits: Constraints, job: str, count: int, options: Options
) -> Lease:
    if options.adopt:
        lease, note = scheduler.adopt(job, options.adopt, count)
        show.words(f"allocation {lease.id} on {', '.join(lease.places)} is adopted")
        if note:
            show.words(f"note: {note}")
        return lease
    show.words(f"waiting for {count} nodes of Slurm")
    began = time.monotonic()
    ask = Ask(job=job, op=START, constraints=limits, kinds=["queue"], count=count)
    lease = scheduler.acquire(ask, options.queue_s or FOR_EVER_S)
    waited = time.monotonic() - began
    show.words(f"allocation {lease.id} on {', '.join(lease.places)} after {waited:.1f} s")
    return lease


def _own_address() -> str:
    """Of the interface that leads to slurmctld: nodes are where it is."""
    said = slurm_cli.run("scontrol", "show", "config")
    found = re.search(r"^SlurmctldHost\[0\]\s*=\s*(\S+?)(?:\((\S+)\))?$", said, re.MULTILINE)
    target = (found[2] or found[1]) if found else socket.gethostname()
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 6817))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"cannot find this machine's address: {error}", hint="name it with --host"
        ) from error


async def _run(
    spec: JobSpec,
    where: Path,
    there: Reached | None,
    host: str,
    output: Output,
    scheduler: SlurmScheduler,
) -> int:
    if there is not None:
        return await attend(spec, where, there, output, agents=False)
    embedded = await embed(spec.job, where, host=host or _own_address(), scheduler=scheduler)
    try:
        there = await asyncio.to_thread(external, where, spec.job, "")
        return await attend(spec, where, there, output, embedded=embedded, agents=False)
    finally:
        shutil.rmtree(where / "authorities" / spec.job, ignore_errors=True)
