"""Deliberate bugs in the protocol of a rank: test_core_rank and test_core_rank_inbox find each.

A mutant is a place in the source of core/rank and what stands there instead: at least one for each
row of a table and each guard. It runs in a process of its own, forked from this one.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

RANK = "keepstep.core.rank"


class Mutant(NamedTuple):
    module: str
    old: str
    new: str


MUTANTS = {
    # The table of answers: every row.
    "reports are not said again": Mutant("inbox", "    commands.Abort: m.Report,\n", ""),
    "decisions are obeyed twice": Mutant("inbox", "    commands.Decide: m.Held,\n", ""),
    "holds are obeyed twice": Mutant("inbox", "    commands.Hold: m.Held,\n", ""),
    "groups are built twice": Mutant("inbox", "    commands.Stage: m.Staged,\n", ""),
    "state is copied twice": Mutant("inbox", "    commands.Copy: m.Copied,\n", ""),
    "swaps are obeyed twice": Mutant("inbox", "    commands.Swap: m.Swapped,\n", ""),
    "a rank is taken twice": Mutant("inbox", "    commands.Assign: m.Arrived,\n", ""),
    "a position is taken twice": Mutant("inbox", "    commands.Position: m.Ready,\n", ""),
    # Facts, and what is done at once: every name.
    "an abort undoes a swap": Mutant(
        "inbox", "(commands.Swap, commands.Assign, c", "(commands.Assign, c"
    ),
    "an abort undoes an assignment": Mutant(
        "inbox", "commands.Assign, commands.Position", "commands.Position"
    ),
    "an abort undoes a position": Mutant(
        "inbox", "commands.Position, commands.Leave)", "commands.Leave)"
    ),
    "an abort keeps a leaver": Mutant(
        "inbox", "commands.Position, commands.Leave)", "commands.Position)"
    ),
    "aborts wait": Mutant("inbox", "(commands.Abort, commands.Stage", "(commands.Stage"),
    "stages wait": Mutant(
        "inbox", "commands.Abort, commands.Stage, commands.Seal", "commands.Abort, commands.Seal"
    ),
    "seals wait": Mutant("inbox", "commands.Seal, commands.Inspect", "commands.Inspect"),
    "inspections wait": Mutant("inbox", "commands.Inspect, commands.Arm", "commands.Arm"),
    "injected faults wait": Mutant("inbox", "commands.Inspect, commands.Arm)", "commands.Inspect)"),
    # Guards of the inbox.
    "stale commands are taken": Mutant("inbox", "if 0 <= generation <", "if False and 0 <="),
    "commands of the newest attempt are stale": Mutant(
        "inbox", "if 0 <= generation < self", "if 0 <= generation <= self"
    ),
    "a process takes another rank": Mutant(
        "inbox", "if self.rank not in (-1, command.rank)", "if False"
    ),
    "the rank is not noted": Mutant("inbox", "            self.rank = command.rank\n", ""),
    "a new buddy is missed": Mutant(
        "inbox",
        "if isinstance(command, commands.Swap):\n                self",
        "if False:\n                self",
    ),
    "a stage leaves the abort unreported": Mutant(
        "inbox",
        "            self._abort = None\n        if isinstance(command, AT",
        "            pass\n        if isinstance(command, AT",
    ),
    "another checkpoint is saved already": Mutant(
        "inbox", "and saved.number == command.number", "and True"
    ),
    "answers of older attempts count": Mutant(
        "inbox", 'getattr(answer, "generation", None) != generation', "False"
    ),
    "a released rank is said to hold": Mutant(
        "inbox", "if kind is not commands.Hold or holds else None", "if True else None"
    ),
    "holds outlive an abort": Mutant(
        "inbox", "self.hold_generation = self.snapshot = -1", "self.snapshot = -1"
    ),
    "snapshots outlive an abort": Mutant(
        "inbox", "self.hold_generation = self.snapshot = -1", "self.hold_generation = -1"
    ),
    "an abort drops nothing": Mutant("inbox", "if not self._stale(one)]", "]"),
    "an abort drops what has no generation": Mutant(
        "inbox", "generation is not None and generation <", "generation is None or generation <"
    ),
    "an abort is reported": Mutant("inbox", "        self._abort = command\n", ""),
    "a hold is not noted": Mutant("inbox", "self.hold_generation = command.generation", "pass"),
    "a snapshot is not noted": Mutant("inbox", "self.snapshot = command.number", "pass"),
    "a buddy is not noted": Mutant(
        "inbox", "self.buddy, self.parity = command.address, command.parity", "pass"
    ),
    "a buddy may be taken for none": Mutant(
        "inbox", "                self.buddy_known = True\n", ""
    ),
    "a release ends later holds": Mutant(
        "inbox",
        "if self.hold_generation <= command.generation:\n                    self",
        "if True:\n                    self",
    ),
    "a release is not heard": Mutant(
        "inbox",
        "hold_generation = -1\n                self.waiting.append(command)",
        "hold_generation = -1",
    ),
    "a swap said again waits twice": Mutant("inbox", "and one.generation == same)", "and False)"),
    "a swap said again ends all others": Mutant(
        "inbox",
        "(isinstance(one, commands.Swap) and one.generation == same)",
        "isinstance(one, commands.Swap)",
    ),
    "an older report is enough": Mutant(
        "inbox",
        "return self._abort if report.generation < self._abort.generation else None",
        "return None",
    ),
    "the abort of this generation is newer": Mutant(
        "inbox",
        "return self.abort_generation > generation",
        "return self.abort_generation >= generation",
    ),
    "what is taken stays": Mutant("inbox", "                del self.waiting[index]\n", ""),
    "an assignment changes a known buddy": Mutant("inbox", "if not self.buddy_known", "if True"),
    "an assignment brings no buddy": Mutant("inbox", "if not self.buddy_known", "if False"),
    "a swap ends later holds": Mutant(
        "inbox",
        "if self.hold_generation <= command.generation:\n            self",
        "if True:\n            self",
    ),
    "a hold outlives its swap": Mutant(
        "inbox",
        "if self.hold_generation <= command.generation:\n            self",
        "if False:\n            self",
    ),
    "a snapshot outlives a swap": Mutant(
        "inbox", "        self.snapshot = -1\n        self._take_buddy", "        self._take_buddy"
    ),
    "a swap takes the buddy away": Mutant("inbox", "if not command.same_buddy", "if True"),
    # Staging.
    "groups are begun twice": Mutant("staging", "return not again", "return True"),
    "a failure is final": Mutant(
        "staging", "self._building = -1\n        return", "pass\n        return"
    ),
    "a failure nobody waits for is said": Mutant(
        "staging", "wanted and aborted <=", "wanted or aborted <="
    ),
    "groups of an aborted attempt are kept": Mutant("staging", "aborted > generation or ", ""),
    "groups of an older attempt are kept": Mutant(
        "staging", " or self._building != generation", ""
    ),
    "groups are lost in silence": Mutant(
        "staging", "return True, before[1] if before is not None else None", "return True, None"
    ),
    "any groups will do": Mutant("staging", " or self._built[0] != generation", ""),
    "a release drops later groups": Mutant("staging", " or self._built[0] >= below", ""),
    # Recovering.
    "a failure waits for no abort": Mutant(
        "recovering", "if kind and not inbox.aborted(me.generation)", "if False"
    ),
    "roll-back comes before the groups are left": Mutant(
        "recovering",
        "            yield asks.LeaveGroups()\n",
        "            yield asks.RollBack()\n            yield asks.LeaveGroups()\n",
    ),
    "groups are not left": Mutant("recovering", "            yield asks.LeaveGroups()\n", ""),
    "a rank that reports seems to hang": Mutant(
        "recovering", "            yield asks.ShowWaiting()\n", ""
    ),
    "the older abort is reported again": Mutant(
        "recovering", "                generation = inbox.abort_generation\n", ""
    ),
    "a step is applied outside of its fence": Mutant(
        "recovering", "if tick == me.tick + 1 and in_fence", "if tick == me.tick + 1"
    ),
    "a debt is forgotten": Mutant("recovering", "                self._owed = generation\n", ""),
    "a debt is paid twice": Mutant("recovering", "= self._owed, None", "= self._owed, self._owed"),
    "a rank that applies seems to wait": Mutant(
        "recovering",
        "                yield asks.ShowBusy()\n                self._owed",
        "                self._owed",
    ),
    "any decision is obeyed": Mutant("recovering", "if tick != me.tick:", "if False:"),
    "a rank that was rolled back is in its fence": Mutant(
        "recovering", "            in_fence = False\n", ""
    ),
    "nothing is rolled back": Mutant("recovering", "            yield asks.RollBack()\n", ""),
    "a newer abort in a hold is missed": Mutant(
        "recovering", "            if newer is None:\n", "            if True:\n"
    ),
    "an old failure is reported again": Mutant(
        "recovering", 'generation, kind, error = newer, "", ""', "generation = newer"
    ),
    "a broken connection is news at once": Mutant("recovering", 'if kind == "comm":', "if False:"),
    "a failure is said once": Mutant(
        "recovering", "while not inbox.aborted(me.generation):", "for _ in range(1):"
    ),
    "a rank that failed does not seem to ask": Mutant(
        "recovering",
        "            yield asks.ShowWaiting(asking=True)\n            yield asks.Say(\n",
        "            yield asks.Say(\n",
    ),
    "decisions of other attempts count": Mutant(
        "recovering",
        "return command.generation == generation\n            return isinstance",
        "return True\n            return isinstance",
    ),
    "the end is not heard before a decision": Mutant(
        "recovering",
        "            return isinstance(command, commands.Finish)\n",
        "            return False\n",
    ),
    "a newer abort does not end the wait for a decision": Mutant(
        "recovering",
        "yield asks.Await(accept, newer_than=generation)\n        if",
        "yield asks.Await(accept)\n        if",
    ),
    "nobody leaves instead of a decision": Mutant(
        "recovering",
        "if isinstance(command, commands.Leave | commands.Finish):\n            yield",
        "if False:\n            yield",
    ),
    "a hold is not said": Mutant("recovering", "        yield asks.Say(held)\n", ""),
    "state is served for ever": Mutant("recovering", "        yield asks.StopServing()\n", ""),
    "only this attempt's release counts": Mutant(
        "recovering",
        "return command.generation >= generation",
        "return command.generation == generation",
    ),
    "older releases count": Mutant(
        "recovering", "return command.generation >= generation", "return True"
    ),
    "other attempts' swaps count": Mutant(
        "recovering",
        "commands.Checkpoint():\n                    return command.generation == generation",
        "commands.Checkpoint():\n                    return True",
    ),
    "a checkpoint is written in silence": Mutant(
        "recovering", "                    yield asks.Say(written)\n", ""
    ),
    "a release drops the next attempt's groups": Mutant(
        "recovering",
        "asks.DropStaged(command.generation + 1)",
        "asks.DropStaged(command.generation)",
    ),
    "an abort behind a swap is an error": Mutant(
        "recovering", " and not inbox.aborted(command.generation)", ""
    ),
    "training goes on without groups": Mutant(
        "recovering", "if not entered.staged and", "if False and"
    ),
    "a swap changes nothing in the inbox": Mutant(
        "recovering", "        inbox.swapped(command)\n", ""
    ),
    "a rank whose script is over publishes": Mutant(
        "recovering", "if not self._me.done:", "if True:"
    ),
    "nothing is published behind a swap": Mutant(
        "recovering", "if not self._me.done:", "if False:"
    ),
    "a newcomer's finding ends with an abort": Mutant(
        "recovering", "None if joining else self._me.generation", "self._me.generation"
    ),
    "an abort does not end a finding": Mutant(
        "recovering", "None if joining else self._me.generation", "None"
    ),
    "the table is repeated": Mutant(
        "recovering", "whole = again % TABLE_EVERY < 2", "whole = True"
    ),
    "a finding is heard before the rank shows that it waits": Mutant(
        "recovering",
        "            yield asks.ShowWaiting(asking=True)\n            yield asks.Say(word",
        "            yield asks.Say(word",
    ),
    "any answer lets a finding pass": Mutant(
        "recovering", "and command.number != word.number", "and False"
    ),
    "a finding keeps a leaver": Mutant(
        "recovering",
        "if isinstance(command, commands.Finish | commands.Leave):\n                    yield",
        "if False:\n                    yield",
    ),
    "a finding that passed seems to wait": Mutant(
        "recovering",
        "                    yield asks.ShowBusy()\n                    return True",
        "                    return True",
    ),
    "a finding that was aborted seems to wait": Mutant(
        "recovering",
        "                    yield asks.ShowBusy()\n                    return False",
        "                    return False",
    ),
    "the end is said once": Mutant(
        "recovering",
        "            yield asks.Say(m.Done(tick=me.tick, version=me.version))\n            command",
        "            command",
    ),
    "whoever is done hears no abort": Mutant(
        "recovering", "asks.Await(_of_the_end, newer_than=me.generation)", "asks.Await(_of_the_end)"
    ),
    # Joining.
    "a parked process is not said": Mutant("joining", "    yield asks.Say(parked)\n", ""),
    "a parked process can not be ended": Mutant(
        "joining",
        "isinstance(c, commands.Assign | commands.Finish | commands.Leave)",
        "isinstance(c, commands.Assign)",
    ),
    "an assignment is not noted": Mutant("joining", "    inbox.assigned(command)\n", ""),
    "an arrival is not said": Mutant(
        "joining", "        yield asks.Say(m.Arrived(generation=self._assign.generation))\n", ""
    ),
    "who has arrived can not be ended": Mutant(
        "joining",
        "isinstance(c, commands.Position | commands.Finish | commands.Leave)",
        "isinstance(c, commands.Position)",
    ),
    "who is ready does not say so": Mutant("joining", "        yield asks.Say(ready)\n", ""),
    "who is ready can not be ended": Mutant(
        "joining",
        "isinstance(c, commands.Copy | commands.Finish | commands.Leave)",
        "isinstance(c, commands.Copy)",
    ),
    "a copy that failed is installed": Mutant(
        "joining", "if isinstance(said, m.Copied):", "if True:"
    ),
    "a copy fails in silence": Mutant(
        "joining", "                yield asks.Say(said)\n", "                pass\n"
    ),
    "an old copy is entered with": Mutant("joining", "            self._installed = None\n", ""),
    "what the way has changed stays": Mutant(
        "joining", "failed = yield asks.Settle(copy)", "failed = None"
    ),
    "a rank enters with a copy that failed": Mutant(
        "joining",
        "                yield asks.Say(failed)\n                continue\n",
        "                yield asks.Say(failed)\n",
    ),
    "a copy is not said": Mutant("joining", "            yield asks.Say(copied)\n", ""),
    "another attempt's swap is obeyed": Mutant(
        "joining", "return command.generation == wanted", "return True"
    ),
    "who has copied can not be ended": Mutant(
        "joining",
        "                return isinstance(command, commands.Finish | commands.Leave)\n",
        "                return False\n",
    ),
    "who has copied hears no abort": Mutant(
        "joining", "asks.Await(accept, newer_than=generation)", "asks.Await(accept)"
    ),
}


def source(module: str) -> str:
    spec = importlib.util.find_spec(f"{RANK}.{module}")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).read_text()


def run_mutated(mutant: Mutant) -> None:
    """The tests, in this process, in which nothing else runs afterwards."""
    for name in [
        name for name in sys.modules if name.startswith((RANK, "tests.unit.test_core_rank"))
    ]:
        del sys.modules[name]
    name = f"{RANK}.{mutant.module}"
    spec = importlib.util.find_spec(name)
    assert spec is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    exec(source(mutant.module).replace(mutant.old, mutant.new), module.__dict__)
    for name in ("tests.unit.test_core_rank", "tests.unit.test_core_rank_inbox"):
        tests = importlib.import_module(name)
        for test in [value for key, value in vars(tests).items() if key.startswith("test_")]:
            for values in parameters(test):
                test(**values)


def parameters(test: Any) -> list[dict[str, Any]]:
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    if not marks:
        return [{}]
    (names, rows), *_ = (mark.args for mark in marks)
    if isinstance(names, str):
        return [{names: row} for row in rows]
    return [dict(zip(names, row, strict=True)) for row in rows]


def outcome(mutant: Mutant) -> Literal["passed", "failed"]:
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # some wait for ever
        try:
            run_mutated(mutant)
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return "passed" if status == 0 else "failed"


def test_every_mutant_fits_the_code_in_one_place() -> None:
    wrong = {name: source(m.module).count(m.old) for name, m in MUTANTS.items()}
    assert {name: count for name, count in wrong.items() if count != 1} == {}
    for mutant in MUTANTS.values():
        compile(source(mutant.module).replace(mutant.old, mutant.new), mutant.module, "exec")


def test_the_tests_pass_without_a_mutant() -> None:
    assert outcome(Mutant("inbox", "no such text", "")) == "passed"


def test_every_mutant_is_found() -> None:
    alive = [name for name, mutant in MUTANTS.items() if outcome(mutant) == "passed"]
    assert alive == []
