"""Operator commands: look at jobs, move their ranks, break them on purpose.

Each finds its orchestrator through KEEPSTEP_HOME/orchestrators, or asks the one that is named, with
an operator's token; `--job` is needed only when several jobs are live. stdout is data (JSON word
for word with --json), stderr is words.
"""

from __future__ import annotations

import functools
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from keepstep.adapters.store import sqlite
from keepstep.adapters.store.chain import VerifyResult
from keepstep.cli import find, moves, past_jobs, show
from keepstep.cli.layout import check_inject
from keepstep.cli.surroundings import home
from keepstep.errors import PermanentError, TransientError, UsageError
from keepstep.model.job import POINTS, InjectSpec
from keepstep.model.views import IncidentView, JobView
from keepstep.orchestrator.main import ENDED
from keepstep.orchestrator.overview import job_lines, node_lines, spare_lines
from keepstep.orchestrator.requests import (
    CancelRequest,
    DrainRequest,
    MigrateRequest,
    Ok,
    ProceedRequest,
    RebalanceRequest,
    TaintRequest,
    UntaintRequest,
)

F = TypeVar("F", bound=Callable[..., Any])

LEDGER_BROKEN = 1


def which_options(command: F) -> F:
    """--job, --orchestrator and --token-file become the argument `which`."""

    @functools.wraps(command)
    def told(
        *args: Any,
        job: str | None,
        orchestrator: str | None,
        token_file: Path | None,
        **kwargs: Any,
    ) -> Any:
        token = find.token_in(token_file) if orchestrator is not None else ""
        which = find.Which(job=job, orchestrator=orchestrator, token=token)
        return command(*args, which=which, **kwargs)

    for option in (
        click.option(
            "--token-file", type=click.Path(path_type=Path), metavar="FILE",
            help="Holds a token of `keepstep token create --operator` [default: KEEPSTEP_TOKEN].",
        ),
        click.option(
            "--orchestrator", metavar="ID|URL", help="Which one [default: all of this machine]."
        ),
        click.option("--job", metavar="ID", help="Which job, when several are live."),
    ):  # fmt: skip
        told = option(told)
    return cast(F, told)


def store_option(command: F) -> F:
    return click.option(
        "--store", default="", envvar="KEEPSTEP_STORE", metavar="URL",
        help="Look for jobs that nobody runs here in this shared store [default: KEEPSTEP_STORE].",
    )(command)  # fmt: skip


def json_option(command: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


@click.command()
@which_options
@store_option
@click.option("--all", "everything", is_flag=True, help="Ended jobs too.")
@json_option
def status(which: find.Which, store: str, everything: bool, as_json: bool) -> None:
    """Show jobs: ranks, spares, nodes. Live ones, else the latest that ended."""
    views = [one.view for one in chosen(which, everything, store)]
    if as_json:
        show.print_json(views)
    elif views:
        show.print_jobs(views)
    else:
        show.words(f"no jobs in {home()}")


@click.command()
@which_options
@store_option
@click.option("--all", "everything", is_flag=True, help="Ended jobs too.")
@json_option
def jobs(which: find.Which, store: str, everything: bool, as_json: bool) -> None:
    """List jobs, one line each. Live ones, else the latest that ended."""
    lines = job_lines([one.view for one in chosen(which, everything, store)])
    if as_json:
        show.print_json(lines)
    elif lines:
        show.print_job_lines(lines)
    else:
        show.words(f"no jobs in {home()}")


@click.command()
@which_options
@json_option
def nodes(which: find.Which, as_json: bool) -> None:
    """List nodes of live jobs: where they are, what runs there, why they are tainted."""
    lines = node_lines(_live(which))
    if as_json:
        show.print_json(lines)
    elif lines:
        show.print_nodes(lines)
    else:
        show.words("no nodes")


def _live(which: find.Which) -> list[JobView]:
    if which.job is None:
        return [one.view for one in find.live_jobs(home(), which)]
    return [find.one_job(home(), which).view]


@click.command()
@which_options
@store_option
@click.option("--all", "everything", is_flag=True, help="Those of ended jobs too.")
@json_option
def incidents(which: find.Which, store: str, everything: bool, as_json: bool) -> None:
    """Show incidents, newest first: what happened, how long it took, what it cost."""
    found = [incident for one in chosen(which, everything, store) for incident in one.incidents]
    found.sort(key=lambda incident: incident.opened_at_ns, reverse=True)
    if as_json:
        show.print_json(found)
    elif found:
        show.print_incidents(found)
    else:
        show.words("no incidents")


def chosen(which: find.Which, everything: bool, store: str = "") -> list[past_jobs.Past]:
    """Live jobs, else the latest that ended; all of them, or the named one."""
    where, job = home(), which.job
    known: list[past_jobs.Past] = []
    try:
        for one in find.all_jobs(where, which):
            known.append(past_jobs.Past(view=one.view, incidents=_incidents(one), at_ns=0))
    except TransientError as error:
        if not store:
            raise
        show.words(f"{error.message}; reading the store")
        known = []
    else:
        if which.orchestrator and not store:
            return _among(known, job)  # what this machine remembers was not asked for
    names = [one.view.job for one in known]
    if job is not None:
        return _among(known if job in names else past_jobs.past_jobs(where, store=store), job)
    if everything:
        return known + past_jobs.past_jobs(where, store=store, skip=names)
    live = [one for one in known if one.view.state not in ENDED]
    return live or known[-1:] or past_jobs.past_jobs(where, store=store, latest=True)


def _among(known: list[past_jobs.Past], job: str | None) -> list[past_jobs.Past]:
    found = [one for one in known if job in (None, one.view.job)]
    if job is not None and not found:
        raise UsageError(f"no such job: {job}", hint="keepstep status --all lists all jobs")
    return found


def _incidents(one: find.FoundOrchestrator) -> list[IncidentView]:
    return one.client().get(f"/v1/jobs/{one.view.job}/incidents", list[IncidentView])


def wait_option(command: F) -> F:
    text = "Return at once instead of waiting for the outcome."
    return click.option("--no-wait", is_flag=True, help=text)(command)


def plan_option(command: F) -> F:
    text = "Print what would be done, and why; change nothing."
    return click.option("--plan-only", is_flag=True, help=text)(command)


@click.command()
@click.option("--rank", "ranks", type=int, multiple=True, required=True, help="Repeatable.")
@click.option("--reason", default="requested", show_default=True)
@wait_option
@plan_option
@which_options
@json_option
def migrate(
    ranks: tuple[int, ...],
    reason: str,
    no_wait: bool,
    plan_only: bool,
    which: find.Which,
    as_json: bool,
) -> None:
    """Move a rank to a spare while training goes on, and wait for the outcome."""
    body = MigrateRequest(ranks=list(ranks), reason=reason)
    found = find.one_job(home(), which)
    if plan_only:
        moves.plan(found, "migrate", body, as_json=as_json)
        return
    said = f"moving rank {', '.join(map(str, ranks))}"
    moves.ask(found, "migrate", body, said, wait=not no_wait, as_json=as_json)


@click.command()
@click.argument("node")
@click.option("--reason", default="drain", show_default=True)
@wait_option
@plan_option
@which_options
@json_option
def drain(
    node: str, reason: str, no_wait: bool, plan_only: bool, which: find.Which, as_json: bool
) -> None:
    """Move every rank off NODE, start nothing there any more, and wait for the outcome."""
    body = DrainRequest(node=node, reason=reason)
    found = find.one_job(home(), which)
    if plan_only:
        moves.plan(found, "drain", body, as_json=as_json)
        return
    moves.ask(found, "drain", body, f"draining {node}", wait=not no_wait, as_json=as_json)


@click.command()
@wait_option
@plan_option
@which_options
@json_option
def rebalance(no_wait: bool, plan_only: bool, which: find.Which, as_json: bool) -> None:
    """Move ranks that an emergency has left in bad places to better ones, one at a time."""
    body = RebalanceRequest()
    found = find.one_job(home(), which)
    if plan_only:
        moves.plan(found, "rebalance", body, as_json=as_json)
        return
    moves.ask(found, "rebalance", body, "rebalancing", wait=not no_wait, as_json=as_json)


@click.command()
@which_options
@json_option
def proceed(which: find.Which, as_json: bool) -> None:
    """Let a job go on that stands because numbers differ between its ranks.

    The ledger keeps it as an exception to the guarantee."""
    _ask(which, "proceed", ProceedRequest(), as_json, "goes on with numbers that differ")


@click.command()
@click.option("--now", is_flag=True, help="Do not wait for a checkpoint.")
@which_options
@json_option
def stop(now: bool, which: find.Which, as_json: bool) -> None:
    """End a job. One that writes checkpoints writes one of the step it is at first."""
    body = CancelRequest(reason="stopped by an operator", checkpoint=not now)
    _ask(which, "cancel", body, as_json, "ends", follow="status")


@click.command()
@click.argument("target")
@click.option("--reason", required=True, metavar="TEXT")
@which_options
@json_option
def taint(target: str, reason: str, which: find.Which, as_json: bool) -> None:
    """Mark a node (n1) or a slot (n1/0) as not to be trusted; its ranks move away."""
    _ask(which, "taint", TaintRequest(target=target, reason=reason), as_json, f"tainted {target}")


@click.command()
@click.argument("target")
@which_options
@json_option
def untaint(target: str, which: find.Which, as_json: bool) -> None:
    """Trust TARGET again: spares may start there."""
    _ask(which, "untaint", UntaintRequest(target=target), as_json, f"untainted {target}")


@click.command()
@which_options
@json_option
def spares(which: find.Which, as_json: bool) -> None:
    """List the spares of live jobs."""
    lines = spare_lines(_live(which))
    if as_json:
        show.print_json(lines)
    elif lines:
        show.print_spares(lines)
    else:
        show.words("no spares")


@click.command()
@click.argument("action", type=click.Choice(["kill", "stop", "kill-node", "device-error"]))
@click.option("--rank", type=int, default=-1, help="Victim.")
@click.option("--node", default="", help="Victim of kill-node.")
@click.option("--at-step", type=int, default=-1, help="In this step, instead of now.")
@click.option("--at-point", type=click.Choice(POINTS), default=None, help="Where in that step.")
@click.option("--seconds", type=float, default=0.0, help="stop: continue after that time.")
@which_options
@json_option
def inject(
    action: Any,
    rank: int,
    node: str,
    at_step: int,
    at_point: str | None,
    seconds: float,
    which: find.Which,
    as_json: bool,
) -> None:
    """Break something on purpose, to see that training goes on."""
    if at_point is not None and at_step < 0:
        raise UsageError("--at-point needs --at-step", hint="for example --at-step 100")
    spec = InjectSpec(
        id=f"inject-{secrets.token_hex(4)}",
        action=action,
        rank=rank,
        node=node,
        step=at_step,
        point=at_point or "before_forward",
        seconds=seconds,
    )
    _ask(
        which, "inject", check_inject(spec), as_json, f"{action} asked for", answer={"id": spec.id}
    )


@click.group()
def ledger() -> None:
    """Look after ledgers."""


def _verified(named: str) -> VerifyResult:
    """A file that is no ledger at all is as broken as a tampered one."""
    shown = named
    try:
        if "://" not in named:
            return sqlite.verify(Path(named))
        from keepstep.adapters.store import postgres, postgres_session

        shown = postgres_session.shown(named)
        return postgres.verify(named)
    except ImportError as error:
        raise UsageError(f"{error}", hint="pip install 'keepstep[postgres]'") from error
    except PermanentError as error:
        return VerifyResult(
            path=shown,
            ok=False,
            records=0,
            broken_seq=None,
            problem=error.message,
            last_hash="",
        )


@ledger.command("verify")
@click.argument("ledger", required=False)
@json_option
def ledger_verify(ledger: str | None, as_json: bool) -> None:
    """Check the hash chain of LEDGER (a file, or a store's URL), or of all in KEEPSTEP_HOME."""
    named = [ledger] if ledger is not None else [str(path) for path in past_jobs.ledgers(home())]
    results = [_verified(one) for one in named]
    if as_json:
        show.print_json(results)
    else:
        for result in results:
            verdict = f"ok, {result.records} records" if result.ok else f"BROKEN: {result.problem}"
            sys.stdout.write(f"{result.path}: {verdict}\n")
        if not results:
            show.words(f"no ledgers in {home()}")
    if not all(result.ok for result in results):
        sys.exit(LEDGER_BROKEN)


def _ask(
    which: find.Which,
    verb: str,
    body: Any,
    as_json: bool,
    said: str,
    answer: Any = None,
    follow: str = "incidents",
) -> None:
    found = find.one_job(home(), which)
    found.client().post(f"/v1/jobs/{found.view.job}/{verb}", body, Ok)
    if as_json:
        show.print_json({"job": found.view.job, "ok": True, **(answer or {})})
    else:
        show.words(f"{found.view.job}: {said}; follow it with keepstep {follow}")
