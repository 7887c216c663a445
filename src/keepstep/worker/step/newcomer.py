"""The newcomer: another process takes a seat.

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

import msgspec
import torch

from keepstep.core.rank import asks
from keepstep.core.rank.joining import Joining
from keepstep.errors import KeepstepError, UsageError
from keepstep.model import messages as m
from keepstep.model.page import CHECKPOINT_TICK, NOTE_TICK, late_tick
from keepstep.worker.checkpoint import checkpoint
from keepstep.worker.groups import groups
from keepstep.worker.line import blobs
from keepstep.worker.script.frames import script_frames
from keepstep.worker.script.tree import Encoded
from keepstep.worker.state import buckets, codec, fsdp, inputs, transfer
from keepstep.worker.state.objects import Registered
from keepstep.worker.step.finish import Finishing, new_behind, with_locals
from keepstep.worker.step.recovery import Recovery
from keepstep.worker.step.seat import Seat
from keepstep.worker.step.transaction import Transactions
from keepstep.worker.vault import vault
from keepstep.worker.vault.replay import ShardsMissing

NATURAL: dict[str, Any] = {}

Result = TypeVar("Result")


class Newcomer:
    def __init__(self, seat: Seat, recovery: Recovery, transactions: Transactions) -> None:
        assert seat.process.assigned is not None
        self.seat = seat
        self.recovery = recovery
        self.transactions = transactions
        self.assign = seat.process.assigned
        self.installed = False  # state is here; the walk may go on
        self.joined = False
        self._protocol = Joining(seat.channel.inbox, self.assign)
        self._fingerprint: dict[str, bytes] = {}
        self._walking: dict[str, Any] | None = None  # side state for the end of the walk
        self._note: dict[str, Any] | None = None  # what it noted when it began the next one
        self.late: dict[str, Any] = {}  # what the rank added to it when its transaction had ended
        self.ended = False  # it had
        self._locals: dict[str, Any] = {}  # of the function, if it had not
        self._lost_in, self._lost_sources = -1, set[int]()
        self._missing = frozenset[str]()  # of the last copy: no source had these
        self._arrived_ns = 0
        self._warm_up_runs = 0
        self._position: dict[str, Any] | None = None  # None: not asked yet
        self._site = ""
        self._alone = -1  # collectives made alone when the walk was over
        self._per_rank: list[tuple[Registered, bytes | None]] = []  # as the script built it
        # Registered objects that were rebuilt from the vault, with what follows from the update.
        self._rebuilt: dict[str, tuple[bytes, list[torch.Tensor]]] = {}

    # ------------------------------------------------------------------ position

    def arrive(self) -> None:
        """At the first ks.* call that depends on where the job is."""
        if self._position is not None:
            return
        seat = self.seat
        self._arrived_ns = time.monotonic_ns()
        command = self._drive(self._protocol.arrive())
        self._position = self._fetch(command.tick, command.holders) or NATURAL
        if self._position:
            seat.tracker.walk_to(self._position["position"])
            self._walking = self._position
            seat.version = self._position["version"]
            seat.tick = self._position["tick"]

    def _fetch(self, tick: int, holders: list[m.Address]) -> dict[str, Any] | None:
        seat = self.seat
        if tick == 0:
            return None
        if tick == CHECKPOINT_TICK:
            data = checkpoint.read_side(self.assign.checkpoint, seat.rank, "side")
        else:
            blob = blobs.fetch(holders, seat.welcome.token, seat.rank, tick)
            data = blob.data if blob is not None else None
        side: dict[str, Any] | None = codec.loads_inline(data) if data is not None else None
        return side

    # ------------------------------------------------------------------ the first call

    def first_call(self, site: str, warm_up: Callable[[], Any] | None) -> None:
        """Warm up (a step: with its own arguments) and join, inside the newcomer's first call that
        is not over already. Afterwards the call begins as on any rank."""
        self.arrive()
        seat = self.seat
        seat.streams.discover()
        natural_rng = seat.streams.capture()
        self._per_rank = [(o, o.snapshot()) for o in seat.objects.values() if o.per_rank]
        stand_in = None
        if warm_up is not None and (seat.version > 0 or not seat.redundancy.needed):
            stand_in = self._warm_up(warm_up, 2 if seat.version > 0 else 1)
        provisional = (self._position or {}).get("tick")
        self._site = site
        self._install()
        final = self._position or {}
        if final.get("tick") != provisional:
            self._lead_on(final)
            seat.tracker.results.setdefault(site, stand_in)
        elif seat.tracker.replay is None:  # nothing to walk past: this very call is the next one
            seat.streams.restore(natural_rng)

    def walked(self, site: str, function: Any, seen: Encoded) -> tuple[Any] | None:
        """The last transaction of the walk returns, as it returned in the rank that is replaced.
        Gives its result where this process has had to make it: with all the rest, or, if the rank
        had `ended` the step, and said what else came of it, the result alone."""
        side, self._walking = self._walking, None
        if side is None:
            return None
        seat, rest, made = self.seat, side["rest"], None
        known = seen.data is not None or "result" in self.late
        if isinstance(rest, list) and not (self.ended and known):
            self._refuse_updates(site, seen.variables)
            rest = with_locals(rest, self._locals)
            stack = script_frames()

            def at_fence() -> list[torch.nn.Parameter]:
                seat.side.apply(side, {})
                if seen.variables is not None:
                    seat.variables.restore(seen.variables, stack)
                return [seat.parameters[index] for index in side["gradients"]]

            made = self._finish(
                function,
                Finishing(rest, site, at_fence, lambda name: seat.known.reach(name, stack)),
                raises=not self.ended and bool(side["late"]),
                refuses=not self.ended and not known,
            )
            if made is not None and not self.ended:
                self.put_rebuilt()
                self._alone = groups.alone_operations()
                return made
        if not self.ended:
            self._refuse_unknown(site, side)
        seat.side.apply(side, self.late)
        self._alone = groups.alone_operations()
        return made

    def _refuse_updates(self, site: str, variables: bytes | None) -> None:
        found = [] if self.ended else self.seat.variables.of_optimizers(variables)
        if found:
            raise UsageError(
                f"rank {self.seat.rank} was lost in the update of step {site!r}, and {found[0]} "
                "keeps objects in its attributes: how the update changes them is not known",
                hint="keep plain data there, or use optimizer.state",
            )

    def _refuse_unknown(self, site: str, side: dict[str, Any]) -> None:
        """The rank was lost behind the update, and its newcomer could not make the rest."""
        new = new_behind(self.seat.behind_elsewhere, site, side["tick"])
        changed = sorted({*side["late"], *new})
        if changed:
            raise UsageError(
                f"rank {self.seat.rank} was lost behind the update of step {site!r}, which changes "
                f"{' and '.join(changed)} of its own there: how is not known",
                hint="draw random numbers and change variables before the update, or between steps",
            )

    def _refuse_alone(self) -> None:
        """Behind the walk, collectives that no section has seen have met nobody: those of DTensors
        and of compiled code."""
        before, self._alone = self._alone, -1
        if before >= 0 and groups.alone_operations() != before:
            raise UsageError(
                f"behind step {self.seat.version} the script makes collectives outside of steps "
                "and sections, in a way that cannot be seen on the other ranks; what they give "
                f"on the newcomer of rank {self.seat.rank} is not what all ranks had",
                hint="put them into a function with @ks.section",
            )

    def _finish(
        self, function: Any, finishing: Finishing, *, raises: bool, refuses: bool
    ) -> tuple[Any] | None:
        """None: it cannot be done, and but for the result, nothing is known to be lost with the
        rank. `raises`: more is, so that no failure can be borne; `refuses`: nor a refusal."""
        self.seat.unfinished = 1
        try:
            result = self.transactions.finish(function, finishing)
            if finishing.reached:
                self.seat.after_update()
        except Exception as error:
            if raises or (refuses and isinstance(error, KeepstepError)):
                raise
            self.seat.warn(
                f"the rest of the last step of rank {self.seat.rank} could not be made here, so a "
                f"result that had not been published is lost: {type(error).__name__}: {error}"
            )
            return None
        finally:
            self.seat.unfinished = 0
            fsdp.reset(self.seat.models.values())
            buckets.forget_backward()
        return (result,) if finishing.reached else None

    def repeats(self, site: str, arguments: Any) -> None:
        """The batch that was seen again on the walk must be the one that the rank had. And if the
        rank had begun this call, its inputs must have been the same."""
        note, self._note = self._note, None
        for loop in self.seat.loops:
            other, loop.other = loop.other, []
            if other:
                self.recovery.diverged(
                    "inputs",
                    site,
                    words=f"ks.batches hands the newcomer of rank {self.seat.rank} another batch "
                    f"than the rank had: {'; '.join(other[:4])}",
                    agreed=self.seat.version,
                )
        if arguments is None or note is None or note["tick"] != self.seat.tick:
            return
        found = inputs.other(note, arguments)
        if found:
            self.recovery.diverged(
                "inputs",
                site,
                words=f"step {site} has other inputs on the newcomer of rank {self.seat.rank} than "
                f"the rank had: argument {'; argument '.join(found[:4])}",
                agreed=self.seat.version,
            )

    def _warm_up(self, function: Callable[[], Any], runs: int) -> Any:
        """Kernels, autograd and optimizer state; whatever it changes is overwritten by Copy."""
        seat = self.seat
        self.transactions.warming = True
        self.transactions.running = "warm-up"
        result = None
        try:
            while self._warm_up_runs < runs:
                self._warm_up_runs += 1
                result = self._warm_up_once(function)
        except KeepstepError:
            raise
        except Exception as error:  # a guard of the user's may dislike unloaded weights
            if any(module.static_graph for module in groups.ddp_modules()):
                raise  # its peers' reducers are past the first backward: this one must be too
            text = "".join(traceback.format_exception(error))
            print(
                f"keepstep: warm-up of the newcomer failed, going on without:\n{text}", flush=True
            )
        finally:
            self.transactions.warming = False
            self.transactions.running = ""
        fsdp.reset(seat.models.values())
        for parameter in seat.parameters:
            parameter.grad = None
        return result

    def _warm_up_once(self, function: Callable[[], Any]) -> Any:
        """Batches that the function pulls itself are handed out again, and the script's variables
        are put back."""
        self.seat.tracker.in_txn = True
        self.seat.variables.begin(script_frames())
        try:
            return function()
        finally:
            self.seat.variables.undo()
            self.seat.variables.end()
            self.seat.tracker.in_txn = False
            undo_arguments = getattr(function, "undo", None)
            if undo_arguments is not None:
                undo_arguments()
            for loop in self.seat.loops:
                loop.retry(other_rng=bool(self._position))

    def _lead_on(self, final: dict[str, Any]) -> None:
        tracker = self.seat.tracker
        for mine, theirs in tracker.move_on_to(final["position"], self._site):
            for loop in self.seat.loops:
                if loop.pos is mine:
                    loop.aim(theirs)

    # ------------------------------------------------------------------ joining

    def _install(self) -> None:
        seat = self.seat
        arrived, now = self._arrived_ns, time.monotonic_ns()
        ready = m.Ready(
            generation=self.assign.generation,
            arrived_ns=max(arrived - seat.process.assigned_ns, 0),
            warm_ns=now - arrived,
            classes=sorted(seat.state.classes()),
        )
        seat.page.where("held")
        self._drive(self._protocol.ready(ready))

    def enter(self) -> None:
        """At the entry of the transaction that comes next, or at the script's end."""
        seat = self.seat
        self._refuse_alone()
        seat.page.where("held")
        swap = self._drive(self._protocol.enter())
        self.joined = True
        seat.state.own, seat.state.walking = None, False
        seat.cells.forget()
        self.recovery.swap(swap)

    def _drive(self, protocol: asks.Protocol[Result]) -> Result:
        return self.seat.channel.drive(protocol, self._perform)

    def _perform(self, ask: asks.Ask) -> Any:
        match ask:
            case asks.Take():
                return self._take(ask.command)
            case asks.Settle():
                if self.seat.state.fingerprint() != self._fingerprint:
                    again = self._copied(ask.command)
                    return again if isinstance(again, m.CopyFailed) else None
            case asks.Leave():
                self.recovery.leave()
        return None

    def _take(self, copy: m.Copy) -> m.Copied | m.CopyFailed:
        said = self._copied(copy)
        if isinstance(said, m.Copied):
            self.installed = True
            complete = not self.seat.state.incomplete
            self._fingerprint = self.seat.state.fingerprint() if complete else {}
        return said

    def _copied(self, copy: m.Copy) -> m.Copied | m.CopyFailed:
        """Copies and installs what replicas share."""
        seat = self.seat
        began = time.monotonic_ns()
        # Behind the walk, what it did to this rank's own state stands.
        behind = self.installed and seat.tracker.replay is None
        seat.state.own = frozenset(seat.cells.own()) if behind else None
        seat.state.walking = not behind and not seat.redundancy.needed
        seat.state.incomplete = False
        try:
            if copy.checkpoint:
                tick = checkpoint.tick_of(copy.checkpoint)
                copy = msgspec.structs.replace(copy, tick=tick)
            kind, side = self._side_state(copy)
            refused = self._refused(side, copy)
            if refused is not None:
                return refused
            if copy.checkpoint:
                copied, missing = checkpoint.read_state(copy.checkpoint, seat.rank, seat.state)
                sources: list[int] = []
            else:
                result = transfer.pull(
                    copy.sources, copy.tick, seat.welcome.token, seat.state, lost=self._lost(copy)
                )
                copied, sources = result.bytes_copied, sorted(result.used)
                missing = result.missing
            if behind and not missing <= self._missing:  # they may have changed on the way here
                rank = min(self._lost(copy), default=-1)
                raise transfer.SourceLost(rank, f"nobody has {', '.join(sorted(missing)[:4])}")
            self._missing = missing
            restored = self._restore(missing, side, copy) if not behind else ""
            if not behind:
                self._adopt(side, copy)
            seat.redundancy.took_over(copy.holders)
        except transfer.SourceLost as error:
            return self._failed(copy, "source-lost", str(error), error.rank)
        except blobs.HoldersUnreachable as error:
            return self._failed(copy, "side-state-unreachable", str(error))
        except ShardsMissing as error:
            return self._failed(copy, "shards-missing", str(error))
        except transfer.DigestMismatch as error:
            kind = "checkpoint" if copy.checkpoint else "digest"
            return self._failed(copy, kind, str(error), error.rank)
        except Exception as error:
            words = "".join(traceback.format_exception(error))[-4000:]
            return self._failed(copy, "checkpoint" if copy.checkpoint else "error", words)
        return m.Copied(
            generation=copy.generation,
            tick=copy.tick,
            bytes_copied=copied,
            copy_ns=time.monotonic_ns() - began,
            sources=sources,
            side_state=kind,  # type: ignore[arg-type]
            restored=restored,
        )

    def _lost(self, copy: m.Copy) -> set[int]:
        """Sources that have not answered in this attempt."""
        if self._lost_in != copy.generation:
            self._lost_in, self._lost_sources = copy.generation, set()
        return self._lost_sources

    def _restore(self, missing: frozenset[str], side: dict[str, Any] | None, copy: m.Copy) -> str:
        """What no rank has; how it was restored, in words."""
        seat = self.seat
        self._rebuilt = {}  # an earlier copy's are of another version
        if not missing:
            return ""
        version = side["version"] if side is not None else 0
        if version == 0 and seat.natural == seat.process.about["natural"]:
            return "shards as the script builds them, before the first step"

        def fetch() -> tuple[vault.Fetched, str]:
            if copy.checkpoint:
                return checkpoint.read_vault(copy.checkpoint, seat.rank)
            return seat.redundancy.fetch(seat.rank, copy.holders, version)

        how = seat.redundancy.restore(missing, version, seat.redundancy.updated, fetch)
        for name in missing:
            kind, _, item = name.partition("/")
            if kind == "object":
                data, tensors = codec.dumps(seat.objects[item].save())
                self._rebuilt[item] = data, [tensor.detach().clone() for tensor in tensors]
        return how

    def put_rebuilt(self) -> None:
        """Where the walk ends, behind the script's variables: these have the tensors of an object
        as they were in the fence, before the update that the vault has replayed."""
        rebuilt, self._rebuilt = self._rebuilt, {}
        for name, (data, tensors) in rebuilt.items():
            self.seat.objects[name].load(codec.loads(data, tensors))

    def _side_state(self, copy: m.Copy) -> tuple[str, dict[str, Any] | None]:
        if copy.tick == 0:
            return "natural", None
        if copy.checkpoint:
            return "checkpoint", self._fetch(CHECKPOINT_TICK, [])
        token, rank = self.seat.welcome.token, self.seat.rank
        blob = blobs.fetch_surely(copy.holders, token, rank, copy.tick, everybody=copy.everybody)
        if blob is None:
            return "missing", None
        return "own-agent" if blob.own else "buddy", codec.loads_inline(blob.data)

    def _fetch_late(self, copy: m.Copy) -> dict[str, Any]:
        """Empty if the rank was lost before the transaction had ended."""
        if copy.checkpoint:
            data = checkpoint.read_side(copy.checkpoint, self.seat.rank, "late")
        else:
            token, tick = self.seat.welcome.token, late_tick(copy.tick)
            blob = blobs.fetch(copy.holders, token, self.seat.rank, tick, patience_s=0.0)
            data = blob.data if blob is not None else None
        late: dict[str, Any] = codec.loads_inline(data) if data is not None else {}
        if data is not None:
            self.seat.page.publish(late_tick(copy.tick), data)
        self._locals = late.pop("locals", {})
        self.ended = data is not None and not late.pop("open", False)
        return late

    def _fetch_note(self, copy: m.Copy) -> dict[str, Any] | None:
        if copy.checkpoint:
            return None
        token, rank = self.seat.welcome.token, self.seat.rank
        blob = blobs.fetch(copy.holders, token, rank, NOTE_TICK, patience_s=0.0)
        note: dict[str, Any] | None = codec.loads_inline(blob.data) if blob is not None else None
        return note

    def _refused(self, side: dict[str, Any] | None, copy: m.Copy) -> m.CopyFailed | None:
        seat = self.seat
        if side is None and copy.tick != 0:
            return self._failed(
                copy,
                "side-state-missing",
                f"side state {copy.tick} of rank {seat.rank} is held by nobody",
            )
        provisional = self._position or {}
        tick = side["tick"] if side is not None else 0
        if side is not None and provisional.get("tick", 0) != tick:
            if not seat.tracker.can_move_on_to(side["position"], self._site):
                return self._failed(
                    copy, "position", "the job has gone on to another epoch or loop"
                )
        elif side is None and provisional:
            return self._failed(copy, "position", "the job was rolled back to its start")
        return None

    def _adopt(self, side: dict[str, Any] | None, copy: m.Copy) -> None:
        seat = self.seat
        seat.tick = copy.tick
        seat.page.set("tick", copy.tick)
        if side is None:
            seat.version = 0
            groups.reset_ddp(0)
            for item, snapshot in self._per_rank:
                item.undo(snapshot)  # what the warm-up did to it
            return
        seat.version = side["version"]
        seat.page.set("version", seat.version)
        self._position = self._walking = side
        self.late = self._fetch_late(copy)
        seat.side.take_behind(side, self.late)
        self._note = self._fetch_note(copy)
        seat.page.publish(copy.tick, codec.dumps_inline(side))

    def _failed(self, copy: m.Copy, reason: Any, error: str, source: int = -1) -> m.CopyFailed:
        return m.CopyFailed(generation=copy.generation, reason=reason, error=error, source=source)
