"""Comparing traces of two runs, and choosing faults: the part of a rehearsal that decides (pure).

A trace has, for every rank and transaction, what there was at its entry and what came out of it
(model/trace.py). Runs are held against each other line by line, by rank and tick; every line of
the disturbed run must agree, also those of a retry and of a newcomer that repeat a tick. The first
difference in step order is the one worth telling: all later ones may follow from it.

What two undisturbed runs already disagree about cannot be compared. If that is something that
training is made of, the script is not reproducible by itself; if it is only a clock in a variable,
or a generator that nobody seeds or uses, it is left out and named.

A variable is compared if it changes from step to step. Two things a newcomer's variables may be
without harm: absent (whoever uses it gets an error, not a wrong number), and as old as the newcomer
until the script assigns it again. What still differs then, or at the end, counts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from keepstep.model.trace import GROUPS, TraceLine

# Differences here between undisturbed runs mean that nothing could be told from a comparison.
TRAINING = ("batch", "learning rate", "hyperparameter", "tensor", "mode", "order", "steps")
_ORDER = {name: at for at, name in enumerate(("order", *GROUPS, "steps"))}


class RunTrace(NamedTuple):
    ranks: dict[int, list[TraceLine]]

    def steps(self) -> int:
        """Steps that were committed, by the first rank."""
        lines = self.ranks.get(0, [])
        return max((line.version + line.step for line in lines if line.kind == "commit"), default=0)


class TraceDifference(msgspec.Struct, frozen=True, kw_only=True):
    step: int  # at whose entry (or in whose result) it was seen
    tick: int
    rank: int
    group: str  # one of model/trace.py's GROUPS, order or steps
    name: str
    expected: str
    found: str

    def text(self) -> str:
        what = {"steps": "number of steps", "order": "order of calls"}.get(
            self.group, f"{self.group} {self.name}"
        )
        return f"{what} of rank {self.rank} at step {self.step}: {self.found}, not {self.expected}"


Ignored = frozenset[tuple[str, str]]  # group and name


def parse(texts: Mapping[int, bytes]) -> RunTrace:
    """Of each rank's file. A line that cannot be read was being written by a process that was
    killed; if anything else is wrong with a file, steps are missing, and that is a difference."""
    decoder = msgspec.json.Decoder(TraceLine)
    ranks: dict[int, list[TraceLine]] = {}
    for rank, text in texts.items():
        found = ranks.setdefault(rank, [])
        for one in text.split(b"\n"):
            with contextlib.suppress(msgspec.DecodeError):
                found.append(decoder.decode(one))
    return RunTrace(ranks)


# --------------------------------------------------------------------------- comparing


def compare(
    reference: RunTrace, other: RunTrace, ignored: Ignored = frozenset()
) -> list[TraceDifference]:
    """Each thing that differs once, where it first does; in step order."""
    found: dict[tuple[int, str, str], TraceDifference] = {}
    for rank, lines in reference.ranks.items():
        for one in _differences(rank, lines, other.ranks.get(rank, [])):
            if (one.group, one.name) not in ignored:
                found.setdefault((rank, one.group, one.name), one)
    return sorted(found.values(), key=lambda d: (d.tick, _ORDER[d.group], d.rank, d.name))


def _differences(
    rank: int, reference: list[TraceLine], other: list[TraceLine]
) -> Iterable[TraceDifference]:
    known = {_key(line): line for line in reference}
    changing = _changing(reference)
    begun: dict[int, TraceLine] = {}  # the first line of each process
    old: dict[str, TraceDifference] = {}  # variables that a newcomer's script has not assigned yet
    for line in other:
        first = begun.setdefault(line.pid, line)
        expected = known.get(_key(line))
        if expected is None:
            yield _difference(rank, line, "steps", "", "the end of the script", line.site)
        elif line.tick != expected.tick:  # of the end
            yield _difference(rank, line, "steps", "", str(expected.version), str(line.version))
        elif line.site != expected.site:
            yield _difference(rank, line, "order", "", expected.site, line.site)
        else:
            for group, name, want, got in _lines_differ(expected, line):
                one = _difference(rank, line, group, name, want, got)
                if group == "variable":
                    stale = line.kind != "end" and first.tick and got == _value(first, group, name)
                    if name not in changing:
                        continue
                    if stale:
                        old.setdefault(name, one)
                        continue
                    one = old.pop(name, one)  # it was wrong from there on
                if group == "mode" and not line.step:
                    continue  # sections set their own mode, and may be begun again in it
                yield one
    if any(line.kind == "end" for line in other):
        seen = {line.tick for line in other}
        end = max(line.tick for line in other)
        for line in reference:
            if line.kind == "entry" and line.tick < end and line.tick not in seen:
                yield _difference(rank, line, "order", "", line.site, "nothing")


def _key(line: TraceLine) -> tuple[str, int]:
    return line.kind, 0 if line.kind == "end" else line.tick


def _difference(
    rank: int, line: TraceLine, group: str, name: str, expected: str, found: str
) -> TraceDifference:
    return TraceDifference(
        step=line.version,
        tick=line.tick,
        rank=rank,
        group=group,
        name=name,
        expected=expected,
        found=found,
    )


def _lines_differ(expected: TraceLine, line: TraceLine) -> Iterable[tuple[str, str, str, str]]:
    for group in GROUPS:
        ours, theirs = expected.groups.get(group, {}), line.groups.get(group, {})
        lenient = group in ("variable", "generator")  # a stream may be imported later or earlier
        for name in [*ours, *(n for n in theirs if n not in ours)]:
            want, got = ours.get(name), theirs.get(name)
            if want == got or (lenient and (want is None or got is None)):
                continue
            yield group, name, want or "nothing", got or "nothing"


def _value(line: TraceLine, group: str, name: str) -> str | None:
    return line.groups.get(group, {}).get(name)


def _changing(lines: list[TraceLine]) -> set[str]:
    """Variables that have more than one value in a run."""
    first: dict[str, str] = {}
    found: set[str] = set()
    for line in lines:
        for name, value in line.groups.get("variable", {}).items():
            if first.setdefault(name, value) != value:
                found.add(name)
    return found


class Reproducible(NamedTuple):
    trouble: TraceDifference | None  # the first thing that training is made of and that differs
    unseeded: list[str]  # generators that differ before the first step
    ignored: Ignored  # what else differs between undisturbed runs


def reproducible(first: RunTrace, second: RunTrace) -> Reproducible:
    found = compare(first, second)
    trouble = next((one for one in found if one.group in TRAINING), None)
    unseeded = [one.name for one in found if one.group == "generator" and one.tick == 0]
    ignored = frozenset((one.group, one.name) for one in found)
    return Reproducible(trouble, sorted(set(unseeded)), ignored)


def headline(found: list[TraceDifference]) -> TraceDifference:
    """What to tell first: a difference in training, if there is one, before a mere variable."""
    return next((one for one in found if one.group != "variable"), found[0])


def suspect(found: list[TraceDifference]) -> TraceDifference | None:
    """A variable that differed no later than training did: the likely cause."""
    first = headline(found)
    if first.group == "variable":
        return None
    return next((d for d in found if d.group == "variable" and d.tick <= first.tick), None)


CURES = {
    "generator": "keep the generator where it can be found (a variable, or an attribute of the "
    "loader, sampler or dataset), or register its state with ks.register(..., per_rank=True)",
    "batch": "make the batches a function of seed, epoch and position (DistributedSampler with "
    "set_epoch), or give the loader state_dict and load_state_dict; iterate with ks.batches",
    "learning rate": "give the scheduler to keepstep.attach and call its step() once per step, "
    "inside the @ks.step function",
    "hyperparameter": "change the optimizer's param_groups inside the @ks.step function, or from "
    "registered state",
    "registered state": "change it inside the @ks.step function, and see that load(save()) "
    "brings back exactly what was saved",
    "tensor": "change it only inside the @ks.step function, and register with ks.register "
    "whatever else the step reads",
    "mode": "call train(), eval() and requires_grad_() where every process passes: inside the "
    "@ks.step function, or before the loop",
    "result": "the step reads something that is not part of the protected state: register it "
    "with ks.register",
    "variable": "carry it with ks.register(name, save, load, per_rank=True), or derive it from "
    "ks.committed_step",
    "order": "let control flow depend on ks.committed_step, the epoch and registered state, not "
    "on counters of the script",
    "steps": "let the end of training depend on ks.committed_step, the epoch and registered "
    "state, not on counters of the script",
}


def cure(found: list[TraceDifference]) -> str:
    cause = suspect(found)
    if cause is not None:
        return f"variable {cause.name} differed before that ({cause.text()}): {CURES['variable']}"
    return CURES[headline(found).group]


def cure_unseeded(why: Reproducible) -> str:
    if why.unseeded:
        return (
            f"seed what the script draws from: {', '.join(why.unseeded)} differ before the first "
            "step of two undisturbed runs"
        )
    return (
        "look for what differs from run to run: the clock, a random seed of the system, an order "
        "that threads decide, or kernels that are not deterministic "
        "(torch.use_deterministic_algorithms(True))"
    )
