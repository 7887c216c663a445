"""`keepstep rehearse`: the user's own script, with faults, before the long run starts.

Two undisturbed runs come first: they say whether the script gives the same numbers twice, without
which nothing could be said about faults, and what there is to disturb. Then the faults of
faultplan.py, several to a run; each run is held against the first one, and verdicts.py says what
that means. Nothing is written where the user's files are (scratch.py).

stdout gets the table (or the JSON), stderr what is going on. Exit code 0: every fault was made and
all are identical; 1: one is not, or the script is not reproducible; 2: it cannot be rehearsed.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep import native
from keepstep.cli import faultplan, rehearsal, rehearse_run, scratch, show
from keepstep.cli.demo import terminated_as_interrupt
from keepstep.cli.faultplan import FaultLine
from keepstep.cli.jobspec import check_script
from keepstep.cli.rehearse_run import RunOutcome, Setup
from keepstep.cli.surroundings import surroundings
from keepstep.cli.verdicts import Played, RehearsalVerdict, judge
from keepstep.errors import UsageError

RANKS_MAX = 64
STEPS = 40
STEPS_QUICK = 24
STEPS_MIN = 6
NOT_IDENTICAL = 1
WORDS_LINES = 12


class VerdictRow(msgspec.Struct, frozen=True, kw_only=True):
    fault: FaultLine
    verdict: RehearsalVerdict


class RehearsalReport(msgspec.Struct, frozen=True, kw_only=True):
    script: list[str]
    ranks: int
    steps: int
    sections: int  # versions at which one is called
    epoch_ends: list[int]
    reproducible: bool
    identical: bool  # every fault was made, and none changed anything
    trouble: RehearsalVerdict | None  # why the script is not reproducible
    faults: list[VerdictRow]
    left_out: list[str]
    not_compared: list[str]  # what two undisturbed runs disagree about already
    runs: int
    seconds: float


@click.command(
    context_settings={"allow_interspersed_args": False},
    short_help="Try faults on a script before its long run, and compare every bit.",
)
@click.option(
    "--nproc-per-node", "--nproc_per_node", "nproc", type=int, default=2, show_default=True,
    help="Ranks; one more process is kept as a spare.",
)  # fmt: skip
@click.option(
    "--steps", type=int, default=None, metavar="N",
    help=f"End each run after N steps [default: {STEPS}, with --quick {STEPS_QUICK}].",
)  # fmt: skip
@click.option("--quick", is_flag=True, help="A few faults in one run instead of all of them.")
@click.option(
    "--stall-timeout", "--stall_timeout", "stall_s", type=float, default=120.0, show_default=True,
    metavar="S", help="A step that stands still that long is a hang.",
)  # fmt: skip
@click.option(
    "--run-limit", "limit_s", type=float, default=900.0, show_default=True, metavar="S",
    help="Give a run up after so long.",
)  # fmt: skip
@click.option("--in-place", is_flag=True, help="Let the script write where it always does.")
@click.option("--keep", is_flag=True, help="Keep the scratch folder: logs, traces, written files.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module name, as in python -m.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def rehearse(
    nproc: int,
    steps: int | None,
    quick: bool,
    stall_s: float,
    limit_s: float,
    in_place: bool,
    keep: bool,
    as_json: bool,
    module: bool,
    script: str,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT with ARGS undisturbed and with faults, and compare all state and all results."""
    steps = steps if steps is not None else STEPS_QUICK if quick else STEPS
    if not 1 <= nproc <= RANKS_MAX:
        raise UsageError(f"--nproc-per-node is {nproc}: it must be 1 to {RANKS_MAX}")
    if steps < STEPS_MIN:
        raise UsageError(f"--steps is {steps}: it must be {STEPS_MIN} or more")
    for name, value in (("--stall-timeout", stall_s), ("--run-limit", limit_s)):
        if not 0 < value < 1e9:
            raise UsageError(f"{name} is {value:g}: it must be above 0")
    check_script(script, module)
    own = {name for option in click.get_current_context().command.params for name in option.opts}
    for word in sorted(own.intersection(args)):
        say(f"note: {word} stands behind the script's name, so it is given to the script")
    native.store_host_path()  # builds once per torch; here, where the user sees why it takes time
    words = (["-m", script] if module else [script]) + list(args)
    with terminated_as_interrupt(), _scratch(script, module, args, in_place, keep) as place:
        setup = Setup(place, words, world=nproc, steps_max=steps, stall_s=stall_s, limit_s=limit_s)
        report = _rehearse(setup, quick=quick)
    if as_json:
        show.print_json(report)
    else:
        print_report(report)
    if not report.identical:
        sys.exit(NOT_IDENTICAL)


@contextmanager
def _scratch(
    script: str, module: bool, args: tuple[str, ...], in_place: bool, keep: bool
) -> Iterator[scratch.Scratch]:
    place = scratch.prepare(script, module, args, in_place=in_place, environ=surroundings().environ)
    if place.way == "copy":
        say(f"runs in copies of {place.cwd}: files elsewhere are not protected from the script")
    if place.way == "in-place":
        say("--in-place: the script writes where it always does")
    for argument in place.folders.open if place.way != "in-place" else ():
        say(f"warning: {argument} leads to a place that cannot be protected from the script")
    try:
        yield place
    finally:
        if keep:
            say(f"kept: {place.base}")
        else:
            scratch.remove(place.base)


# --------------------------------------------------------------------------- the runs


def _rehearse(setup: Setup, *, quick: bool) -> RehearsalReport:
    began_s = time.monotonic()
    say(f"undisturbed, 1 of 2: {setup.world} ranks, at most {setup.steps_max} steps")
    reference = _undisturbed(setup)
    found = faultplan.shape(reference)
    say(f"undisturbed, 2 of 2: {found.steps} steps")
    why = rehearsal.reproducible(reference, _undisturbed(setup))
    trouble = None
    rows: list[VerdictRow] = []
    left_out: list[str] = []
    if why.trouble is not None:
        detail = why.trouble.text()
        trouble = RehearsalVerdict(
            word="DIFFERS",
            detail=detail,
            cure=rehearsal.cure_unseeded(why),
            differences=[why.trouble],
        )
        say(f"two undisturbed runs differ already: {detail}")
    else:
        plan = faultplan.plan(found, setup.world, quick=quick)
        left_out = plan.left_out
        if not plan.runs:
            raise UsageError(
                f"the script makes {found.steps} steps: too few for a fault and what follows it",
                hint="rehearse it with more data, more epochs or a larger --steps",
            )
        rows = _disturbed(setup, plan.runs, reference, why.ignored, quick=quick)
    ignored = sorted(f"{g} {n}" for g, n in why.ignored) if trouble is None else []
    return RehearsalReport(
        script=setup.words,
        ranks=setup.world,
        steps=found.steps,
        sections=len(found.sections),
        epoch_ends=list(found.ends),
        reproducible=trouble is None,
        identical=bool(rows) and all(row.verdict.word == "identical" for row in rows),
        trouble=trouble,
        faults=rows,
        left_out=left_out,
        not_compared=ignored,
        runs=setup.count,
        seconds=round(time.monotonic() - began_s, 1),
    )


def _undisturbed(setup: Setup) -> rehearsal.RunTrace:
    played = rehearse_run.play(setup, [])
    if played.code != 0:
        raise UsageError(
            f"the script does not run undisturbed: {_why(played)}",
            hint=_last_words(played) or "see it fail with keepstep run",
        )
    if not played.trace.steps():
        raise UsageError(
            "the script made no step that Keepstep protects",
            hint="attach it: docs/guides/quickstart.md shows the lines to change",
        )
    return played.trace


def _disturbed(
    setup: Setup,
    runs: list[list[FaultLine]],
    reference: rehearsal.RunTrace,
    ignored: rehearsal.Ignored,
    *,
    quick: bool,
) -> list[VerdictRow]:
    verdicts: dict[str, RehearsalVerdict] = {}
    faults = [fault for run in runs for fault in run]
    left = list(runs)
    while left:
        run = left.pop(0)
        for fault in run:
            say(f"{fault.what}, rank {fault.rank}, step {fault.step}")
        played = rehearse_run.play(setup, run)
        differences = rehearsal.compare(reference, played.trace, ignored)
        judged = judge(
            run,
            Played(
                fired=played.fired,
                incidents=played.incidents,
                differences=differences,
                good=played.code == 0,
                why="" if played.code == 0 else _why(played),
                refusal=_refusal(played),
            ),
            quick=quick,
        )
        verdicts |= judged.verdicts
        left += judged.again
        for fault in run:
            if fault.id in judged.verdicts:
                one = judged.verdicts[fault.id]
                say(f"  {fault.what}, rank {fault.rank}: {one.word}")
    return [VerdictRow(fault=fault, verdict=verdicts[fault.id]) for fault in faults]


def _why(played: RunOutcome) -> str:
    if played.code is None:
        return "it did not end in time (--run-limit)"
    reason = played.view.reason if played.view is not None else ""
    return " ".join(reason.split()) or f"it ended with code {played.code}"


_REFUSAL = re.compile(r"UsageError: (.*?)(?:\n(?!hint)|\Z)", re.DOTALL)


def _refusal(played: RunOutcome) -> str:
    """What Keepstep refused, if that ended the run."""
    if played.code == 0 or played.view is None:
        return ""
    said = _REFUSAL.search(played.view.traceback) or _REFUSAL.search(played.view.reason)
    return " ".join(said.group(1).split()) if said else ""


def _last_words(played: RunOutcome) -> str:
    lines = [line for line in played.words.splitlines() if line.strip()]
    return "its last words:\n" + "\n".join(lines[-WORDS_LINES:]) if lines else ""


# --------------------------------------------------------------------------- the report


def print_report(report: RehearsalReport) -> None:
    console = Console(highlight=False, width=None if sys.stdout.isatty() else show.PIPE_COLUMNS)
    if report.trouble is not None:
        console.print(Text(f"not reproducible by itself: {report.trouble.detail}"))
        console.print(Text(f"hint: {report.trouble.cure}"))
        return
    table = Table(title=f"{report.ranks} ranks, {report.steps} steps", title_justify="left")
    for name in ("fault", "rank", "step", "verdict", "first difference, or why"):
        table.add_column(name, justify="right" if name in ("rank", "step") else "left")
    for row in report.faults:
        fault, verdict = row.fault, row.verdict
        cells = [fault.what, str(fault.rank), str(fault.step), verdict.word, verdict.detail]
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    for text in report.left_out:
        console.print(Text(f"left out: {text}"))
    if report.not_compared:
        console.print(Text(f"not compared, since it differs by itself: {_some(report)}"))
    for cure in dict.fromkeys(row.verdict.cure for row in report.faults if row.verdict.cure):
        console.print(Text(f"hint: {cure}"))
    good = sum(row.verdict.word == "identical" for row in report.faults)
    console.print(Text(f"identical: {good} of {len(report.faults)} ({report.seconds:.0f} s)"))


def _some(report: RehearsalReport) -> str:
    names = report.not_compared
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def say(text: str) -> None:
    show.words(f"keepstep rehearse: {text}")
