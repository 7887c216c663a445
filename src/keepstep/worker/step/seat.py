"""The seat of one rank: everything that recovery, transactions and newcomers share.

A seat is used by the user's main thread. The daemon thread of the channel only sets flags, shuts
sockets down and starts the builder thread of `Stager`.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch

from keepstep.core.rank.staging import Staging
from keepstep.errors import UsageError
from keepstep.model import messages as m
from keepstep.model.page import INIT_TICK, NOTE_TICK, late_tick
from keepstep.worker.device import cuda
from keepstep.worker.groups import groups, nccl
from keepstep.worker.line import blobs
from keepstep.worker.line.ahead import Ahead
from keepstep.worker.line.channel import Channel
from keepstep.worker.line.page import Page
from keepstep.worker.script import sharing
from keepstep.worker.script.batches import Loop
from keepstep.worker.script.collectives import Recorder
from keepstep.worker.script.position import Tracker
from keepstep.worker.script.roots import Roots, script_roots
from keepstep.worker.script.streams import Streams
from keepstep.worker.script.unasked import OF_OPTIMIZERS, Unasked
from keepstep.worker.script.variables import Variables
from keepstep.worker.state import buckets, codec, shards
from keepstep.worker.state.cells import Cells
from keepstep.worker.state.flags import Flags
from keepstep.worker.state.gradients import Gradients
from keepstep.worker.state.inputs import Inputs
from keepstep.worker.state.objects import Registered
from keepstep.worker.state.parameters import Parameters, content
from keepstep.worker.state.shards import Replicas
from keepstep.worker.state.state import StateSet
from keepstep.worker.state.witness import Agreement, Replicated
from keepstep.worker.step.faults import Injector
from keepstep.worker.step.finish import Behind
from keepstep.worker.vault.redundancy import Redundancy

if TYPE_CHECKING:
    from keepstep.worker.checkpoint.periodic import Periodic

ATTACHED: Final = "attached"  # before the name of a weight or buffer
STAGE_TIMEOUT_S = 60.0
BUDDY_AGAIN_S = 5  # until a lost buddy is tried again, if nobody has named another one
SIDE_BYTES_MAX = 60 << 20  # it travels in one frame
CARRIED_BYTES_MAX = 32 << 20  # of gradients in the side state: it travels in one frame
# What may change behind a fence: in the late part, and in words.
BEHIND = {
    "variables": "variables",
    "streams": "streams",
    "objects": "registered objects",
    "gradients": "gradients",
}


class Line:
    """What the process had before `attach`: its line to the agent, and whom it is."""

    def __init__(self, channel: Channel, page: Page, recorder: Recorder) -> None:
        self.channel = channel
        self.page = page
        self.recorder = recorder
        self.assigned: m.Assign | None = None  # newcomers only
        self.assigned_ns = 0
        self.init_record = b""  # of the rank that a newcomer replaces
        self.about: dict[str, Any] = {}  # what that rank found out at its attach


class Stager:
    """Builds the groups of the next generation beside the old ones."""

    def __init__(
        self, channel: Channel, rank: int, world: int, ready: Callable[[], None] = lambda: None
    ) -> None:
        """`ready` comes back when groups may be built."""
        self._channel = channel
        self._rank = rank
        self._world = world
        self._ready = ready
        self._lock = threading.Lock()
        self._staging: Staging[groups.StagedGroups] = Staging()

    def begin(self, command: m.Stage) -> None:
        with self._lock:
            if not self._staging.begin(command.generation):
                return  # asked again while it is being done
        threading.Thread(
            target=self._build, args=(command,), name="keepstep-stage", daemon=True
        ).start()

    def _build(self, command: m.Stage) -> None:
        generation = command.generation
        try:
            self._ready()
            staged = groups.stage(
                generation,
                command.store.host,
                command.store.port,
                self._rank,
                self._world,
                self._channel.welcome.interface,
                STAGE_TIMEOUT_S,
            )
        except Exception as error:
            with self._lock:
                wanted = self._staging.failed(generation, self._channel.inbox.abort_generation)
            if wanted:
                self._channel.send(m.StageFailed(generation=generation, error=str(error)[:2000]))
            return
        with self._lock:
            aborted = self._channel.inbox.abort_generation
            kept, useless = self._staging.built(generation, staged, aborted)
            if useless is not None:
                useless.discard()
        if kept:
            self._channel.send(m.Staged(generation=generation))

    def take(self, generation: int) -> groups.StagedGroups | None:
        with self._lock:
            return self._staging.take(generation)

    def discard(self, below: int) -> None:
        with self._lock:
            useless = self._staging.drop(below)
            if useless is not None:
                useless.discard()


class Seat:
    def __init__(
        self,
        line: Line,
        rank: int,
        world: int,
        models: dict[str, torch.nn.Module],
        optimizers: dict[str, torch.optim.Optimizer],
    ) -> None:
        self.line = line
        self.channel = line.channel
        self.page = line.page
        self.welcome = line.channel.welcome
        self.rank = rank
        self.world = world
        self.models = models
        self.optimizers = optimizers
        self.objects: dict[str, Registered] = {}
        self.tracker = Tracker()
        self.loops: list[Loop] = []
        self.functions: dict[str, Any] = {}  # steps and sections, by site
        self.streams = Streams(self.roots)
        self.variables = Variables(self.knows, self.has_memory_of)
        # What is attached, by id and by the address of its memory. Both may be another's later.
        self._known: dict[int, Callable[[], Any]] = {}
        self._memory: dict[int, weakref.ref[torch.Tensor]] = {}
        self._names: dict[int, str] = {}
        self._known_at = -1
        self.tick = 0
        self.version = 0
        self.generation = 0
        self.alone = world == 1  # no peers: fences pass by themselves
        self.done = False
        self.unfinished = 0  # steps that others have behind them, and whose rest is made here
        self.rebuilding = False  # updates are made again that the rank before has made
        self.resumed = -1  # generation whose first commit must be announced
        self.abort_ns = 0
        self.last_commit_ns = 0
        self.step_times_ns: deque[int] = deque(maxlen=65)
        self.stager = Stager(self.channel, rank, world)
        self.injector = Injector(self.channel.armed, self.channel.send)
        self.buddy_line = blobs.BuddyLine(self.welcome.token)
        self.ahead = Ahead()
        self.parameters = self._all_parameters()
        cuda.settle_in(self.parameters)
        self.gradients = Gradients(self.parameters)
        self._carries_on = False  # gradients are added up over several steps, if the fence passes
        self.inputs = Inputs()
        self._streams = b""  # as published at the last fence
        self._objects = b""  # likewise; empty: there are none of this rank alone
        self._gradients = b""  # likewise; empty: none outlive the step
        self._locals: dict[str, Any] = {}  # of the step, that have come from the device
        self.behind = Behind()
        self.behind_elsewhere: dict[str, dict[str, int]] = {}  # a newcomer's source's
        self.cells = Cells(models)
        self.flags = Flags(models, self.parameters, lambda: buckets.modules(self.parameters))
        self.replicas = Replicas(rank, world)
        self.redundancy = Redundancy(self)
        self.changes = Parameters(self)
        self.unasked = Unasked(self.roots, self.knows, content, self._register_unasked, optimizers)
        self.agreement = Agreement()
        self.replicated = Replicated(self)
        self.natural = b""  # digest of what only this rank has, as the script built it
        self.state = self._new_state()
        self.periodic: Periodic | None = None
        if self.welcome.checkpoints:
            from keepstep.worker.checkpoint.periodic import Periodic  # takes a while to be imported

            self.periodic = Periodic(self, self.welcome.checkpoints)
            self.channel.on_seal = self.periodic.seal
        self.channel.on_abort = self._on_abort
        self.channel.on_stage = self.stager.begin
        nccl.watch(self._network_failed)

    # ------------------------------------------------------------------ state

    def _all_parameters(self) -> list[torch.nn.Parameter]:
        seen: dict[int, torch.nn.Parameter] = {}
        for model in self.models.values():
            for parameter in model.parameters():
                seen.setdefault(id(parameter), parameter)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    seen.setdefault(id(parameter), parameter)
        return list(seen.values())

    def _new_state(self) -> StateSet:
        shared = {n: o for n, o in self.objects.items() if not o.per_rank}
        shared["keepstep/flags"] = Registered("keepstep/flags", self._save_flags, self._load_flags)
        shared["keepstep/ddp"] = Registered(
            "keepstep/ddp",
            lambda: buckets.layouts(self.parameters),
            lambda layouts: buckets.set_layouts(self.parameters, layouts),
        )
        shared["keepstep/results"] = Registered(
            "keepstep/results", self._save_results, self._load_results
        )
        shared["keepstep/updates"] = Registered(
            "keepstep/updates", lambda: self.redundancy.updated, self._load_updates
        )
        state = StateSet(
            self.models,
            self.optimizers,
            shared,
            self.replicas,
            groups.ddp_modules,
            lambda: bool(self.gradients.outliving) or self.gradients.carrying,
        )
        state.expect = self._expect
        return state

    def _expect(self, names: set[str]) -> None:
        """A newcomer's import is under way: objects are added to the state it goes to."""
        state = self.state
        self.unasked.expect(names)
        state.objects = {**state.objects, **{n: self.objects[n] for n in self.unasked.names}}
        self.state = state

    def register(self, item: Registered) -> None:
        if item.name in self.objects or item.name.startswith("keepstep/"):
            raise UsageError(
                f"{item.name!r} is registered already", hint="give each object a name of its own"
            )
        self.objects[item.name] = item
        self.state = self._new_state()

    def _register_unasked(self, name: str, save: Any, load: Any) -> None:
        own = name.startswith(OF_OPTIMIZERS) and not isinstance(save(), bool)
        if own and self.redundancy.needed:  # it makes updates again, and they would change it
            raise UsageError(
                f"{name.removeprefix('script/')}, an attribute of the optimizer, changes with its "
                "updates, and no other rank has the shards that it belongs to: after a loss it "
                "could not be made again",
                hint="keep it in optimizer.state[parameter]",
            )
        self.objects[name] = Registered(name, save, load)
        self.state = self._new_state()
        self.warn(
            f"{name.removeprefix('script/')} is used by the script and was not given to attach: it "
            "is carried as if it were registered"
        )

    def make_own(self, name: str) -> None:
        """A registered object differs between ranks, although nobody said so."""
        self.objects[name].per_rank = True
        self.state = self._new_state()
        self.warn(
            f"registered object {name!r} differs between ranks: it is carried as each rank's own, "
            "as with per_rank=True"
        )

    def knows(self, thing: Any) -> bool:
        """It is part of what is attached or registered, or Keepstep's own."""
        if type(thing).__module__.startswith("keepstep."):
            return True
        self._know()
        found = self._known.get(id(thing))
        return found is not None and found() is thing

    def has_memory_of(self, tensor: torch.Tensor) -> bool:
        """It is, or is a view of, a tensor that is attached."""
        return self._owner(tensor) is not None

    def _owner(self, value: Any) -> torch.Tensor | None:
        self._know()
        address = _address(value)
        found = self._memory.get(address) if address else None
        owner = found() if found is not None else None
        return owner if owner is not None and _address(owner) == address else None

    def lying_with(self, value: Any) -> tuple[list[Any], Any] | None:
        """What is attached, or a variable of the script, in the same memory as this tensor or
        array, and its name; None: neither. LookupError: it has no name."""
        owner = self._owner(value)
        if owner is None:
            return self.variables.lying_with(value)
        return [ATTACHED, self._names[id(owner)]], owner

    def reach(self, name: list[Any], stack: list[FrameType]) -> Any:
        """What has this name in this process. LookupError: nothing."""
        if name[0] != ATTACHED:
            return self.variables.reach(name, stack)
        return dict(self._named())[name[1]]

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for prefix, model in self.models.items():
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                yield f"{prefix}/{name}", tensor

    def _know(self) -> None:
        stamp = len(self.objects) + sum(len(o.state) for o in self.optimizers.values())
        if stamp != self._known_at:
            self._known_at = stamp
            found = self._attached()
            self._known = {id(thing): _weak(thing) for thing in found}
            tensors = [thing for thing in found if isinstance(thing, torch.Tensor)]
            self._known |= {id(thing): _weak(thing) for thing in self._saved()}
            self._memory = {_address(tensor): weakref.ref(tensor) for tensor in tensors}
            self._names = {id(tensor): name for name, tensor in self._named()}

    def _saved(self) -> list[torch.Tensor]:
        """Of registered objects: the script may hold them, too."""
        return [
            tensor
            for item in self.objects.values()
            if not isinstance(getattr(item.save, "__self__", None), torch.nn.Module)
            for tensor in codec.dumps(item.save())[1]
        ]

    def _attached(self) -> list[Any]:
        owners = [getattr(item.save, "__self__", None) for item in self.objects.values()]
        modules = [x for x in (*self.models.values(), *owners) if isinstance(x, torch.nn.Module)]
        found: list[Any] = [*owners, *self.optimizers.values(), *self.parameters]
        for module in modules:
            found += [*module.modules(), *module.parameters(), *module.buffers()]
        for optimizer in self.optimizers.values():
            for entry in optimizer.state.values():
                found += entry.values() if isinstance(entry, dict) else [entry]
        return [thing for thing in found if thing is not None]

    def roots(self) -> Roots:
        """Where the script's own state is looked for."""
        named: dict[str, Any] = {f"step {site}": x for site, x in self.functions.items()}
        named |= {f"model {name}": model for name, model in self.models.items()}
        named |= {f"registered {name}": item.save for name, item in self.objects.items()}
        running = [loop for loop in self.loops if not loop.pos.closed]
        return script_roots(named, {f"loader{i}": loop.loader for i, loop in enumerate(running)})

    def after_update(self) -> None:
        for item in self.objects.values():
            if item.after_update is not None:
                item.after_update()

    def _save_results(self) -> dict[str, Any]:
        """The newest result of every step and section, for a newcomer that walks past them."""
        return self.tracker.results

    def _load_results(self, results: dict[str, Any]) -> None:
        self.tracker.results = results

    def _save_flags(self) -> dict[str, Any]:
        return {
            "flags": self.flags.save(),
            "extra": self.cells.extra(),
            "late": self.cells.export_late(),
            "changing": self.changes.export(),
            "outliving": sorted(self.gradients.outliving),
            "carrying": self.gradients.carrying,
            "comparable": self.agreement.comparable,
            "per_rank": sorted(name for name, item in self.objects.items() if item.per_rank),
            "behind": self.behind.export(),
        }

    def _load_flags(self, saved: dict[str, Any]) -> None:
        self.flags.load(saved["flags"])
        own = self.state.own or frozenset()
        self.cells.import_late(saved["late"])
        self.cells.put_extra({n: v for n, v in saved["extra"].items() if n not in own})
        self.changes.load(saved["changing"])
        self.gradients.outliving |= set(saved["outliving"])
        self.gradients.carrying = saved["carrying"]
        self.agreement.comparable = saved["comparable"]
        for name in saved["per_rank"]:
            self.objects[name].per_rank = True
        self.behind_elsewhere = saved.get("behind", {})

    def _load_updates(self, updated: list[str]) -> None:
        self.redundancy.updated = updated

    # ------------------------------------------------------------------ side state

    def _carried(self, step: bool, updating: bool) -> dict[int, torch.Tensor]:
        """Gradients that the next step may add to, by parameter."""
        gradients = self.gradients
        self._carries_on = False
        if not updating and not step and not gradients.carrying:
            return {}
        if updating and not gradients.outliving:
            return {}
        found = gradients.to_carry(updating)
        self._carries_on = bool(found) and not updating
        size = sum(g.nbytes for g in found.values())
        if size > CARRIED_BYTES_MAX:
            raise UsageError(
                f"gradients of {size >> 20} MiB outlive a step, more than can be published with "
                "every step: a rank that is lost in between could not be replaced exactly",
                hint="make one @ks.step call of all micro-batches of an update",
            )
        return found

    def side_state(
        self,
        site: str,
        step: bool,
        updating: bool = True,
        position: Any = None,
        result: bytes | None = None,
        variables: bytes | None = None,
        rest: list[dict[str, Any]] | None = None,
    ) -> bytes:
        """Version tick+1 of what only this rank has, as it will be if the fence passes.
        `updating`: an optimizer is about to use up the gradients."""
        if position is None:
            position = self.tracker.position(site, step, result, variables)
        self.cells.fence()
        self._streams = self.streams.capture()
        carried = self._carried(step, updating)
        # Of a step without an update nothing comes behind the fence.
        outliving = updating and bool(self.gradients.outliving)
        self._gradients = codec.dumps_inline(carried) if outliving else b""
        objects = self._own_objects()
        self._objects = (
            codec.dumps_inline(objects) if objects["per_rank"] or objects["own"] else b""
        )
        data = codec.dumps_inline(
            {
                "gradients": carried,
                "tick": self.tick + 1,
                "version": self.version + step,
                "streams": self._streams,
                "late": self.behind.changes(site) if updating else [],
                "behind": self.behind.export(),
                "site": site,
                "rest": rest,
                "position": position,
                "cells": self.cells.side(),
                **objects,
            }
        )
        if len(data) > SIDE_BYTES_MAX:
            raise self._too_large(len(data))
        return data

    def _own_objects(self) -> dict[str, Any]:
        """Of what is registered, what only this rank has."""
        return {
            "per_rank": {n: o.save() for n, o in self.objects.items() if o.per_rank},
            "own": {n: o.own_tensors() for n, o in self.objects.items() if o.own},
        }

    def _too_large(self, size: int) -> UsageError:
        parts = {f"buffer {n}": _bytes_of(value) for n, value in self.cells.side().items()}
        parts |= self.variables.heavy()
        for name, item in self.objects.items():
            if item.per_rank or item.own:
                parts[f"registered object {name!r}"] = item.size
        name, largest = max(parts.items(), key=lambda one: one[1], default=("the script", 0))
        return UsageError(
            f"what only this rank has is {size >> 20} MiB, and it is published with every step; "
            f"the largest part is {name} ({largest >> 20} MiB), which changes and may differ "
            "between ranks",
            hint=f"the limit is {SIDE_BYTES_MAX >> 20} MiB: make it smaller, or a buffer that "
            "changes only behind the optimizer's update and alike on all ranks, or register such a "
            "thing with ks.register(name, save, load)",
        )

    def note_inputs(self, arguments: Any) -> None:
        """A step begins: a newcomer that has to repeat it must come to the same arguments."""
        self.inputs.enter(arguments)
        self._publish_note()

    def complete_note(self) -> None:
        """What lay on the device, if it has just become known."""
        if self.inputs.complete():
            self._publish_note()

    def _publish_note(self) -> None:
        note = {"tick": self.tick, **self.inputs.note()}
        self.page.publish(NOTE_TICK, codec.dumps_inline(note))

    def publish_late(
        self,
        site: str,
        result: bytes | None,
        variables: bytes | None,
        foreseen: bool,
        mark: str,
    ) -> None:
        """The transaction has ended: what was not known in its fence. To the own agent, and to the
        buddy without waiting for it. `foreseen`: the result was known."""
        late: dict[str, Any] = {} if result is None else {"result": result}
        if mark:
            late["mark"] = mark
        locals_, self._locals = self._locals, {}
        if result is None and locals_:
            late["locals"] = locals_  # it can be made again
        if variables is not None:
            late["variables"] = variables
        streams = self.streams.capture()
        if streams != self._streams:
            late["streams"] = streams
        if self._objects and (objects := codec.dumps_inline(self._own_objects())) != self._objects:
            late["objects"] = objects
        if self._gradients:
            gradients = codec.dumps_inline(self.gradients.to_carry(updating=True))
            if gradients != self._gradients:
                late["gradients"] = gradients
        self.behind.note(site, [BEHIND[n] for n in late if n in BEHIND], foreseen, self.tick + 1)
        self._send_late(late)

    def take_behind(self, side: dict[str, Any], late: dict[str, Any]) -> None:
        """On a newcomer: what its rank knew of its step functions."""
        self.behind.load(side.get("behind", {}))
        changed = [BEHIND[name] for name in late if name in BEHIND]
        if changed and "site" in side:
            self.behind.note(side["site"], changed, True, side["tick"])

    def publish_locals(self) -> None:
        """The device has come to the fence, and so have local variables of the step that were on
        it: the rest of the step, and only that, may need them."""
        self._locals = self.behind.come()
        if self._locals and not self.aborted():
            self._send_late({"locals": self._locals, "open": True})

    def _send_late(self, late: dict[str, Any]) -> None:
        tick = late_tick(self.tick + 1)
        data = codec.dumps_inline(late)
        self.page.publish(tick, data)
        address = self.channel.inbox.buddy
        if address is not None:
            self.buddy_line.send_late(address, self.rank, tick, data)

    def warn(self, text: str) -> None:
        print(f"keepstep: {text}", file=sys.stderr, flush=True)

    def publish(self, tick: int, data: bytes) -> None:
        """To the own agent (shared memory) and, acknowledged, to the buddy. Raises OSError or
        ConnectionAbortedError when an Abort interrupts it: the fence is then not reached."""
        self.ahead.wait()
        self.buddy_line.generation = self.generation
        self.page.publish(tick, data)

        def put(address: m.Address | None) -> None:
            if address is not None:
                init = self.page.held(INIT_TICK)
                self.buddy_line.put(address, self.rank, tick, data, self.aborted, init)

        self._at_buddy(put)

    def secure(self, updating: bool) -> None:
        """State that no other rank has begins to go where it outlives this one; as `publish`."""
        if not self.redundancy.needed:
            return
        try:
            self._at_buddy(lambda address: self.redundancy.publish(address, updating))
        except UsageError as error:  # there is not enough memory at the only place that is left
            self.redundancy.suspend(str(error))

    def secured(self, updating: bool, let_go: Callable[[], None]) -> None:
        """It is there. If not, another place is looked for, which the device shall not wait for:
        `let_go` sees to that."""
        if not self.redundancy.needed:
            return

        def again(address: m.Address | None) -> None:
            self.redundancy.publish(address, updating)
            self.redundancy.confirm(let_go)

        try:
            try:
                self.redundancy.confirm(let_go)
            except OSError:
                let_go()
                self._at_buddy(again)
        except UsageError as error:
            self.redundancy.suspend(str(error))

    def _at_buddy(self, action: Callable[[m.Address | None], None]) -> None:
        try:
            while not self._acted(action):
                pass
        finally:
            if self.page.get("asked_ns"):
                self.page.set("hold", 0)
                self.page.set("asked_ns", 0)

    def _acted(self, action: Callable[[m.Address | None], None]) -> bool:
        """False: another buddy was asked for, or it is time to try the same again."""
        address = self.channel.inbox.buddy
        if self.aborted():
            raise ConnectionAbortedError("publishing was aborted")
        try:
            action(address)
        except OSError as error:
            if self.aborted():
                raise ConnectionAbortedError("publishing was aborted") from error
            self.channel.send(m.BuddyLost(generation=self.generation, error=str(error)))
            self._wait_for_other_buddy(address)
            return False
        return True

    def sends_ahead(self) -> bool:
        """Whether the side state goes to the buddy while the last backward pass of a step runs.
        What lies on another device is not waited for, and what the user saves by a function of his
        is saved in his thread."""
        if self.channel.inbox.buddy is None or not self.ahead.worthwhile():
            return False
        return not any(o.per_rank for o in self.objects.values()) and all(
            tensor.device.type == "cpu" for tensor in self.cells.tensors()
        )

    def publish_ahead(
        self,
        site: str,
        result: bytes | None,
        variables: bytes,
        rest: list[dict[str, Any]] | None,
    ) -> None:
        """The last backward pass of a step begins."""
        address = self.channel.inbox.buddy
        if address is None:
            return
        # The tracker is no other thread's business.
        position = self.tracker.position(site, True, result, variables)

        def send() -> bytes:
            data = self.side_state(site, True, True, position, rest=rest)
            self.buddy_line.send_ahead(address, self.rank, self.tick + 1, data)
            return data

        self.ahead.begin(send)

    def _wait_for_other_buddy(self, old: m.Address | None) -> None:
        """It waits for a command, as in a hold, and shows that it has not come to a stop."""
        inbox = self.channel.inbox
        for _ in range(BUDDY_AGAIN_S):
            self.page.set("asked_ns", time.monotonic_ns())
            self.page.set("hold", 1)
            if self.channel.wait_until(lambda: inbox.buddy != old or self.aborted(), 1.0):
                return

    def republish(self) -> None:
        """After a swap the buddy may be new: give it what it would need now."""
        for tick in (INIT_TICK, self.tick, late_tick(self.tick)):
            data = self.page.held(tick)
            if data is not None:
                self.publish(tick, data)

    def apply_side_state(self, side: dict[str, Any], late: dict[str, Any]) -> None:
        """On a newcomer, where the transaction that it was published for returns."""
        self.cells.put(side["cells"])
        gradients = late.get("gradients")
        self.gradients.put(codec.loads_inline(gradients) if gradients else side["gradients"])
        self.streams.restore(late.get("streams", side["streams"]))
        objects = codec.loads_inline(late["objects"]) if "objects" in late else side
        for name, value in objects["per_rank"].items():
            if name in self.objects:
                self.objects[name].load(value)
        for name, tensors in objects["own"].items():
            self.objects[name].put_own(tensors)

    # ------------------------------------------------------------------ faults

    def aborted(self) -> bool:
        return self.channel.inbox.abort_generation > self.generation

    def _on_abort(self, command: m.Abort) -> None:
        """Again every second, until the main thread has come back from whatever it was doing."""
        groups.abort()
        self.buddy_line.interrupt()
        self.redundancy.interrupt()
        self.stager.discard(below=self.channel.inbox.abort_generation)

    def _network_failed(self, reason: str) -> None:
        """In a thread of its own: the main one may wait for the device, and never hear of it."""
        if not self.aborted():
            self.channel.send(
                m.Failure(
                    generation=self.generation,
                    error_kind="comm",
                    error=f"Connection lost: {reason}",
                    version=self.version,
                )
            )

    def median_step_ns(self) -> int:
        return int(statistics.median(self.step_times_ns)) if self.step_times_ns else 0

    def committed(self, step: bool) -> None:
        now = time.monotonic_ns()
        self.tick += 1
        self.version += step
        self.gradients.carrying = self._carries_on
        page = self.page
        page.set("tick", self.tick)
        page.set("version", self.version)
        page.set("commit_ns", now)
        page.new_tick()
        if self.resumed == self.generation:
            self._announce(now)
        elif step and self.last_commit_ns:
            self.step_times_ns.append(now - self.last_commit_ns)
        self.last_commit_ns = now

    def _announce(self, now: int) -> None:
        self.resumed = -1
        self.channel.send(
            m.Resumed(
                generation=self.generation,
                tick=self.tick,
                version=self.version,
                last_commit_ns=self.last_commit_ns,
                first_commit_ns=now,
                median_step_ns=self.median_step_ns(),
                abort_ns=self.abort_ns,
            )
        )
        self.abort_ns = 0  # a planned move that follows has none


def _bytes_of(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else len(codec.dumps_inline(value))


def _weak(thing: Any) -> Callable[[], Any]:
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


def _address(value: Any) -> int:
    """0: it has no memory of its own."""
    place = sharing.place(shards.local(value))
    return place[0] if place is not None else 0
