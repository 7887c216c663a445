"""`keepstep kubernetes launch`: a job on nodes of Kubernetes, one pod in each."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from keepstep.adapters.schedule.kubernetes import KubernetesScheduler
from keepstep.adapters.schedule.kubernetes_requests import Settings
from keepstep.cli import options
from keepstep.cli.options import JobOptions, LaunchCommand, grouped, job_options
from keepstep.cli.scheduled import PlaceOptions, address_towards, place_options, start
from keepstep.errors import UsageError
from keepstep.model.schedule import Lease, Provision

CLUSTER = (
    grouped(options.NODES, "--kubeconfig", default="", metavar="FILE", help="As of kubectl."),
    grouped(options.NODES, "--context", default="", metavar="NAME", help="As of kubectl."),
    grouped(
        options.NODES, "--namespace", "-n", default="", metavar="NAME",
        help="Of the pods [default: keepstep].",
    ),
    grouped(
        options.NODES, "--pod-template", default="", metavar="FILE",
        help="What agents' pods are made of: image, volumes and so on. The command is Keepstep's.",
    ),
)  # fmt: skip
cluster_options = options.with_options(CLUSTER)


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


@kubernetes.command(cls=LaunchCommand)
@grouped(
    options.NODES, "--nodes", "-N", type=int, default=1, show_default=True,
    help="Nodes with ranks.",
)  # fmt: skip
@grouped(
    options.NODES, "--adopt", "owner", default="", metavar="KIND/NAME",
    help="Run in pods of this Job, JobSet, TrainJob or PyTorchJob, which run agents.",
)  # fmt: skip
@cluster_options
@grouped(
    options.NODES, "--selector", "-l", "features", default="", metavar="KEY=VALUE,...",
    help="Labels of all nodes.",
)  # fmt: skip
@grouped(
    options.NODES, "--gpus-per-node", "gpus", metavar="[TYPE:]N", default="",
    help="For example h200:8.",
)  # fmt: skip
@grouped(
    options.FURTHER, "--spare-pool", "reservation", default="", metavar="NAME",
    help="Take further spares first from nodes with the taint keepstep.dev/spare=NAME.",
)  # fmt: skip
@place_options
@job_options
def launch(kubeconfig: str, context: str, namespace: str, pod_template: str, **given: Any) -> None:
    """Start SCRIPT with ARGS in pods on nodes of Kubernetes; when some are lost, take others."""
    if not pod_template:
        raise UsageError(
            "--pod-template is missing", hint="it names the image that has Keepstep and the script"
        )
    scheduler = connect(
        kubeconfig=kubeconfig, context=context, namespace=namespace, pod_template=pod_template
    )
    job = options.take(JobOptions, given)
    if given["owner"] and not job.orchestrator:
        raise UsageError(
            "--adopt needs --orchestrator",
            hint="pods have to know whom to ask before the job is there",
        )
    wanted = PlaceOptions(adopt="", partition=namespace, account="", qos="", **given)
    start(_Kubernetes(scheduler), job, wanted)


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
