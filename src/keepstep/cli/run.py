"""`keepstep run`: torchrun's command line, with spares."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import click

from keepstep.agent import kernel_namespaces, preflight
from keepstep.cli import jobspec, options
from keepstep.cli.client import AsyncClient
from keepstep.cli.find import Reached, external
from keepstep.cli.launcher import Launcher
from keepstep.cli.layout import count_nodes
from keepstep.cli.options import JobOptions, LaunchCommand, grouped, job_options
from keepstep.cli.output import Output
from keepstep.cli.surroundings import Surroundings, surroundings
from keepstep.errors import UsageError
from keepstep.model.job import JobSpec
from keepstep.orchestrator.main import Orchestrator


@click.command(
    name="run",
    cls=LaunchCommand,
    short_help="Start a training script whose ranks can be moved and replaced.",
)
@grouped(
    options.NODES, "--nnodes", type=int, default=1, show_default=True,
    help="Machines; each runs keepstep agent.",
)  # fmt: skip
@grouped(
    options.NODES, "--local-nodes", type=int, default=None,
    help="Run that many agents here, as if they were nodes.",
)  # fmt: skip
@grouped(
    options.NODES, "--standalone", is_flag=True, help="Accepted as torchrun's; every job is."
)  # fmt: skip
@job_options
def run(nnodes: int, local_nodes: int | None, standalone: bool, **given: Any) -> None:
    """Start SCRIPT with ARGS on every rank, as torchrun does, and keep it going."""
    job, around = options.take(JobOptions, given), surroundings()
    nodes = count_nodes(
        nnodes=nnodes, local_nodes=local_nodes, external=job.orchestrator is not None
    )
    remote = nnodes > 1 and local_nodes is None
    checked = jobspec.check(job, nodes, watched=around.watched)
    if job.mode == "transparent" and not remote:
        check_transparent()
    spec = jobspec.build(checked, around.home)
    output = Output(quiet=job.quiet)
    sys.exit(asyncio.run(launch(spec, around, job.orchestrator, output, remote=remote)))


async def launch(
    spec: JobSpec,
    around: Surroundings,
    orchestrator: str | None,
    output: Output,
    *,
    remote: bool = False,
) -> int:
    """Run `spec` under an external orchestrator, or under one of our own; returns the exit code.
    `remote`: its nodes are other machines, whose agents are started there."""
    if orchestrator is None:
        embedded = await embed(spec.job, around.home)
        there = Reached(urls=[embedded.url], streams=[embedded.stream], token=embedded.token)
        return await attend(spec, around, there, output, embedded=embedded, agents=not remote)
    there = external(around.home, orchestrator, around.token)
    return await attend(spec, around, there, output, agents=not remote)


async def embed(job: str, where: Path, **more: Any) -> Orchestrator:
    log_to(where / "jobs" / job / "orchestrator.log")
    return await Orchestrator.start(where, id=job, embedded=True, **more)


async def attend(
    spec: JobSpec,
    around: Surroundings,
    there: Reached,
    output: Output,
    *,
    embedded: Orchestrator | None = None,
    agents: bool,
) -> int:
    """Submit it and stay until it has ended. `agents`: they are started here."""
    client = AsyncClient(there.urls, there.token, there.ca)
    try:
        launcher = Launcher(
            spec,
            client=client,
            there=there,
            around=around,
            output=output,
            embedded=embedded,
            agents=agents,
        )
        return await launcher.run()
    finally:
        await client.close()
        if embedded is not None:
            if embedded.broker is not None:
                await embedded.broker.finish(spec.job)
            await embedded.stop()


def log_to(path: Path) -> None:
    """The orchestrator's own words go to a file: on the screen only what the user must know."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handler = logging.FileHandler(path)
    except OSError as error:
        raise UsageError(
            f"cannot write {path}: {error.strerror}", hint="set KEEPSTEP_HOME to another directory"
        ) from error
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("keepstep")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    logger.propagate = False


def check_transparent() -> None:
    """Agents of other machines say the same when a move is asked for."""
    trouble = [*preflight.host().trouble, *filter(None, [kernel_namespaces.trouble()])]
    if trouble:
        raise UsageError(
            f"--mode transparent cannot work here: {'; '.join(trouble)}",
            hint="keepstep doctor --transparent",
        )
