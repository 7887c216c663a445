"""`keepstep kubernetes launch`: a job on nodes of Kubernetes, one pod in each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from keepstep.adapters.schedule.kubernetes import KubernetesScheduler, Settings
from keepstep.cli.run import check_script
from keepstep.cli.scheduled import Options, address_towards, check_times, start
from keepstep.cli.slurm import launch as slurm
from keepstep.errors import UsageError
from keepstep.model.schedule import Lease, Provision

AS_SLURM = {
    *("nproc", "spare_nodes", "idle", "preempt", "spare_s", "replenish", "within", "priority"),
    *("yields", "grace_s", "back", "quiet_s", "back_s", "stall_s", "resume", "checkpoint_dir"),
    *("rebalance", "stragglers", "straggler_factor", "straggler_s", "on_divergence"),
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
@click.option(
    "--adopt", "owner", default="", metavar="KIND/NAME",
    help="Run in pods of this Job, JobSet, TrainJob or PyTorchJob, which run agents.",
)  # fmt: skip
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
    if given["owner"] and not given["orchestrator"]:
        raise UsageError(
            "--adopt needs --orchestrator",
            hint="pods have to know whom to ask before the job is there",
        )
    check_script(script, given["module"])
    options = Options(adopt="", partition=namespace, account="", qos="", **given)
    check_times(options)
    words = (["-m", script] if options.module else [script]) + list(args)
    start(_Kubernetes(scheduler), words, options)


# What means the same on every scheduler, before SCRIPT and ARGS.
launch.params[-2:-2] = [one for one in slurm.params if one.name in AS_SLURM]


class _Kubernetes:
    title = "Kubernetes"
    held_by = "pods"

    def __init__(self, scheduler: KubernetesScheduler) -> None:
        self.scheduler = scheduler
        self.settings = scheduler.settings

    def check(self, provision: Provision, count: int) -> None:
        self.scheduler.check(provision.constraints, provision.kinds, count)

    def before(self, where: Path) -> None:
        """Pods of launchers that have ended are their guards' business."""

    def adopt(self, job: str, count: int) -> Lease | None:
        return None

    def own_address(self) -> str:
        """Nodes are where the API server is."""
        there = urlsplit(self.scheduler.server)
        return address_towards(there.hostname or "", there.port or 443)
