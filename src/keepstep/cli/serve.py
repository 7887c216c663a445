"""`keepstep orchestrator` (one that outlives jobs) and `keepstep agent` (one more node)."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from keepstep.cli import find, show
from keepstep.cli.client import AsyncClient
from keepstep.cli.home import home
from keepstep.cli.launcher import LaunchNote
from keepstep.cli.processes import become_subreaper, reap_orphans, start_agent, sweep
from keepstep.cli.run import STALL_S_DEFAULT
from keepstep.errors import KeepstepError, UsageError
from keepstep.model.views import JobView
from keepstep.orchestrator.main import LEASE_S, Orchestrator
from keepstep.orchestrator.requests import Ok

AGENT_END_S = 4.0
LEASE_S_MIN, LEASE_S_MAX = 1.0, 300.0


@click.command()
@click.option(
    "--id", "id_", metavar="NAME",
    help="Same name again: a restart [default, with --store only: this host's name].",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True)
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
def orchestrator(
    id_: str | None, host: str, port: int, stream_port: int, store: str, lease_s: float
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
    sys.exit(asyncio.run(_orchestrate({**where, "store": store, "lease_s": lease_s})))


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
    try:
        await end.wait()
    finally:
        await running.stop()
    return 3 if running.driver.failed.done() else 0


@click.command()
@click.option(
    "--orchestrator", "--orchestrator-id", "--url", "orchestrator_", metavar="URL|ID[,...]",
    help="Where to join [default: the one that runs here].",
)  # fmt: skip
@click.option("--job", metavar="ID", help="Which job, when several are live.")
@click.option("--node", metavar="NAME", help="Name of the new node [default: the next nK].")
@click.option("--slots", type=int, default=1, show_default=True, help="Places for spares.")
def agent(orchestrator_: str | None, job: str | None, node: str | None, slots: int) -> None:
    """Join this machine to a live job as one more node, whose slots are spares."""
    if slots < 1:
        raise UsageError(f"--slots is {slots}: it must be at least 1")
    where = home()
    if orchestrator_ is None:
        found = find.one_job(where, job)
        view = found.view
        reach = find.external(where, found.entry.url, found.entry.token)
    else:
        reach = find.external(where, orchestrator_, os.environ.get("KEEPSTEP_TOKEN", ""))
        view = find.job_of(reach, job)
    taken = {one.node for one in view.nodes}
    if node is None:
        node = next(f"n{i}" for i in range(len(taken) + 1) if f"n{i}" not in taken)
    elif node in taken:
        raise UsageError(f"job {view.job} has a node {node} already", hint="omit --node")
    sys.exit(asyncio.run(_join(view, reach, node, slots)))


async def _join(view: JobView, reach: find.Reach, node: str, slots: int) -> int:
    """Not an exec: an agent ends its whole session, which must not be the user's shell's."""
    loop = asyncio.get_running_loop()
    directory = Path(view.directory)
    note = _note(directory)
    if note is not None and Path(note.cwd).is_dir():
        os.chdir(note.cwd)  # scripts and their data are named relative to where the job began
    become_subreaper()
    stall_ns = note.stall_timeout_ns if note is not None else int(STALL_S_DEFAULT * 1e9)
    process = start_agent(
        streams=reach.streams,
        token=reach.token,
        job=view.job,
        node=node,
        slots=slots,
        directory=directory,
        stall_timeout_ns=stall_ns,
        environ=os.environ,
    )
    ended, told = asyncio.Event(), asyncio.Event()
    process.watch(loop, lambda _: ended.set())

    def leave() -> None:
        if told.is_set():
            sweep([process.session])
        else:
            told.set()
            process.process.terminate()
            loop.call_later(AGENT_END_S, sweep, [process.session])

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave)
    show.words(f"node {node} with {slots} slots joins job {view.job}")
    while not ended.is_set():
        reap_orphans([process.process.pid])
        try:
            await asyncio.wait_for(ended.wait(), 1.0)
        except TimeoutError:
            continue
    code = process.process.wait()
    sweep([process.session])
    reap_orphans(())
    client = AsyncClient(reach.urls, reach.token)
    try:
        await client.post(f"/v1/jobs/{view.job}/nodes/{node}/dead", None, Ok)
    except KeepstepError:
        pass  # the job and its orchestrator have ended
    finally:
        await client.close()
    if code > 0 and (said := process.last_words()):
        show.words(said)
    return 128 - code if code < 0 else code


def _note(directory: Path) -> LaunchNote | None:
    try:
        return msgspec.json.decode((directory / "launch.json").read_bytes(), type=LaunchNote)
    except (OSError, msgspec.DecodeError):
        return None
