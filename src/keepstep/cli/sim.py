"""`keepstep sim`: the control plane in simulated worlds."""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import click

from keepstep.errors import UsageError
from keepstep.sim.many import Summary, Task, failure_lines, run_many
from keepstep.sim.plans.scenario import find_plan
from keepstep.sim.plans.table import cells
from keepstep.sim.run_world import Result, commit, run_plan

VIOLATED_EXIT = 1


@click.command()
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N")
@click.option("--count", type=click.IntRange(min=1), metavar="K", help="Worlds N, N+1, ... N+K-1.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    metavar="S",
    help="As many worlds as fit into S seconds.",
)
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, metavar="J")
@click.option(
    "--scenario",
    default="",
    metavar="NAME",
    help="PHASE/MIGRATION/ACTOR/FAULT, the name of a story, or `table` for every cell.",
)
@click.option("--trace", is_flag=True, help="One line per transition, one column per rank.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def sim(
    seed: int,
    count: int | None,
    seconds: float | None,
    jobs: int,
    scenario: str,
    trace: bool,
    as_json: bool,
) -> int:
    """Run the control plane in worlds made from seeds, and check what must hold.

    The same seed and the same version give the same history, down to its digest. Exit code 1: a
    world broke a rule; how to replay it is printed.
    """
    several = count is not None or seconds is not None or scenario == "table"
    if not several:
        name, plan = find_plan(seed, scenario)
        result = run_plan(plan, name, click.echo if trace else None, given=scenario)
        _print_one(result, as_json)
        return VIOLATED_EXIT if result.violation else 0
    if trace:
        raise UsageError("--trace shows one world", hint="leave out --count and --seconds")
    summary = run_many(_tasks(seed, count, seconds, scenario), jobs, seconds, _report)
    _print_many(summary, as_json)
    return VIOLATED_EXIT if summary.failures else 0


def _tasks(
    seed: int, count: int | None, seconds: float | None, scenario: str
) -> itertools.chain[Task]:
    if count is not None:
        seeds: Any = range(seed, seed + count)
    else:
        seeds = itertools.count(seed) if seconds is not None else [seed]
    if scenario == "table":
        names = ["/".join(cell) for cell in cells()]
        return itertools.chain.from_iterable(((s, name) for name in names) for s in seeds)
    find_plan(seed, scenario)  # refuse a bad name before any process is started
    return itertools.chain((s, scenario) for s in seeds)


def _report(result: Result) -> None:
    if result.violation:
        click.echo(failure_lines(result), err=True)


def _print_one(result: Result, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(_as_dict(result)))
        return
    click.echo(
        f"seed {result.seed} ({result.scenario}): {result.outcome} after {result.virtual_s:.1f} "
        f"virtual seconds, {result.events} events, {result.inputs} inputs of the core"
    )
    for fault in result.fired:
        click.echo(f"  fault: {fault}")
    click.echo(f"digest {result.digest}")
    if result.violation:
        sys.stdout.flush()
        click.echo(failure_lines(result), err=True)


def _as_dict(result: Result) -> dict[str, Any]:
    return {
        "seed": result.seed,
        "scenario": result.scenario,
        "commit": commit(),
        "outcome": result.outcome,
        "events": result.events,
        "inputs": result.inputs,
        "virtual_s": round(result.virtual_s, 3),
        "digest": result.digest,
        "faults": list(result.fired),
        "violation": result.violation,
    }


def _print_many(summary: Summary, as_json: bool) -> None:
    rate = summary.worlds / summary.seconds if summary.seconds else 0.0
    if as_json:
        click.echo(
            json.dumps(
                {
                    "commit": commit(),
                    "worlds": summary.worlds,
                    "seconds": round(summary.seconds, 1),
                    "worlds_per_s": round(rate, 1),
                    "events_median": summary.events_median,
                    "outcomes": dict(sorted(summary.outcomes.items())),
                    "without_fault": summary.unfired,
                    "failures": [_as_dict(result) for result in summary.failures],
                }
            )
        )
        return
    ends = ", ".join(f"{count} {name}" for name, count in sorted(summary.outcomes.items()))
    click.echo(
        f"{summary.worlds} worlds in {summary.seconds:.1f} s ({rate:.1f} a second), median "
        f"{summary.events_median} events: {ends}; {len(summary.failures)} broke a rule"
    )
