"""Options of a job's policy that every way to start one has."""

from __future__ import annotations

import os
import sys
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
    click.option(
        "--on-divergence", type=click.Choice(("hold", "fall-back", "continue")), default="hold",
        show_default=True,
        help="Numbers differ between ranks: hold, go back to a checkpoint, or train on regardless.",
    ),
)  # fmt: skip


def policy_options(command: F) -> F:
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def hold_ns(stall_s: float) -> int:
    """How long a job stands for a divergence before it ends. Somebody at a terminal sees it, and
    decides; where nobody looks, a job must not stand for ever."""
    watched = sys.stderr.isatty() and not os.environ.get("CI")
    return 0 if watched else int(stall_s * 1e9)


def check_policy(factor: float, after_s: float, quiet_s: float) -> None:
    if not 1.0 < factor <= 1000.0:
        raise UsageError(f"--straggler-factor is {factor:g}: it must be above 1")
    if not 0 < after_s < 1e9:
        raise UsageError(f"--straggler-after is {after_s:g}: seconds, and above 0")
    if not 0 <= quiet_s < 1e9:
        raise UsageError(f"--quiet-after is {quiet_s:g}: seconds, and not below 0")
