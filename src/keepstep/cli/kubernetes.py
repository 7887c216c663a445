"""`keepstep kubernetes launch`: a job on nodes of Kubernetes, one pod in each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click
import msgspec

from keepstep import native
from keepstep.adapters.schedule.kubernetes import KubernetesScheduler, Settings
from keepstep.cli import show, slurm_guard
from keepstep.cli.checkpoints import check_periodic, check_resume
from keepstep.cli.find import Reached, external
from keepstep.cli.home import home
from keepstep.cli.layout import Layout, check_counts, lay_out
from keepstep.cli.output import Output
from keepstep.cli.run import attend, check_script, embed, new_job_id
from keepstep.cli.slurm import FOR_EVER_S, Options
from keepstep.cli.slurm import launch as slurm
from keepstep.core.operator import check_spec
from keepstep.errors import KeepstepError, UsageError
from keepstep.model.job import JobSpec
from keepstep.model.schedule import START, Ask, Provision
from keepstep.orchestrator.registry import check_id, prepare_home
from keepstep.orchestrator.requests import Info

AS_SLURM = {
    *("nproc", "spare_nodes", "idle", "preempt", "spare_s", "replenish", "within", "priority"),
    *("yields", "grace_s", "back", "quiet_s", "back_s", "stall_s", "resume", "checkpoint_dir"),
    *("interval", "job_id", "quiet", "module"),
}
F = TypeVar("F", bound=Callable[..., Any])
OPTIONS = (
    click.option("--kubeconfig", default="", metavar="FILE", help="As of kubectl."),
    click.option("--context", default="", metavar="NAME", help="As of kubectl."),
    click.option(
        "--namespace", "-n", default="", metavar="NAME", help="Of the pods [default: keepstep]."
    ),
    click.option(
        "--pod-template", default="", metavar="FILE",
        help="What agents' pods are made of: image, volumes and so on. The command is Keepstep's.",
    ),
)  # fmt: skip


def cluster_options(command: F) -> F:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def connect(
    *, kubeconfig: str, context: str, namespace: str, pod_template: str
) -> KubernetesScheduler:
    template = read_template(Path(pod_template)) if pod_template else {}
    return KubernetesScheduler(
        Settings(
            kubeconfig=kubeconfig,
            context=context,
            namespace=namespace or Settings().namespace,
            template=template,
        )
    )


def read_template(file: Path) -> dict[str, Any]:
    try:
        import yaml  # type: ignore[import-untyped]

        found = yaml.safe_load(file.read_text())
    except ImportError as error:
        raise UsageError(
            "the client library of Kubernetes is not installed",
            hint="pip install 'keepstep[kubernetes]'",
        ) from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(
            f"cannot read the pod template {file}: {error}", hint="see docs/guides/kubernetes.md"
        ) from error
    containers = found.get("spec", {}).get("containers") if isinstance(found, dict) else None
    if not containers or not isinstance(containers, list) or not containers[0].get("image"):
        raise UsageError(
            f"the pod template {file} names no image",
            hint="it is the description of a pod: spec.containers[0].image",
        )
    return dict(found)


@click.group()
def kubernetes() -> None:
    """Run jobs on a Kubernetes cluster."""


@kubernetes.command(context_settings={"allow_interspersed_args": False})
@click.option("--nodes", "-N", type=int, default=1, show_default=True, help="Nodes with ranks.")
@cluster_options
@click.option(
    "--selector", "-l", "features", default="", metavar="KEY=VALUE,...", help="Labels of all nodes."
)
@click.option("--gpus-per-node", "gpus", metavar="[TYPE:]N", default="", help="For example h200:8.")
@click.option(
    "--spare-pool", "reservation", default="", metavar="NAME",
    help="Take further spares first from nodes with the taint keepstep.dev/spare=NAME.",
)  # fmt: skip
@click.option(
    "--queue-timeout", "queue_s", type=float, default=None, metavar="S",
    help="Give up if there are no nodes within this time [default: wait].",
)  # fmt: skip
@click.option(
    "--orchestrator", metavar="URL|ID",
    help="Use this one, which runs with --scheduler kubernetes; do not embed one.",
)  # fmt: skip
@click.option(
    "--host", default="", metavar="ADDRESS",
    help="Where pods reach the embedded one [default: as the API server does].",
)  # fmt: skip
@click.option("--log-dir", metavar="DIR", help="As of run; all pods must see it.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def launch(
    script: str,
    args: tuple[str, ...],
    kubeconfig: str,
    context: str,
    namespace: str,
    pod_template: str,
    **given: Any,
) -> None:
    """Start SCRIPT with ARGS in pods on nodes of Kubernetes; when some are lost, take others."""
    if not pod_template:
        raise UsageError(
            "--pod-template is missing", hint="it names the image that has Keepstep and the script"
        )
    scheduler = connect(
        kubeconfig=kubeconfig, context=context, namespace=namespace, pod_template=pod_template
    )
    check_script(script, given["module"])
    options = Options(adopt="", partition=namespace, account="", qos="", **given)
    _check_times(options)
    words = (["-m", script] if options.module else [script]) + list(args)
    _launch(scheduler, words, options)


# What means the same on every scheduler, before SCRIPT and ARGS.
launch.params[-2:-2] = [one for one in slurm.params if one.name in AS_SLURM]


def _check_times(options: Options) -> None:
    for name, value, least in (
        ("stall-timeout", options.stall_s, 1e-9),
        ("spare-timeout", options.spare_s, 1e-9),
        ("back-after", options.back_s, 0.0),
        ("quiet-after", options.quiet_s, 0.0),
        ("grace", options.grace_s, 0.0),
    ):
        if not least <= value < 1e9:
            raise UsageError(f"--{name} is {value:g}: seconds, and not below {least:g}")
    if options.replenish and not options.spare_nodes:
        raise UsageError("--replenish: there are no spare nodes", hint="--spare-nodes 1")


def _launch(scheduler: KubernetesScheduler, script: list[str], options: Options) -> None:
    layout = _lay_out(options)
    provision = msgspec.structs.replace(options.provision(), scheduler=scheduler.name)
    _check(scheduler, provision, len(layout.nodes))
    where = home()
    prepare_home(where)
    job = options.job_id or new_job_id(script[1 if options.module else 0])
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
        script=script,
        directory=str(log_dir),
        resume=resume,
        checkpoints=periodic.directory,
        checkpoint_interval_ns=periodic.interval_ns,
        provision=provision,
        policy=options.policy(),
    )
    check_spec(spec)
    guard = slurm_guard.begin(where, job, scheduler.settings) if there is None else None
    try:
        names = [node.name for node in layout.nodes]
        provision = _hold(scheduler, provision, job, names, options.queue_s)
        spec = msgspec.structs.replace(spec, provision=provision)
        host = options.host or (_own_address(scheduler.server) if there is None else "")
        output = Output(quiet=options.quiet)
        sys.exit(asyncio.run(_run(spec, where, there, host, output, scheduler)))
    finally:
        with contextlib.suppress(KeepstepError):
            for left in scheduler.leases(job):
                scheduler.release(left)
            if guard is not None:
                guard.dismiss()


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


def _check(scheduler: KubernetesScheduler, provision: Provision, count: int) -> None:
    """Everything that can be known to be wrong, before anything is made."""
    scheduler.check(provision.constraints, provision.kinds, count)
    for sentence in scheduler.capabilities().lacks:
        show.words(f"note: {sentence}")


def _named(where: Path, orchestrator: str) -> Reached:
    there = external(where, orchestrator, os.environ.pop("KEEPSTEP_TOKEN", ""))
    if there.client().get("/v1/orchestrator", Info).scheduler != KubernetesScheduler.name:
        raise UsageError(
            f"orchestrator {orchestrator} knows no Kubernetes",
            hint="start it with keepstep orchestrator --scheduler kubernetes",
        )
    return there


def _hold(
    scheduler: KubernetesScheduler,
    provision: Provision,
    job: str,
    nodes: list[str],
    queue_s: float | None,
) -> Provision:
    show.words(f"waiting for {len(nodes)} nodes of Kubernetes")
    began = time.monotonic()
    limits = provision.constraints
    ask = Ask(job=job, op=START, constraints=limits, kinds=["queue"], count=len(nodes))
    lease = scheduler.acquire(ask, queue_s or FOR_EVER_S)
    waited = time.monotonic() - began
    show.words(f"pods on {', '.join(lease.places)} after {waited:.1f} s")
    places = dict(zip(nodes, lease.places, strict=True))
    return msgspec.structs.replace(provision, places=places)


async def _run(
    spec: JobSpec,
    where: Path,
    there: Reached | None,
    host: str,
    output: Output,
    scheduler: KubernetesScheduler,
) -> int:
    if there is not None:
        return await attend(spec, where, there, output, agents=False)
    embedded = await embed(spec.job, where, host=host, scheduler=scheduler)
    try:
        there = await asyncio.to_thread(external, where, spec.job, "")
        return await attend(spec, where, there, output, embedded=embedded, agents=False)
    finally:
        shutil.rmtree(where / "authorities" / spec.job, ignore_errors=True)


def _own_address(server: str) -> str:
    """Of the interface that leads to the API server: nodes are where it is."""
    there = urlsplit(server)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((there.hostname or "", there.port or 443))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"cannot find this machine's address: {error}", hint="name it with --host"
        ) from error
