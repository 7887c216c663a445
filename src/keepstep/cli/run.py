"""`keepstep run`: torchrun's command line, with spares."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any, Literal

import click

from keepstep import native
from keepstep.agent import namespaces, preflight
from keepstep.cli.checkpoints import AUTO, check_periodic, check_resume
from keepstep.cli.client import AsyncClient
from keepstep.cli.find import Reached, external
from keepstep.cli.home import home
from keepstep.cli.launcher import Launcher
from keepstep.cli.layout import check_counts, compose_job_id, lay_out, parse_inject
from keepstep.cli.output import Output
from keepstep.cli.policies import check_policy, hold_ns, policy_options
from keepstep.core.placement import parity_trouble
from keepstep.errors import UsageError
from keepstep.model.job import InjectSpec, JobSpec
from keepstep.model.schedule import Policy
from keepstep.native import plugin
from keepstep.net.environment import MODE, check_mode
from keepstep.orchestrator.main import Orchestrator
from keepstep.orchestrator.registry import check_id, prepare_home

MODES = ("aware", "transparent")
REDUNDANCY = ("auto", "buddy", "parity", "off")
STALL_S_DEFAULT = 300.0


class _Run(click.Command):
    """`--net` alone is `--net=auto`: click would take the script's name for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = {name: p for p in self.params for name in p.opts if isinstance(p, click.Option)}
        at = 0
        while at < len(args) and args[at].startswith("-") and args[at] != "--":
            option = options.get(args[at])
            if args[at] == "--net":
                args = [*args[:at], "--net=auto", *args[at + 1 :]]
            elif isinstance(option, click.Option) and not option.is_flag:
                at += 1
            at += 1
        return super().parse_args(ctx, args)


@click.command(
    name="run",
    cls=_Run,
    context_settings={"allow_interspersed_args": False},
    short_help="Start a training script whose ranks can be moved and replaced.",
)
@click.option(
    "--nnodes", type=int, default=1, show_default=True, help="Machines; each runs keepstep agent."
)
@click.option(
    "--nproc-per-node", "--nproc_per_node", "nproc", type=int, default=1, show_default=True,
    help="Ranks on each node.",
)  # fmt: skip
@click.option(
    "--mode", type=click.Choice(MODES), default="aware", show_default=True,
    help="transparent: SCRIPT knows nothing of Keepstep; its processes move as a whole.",
)  # fmt: skip
@click.option("--spares", type=int, default=0, show_default=True, help="Warm standby processes.")
@click.option(
    "--understudies", type=int, default=0, show_default=True, metavar="N",
    help="Beside each spare, N processes built ahead as presumed ranks.",
)  # fmt: skip
@click.option(
    "--redundancy", type=click.Choice(REDUNDANCY), default="auto", show_default=True,
    help="Keep tensors that no other rank has in the memory of another node.",
)  # fmt: skip
@click.option(
    "--local-nodes", "--local_nodes", type=int, default=None,
    help="Run that many agents here, as if they were nodes.",
)  # fmt: skip
@click.option(
    "--spare-nodes", "--spare_nodes", type=int, default=0, show_default=True,
    help="More such nodes, all of whose slots are spares.",
)  # fmt: skip
@click.option(
    "--stall-timeout", "--stall_timeout", "stall_s", type=float, default=STALL_S_DEFAULT,
    show_default=True, metavar="S", help="A step that stands still that long is a hang.",
)  # fmt: skip
@click.option(
    "--orchestrator", metavar="URL|ID[,...]",
    help="Use this orchestrator (one of these), do not embed one.",
)  # fmt: skip
@click.option(
    "--within", multiple=True, metavar="LABEL",
    help="Ranks stay in the domain of this label of `keepstep agent --label` (repeatable).",
)  # fmt: skip
@policy_options
@click.option("--resume", metavar="DIR", help="Start from a checkpoint, or the newest one in DIR.")
@click.option(
    "--checkpoint-dir", "--checkpoint_dir", metavar="DIR",
    help="Write checkpoints here from time to time; a loss that nothing else covers goes back to "
    "one.",
)  # fmt: skip
@click.option(
    "--checkpoint-interval", "--checkpoint_interval", "interval", default=AUTO, show_default=True,
    metavar="S|auto", help="Seconds between them; auto: from what they cost and --mttf.",
)  # fmt: skip
@click.option(
    "--mttf", "mttf_h", type=float, default=None, metavar="HOURS",
    help="Mean time between failures of the job [default: 6000 / nodes].",
)  # fmt: skip
@click.option(
    "--log-dir", "--log_dir", metavar="DIR",
    help="Logs and checkpoints [default: KEEPSTEP_HOME/jobs/<job>].",
)  # fmt: skip
@click.option("--job-id", "--job_id", metavar="ID", help="Name the job instead of inventing an id.")
@click.option(
    "--inject", multiple=True, metavar="SPEC",
    help="Inject a fault, e.g. kill:rank=2,step=5,point=in_backward (repeatable).",
)  # fmt: skip
@click.option(
    "--net", type=click.Choice(["auto", "tcp"]), default=None, metavar="[=tcp]",
    help="Collectives over Keepstep's network plugin; tcp: even where RDMA devices are.",
)  # fmt: skip
@click.option("--quiet", "-q", is_flag=True, help="Only ranks' output and errors.")
@click.option("--standalone", is_flag=True, help="Accepted as torchrun's; every job is.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    nnodes: int,
    nproc: int,
    mode: Literal["aware", "transparent"],
    spares: int,
    understudies: int,
    redundancy: Literal["auto", "buddy", "parity", "off"],
    local_nodes: int | None,
    spare_nodes: int,
    stall_s: float,
    orchestrator: str | None,
    within: tuple[str, ...],
    rebalance: Literal["never", "when-free"],
    quiet_s: float,
    stragglers: Literal["off", "report", "move"],
    straggler_factor: float,
    straggler_s: float,
    on_divergence: Literal["hold", "fall-back", "continue"],
    resume: str | None,
    checkpoint_dir: str | None,
    interval: str,
    mttf_h: float | None,
    log_dir: str | None,
    job_id: str | None,
    inject: tuple[str, ...],
    net: Literal["auto", "tcp"] | None,
    quiet: bool,
    standalone: bool,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Start SCRIPT with ARGS on every rank, as torchrun does, and keep it going."""
    rank_nodes = check_counts(
        nnodes=nnodes,
        nproc=nproc,
        spares=spares,
        understudies=understudies,
        local_nodes=local_nodes,
        spare_nodes=spare_nodes,
        external=orchestrator is not None,
    )
    check_script(script, module)
    if not 0 < stall_s < 1e9:
        raise UsageError(f"--stall-timeout is {stall_s:g}: it must be above 0")
    check_policy(straggler_factor, straggler_s, quiet_s)
    injects = [parse_inject(text, f"inject-{i}") for i, text in enumerate(inject, 1)]
    if net is not None:
        check_mode(net)
        plugin.ensure()
    where = home()
    prepare_home(where)
    job = job_id or new_job_id(script)
    check_id(job)
    layout = lay_out(local_nodes=rank_nodes, nproc=nproc, spares=spares, spare_nodes=spare_nodes)
    check_injects(injects, layout.world, [node.name for node in layout.nodes])
    resume = check_resume(resume, layout.world)
    if on_divergence == "fall-back" and checkpoint_dir is None:
        raise UsageError(
            "--on-divergence fall-back: there are no checkpoints", hint="--checkpoint-dir DIR"
        )
    periodic = check_periodic(checkpoint_dir, interval, mttf_h, job, resume)
    spec = JobSpec(
        job=job,
        world=layout.world,
        local_world=layout.local_world,
        nodes=layout.nodes,
        spares=layout.spares,
        understudies=understudies,
        redundancy=redundancy,
        mode=mode,
        stall_timeout_ns=int(stall_s * 1e9),
        script=(["-m", script] if module else [script]) + list(args),
        env={MODE: net} if net is not None else {},
        directory=str(Path(log_dir).absolute() if log_dir else where / "jobs" / job),
        resume=resume,
        checkpoints=periodic.directory,
        checkpoint_interval_ns=periodic.interval_ns,
        mttf_ns=periodic.mttf_ns,
        inject=injects,
        policy=Policy(
            within=list(within),
            quiet_ns=int(quiet_s * 1e9),
            rebalance=rebalance,
            stragglers=stragglers,
            straggler_factor=straggler_factor,
            straggler_after_ns=int(straggler_s * 1e9),
            on_divergence=on_divergence,
            hold_ns=hold_ns(stall_s),
        ),
    )
    trouble = parity_trouble(spec) if redundancy == "parity" else ""
    if trouble:
        raise UsageError(
            f"--redundancy parity: {trouble}", hint="--spare-nodes 1, or --redundancy buddy"
        )
    if mode == "transparent" and not (nnodes > 1 and local_nodes is None):
        check_transparent()
    native.store_host_path()  # builds once per torch; here, where the user sees why it takes time
    remote = nnodes > 1 and local_nodes is None
    code = asyncio.run(launch(spec, where, orchestrator, Output(quiet=quiet), remote=remote))
    sys.exit(code)


async def launch(
    spec: JobSpec,
    where: Path,
    orchestrator: str | None,
    output: Output,
    *,
    remote: bool = False,
) -> int:
    """Run `spec` under an external orchestrator, or under one of our own; returns the exit code.
    `remote`: its nodes are other machines, whose agents are started there."""
    if orchestrator is None:
        embedded = await embed(spec.job, where)
        there = Reached(urls=[embedded.url], streams=[embedded.stream], token=embedded.token)
        return await attend(spec, where, there, output, embedded=embedded, agents=not remote)
    there = external(where, orchestrator, os.environ.pop("KEEPSTEP_TOKEN", ""))
    return await attend(spec, where, there, output, agents=not remote)


async def embed(job: str, where: Path, **more: Any) -> Orchestrator:
    log_to(where / "jobs" / job / "orchestrator.log")
    return await Orchestrator.start(where, id=job, embedded=True, **more)


async def attend(
    spec: JobSpec,
    where: Path,
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
            home=where,
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
    trouble = [*preflight.host().trouble, *filter(None, [namespaces.trouble()])]
    if trouble:
        raise UsageError(
            f"--mode transparent cannot work here: {'; '.join(trouble)}",
            hint="keepstep doctor --transparent",
        )


def check_script(script: str, module: bool) -> None:
    if module:
        top = script.partition(".")[0]
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(top) is not None
        except (ImportError, ValueError):
            found = False
        finally:
            sys.path.pop(0)
        if not found:
            raise UsageError(f"no module named {script}", hint="run it where python -m finds it")
        return
    path = Path(script)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UsageError(f"script {script} {what}", hint="the script comes after all options")
    if not os.access(path, os.R_OK):
        raise UsageError(f"script {script} cannot be read")


def check_injects(injects: list[InjectSpec], world: int, nodes: list[str]) -> None:
    for spec in injects:
        if spec.rank >= world:
            raise UsageError(
                f"--inject: there is no rank {spec.rank}", hint=f"ranks are 0 to {world - 1}"
            )
        if spec.node and spec.node not in nodes:
            raise UsageError(
                f"--inject: there is no node {spec.node}", hint=f"nodes: {', '.join(nodes)}"
            )


def new_job_id(script: str) -> str:
    return compose_job_id(script, time.strftime("%Y%m%d-%H%M%S"), secrets.token_hex(2))
