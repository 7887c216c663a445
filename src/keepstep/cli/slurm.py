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
from keepstep.cli import options, show
from keepstep.cli.options import JobOptions, LaunchCommand, grouped, job_options
from keepstep.cli.scheduled import PlaceOptions, address_towards, place_options, release, start
from keepstep.errors import UsageError
from keepstep.model.schedule import Lease, Provision
from keepstep.orchestrator import registry


@click.group()
def slurm() -> None:
    """Run jobs on a Slurm cluster."""


@slurm.command(cls=LaunchCommand)
@grouped(
    options.NODES, "--nodes", "-N", type=int, default=None,
    help="Nodes with ranks [default: 1, or all that --adopt has].",
)  # fmt: skip
@grouped(
    options.NODES, "--adopt", default="", metavar="JOBID",
    help="Use this allocation of yours instead of a new one, and leave it when the job ends.",
)  # fmt: skip
@grouped(options.NODES, "--partition", "-p", default="", help="As of sbatch.")
@grouped(options.NODES, "--account", "-A", default="", help="As of sbatch.")
@grouped(options.NODES, "--qos", default="", help="As of sbatch.")
@grouped(
    options.NODES, "--constraint", "-C", "features", default="", help="A feature of all nodes."
)
@grouped(
    options.NODES, "--gpus-per-node", "gpus", metavar="[TYPE:]N", default="", help="As of sbatch."
)  # fmt: skip
@grouped(
    options.FURTHER, "--spare-reservation", "reservation", default="", metavar="NAME",
    help="Take further spares from this reservation first.",
)  # fmt: skip
@place_options
@job_options
def launch(**given: Any) -> None:
    """Start SCRIPT with ARGS on nodes of Slurm; when some are lost, take others."""
    job = options.take(JobOptions, given)
    wanted = PlaceOptions(owner="", **given)
    if wanted.adopt:
        wanted = _adopting(wanted, job.spare_nodes)
    start(_Slurm(wanted.adopt), job, wanted)


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


def _adopting(wanted: PlaceOptions, spare_nodes: int) -> PlaceOptions:
    """Unless it is said, all nodes that are there and are no spares get ranks."""
    found = slurm_cli.read_job(wanted.adopt)
    count = len(slurm_cli.expand(found.get("NodeList", "")))
    nodes = max(1, count - spare_nodes) if wanted.nodes is None else wanted.nodes
    return msgspec.structs.replace(wanted, nodes=nodes)


def release_orphans(scheduler: SlurmScheduler, where: Path) -> None:
    """Allocations of launchers that have ended on this machine, guard and all (it was rebooted)."""
    for entry in registry.dead_embedded(where):
        for lease in scheduler.leases(entry.id):
            show.words(f"allocation {lease.id} of job {entry.id}, which is no more, goes back")
            release(scheduler, lease)
