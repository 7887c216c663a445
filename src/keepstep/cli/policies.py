"""Options of a job's policy that every way to start one has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from keepstep.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])
QUIET_S = 600.0
OPTIONS = (
    click.option(
        "--rebalance", type=click.Choice(("never", "when-free")), default="never",
        show_default=True,
        help="Move ranks that are not where they belong to better places, at a quiet time.",
    ),
    click.option(
        "--quiet-after", "quiet_s", type=float, default=QUIET_S, show_default=True, metavar="S",
        help="It is quiet when nothing has happened for so long.",
    ),
    click.option(
        "--stragglers", type=click.Choice(("report", "move", "off")), default="report",
        show_default=True, help="A rank that holds the others up: say so, or move it to a spare.",
    ),
    click.option(
        "--straggler-factor", type=float, default=1.5, show_default=True, metavar="X",
        help="It takes X times the median of the ranks for what it does alone.",
    ),
    click.option(
        "--straggler-after", "straggler_s", type=float, default=60.0, show_default=True,
        metavar="S", help="And has done so for so long.",
    ),
)  # fmt: skip


def policy_options(command: F) -> F:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def check_policy(factor: float, after_s: float, quiet_s: float) -> None:
    if not 1.0 < factor <= 1000.0:
        raise UsageError(f"--straggler-factor is {factor:g}: it must be above 1")
    if not 0 < after_s < 1e9:
        raise UsageError(f"--straggler-after is {after_s:g}: seconds, and above 0")
    if not 0 <= quiet_s < 1e9:
        raise UsageError(f"--quiet-after is {quiet_s:g}: seconds, and not below 0")
