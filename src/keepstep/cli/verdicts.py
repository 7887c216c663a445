"""What a run with faults says about each of them (pure).

A difference belongs to the fault after which it shows. When several faults came before it, the last
of them is the likeliest, but an effect may show late; so each is then made again in a run of its
own, and so is every fault that came after the difference. With `quick` there is no second run: the
last one is named, and those after it were not rehearsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from keepstep.cli import rehearsal
from keepstep.cli.faultplan import FaultLine
from keepstep.cli.rehearsal import TraceDifference
from keepstep.model.views import IncidentView

DIFFERENCES_MAX = 8

Word = Literal[
    "identical",
    "DIFFERS",
    "refused",
    "stopped by a witness",
    "not resolved",
    "not reached",
    "not run",
]


class RehearsalVerdict(msgspec.Struct, frozen=True, kw_only=True):
    word: Word
    detail: str = ""
    cure: str = ""
    differences: list[TraceDifference] = []  # the first few, in step order
    outcome: str = ""  # of the incident
    pause_ms: float = 0.0


class Played(NamedTuple):
    """A run with faults."""

    fired: frozenset[str]
    incidents: dict[str, IncidentView]
    differences: list[TraceDifference]
    good: bool  # the job ended well
    why: str  # ... if not
    refusal: str = ""  # a refusal of Keepstep's that ended it, with its hint


class Judgement(NamedTuple):
    verdicts: dict[str, RehearsalVerdict]
    again: list[list[FaultLine]]  # runs to be made


def judge(faults: Sequence[FaultLine], played: Played, *, quick: bool) -> Judgement:
    verdicts: dict[str, RehearsalVerdict] = {}
    again: list[list[FaultLine]] = []
    first = rehearsal.headline(played.differences) if played.differences else None
    reached = [f for f in faults if f.id in played.fired]
    suspects = [f for f in reached if first is not None and f.step <= first.step]
    broken = _broken(reached, played)
    later: list[FaultLine] = []  # behind something that went wrong: nothing is known of them
    wrong_from = min(
        [f.step for f in (broken, suspects[-1] if suspects else None) if f is not None],
        default=None,
    )
    for fault in faults:
        if fault in suspects and len(suspects) > 1 and not quick:
            again.append([fault])
        elif suspects and fault == suspects[-1]:
            verdicts[fault.id] = _differs(fault, played)
        elif fault == broken:
            verdicts[fault.id] = _unresolved(fault, played)
        elif wrong_from is not None and fault.step > wrong_from:
            later.append(fault)
        elif fault not in reached:
            verdicts[fault.id] = RehearsalVerdict(word="not reached", detail=_not_reached(played))
        elif played.differences and not suspects:
            verdicts[fault.id] = _differs(fault, played)
        else:
            verdicts[fault.id] = _identical(fault, played)
    if later and quick:
        verdicts |= {
            f.id: RehearsalVerdict(word="not run", detail="after what went wrong before it")
            for f in later
        }
    elif later:
        again.append(later)
    return Judgement(verdicts, again)


def _broken(reached: list[FaultLine], played: Played) -> FaultLine | None:
    """The first whose incident did not end well; if the job did not and all of them did, the
    last."""
    for fault in reached:
        incident = played.incidents.get(fault.id)
        if incident is None or incident.outcome != "RESOLVED":
            return fault
    return reached[-1] if reached and not played.good else None


def _incident(fault: FaultLine, played: Played) -> tuple[str, float]:
    incident = played.incidents.get(fault.id)
    return (incident.outcome, incident.pause_ms) if incident is not None else ("", 0.0)


def _identical(fault: FaultLine, played: Played) -> RehearsalVerdict:
    outcome, pause_ms = _incident(fault, played)
    return RehearsalVerdict(word="identical", outcome=outcome, pause_ms=round(pause_ms, 1))


def _differs(fault: FaultLine, played: Played) -> RehearsalVerdict:
    outcome, pause_ms = _incident(fault, played)
    found = played.differences
    return RehearsalVerdict(
        word="DIFFERS",
        detail=rehearsal.headline(found).text(),
        cure=rehearsal.cure(found),
        differences=found[:DIFFERENCES_MAX],
        outcome=outcome,
        pause_ms=round(pause_ms, 1),
    )


def _unresolved(fault: FaultLine, played: Played) -> RehearsalVerdict:
    outcome, pause_ms = _incident(fault, played)
    reason = played.incidents[fault.id].reason if fault.id in played.incidents else ""
    word: Word = "not resolved"
    detail = f"{outcome}: {reason}" if outcome not in ("", "RESOLVED") else played.why or reason
    if str(outcome) == "DIVERGED":
        word, detail = "stopped by a witness", reason
    elif played.refusal:
        word, detail = "refused", played.refusal
    return RehearsalVerdict(word=word, detail=detail, outcome=outcome, pause_ms=round(pause_ms, 1))


def _not_reached(played: Played) -> str:
    return f"it never happened: {played.why}" if played.why else "the run never came to its point"
