"""`keepstep kubernetes launch`: a job on nodes of Kubernetes, one pod in each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
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
from keepstep.cli import show
from keepstep.cli.checkpoints import AUTO, check_periodic, check_resume
from keepstep.cli.client import AsyncClient
from keepstep.cli.find import Reached, external
from keepstep.cli.home import home
from keepstep.cli.launcher import Launcher
from keepstep.cli.layout import Layout, check_counts, lay_out
from keepstep.cli.output import Output
from keepstep.cli.run import STALL_S_DEFAULT, check_script, log_to, new_job_id
from keepstep.errors import KeepstepError, UsageError
from keepstep.model.job import JobSpec
from keepstep.model.schedule import START, Ask, Constraints, Kind, Provision
from keepstep.orchestrator.main import Orchestrator
from keepstep.orchestrator.registry import check_id, prepare_home
from keepstep.orchestrator.requests import Info

FOR_EVER_S = 1e6
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


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The command line, without what finds the cluster."""

    nodes: int
    nproc: int
    spare_nodes: int
    features: str
    gpus: str
    reservation: str
    idle: bool
    preempt: bool
    spare_s: float
    back_s: float
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

    def provision(self, namespace: str) -> Provision:
        """Which nodes will do, and where spares may come from; it has none yet."""
        match = re.fullmatch(r"(?:([A-Za-z_][\w.-]*):)?(\d{1,4})", self.gpus)
        if self.gpus and match is None:
            raise UsageError(f"--gpus-per-node is {self.gpus}", hint="for example 8, or h200:8")
        allowed: dict[Kind, object] = {
            "reserved": self.reservation,
            "idle": self.idle,
            "preempt": self.preempt,
        }
        return Provision(
            scheduler=KubernetesScheduler.name,
            places={},
            kinds=[kind for kind, wanted in allowed.items() if wanted],
            patience_ns=int(self.spare_s * 1e9),
            back_after_ns=int(self.back_s * 1e9),
            constraints=Constraints(
                partition=namespace,
                reservation=self.reservation,
                features=self.features,
                gpus=int(match[2]) if match else 0,
                gpu_type=(match[1] or "").lower() if match else "",
            ),
        )

    def layout(self) -> Layout:
        check_counts(
            nnodes=self.nodes,
            nproc=self.nproc,
            spares=0,
            local_nodes=None,
            spare_nodes=self.spare_nodes,
            external=True,
        )
        return lay_out(
            local_nodes=self.nodes, nproc=self.nproc, spares=0, spare_nodes=self.spare_nodes
        )


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
@click.option(
    "--nproc-per-node", "nproc", type=int, default=1, show_default=True, help="Ranks on each node."
)
@click.option(
    "--spare-nodes", type=int, default=0, show_default=True, help="More nodes, as warm spares."
)
@cluster_options
@click.option(
    "--selector", "-l", "features", default="", metavar="KEY=VALUE,...", help="Labels of all nodes."
)
@click.option("--gpus-per-node", "gpus", metavar="[TYPE:]N", default="", help="For example h200:8.")
@click.option(
    "--spare-pool", "reservation", default="", metavar="NAME",
    help="Take further spares first from nodes with the taint keepstep.dev/spare=NAME.",
)  # fmt: skip
@click.option("--idle/--no-idle", default=True, help="Then take idle nodes [default: idle].")
@click.option("--preempt", is_flag=True, help="Then take nodes from pods of lower priority.")
@click.option(
    "--spare-timeout", "spare_s", type=float, default=120.0, show_default=True, metavar="S",
    help="How long one request for a spare may take.",
)  # fmt: skip
@click.option(
    "--back-after", "back_s", type=float, default=0.0, metavar="S",
    help="Move back to a node that was lost when it has been idle for so long [default: never].",
)  # fmt: skip
@click.option(
    "--queue-timeout", "queue_s", type=float, default=None, metavar="S",
    help="Give up if there are no nodes within this time [default: wait].",
)  # fmt: skip
@click.option(
    "--stall-timeout", "stall_s", type=float, default=STALL_S_DEFAULT, show_default=True,
    metavar="S", help="A step that stands still that long is a hang.",
)  # fmt: skip
@click.option(
    "--orchestrator", metavar="URL|ID",
    help="Use this one, which runs with --scheduler kubernetes; do not embed one.",
)  # fmt: skip
@click.option(
    "--host", default="", metavar="ADDRESS",
    help="Where pods reach the embedded one [default: as the API server does].",
)  # fmt: skip
@click.option("--resume", metavar="DIR", help="As of run.")
@click.option("--checkpoint-dir", metavar="DIR", help="As of run.")
@click.option(
    "--checkpoint-interval", "interval", default=AUTO, metavar="S|auto", help="As of run."
)
@click.option("--log-dir", metavar="DIR", help="As of run; all pods must see it.")
@click.option("--job-id", metavar="ID", help="Name the job instead of inventing an id.")
@click.option("--quiet", "-q", is_flag=True, help="Only ranks' output and errors.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as in python -m.")
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
    options = Options(**given)
    for name, value in (("stall", options.stall_s), ("spare", options.spare_s)):
        if not 0 < value < 1e9:
            raise UsageError(f"--{name}-timeout is {value:g}: it must be above 0")
    if not 0 <= options.back_s < 1e9:
        raise UsageError(f"--back-after is {options.back_s:g}: it cannot be negative")
    check_script(script, options.module)
    words = (["-m", script] if options.module else [script]) + list(args)
    _launch(scheduler, options.provision(namespace), words, options)


def _launch(
    scheduler: KubernetesScheduler, provision: Provision, script: list[str], options: Options
) -> None:
    layout = options.layout()
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
    try:
        held = _hold(scheduler, provision, job, [n.name for n in layout.nodes], options.queue_s)
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
            provision=held,
        )
        host = options.host or (_own_address(scheduler.server) if there is None else "")
        output = Output(quiet=options.quiet)
        sys.exit(asyncio.run(_run(spec, where, there, host, output, scheduler)))
    finally:
        with contextlib.suppress(KeepstepError):
            for left in scheduler.leases(job):
                scheduler.release(left)


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
    embedded: Orchestrator | None = None
    if there is None:
        log_to(where / "jobs" / spec.job / "orchestrator.log")
        embedded = await Orchestrator.start(
            where, id=spec.job, embedded=True, host=host, scheduler=scheduler
        )
        there = await asyncio.to_thread(external, where, spec.job, "")
    client = AsyncClient(there.urls, there.token, there.ca)
    try:
        launcher = Launcher(
            spec,
            client=client,
            there=there,
            home=where,
            output=output,
            embedded=embedded,
            agents=False,
        )
        return await launcher.run()
    finally:
        await client.close()
        if embedded is not None:
            if embedded.broker is not None:
                await embedded.broker.finish(spec.job)
            await embedded.stop()
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
