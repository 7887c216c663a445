"""`keepstep orchestrator`: one that outlives jobs, on this machine or for several."""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import click

from keepstep.adapters.schedule.slurm import SlurmScheduler
from keepstep.cli import show
from keepstep.cli.kubernetes import cluster_options, connect
from keepstep.cli.surroundings import home
from keepstep.errors import UsageError
from keepstep.orchestrator.main import LEASE_S, Orchestrator
from keepstep.ports.election import Election
from keepstep.ports.ledger import LedgerMember
from keepstep.ports.schedule import Scheduler

LEASE_S_MIN, LEASE_S_MAX = 1.0, 300.0


@click.command()
@click.option(
    "--id", "id_", metavar="NAME",
    help="Same name again: a restart [default, with --store only: this host's name].",
)  # fmt: skip
@click.option(
    "--host", default="127.0.0.1", show_default=True,
    help="Address to listen on; beyond loopback everything is TLS.",
)  # fmt: skip
@click.option("--port", type=int, default=0, help="REST [default: as before, else any].")
@click.option("--stream-port", type=int, default=0, help="Agents [default: as before, else any].")
@click.option(
    "--store", default="", envvar="KEEPSTEP_STORE", metavar="URL",
    help="postgresql://USER@HOST/DATABASE, shared with other orchestrators of which one is "
    "active [default: KEEPSTEP_STORE, else a file of its own].",
)  # fmt: skip
@click.option(
    "--lease", "lease_s", type=float, default=LEASE_S, show_default=True, metavar="S",
    help="With --store: after this time without a word another one takes over.",
)  # fmt: skip
@click.option(
    "--scheduler", type=click.Choice(("slurm", "kubernetes")),
    help="Take further nodes from it for jobs of `keepstep slurm|kubernetes launch`.",
)  # fmt: skip
@cluster_options
def orchestrator(
    id_: str | None,
    host: str,
    port: int,
    stream_port: int,
    store: str,
    lease_s: float,
    scheduler: str | None,
    **cluster: Any,
) -> None:
    """Run an orchestrator for `keepstep run --orchestrator NAME`."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if not LEASE_S_MIN <= lease_s <= LEASE_S_MAX:
        raise UsageError(
            f"--lease is {lease_s:g}: it must be {LEASE_S_MIN:g} to {LEASE_S_MAX:g}",
            hint="a short one takes over early and may do so needlessly; 10 is a good choice",
        )
    if id_ is None and not store:
        raise UsageError("--id is missing", hint="it names the ledger, for example --id main")
    id_ = id_ or socket.gethostname()
    where = {"id": id_, "host": host, "port": port, "stream_port": stream_port}
    if scheduler != "kubernetes" and any(cluster.values()):
        raise UsageError(
            "--namespace and --pod-template belong to --scheduler kubernetes", hint="see --help"
        )
    by: Scheduler | None = SlurmScheduler() if scheduler == "slurm" else None
    election: Callable[[LedgerMember, str], Election] | None = None
    if scheduler == "kubernetes":
        by = there = connect(**cluster)
        if store:  # without one nobody else could lead
            election = functools.partial(there.election, lease_s=lease_s)
    if by is not None:
        for sentence in by.capabilities().lacks:
            show.words(f"note: {sentence}")
    more = {"store": store, "lease_s": lease_s, "scheduler": by, "election": election}
    sys.exit(asyncio.run(_orchestrate({**where, **more})))


async def _orchestrate(options: dict[str, Any]) -> int:
    loop = asyncio.get_running_loop()
    end = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, end.set)
    running = await Orchestrator.start(home(), **options)
    running.driver.failed.add_done_callback(lambda _: end.set())
    show.words(
        f"orchestrator {running.id} at {running.url}, agents at port {running.stream.port}, "
        f"{running.terms.role}"
    )
    if running.url.startswith("https:"):
        show.words(f"nodes join with a token: keepstep token create --orchestrator {running.id}")
    try:
        await end.wait()
    finally:
        await running.stop()
    return 3 if running.driver.failed.done() else 0
