"""A rehearsal decides by traces alone: what differs, what counts, which fault is to blame."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from keepstep.cli import rehearsal
from keepstep.cli.faultplan import FaultLine, Shape, plan, shape
from keepstep.cli.rehearsal import RunTrace, compare, cure, headline, parse, reproducible
from keepstep.cli.verdicts import Played, judge
from keepstep.model.trace import TraceLine
from keepstep.model.views import IncidentView

STEPS = 12


def line(tick: int, pid: int = 1, kind: Any = "entry", **groups: dict[str, str]) -> TraceLine:
    found = {name.replace("_", " "): values for name, values in groups.items()}
    return TraceLine(
        kind=kind, pid=pid, tick=tick, version=tick, site="train", step=True, groups=found
    )


def run(
    steps: int = STEPS,
    *,
    changed: dict[int, dict[str, dict[str, str]]] | None = None,
    newcomer_at: int | None = None,
) -> RunTrace:
    """A rank whose weight, rate and count go with the step; `changed` at the entry of steps."""
    lines = []
    for tick in range(steps):
        pid = 2 if newcomer_at is not None and tick >= newcomer_at else 1
        groups = {
            "tensor": {"w": f"w{tick}"},
            "learning rate": {"optimizer 0": str(tick)},
            "generator": {"torch": f"g{tick}"},
            "variable": {"count": str(tick), "rank": "0"},
        }
        for name, values in (changed or {}).get(tick, {}).items():
            groups[name] = {**groups.get(name, {}), **values}
        spelled = {name.replace(" ", "_"): values for name, values in groups.items()}
        lines.append(line(tick, pid, **spelled))
        lines.append(line(tick, pid, "commit", result={"result": f"r{tick}"}))
    end = TraceLine(kind="end", pid=pid, tick=steps, version=steps)
    return RunTrace({0: [*lines, end]})


def from_step(step: int, group: str, **values: str) -> dict[int, dict[str, dict[str, str]]]:
    return {tick: {group: values} for tick in range(step, STEPS)}


# --------------------------------------------------------------------------- comparing


def test_equal_traces_do_not_differ() -> None:
    assert compare(run(), run()) == []


def test_a_killed_process_leaves_half_a_line_and_the_next_one_repeats_the_entry() -> None:
    lines = [msgspec.json.encode(one) for one in run().ranks[0]]
    torn = [*lines[:6], lines[6][:20], b"", *lines[6:]]
    again = parse({0: b"\n".join(torn) + b"\n"})
    assert len(again.ranks[0]) == len(lines)
    assert compare(run(), again) == []
    assert len(parse({0: b"\n".join(torn[:7])}).ranks[0]) == 6


def test_a_step_that_nobody_saw_is_a_difference() -> None:
    lines = [one for one in run().ranks[0] if one.tick != 6]
    assert headline(compare(run(), RunTrace({0: lines}))).text() == (
        "order of calls of rank 0 at step 6: nothing, not train"
    )
    cut = RunTrace({0: [one for one in run().ranks[0] if one.tick < 6]})  # its job ended badly
    assert compare(run(), cut) == []


def test_the_first_difference_in_step_order_is_told() -> None:
    changed = from_step(7, "tensor", w="other")
    changed[5] = {"learning rate": {"optimizer 0": "99"}}
    found = compare(run(), run(changed=changed))
    assert [(one.step, one.group) for one in found] == [(5, "learning rate"), (7, "tensor")]
    assert headline(found).text() == "learning rate optimizer 0 of rank 0 at step 5: 99, not 5"
    assert "scheduler" in cure(found)


def test_every_attempt_at_a_step_must_begin_alike() -> None:
    """A retry that was not rolled back shows in its own line, though the last one is right."""
    lines = run().ranks[0]
    at = next(i for i, one in enumerate(lines) if one.tick == 4)
    bad = msgspec.structs.replace(
        lines[at], groups={**lines[at].groups, "tensor": {"w": "half done"}}
    )
    found = compare(run(), RunTrace({0: [*lines[:at], bad, *lines[at:]]}))
    assert headline(found).found == "half done"


def test_a_missing_tensor_and_a_missing_step_are_differences() -> None:
    short = run(steps=STEPS - 1)
    assert headline(compare(run(), short)).text() == (
        "number of steps of rank 0 at step 11: 11, not 12"
    )
    longer = compare(short, run())
    assert headline(longer).group == "steps"
    other = run()
    other.ranks[0][6] = line(3)
    assert headline(compare(run(), other)).found == "nothing"


def test_only_variables_that_change_count() -> None:
    slot = from_step(5, "variable", rank="2")
    assert compare(run(), run(changed=slot, newcomer_at=5)) == []
    counted = {tick: {"variable": {"count": str(tick - 5)}} for tick in range(5, STEPS)}
    found = compare(run(), run(changed=counted, newcomer_at=5))
    assert [(one.step, one.name, one.found) for one in found] == [(5, "count", "0")]


def test_a_newcomers_variable_is_judged_once_the_script_has_assigned_it() -> None:
    old = {tick: {"variable": {"count": "0"}} for tick in range(5, 8)}  # then assigned, and right
    assert compare(run(), run(changed=old, newcomer_at=5)) == []
    assert compare(run(), run(changed=old)) != [], "a survivor has no such excuse"


def test_a_variable_that_differed_before_training_did_is_named_as_the_cause() -> None:
    changed = {
        tick: {"variable": {"count": str(tick - 5)}, "tensor": {"w": "x"} if tick > 5 else {}}
        for tick in range(5, STEPS)
    }
    found = compare(run(), run(changed=changed, newcomer_at=5))
    assert headline(found).group == "tensor"
    assert "variable count differed before that" in cure(found)
    assert "ks.register" in cure(found)


def test_a_script_that_differs_by_itself_is_told_by_name() -> None:
    other = run(changed={**from_step(0, "generator", torch="x"), **from_step(3, "tensor", w="x")})
    why = reproducible(run(), other)
    assert why.trouble is not None and why.trouble.name == "w"
    seeds = reproducible(run(), run(changed=from_step(0, "generator", torch="x", numpy="y")))
    assert seeds.trouble is None and seeds.unseeded == ["torch"]


def test_what_differs_by_itself_is_not_compared() -> None:
    clock = run(changed=from_step(0, "variable", count="12:00"))
    why = reproducible(run(), clock)
    assert why.trouble is None and ("variable", "count") in why.ignored
    assert compare(run(), clock, why.ignored) == []


def test_every_group_has_a_cure() -> None:
    assert set(rehearsal.CURES) == {*rehearsal._ORDER}


# --------------------------------------------------------------------------- choosing faults


def entries(steps: int, per_epoch: int, *, sections: bool) -> RunTrace:
    lines, tick = [], 0
    for step in range(steps):
        where = [step // per_epoch, step % per_epoch + 1]
        for kind in ("entry", "commit"):
            lines.append(
                TraceLine(
                    kind=kind, pid=1, tick=tick, version=step, site="s", step=True, where=where
                )  # type: ignore[arg-type]
            )
        tick += 1
        if sections and (step + 1) % per_epoch == 0:
            lines.append(
                TraceLine(kind="entry", pid=1, tick=tick, version=step + 1, site="evaluate")
            )
            tick += 1
    return RunTrace({0: lines})


def test_the_shape_of_a_script_is_seen_in_its_trace() -> None:
    assert shape(entries(24, 8, sections=True)) == Shape(24, (8, 16, 24), (7, 15))


def test_a_full_plan_has_every_point_on_both_ranks_and_room_between() -> None:
    made = plan(Shape(40, (8, 16, 24, 32, 40), (7, 15, 23, 31)), 3, quick=False)
    faults = [fault for run in made.runs for fault in run]
    points = {(fault.point or fault.action, fault.rank) for fault in faults}
    for point in ("before_forward", "in_backward", "before_fence", "in_fence", "in_optimizer"):
        assert {(point, 0), (point, 2)} <= points
    assert {("after_step", 0), ("in_section", 2), ("migrate", 0), ("migrate", 2)} <= points
    assert any(f.what == "kill after an epoch's last step" and f.step in (7, 15) for f in faults)
    assert made.left_out == [] and len({fault.id for fault in faults}) == len(faults)
    for one in made.runs:
        for fault, after in itertools.pairwise(one):
            assert fault.step + fault.steps <= after.step


def test_a_quick_plan_is_one_run() -> None:
    made = plan(Shape(24, (16,), (15,)), 2, quick=True)
    assert len(made.runs) == 1 and len(made.runs[0]) == 5
    assert any(fault.point == "in_section" and fault.step == 16 for fault in made.runs[0])


def test_what_cannot_be_tried_is_named() -> None:
    made = plan(Shape(7, (), ()), 1, quick=False)
    assert any("epoch" in text for text in made.left_out)
    assert any("sections" in text for text in made.left_out)
    assert plan(Shape(3, (), ()), 2, quick=True).runs == []


# --------------------------------------------------------------------------- blaming


def fault(number: int, step: int) -> FaultLine:
    return FaultLine(
        id=f"f{number}", what="kill", action="kill", rank=0, step=step, point="in_fence"
    )


def incident(outcome: Any, reason: str = "") -> IncidentView:
    return IncidentView(
        id="i", job="j", trigger="unplanned", cause="process-exit", victims=[0], moves=[],
        generation=1, opened_at_ns=0, phases=[], timings_ms={}, source="", decision="RETRY",
        pause_ms=1.0, steps_lost=0, steps_recomputed=0, outcome=outcome, reason=reason,
    )  # fmt: skip


FAULTS = [fault(1, 2), fault(2, 5), fault(3, 8)]


def played(outcomes: dict[str, str], differences: list[Any] | None = None, **more: Any) -> Played:
    return Played(
        frozenset(outcomes),
        {name: incident(outcome) for name, outcome in outcomes.items()},
        differences or [],
        more.pop("good", True),
        more.pop("why", ""),
        **more,
    )


ALL = {"f1": "RESOLVED", "f2": "RESOLVED", "f3": "RESOLVED"}


def words(found: Any) -> dict[str, str]:
    return {name: verdict.word for name, verdict in found.verdicts.items()}


def test_all_identical() -> None:
    assert words(judge(FAULTS, played(ALL), quick=False)) == dict.fromkeys(ALL, "identical")


def test_a_fault_that_never_fired_is_not_identical() -> None:
    found = judge(FAULTS, played({"f1": "RESOLVED", "f3": "RESOLVED"}), quick=False)
    assert words(found)["f2"] == "not reached"


def test_several_suspects_are_tried_alone_and_what_came_later_again() -> None:
    different = compare(run(), run(changed=from_step(6, "tensor", w="x")))
    found = judge(FAULTS, played(ALL, different), quick=False)
    assert found.verdicts == {}
    assert found.again == [[FAULTS[0]], [FAULTS[1]], [FAULTS[2]]]
    alone = judge([FAULTS[1]], played({"f2": "RESOLVED"}, different), quick=False)
    assert words(alone) == {"f2": "DIFFERS"} and alone.again == []


def test_quick_names_the_last_fault_before_the_difference() -> None:
    different = compare(run(), run(changed=from_step(6, "tensor", w="x")))
    found = judge(FAULTS, played(ALL, different), quick=True)
    assert words(found) == {"f1": "identical", "f2": "DIFFERS", "f3": "not run"}
    assert found.again == []


def test_a_job_that_ends_badly_is_told_by_its_incident() -> None:
    ended = played({"f1": "RESOLVED", "f2": "FAILED"}, good=False, why="given up")
    found = judge(FAULTS, ended, quick=False)
    assert words(found) == {"f1": "identical", "f2": "not resolved"}
    assert found.again == [[FAULTS[2]]]
    refused = judge(FAULTS, ended._replace(refusal="no such thing"), quick=False)
    assert refused.verdicts["f2"].word == "refused"
    assert refused.verdicts["f2"].detail == "no such thing"
    witness = judge(FAULTS[:1], played({"f1": "DIVERGED"}, good=False), quick=False)
    assert words(witness) == {"f1": "stopped by a witness"}


def test_a_move_that_changed_nothing_is_no_proof() -> None:
    assert words(judge(FAULTS[:1], played({"f1": "ABORTED"}), quick=True)) == {"f1": "not resolved"}
