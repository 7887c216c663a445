"""The newcomer: another process takes a rank over.

    Assign    the parked script goes on, as rank r, in solo mode; model and optimizer are built
    Arrived   it reached its first ks.epochs/batches/step/section and asks for a position
    Position  the side state of the rank it replaces tells it which epoch, loop and batch to enter
    Ready     its first step call warms up: the user's function runs in solo mode on that batch
    Copy      state from holders, side state from the rank's agent or buddy; digests compared
    Copied    said at the entry of the transaction that comes next
    Swap      the staged groups are put in place: from here on it is an ordinary rank

State is installed where it was taken. What replicas share was taken at the entry of the transaction
that comes next, behind whatever the script does between transactions. It is put in place when it
arrives, inside the first call, so that the code on the way sees it; and again at that entry if the
code has changed anything, since there it would be changed twice. What only this rank has was
published in its last fence; it is put in place where that transaction returns in the newcomer's
walk, and the code on the way then makes its draws and changes once.

In a planned move the job trains on while the newcomer prepares, so the position it warmed up with
is provisional. After Copy it is led on to the real one: the step call it stands in returns at
once, and the next turn of its loop hands out the real batch.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from keepstep.core.rank import asks
from keepstep.core.rank.joining import Joining
from keepstep.errors import KeepstepError, UsageError
from keepstep.model import messages as m
from keepstep.worker.groups import groups, reducers
from keepstep.worker.script.frames import script_frames
from keepstep.worker.script.tree import Encoded
from keepstep.worker.state import buckets, codec, fsdp, step_inputs
from keepstep.worker.step.copying import Copying, Inherited
from keepstep.worker.step.finish import Finishing, new_behind, with_locals
from keepstep.worker.step.live_rank import LiveRank
from keepstep.worker.step.recovery import Recovery
from keepstep.worker.step.side_state import SIDE_BYTES_MAX
from keepstep.worker.step.transaction import Transactions

NATURAL: dict[str, Any] = {}

Result = TypeVar("Result")


class Newcomer:
    def __init__(self, live: LiveRank, recovery: Recovery, transactions: Transactions) -> None:
        assert live.process.assigned is not None
        self.live = live
        self.recovery = recovery
        self.transactions = transactions
        self.assign = live.process.assigned
        self.joined = False
        self.had = Inherited()
        self.copying = Copying(live, self.assign, self.had)
        self._protocol = Joining(live.channel.inbox, self.assign)
        self._arrived_ns = 0
        self._warm_up_runs = 0
        self._alone = -1  # collectives made alone when the walk was over

    # ------------------------------------------------------------------ position

    def arrive(self) -> None:
        """At the first ks.* call that depends on where the job is."""
        if self.had.position is not None:
            return
        live = self.live
        self._arrived_ns = time.monotonic_ns()
        command = self._drive(self._protocol.arrive())
        self.had.position = self.copying.fetch(command.tick, command.holders) or NATURAL
        if self.had.position:
            live.tracker.walk_to(self.had.position["position"])
            self.had.walking = self.had.position
            live.version = self.had.position["version"]
            live.tick = self.had.position["tick"]

    # ------------------------------------------------------------------ the first call

    def first_call(self, site: str, warm_up: Callable[[], Any] | None) -> None:
        """Warm up (a step: with its own arguments) and join, inside the newcomer's first call that
        is not over already. Afterwards the call begins as on any rank."""
        self.arrive()
        live = self.live
        live.streams.discover()
        natural_rng = live.streams.capture()
        for item in live.objects.values():
            built = item.snapshot()
            if built is None and not self.had.position and item.size <= SIDE_BYTES_MAX:
                built = codec.dumps_inline(item.save())
            self.had.objects.append((item, built))
        put_back = live.unasked.before_warm_up()
        stand_in = None
        if warm_up is not None and (live.version > 0 or not live.redundancy.needed):
            stand_in = self._warm_up(warm_up, 2 if live.version > 0 else 1)
            self.had.warmed = put_back()
        provisional = (self.had.position or {}).get("tick")
        self.had.site = site
        self._install()
        final = self.had.position or {}
        if final.get("tick") != provisional:
            self._lead_on(final)
            live.tracker.results.setdefault(site, stand_in)
        elif live.tracker.replay is None:  # nothing to walk past: this very call is the next one
            live.streams.restore(natural_rng)

    def walked(self, site: str, function: Any, seen: Encoded) -> tuple[Any] | None:
        """The last transaction of the walk returns, as it returned in the rank that is replaced.
        Gives its result where this process has had to make it: with all the rest, or, if the rank
        had `ended` the step, and said what else came of it, the result alone."""
        side, self.had.walking = self.had.walking, None
        if side is None:
            return None
        made = self._made(site, function, seen, side)
        self.live.boundary.put_left()
        return made

    def _made(
        self, site: str, function: Any, seen: Encoded, side: dict[str, Any]
    ) -> tuple[Any] | None:
        live, rest, made = self.live, side["rest"], None
        known = seen.data is not None or "result" in self.had.late
        if isinstance(rest, list) and not (self.had.ended and known):
            self._refuse_updates(site, seen.variables)
            rest = with_locals(rest, self.had.locals)
            stack = script_frames()

            def at_fence() -> list[torch.nn.Parameter]:
                live.boundary.put_fence()
                live.side.apply(side, {})
                if seen.variables is not None:
                    live.variables.restore(seen.variables, stack)
                return [live.parameters[index] for index in side["gradients"]]

            made = self._finish(
                function,
                Finishing(rest, site, at_fence, lambda name: live.known.reach(name, stack)),
                raises=not self.had.ended and bool(side["late"]),
                refuses=not self.had.ended and not known,
            )
            failed = self.copying.again()
            if failed is not None:  # whoever it was copied from is lost: another one begins
                live.channel.send(failed)
                self.recovery.leave()
            if made is not None and not self.had.ended:
                self.copying.put_rebuilt()
                self._alone = groups.alone_operations()
                return made
        if not self.had.ended:
            self._refuse_unknown(site, side)
        live.side.apply(side, self.had.late)
        self._alone = groups.alone_operations()
        return made

    def _refuse_updates(self, site: str, variables: bytes | None) -> None:
        found = [] if self.had.ended else self.live.variables.of_optimizers(variables)
        if found:
            raise UsageError(
                f"rank {self.live.rank} was lost in the update of step {site!r}, and {found[0]} "
                "keeps objects in its attributes: how the update changes them is not known",
                hint="keep plain data there, or use optimizer.state",
            )

    def _refuse_unknown(self, site: str, side: dict[str, Any]) -> None:
        """The rank was lost behind the update, and its newcomer could not make the rest."""
        new = new_behind(self.live.behind_elsewhere, site, side["tick"])
        changed = sorted({*side["late"], *new})
        if changed:
            raise UsageError(
                f"rank {self.live.rank} was lost behind the update of step {site!r}, which changes "
                f"{' and '.join(changed)} of its own there: how is not known",
                hint="draw random numbers and change variables before the update, or between steps",
            )

    def _refuse_alone(self) -> None:
        """Behind the walk, collectives that no section has seen have met nobody: those of DTensors
        and of compiled code."""
        before, self._alone = self._alone, -1
        if before >= 0 and groups.alone_operations() != before:
            raise UsageError(
                f"behind step {self.live.version} the script makes collectives outside of steps "
                "and sections, in a way that cannot be seen on the other ranks; what they give "
                f"on the newcomer of rank {self.live.rank} is not what all ranks had",
                hint="put them into a function with @ks.section",
            )

    def _finish(
        self, function: Any, finishing: Finishing, *, raises: bool, refuses: bool
    ) -> tuple[Any] | None:
        """None: it cannot be done, and but for the result, nothing is known to be lost with the
        rank. `raises`: more is, so that no failure can be borne; `refuses`: nor a refusal."""
        self.live.unfinished = 1
        try:
            result = self.transactions.finish(function, finishing)
            if finishing.reached:
                self.live.after_update()
        except Exception as error:
            if raises or (refuses and isinstance(error, KeepstepError)):
                raise
            self.live.warn(
                f"the rest of the last step of rank {self.live.rank} could not be made here, so a "
                f"result that had not been published is lost: {type(error).__name__}: {error}"
            )
            return None
        finally:
            self.live.unfinished = 0
            fsdp.reset(self.live.models.values())
            buckets.forget_backward()
        return (result,) if finishing.reached else None

    def repeats(self, site: str, arguments: Any) -> None:
        """The batch that was seen again on the walk must be the one that the rank had. And if the
        rank had begun this call, its inputs must have been the same."""
        note, self.had.note = self.had.note, None
        for loop in self.live.loops:
            other, loop.other = loop.other, []
            if other:
                self.recovery.diverged(
                    "inputs",
                    site,
                    words=f"ks.batches hands the newcomer of rank {self.live.rank} another batch "
                    f"than the rank had: {'; '.join(other[:4])}",
                    agreed=self.live.version,
                )
        if note is None or note["tick"] != self.live.tick:
            return
        self.live.replicated.inherit(note.get("objects", {}))
        if arguments is None:
            return
        found = step_inputs.other(note, arguments)
        if found:
            self.recovery.diverged(
                "inputs",
                site,
                words=f"step {site} has other inputs on the newcomer of rank {self.live.rank} than "
                f"the rank had: argument {'; argument '.join(found[:4])}",
                agreed=self.live.version,
            )

    def _warm_up(self, function: Callable[[], Any], runs: int) -> Any:
        """Kernels, autograd and optimizer state; whatever it changes is overwritten by Copy."""
        live = self.live
        self.transactions.call.warming = True
        self.transactions.call.site = "warm-up"
        result = None
        try:
            while self._warm_up_runs < runs:
                self._warm_up_runs += 1
                result = self._warm_up_once(function)
        except KeepstepError:
            raise
        except Exception as error:  # a guard of the user's may dislike unloaded weights
            if any(module.static_graph for module in reducers.ddp_modules()):
                raise  # its peers' reducers are past the first backward: this one must be too
            text = "".join(traceback.format_exception(error))
            print(
                f"keepstep: warm-up of the newcomer failed, going on without:\n{text}", flush=True
            )
        finally:
            self.transactions.call.warming = False
            self.transactions.call.site = ""
        fsdp.reset(live.models.values())
        for parameter in live.parameters:
            parameter.grad = None
        return result

    def _warm_up_once(self, function: Callable[[], Any]) -> Any:
        """Batches that the function pulls itself are handed out again, and the script's variables
        are put back."""
        self.live.tracker.in_txn = True
        self.live.variables.begin(script_frames())
        try:
            return function()
        finally:
            self.live.variables.undo()
            self.live.variables.end()
            self.live.tracker.in_txn = False
            undo_arguments = getattr(function, "undo", None)
            if undo_arguments is not None:
                undo_arguments()
            for loop in self.live.loops:
                loop.retry(other_rng=bool(self.had.position))

    def _lead_on(self, final: dict[str, Any]) -> None:
        tracker = self.live.tracker
        for mine, theirs in tracker.move_on_to(final["position"], self.had.site):
            for loop in self.live.loops:
                if loop.pos is mine:
                    loop.aim(theirs)

    # ------------------------------------------------------------------ joining

    def _install(self) -> None:
        live = self.live
        arrived, now = self._arrived_ns, time.monotonic_ns()
        ready = m.Ready(
            generation=self.assign.generation,
            arrived_ns=max(arrived - live.process.assigned_ns, 0),
            warm_ns=now - arrived,
            classes=sorted(live.state.classes()),
        )
        live.page.where("held")
        self._drive(self._protocol.ready(ready))

    def end(self) -> None:
        """At the script's end, behind its last transaction; all others have come to theirs."""
        names = self.copying.changed()
        if names:
            rank = self.live.rank
            self.recovery.diverged(
                "replicas",
                self.had.site,
                words=f"rank {rank} was lost in its last step or behind it, and behind that step "
                f"the script changes {names[0]} (and {len(names) - 1} more), which the other ranks "
                f"had done when it was copied from them: whatever the newcomer of rank {rank} has "
                "written since may be wrong",
                agreed=self.live.version,
            )
        self.enter()

    def enter(self) -> None:
        """At the entry of the transaction that comes next, or at the script's end."""
        live = self.live
        self._refuse_alone()
        live.page.where("held")
        swap = self._drive(self._protocol.enter())
        self.joined = True
        live.state.own, live.state.walking = None, False
        live.cells.forget()
        self.recovery.swap(swap)

    def _name_changed(self) -> None:
        """The script's own way here has changed large state once more. It is copied again, but what
        has been read of it since cannot be known."""
        found = self.live.boundary.not_remembered(self.copying.changed())
        if found:
            rank, version = self.live.rank, self.live.version
            self.live.warn(
                f"between steps the script changes {found[0]} (and {len(found) - 1} more), which "
                f"the other ranks had done when the newcomer of rank {rank} copied it: if the "
                f"script has read it behind step {version} and outside of sections, what it has "
                "read there is wrong (hint: change and read it in the @ks.step function, or read "
                "it in a @ks.section)"
            )

    def _drive(self, protocol: asks.Protocol[Result]) -> Result:
        return self.live.channel.drive(protocol, self._perform)

    def _perform(self, ask: asks.Ask) -> Any:
        match ask:
            case asks.Take():
                return self.copying.take(ask.command)
            case asks.Settle():
                if self.live.state.fingerprint() != self.copying.fingerprint:
                    if self.copying.fingerprint:
                        self._name_changed()
                    again = self.copying.copied(ask.command)
                    return again if isinstance(again, m.CopyFailed) else None
            case asks.LeaveJob():
                self.recovery.leave()
        return None
