"""Who is to blame, and what is to be done about it. Pure functions: (decision, reason).

Two questions need care, because effects look like causes:

* After an abort every live rank reports. A rank that raised because its neighbour vanished looks
  exactly like one with a bug, so a user's exception counts only if nobody died and no device
  failed. The first one by arrival is the one shown.
* In a hang every rank stands still, nearly all of them innocently inside a collective. The
  culprit is the one that is stopped, or did less than the others, or is the only one computing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from keepstep.model.agent_messages import Stalled
from keepstep.model.messages import Report


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the reports of all live ranks lead to."""

    what: Literal["fence", "user", "decide", "fell_back"]
    reason: str
    ranks: tuple[int, ...] = ()  # fence: ranks with a broken device
    tick: int = 0
    decision: Literal["RETRY", "COMMIT"] = "RETRY"
    traceback: str = ""


def judge_reports(
    reports: Sequence[tuple[int, Report]],
    victims: Sequence[int],
    sticky_tick: int | None,
) -> Verdict:
    """`reports` in order of arrival, one per live rank. `sticky_tick` was decided before."""
    broken = tuple(sorted(rank for rank, report in reports if report.error_kind == "device"))
    if broken:
        return Verdict(
            what="fence", ranks=broken, reason=f"device error on {name_ranks(broken)}: replace"
        )
    user = [(rank, report) for rank, report in reports if report.error_kind == "user"]
    if user and not victims:
        rank, report = user[0]
        return Verdict(
            what="user",
            traceback=report.error,
            reason=f"rank {rank} raised {headline(report.error)}; "
            "no rank died and no device failed before it",
        )
    ended = {rank: report.tick for rank, report in reports if report.done}
    inside = [(rank, report) for rank, report in reports if report.computing or report.in_fence]
    busy = {rank: report.tick for rank, report in inside if not report.done}
    if uneven := uneven_steps(ended, busy):
        return Verdict(what="user", reason=uneven)
    return _decide_tick(reports, sticky_tick)


def _decide_tick(reports: Sequence[tuple[int, Report]], sticky_tick: int | None) -> Verdict:
    tick = max(report.tick for _, report in reports)
    if sticky_tick == tick + 1 and all(report.in_fence for _, report in reports):
        # Decided COMMIT, then the only ranks that had applied it died: those waiting in the
        # fence can still apply, and the decision on record stays the only one.
        tick = sticky_tick
    behind = sorted(rank for rank, report in reports if report.tick == tick - 1)
    torn = sorted(
        rank
        for rank, report in reports
        if report.tick < tick - 1 or (report.tick == tick - 1 and not report.in_fence)
    )
    if torn:
        return Verdict(
            what="fell_back",
            tick=tick,
            reason=f"{name_ranks(torn)} cannot reach tick {tick}: not waiting in its fence",
        )
    if behind:
        return Verdict(
            what="decide",
            tick=tick,
            decision="COMMIT",
            reason=f"fence {tick - 1} was passed, {name_ranks(behind)} waiting in it can apply",
        )
    return Verdict(
        what="decide",
        tick=tick,
        decision="RETRY",
        reason=f"all live ranks stand at tick {tick} and nobody passed its fence",
    )


def hang_culprits(
    stalled: Mapping[int, Stalled], stall_timeout_ns: int
) -> tuple[tuple[int, ...], str]:
    """Every live rank that should progress is in `stalled`. Nobody to blame: ((), why)."""
    frozen = tuple(
        rank
        for rank, seen in sorted(stalled.items())
        if seen.stopped or seen.heartbeat_age_ns > stall_timeout_ns
    )
    if frozen:
        return frozen, f"{name_ranks(frozen)}: stopped, or no heartbeat for the stall timeout"
    done = {rank: (seen.tick, seen.marks) for rank, seen in stalled.items()}
    least = min(done.values())
    behind = tuple(sorted(rank for rank, marks in done.items() if marks == least))
    if len(behind) < len(done):
        where = ", ".join(sorted({stalled[rank].where for rank in behind}))
        return behind, f"{name_ranks(behind)} did less than the others (in {where})"
    busy = tuple(rank for rank, seen in sorted(stalled.items()) if seen.cpu_busy)
    if len(busy) == 1:
        return busy, f"rank {busy[0]} is the only one that computes while the others wait"
    return (), "all ranks stand still at the same place: no culprit can be told"


def uneven_steps(ended: Mapping[int, int], busy: Mapping[int, int]) -> str:
    """`ended`: the ticks at which scripts have ended; `busy`: those of ranks inside a step. Whoever
    began one where another script ended can never finish it. "" if nobody did."""
    begun = [rank for rank, tick in sorted(busy.items()) if ended and tick >= min(ended.values())]
    if not begun:
        return ""
    return (
        f"the script of {name_ranks(sorted(ended))} has ended, and {name_ranks(begun)} began "
        "another step (hint: every rank must make the same number of steps)"
    )


def group_mismatch(groups: Mapping[int, Mapping[str, Sequence[int]]]) -> str:
    """`groups`: rank -> the process groups it is in, with their ranks. "" if all agree: a
    group exists on each of its ranks, with the same ranks."""
    for rank, mine in sorted(groups.items()):
        for name, ranks in sorted(mine.items()):
            others = {other: groups[other].get(name) for other in ranks if other in groups}
            for other, theirs in sorted(others.items()):
                if theirs is None:
                    return (
                        f"rank {rank} has a process group {name!r} with {name_ranks(ranks)}, "
                        f"and rank {other} does not have it"
                    )
                if list(theirs) != list(ranks):
                    return (
                        f"process group {name!r} has {name_ranks(ranks)} on rank {rank} and "
                        f"{name_ranks(theirs)} on rank {other}"
                    )
    return ""


def headline(error: str) -> str:
    """The line of a traceback that says what it is: the last one that is no hint."""
    lines = [line for line in error.strip().splitlines() if not line.startswith("hint:")]
    return lines[-1] if lines else "an exception"


def name_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "ranks " + ", ".join(str(rank) for rank in ranks)
