"""`keepstep kubernetes launch`: a job on nodes of Kubernetes, one pod in each."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import click

from keepstep.adapters.schedule.kubernetes import KubernetesScheduler, Settings
from keepstep.cli.checkpoints import AUTO
from keepstep.cli.run import STALL_S_DEFAULT
from keepstep.cli.slurm import Options, launch_on
from keepstep.errors import UsageError

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
    options = Options(partition=namespace, account="", qos="", **given)
    launch_on(scheduler, script, args, options, lambda: _own_address(scheduler.server))


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
