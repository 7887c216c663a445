"""`keepstep slurm launch`: a job on nodes that Slurm gives, and takes back."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import click
import msgspec

from keepstep.adapters.schedule import slurm_cli
from keepstep.adapters.schedule.slurm import SlurmScheduler
from keepstep.cli import show
from keepstep.cli.checkpoints import AUTO
from keepstep.cli.policies import policy_options
from keepstep.cli.run import STALL_S_DEFAULT, check_script
from keepstep.cli.scheduled import Options, address_towards, check_times, release, start
from keepstep.errors import UsageError
from keepstep.model.schedule import Lease, Provision
from keepstep.orchestrator import registry

GRACE_S = 30.0


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
    "--back-after", "back_s", type=float, default=0.0, metavar="S",
    help="Move back to a node that was lost when it has been idle for so long [default: never].",
)  # fmt: skip
@policy_options
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
    check_times(options)
    if options.adopt:
        options = _adopting(options)
    words = (["-m", script] if options.module else [script]) + list(args)
    start(_Slurm(options.adopt), words, options)


class _Slurm:
    title = "Slurm"
    held_by = "allocation {}"
    settings = None

    def __init__(self, adopted: str) -> None:
        self.scheduler = SlurmScheduler()
        self._adopted = adopted

    def check(self, provision: Provision, count: int) -> None:
        self.scheduler.check(provision.constraints, provision.kinds, count)
        if "preempt" in provision.kinds and not self.scheduler.capabilities().preempt:
            raise UsageError(
                "--preempt: this cluster does not preempt", hint="PreemptType in slurm.conf"
            )

    def before(self, where: Path) -> None:
        release_orphans(self.scheduler, where)

    def adopt(self, job: str, count: int) -> Lease | None:
        if not self._adopted:
            return None
        lease, note = self.scheduler.adopt(job, self._adopted, count)
        show.words(f"allocation {lease.id} on {', '.join(lease.places)} is adopted")
        if note:
            show.words(f"note: {note}")
        return lease

    def own_address(self) -> str:
        """Nodes are where slurmctld is."""
        said = slurm_cli.run("scontrol", "show", "config")
        found = re.search(r"^SlurmctldHost\[0\]\s*=\s*(\S+?)(?:\((\S+)\))?$", said, re.MULTILINE)
        target = (found[2] or found[1]) if found else socket.gethostname()
        return address_towards(target, 6817)


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
            release(scheduler, lease)
