"""State that no other rank has, kept in the memory of another node (or of the own agent).

The vault holds of every *unit* (a parameter with its optimizer's state) a base, its bytes at some
version, and the gradients of every step since. At the fence of step k it has everything up to
gradient k, acknowledged; so whatever becomes of this rank, another process can bring the base to
version k, or to k+1 if the fence passed: by the same optimizer, with the same gradients and
hyperparameters, on the same kind of device. That is exact, and nothing is computed twice.

Bases are renewed in turn, one share per step, so that a step costs the same every time: gradients
of everything, and 1/RENEW of all bases. They are read where they lie while the step computes;
before the update, which changes them, the fence waits until they have been read. Gradients are sent
during the last backward pass (early.py); at the fence those that are not there as they are now.

What the user keeps besides (averages of sharded weights) is not an optimizer's business: such an
object must say how it follows from the parameters (`after_update`), and then all bases are of one
version, because it may depend on any of them.

With `parity` the vault is that of the own agent, and the parity of several ranks is kept besides
(parity.py). Then all bases are of one version, too, and all ranks renew them at the same ones. What
was added to a parity cannot be taken out: what takes the place of a gradient that was sent too
early is in the step's note.

Main thread only, but for `interrupt`.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from keepstep.adapters.transport.blocking import pieces
from keepstep.errors import KeepstepError, PermanentError, UsageError
from keepstep.model.messages import Address
from keepstep.worker.device import cuda
from keepstep.worker.line import blobs
from keepstep.worker.state import codec, shards
from keepstep.worker.state.rank import Rank
from keepstep.worker.state.state import flat
from keepstep.worker.vault import lane, parity, rebuild, vault
from keepstep.worker.vault.early import Early, same_kind, watch_clipping
from keepstep.worker.vault.host import HostWay
from keepstep.worker.vault.replay import Replay
from keepstep.worker.vault.staging import Staging, numbers
from keepstep.worker.vault.units import Parts, Unit, described, in_order, part_of, view, views

NOTED_BYTES = 1 << 30  # in a piece: msgpack knows none of 4 GiB
UNIT_BYTES = 1 << 10  # of a base, between its tensors
PARCELS_MAX = 64  # there are about RENEW, as a rule
RENEW = 4  # steps in which all bases are renewed once; more gradients are kept, fewer bases sent


class ShardsMissing(PermanentError):
    """State of which there was one copy, and that was lost."""


@dataclass
class _Unconfirmed:
    """What `publish` has put."""

    line: vault.VaultLine
    version: int
    update: bytes
    gradients: dict[int, torch.Tensor | None]
    asked: bool = False  # the vault, for its word that it has all


class Redundancy:
    def __init__(self, me: Rank) -> None:
        self._me = me
        self.mode = me.welcome.settings.redundancy
        self.units: list[Unit] = []
        self.unprotected = 0  # tensors that are nowhere else
        self.first_unprotected = ""
        self._whole = False  # all bases are of one version
        self._parity = parity.ParityLine(me) if self.mode == "parity" else None
        self._realign = True  # all ranks put bases at the version that they have now
        self._aligned = -1  # version at which they did last
        self._line: vault.VaultLine | None = None
        self._lanes: dict[int, int] = {}  # unit or slice -> lane of the line
        self._parcels: dict[tuple[int, ...], tuple[list[Parts | None], vault.Parcel]] = {}
        self._former: list[Address] = []  # to forget all when the new one has all
        self._suspended = ""  # why nothing is kept at present
        self._begun = -1  # version whose share of bases was put, but for these
        self._due: list[Unit] = []
        self._published: dict[int, Any] = {}  # unit -> what its gradient was at the fence
        self._early = Early()
        self._watching = False  # clipping
        self._staging: Staging | None = None  # on a GPU
        self._host: HostWay | None = None
        self._unconfirmed: _Unconfirmed | None = None
        self.updated: list[str] = []  # optimizers that made the last step's updates, in order

    @property
    def kept_bytes(self) -> int:
        return sum(unit.size for unit in self.units)

    @property
    def needed(self) -> bool:
        return bool(self.units)

    # ------------------------------------------------------------------ what is to be kept

    def survey(self) -> None:
        """At attach: what has no replica where a failure of this node would leave it."""
        self._early.unwatch()
        me = self._me
        state, replicas = me.state, me.replicas
        local_world, settings = me.local_world, me.welcome.settings
        if me.world == 1:
            return  # with its only rank all that could decide how to go on is lost

        def alone(tensor: torch.Tensor) -> bool:
            return not replicas.elsewhere(replicas.of(tensor), local_world)

        tensors = state.named_tensors()
        lonely = {name for name, tensor in tensors.items() if alone(tensor)}
        objects = [
            name
            for name, item in me.objects.items()
            if not item.per_rank and any(alone(t) for t in codec.dumps(item.save())[1])
        ]
        if self.mode == "off":
            self.unprotected = len(lonely) + len(objects)
            self.first_unprotected = next(iter(sorted(lonely) + objects), "")
        if self.mode == "off" or not (lonely or objects):
            return
        self._refuse_objects(objects)
        self._whole = bool(objects) or self._parity is not None
        wanted = tensors if objects else {n: t for n, t in tensors.items() if n in lonely}
        owners = {
            id(p): (name, place)
            for name, optimizer in me.optimizers.items()
            for place, p in enumerate(flat(optimizer))
        }
        buffers = []
        for name, tensor in wanted.items():
            if not isinstance(tensor, torch.nn.Parameter):
                buffers.append(name)
                continue
            optimizer, place = owners.get(id(tensor), ("", 0))
            self._add(Unit(0, name, tensor, optimizer, place))
        if buffers:
            self._add(Unit(0, "buffers", buffers=buffers))
        for name in objects:
            self._add(Unit(0, f"object/{name}", object=name))
        if not self._watching:
            self._watching = True
            watch_clipping(self._early)
        sizes = {unit.index: unit.size for unit in self.units}
        self._lanes = vault.lanes_of(
            vault.sliced(sizes, self._parameters, settings.vault_slice),
            local_world,
            settings.vault_lanes,
        )
        self._stage()
        self._copy_on_host()

    def _gradients_on(self, device: torch.device | None) -> dict[int, int]:
        return {
            unit.index: shards.local(unit.parameter).nbytes
            for unit in self.units
            if unit.parameter is not None and unit.parameter.device == device
        }

    def _copy_on_host(self) -> None:
        gradients, old = self._gradients_on(torch.device("cpu")), self._host
        if old is not None:
            if old.made_for == gradients:
                return
            self._host = None
            self._early.ways.remove(old)
            old.close()
        if gradients:
            self._host = HostWay(gradients, vault.cores_left(self._me.local_world))
            self._early.ways.append(self._host)

    def _stage(self) -> None:
        home = cuda.home
        gradients = self._gradients_on(home)
        old = self._staging
        readers = max(self._lanes.values()) + 1
        sizes = [unit.size + UNIT_BYTES for unit in self.units]
        room = sum(sizes) if self._whole else sum(sizes) // RENEW + max(sizes)
        if old is not None:
            if old.made_for == (home, gradients, room, readers):
                return
            self._staging = None
            self._early.ways.remove(old)
            old.close()
        if home is None or not gradients:
            return
        try:
            self._staging = Staging(home, gradients, room, readers)
        except RuntimeError as error:  # everything works without, only slower
            print(f"keepstep: copies to the vault are waited for: {error}", file=sys.stderr)
            return
        self._early.ways.insert(0, self._staging)

    def settle(self) -> None:
        """At the first step: objects may have been registered since attach."""
        before = self.layout
        self.units.clear()
        self._parcels.clear()
        self.survey()
        if self._line is not None and self.layout != before:
            self._open(self._line.address, fresh=True)
            self._align()
        elif self._line is None and self._me.process.assigned is None:
            self.connect()

    def _add(self, unit: Unit) -> None:
        unit.index = len(self.units)
        self.units.append(unit)
        unit.size = sum(len(view) for view in self._base(unit)) + self._state_to_come(unit)
        parameter = unit.parameter
        if parameter is None or not unit.optimizer or not parameter.requires_grad:
            return
        # DDP reduces gradients behind the back of hooks.
        if isinstance(parameter, DTensor) or not self._me.replicas.described(parameter):
            self._early.watch(unit.index, parameter)

    def _state_to_come(self, unit: Unit) -> int:
        """Optimizers make their state at the first update: room for twice the parameter, which is
        what Adam needs, unless it is there already."""
        if unit.parameter is None or not unit.optimizer:
            return 0
        if unit.parameter in self._me.optimizers[unit.optimizer].state:
            return 0
        return 2 * shards.local(unit.parameter).nbytes + 256

    def _refuse_objects(self, objects: Iterable[str]) -> None:
        for name in objects:
            if self._me.objects[name].after_update is None:
                raise UsageError(
                    f"registered object {name!r} has tensors that no other rank has, and Keepstep "
                    "does not know how they change: after a loss they could not be rebuilt",
                    hint="give register(..., after_update=function) instead of changing it in the "
                    "step; per_rank=True for small state that changes before the update",
                )

    @property
    def layout(self) -> bytes:
        """What the units are, and how they are cut; who only reads need not know that."""
        return self._content + xxhash.xxh3_64_digest(repr(sorted(self._lanes)).encode())

    @property
    def _content(self) -> bytes:
        digest = xxhash.xxh3_128()
        for unit in self.units:
            digest.update(f"{unit.index} {unit.name} {unit.optimizer} {unit.place}\n".encode())
        return digest.digest()

    @property
    def reserve(self) -> int:
        """Bytes in the vault at most. A base is there beside the one before it until the fence of
        the next step: two shares are, each of them up to one unit larger than it should be. Then
        there is the log, of RENEW / 2 + 2.5 steps on average. What is put again is there twice
        until it was received."""
        bases = sum(unit.size for unit in self.units)
        largest = max((unit.size for unit in self.units), default=0)
        gradients = self._gradients
        notes = 1 << 20
        if self._parity is not None:  # faults one after the other may add bases between the common
            return 3 * bases + (RENEW + 5) * gradients + notes  # those of one step in its note
        if self._whole:
            return 2 * bases + largest + (RENEW + 2) * gradients + notes
        shares = 2 * (bases // RENEW + largest)
        return bases + shares + largest + (RENEW // 2 + 3) * gradients + notes

    @property
    def _gradients(self) -> int:
        """Bytes of those of one step."""
        return sum(self._parameters.values())

    @property
    def _parameters(self) -> dict[int, int]:
        """Bytes of each unit's."""
        return {
            unit.index: shards.local(unit.parameter).nbytes
            for unit in self.units
            if unit.parameter is not None
        }

    def digest(self) -> bytes:
        digest = xxhash.xxh3_128()
        for unit in self.units:
            for data in self._base(unit):
                digest.update(data)
        return digest.digest()

    # ------------------------------------------------------------------ the line

    def _target(self, buddy: Address | None) -> Address:
        own = self._me.welcome.blobs
        return own if self._parity is not None else buddy or own

    def connect(self) -> None:
        """Before training begins, so that too little memory is known in time."""
        if self.needed:
            self._open(self._target(self._me.channel.inbox.buddy))
            self._align()

    def reconnect(self) -> None:
        """After a swap: the step that follows can send while it computes. If it fails, the fence
        will find out."""
        self._suspended = ""
        if self.needed:
            with contextlib.suppress(OSError, KeepstepError):
                self._open(self._target(self._me.channel.inbox.buddy))
            with contextlib.suppress(OSError, KeepstepError):
                self._align()

    def _align(self) -> None:
        if self._parity is not None:
            self._realign, self._begun = True, -1
            self._parity.open(self.layout, self._lanes, self.reserve)

    def _open(self, address: Address, fresh: bool = False) -> None:
        """What the vault has is good until it has something newer."""
        me = self._me
        old, self._line = self._line, None
        if old is not None:
            old.close()
        who = (address, me.welcome.token, me.rank, max(me.generation, 0))
        if self._parity is not None:
            line: vault.VaultLine = parity.Both(self._parity, *who, self._lanes)
        else:
            own = address == me.welcome.blobs
            line = vault.VaultLine(*who, own=own, lanes=self._lanes)
        at, layout = me.version, self.layout
        reaches = line.open(layout, self._lanes, self.reserve, fresh=fresh, version=at)
        same = old is not None and old.address == address
        if not same or reaches < at:
            if at > 0 and not fresh:
                # All bases at once, beside those of an earlier writer until the next fence.
                more = self.kept_bytes + self._gradients
                line.open(layout, self._lanes, self.reserve + more, version=at)
            for unit in self.units:
                unit.confirmed = -1
        for unit in self.units:
            unit.version = unit.confirmed  # what was on its way may be lost
        self._begun = -1
        if old is not None and not same:
            self._former.append(old.address)
        self._line = line

    def took_over(self, holders: list[Address]) -> None:
        """A newcomer: what earlier processes of the rank have left there, with gradients of steps
        that never came to pass, must not be taken for this one's later."""
        if self._parity is None:
            self._former = list(holders)

    def interrupt(self) -> None:
        line = self._line
        if line is not None:
            line.interrupt()
        if self._parity is not None:
            self._parity.interrupt()

    # ------------------------------------------------------------------ in a step

    def begin(self) -> None:
        """A step begins: put the bases that are due. Whatever is wrong with the line shows in the
        fence, where it can be waited for."""
        self._early.forget()
        if self._staging is not None:
            self._staging.turn()
        if self._host is not None:
            self._host.turn()
        line = self._line
        version = self._me.version
        if line is None or self._begun == version:
            return
        self._put_bases(line, version)

    def backward(self, last: bool) -> None:
        """A backward pass begins; `last`: of this step, as it seems."""
        if self._line is not None:
            self._put_due(self._line, self._me.version)
        if last and self.needed and not self._suspended and self._line is not None:
            self._early.open(self._line, self._me.version)
        else:
            self._early.close()

    def backward_done(self) -> None:
        self._early.flush()
        if self._staging is not None:
            self._staging.hold_back()

    def _put_bases(self, line: vault.VaultLine, version: int) -> None:
        self._begun = version
        if self._staging is not None:
            self._staging.turn()
        if self._parity is not None:
            due = self._due_with_others(self._parity, version)
        elif self._whole:
            due = self.units if self._oldest() <= version - RENEW else []
        else:
            due = self._share()
        self._due = []
        if self._staging is not None:
            # A GPU has nothing to do when a step begins: whatever is done here, it waits for.
            # Parameters stay what they are until the update. All else the forward pass may change.
            self._due = [unit for unit in due if unit.parameter is not None]
            due = [unit for unit in due if unit.parameter is None]
        self._put(line, version, due)

    def _put_due(self, line: vault.VaultLine, version: int) -> None:
        if self._begun == version:
            due, self._due = self._due, []
            self._put(line, version, due)

    def _put(self, line: vault.VaultLine, version: int, due: list[Unit]) -> None:
        if self._staging is None:
            if due:
                line.put_parcel("base", version, self._parcel(due))
        else:
            parts = {unit.index: self._parts(unit) for unit in due}
            left = self._staging.put_bases(line, version, parts)
            line.put_all("base", version, {index: views(parts[index]) for index in left})
        for unit in due:
            unit.version = version

    def _parcel(self, due: list[Unit]) -> vault.Parcel:
        """Their bases. In host memory these are what they were when they were due before."""
        bases = {unit.index: self._base(unit) for unit in due}
        made_of = [unit.parts for unit in due]
        if None in made_of:
            return vault.Parcel(bases)
        key = tuple(bases)
        known = self._parcels.get(key)
        if known is None or known[0] != made_of:
            if len(self._parcels) >= PARCELS_MAX:
                self._parcels.clear()
            known = self._parcels[key] = (made_of, vault.Parcel(bases))
        return known[1]

    def _due_with_others(self, line: parity.ParityLine, version: int) -> list[Unit]:
        """Of the multiples of RENEW, and of what follows a swap, all ranks have bases."""
        if self._realign or version % RENEW == 0:
            self._realign, self._aligned = False, version
        if self._aligned != version:
            return [unit for unit in self.units if unit.version < 0]
        line.begin(version)
        return self.units

    def _oldest(self) -> int:
        low = min(unit.version for unit in self.units)
        return low if low >= 0 else -RENEW - 1

    def _share(self) -> list[Unit]:
        """Those that were never sent, and the oldest ones, as many as make up one share."""
        due = [unit for unit in self.units if unit.version < 0]
        if due:
            return due
        room = sum(unit.size for unit in self.units) // RENEW
        for unit in sorted(self.units, key=lambda one: (one.version, one.index)):
            due.append(unit)
            room -= unit.size
            if room <= 0:
                break
        return due

    def _base(self, unit: Unit) -> list[memoryview | bytes]:
        return views(self._parts(unit))

    def _parts(self, unit: Unit) -> list[memoryview | bytes | torch.Tensor]:
        """What lies on a device is for somebody else to fetch."""
        if unit.parameter is not None:
            optimizer = self._me.optimizers.get(unit.optimizer)
            entry = optimizer.state.get(unit.parameter) if optimizer is not None else None
            if unit.parts is not None and unit.parts.good(entry):
                return [*unit.parts.views]
            if unit.parts is not None:
                self._parcels.clear()  # they would hold what is not used any more
            data, found = codec.dumps(entry)
            parts = [data, *map(part_of, [unit.parameter, *found]), *map(described, found)]
            unit.parts = Parts.of(unit.parameter, entry, parts)
            return parts
        if unit.object:
            data, found = codec.dumps(self._me.objects[unit.object].save())
            return [data, *map(part_of, found), *map(described, found)]
        named = self._me.state.named_tensors()
        found = [named[name] for name in unit.buffers]
        # A forward pass may write to them while the line reads.
        copies = [shards.local(tensor).detach().clone() for tensor in found]
        return [b"", *map(view, copies), *map(described, found)]

    def publish(self, address: Address | None, updating: bool) -> None:
        """At the fence: all that leads to the next version is on its way to the vault. The device
        is not waited for. OSError when there is no vault."""
        me = self._me
        self._unconfirmed = None
        if not self.units or self._suspended:
            return
        target = self._target(address)
        version = me.version
        line = self._line
        if line is None or line.address != target or line.broken:
            if line is not None and self._parity is not None and self._early.guessed(line):
                self._parity.give_up(version)  # it has gradients from before they were final
            self._open(target)
            line = self._line
            assert line is not None
        if self._begun != version:
            self._put_bases(line, version)
        self._put_due(line, version)
        gradients = self._put_gradients(line, version, updating)
        done = _Unconfirmed(line, version, self._update_of(updating), gradients)
        if self._staging is None and self._parity is None:
            # As if all were right, which will have been seen when the answer comes. Nothing of it
            # counts before all ranks have passed the fence.
            self._ask(done, {})
        self._early.look(lambda unit: gradients[unit] is not None)
        if self._staging is not None:
            self._early.bring(self._staging.bring)
            self._staging.hold_back()
        self._unconfirmed = done

    def _ask(self, done: _Unconfirmed, instead: dict[int, list[bytes] | None]) -> None:
        if self._staging is not None:
            self._staging.flush()
        note = {"update": done.update, "clipped": self._early.scales, "instead": instead}
        done.line.note(done.version, codec.dumps_inline(note))
        done.line.ask(done.version)
        done.asked = True

    def _put_gradients(
        self, line: vault.VaultLine, version: int, updating: bool
    ) -> dict[int, torch.Tensor | None]:
        self._published.clear()
        found: dict[int, torch.Tensor | None] = {}
        for unit in self.units:
            gradient = unit.parameter.grad if unit.parameter is not None else None
            if not updating or not unit.optimizer:
                gradient = None
            found[unit.index] = gradient
            if gradient is not None:
                _require_same_kind(unit.name, unit.parameter, gradient)
                if len(self._me.optimizers) > 1:
                    self._published[unit.index] = _content(gradient)
        sent = self._early.sent(line)
        for index, gradient in found.items():
            if index in sent:
                continue
            if gradient is None:
                line.put_absent(index, version)
            elif not self._staged(line, index, version, gradient):
                line.put_grad(index, version, self._bytes(index, gradient))
        return found

    def _bytes(self, unit: int, gradient: torch.Tensor) -> memoryview:
        parameter = self.units[unit].parameter
        assert parameter is not None
        return view(in_order(parameter, gradient))

    def _staged(self, line: vault.VaultLine, unit: int, version: int, gradient: Any) -> bool:
        staging, part = self._staging, shards.local(gradient)
        if staging is None or not staging.suits(part):
            return False
        return staging.put(line, version, {unit: part}, staging.here()) is not None

    def confirm(self, let_go: Callable[[], None]) -> None:
        """Behind the device: returns when the vault has all. OSError when it cannot be had.
        `let_go`: the device may wait for the host; after this it does not."""
        done = self._unconfirmed
        if done is None:
            return
        if self._staging is not None:
            self._staging.flush()
        line, aborted = done.line, self._me.aborted
        if line.broken:
            line.sync(done.version, aborted)  # which says why
        instead: dict[int, list[bytes] | None] = {}
        changed = self._early.changed(line)
        for unit in changed:
            if line.broken:
                line.sync(done.version, aborted)
            instead |= self._correct(done, unit, let_go)
        if changed or not done.asked:
            self._ask(done, instead)
        line.synced(done.version, aborted)
        for one in self.units:
            one.confirmed = one.version
        self._unconfirmed = None
        former, self._former = self._former, []
        if former:
            me = self._me
            old = [address for address in former if address != done.line.address]
            _forget_later(old, me.welcome.token, me.rank, max(me.generation, 0))

    def _correct(
        self, done: _Unconfirmed, unit: int, let_go: Callable[[], None]
    ) -> dict[int, list[bytes] | None]:
        """What was sent of it is not what it is now. Gives what the note has to say of it."""
        gradient, line, version = done.gradients[unit], done.line, done.version
        if gradient is None:
            if self._parity is not None:
                return {unit: None}
            line.put_absent(unit, version)
            return {}
        staging = self._staging if self._parity is None else None
        if staging is not None and staging.put_again(line, unit, version, gradient):
            return {}
        if gradient.device.type != "cpu":
            let_go()
        if self._parity is not None:
            whole = self._bytes(unit, gradient)
            return {unit: [bytes(part) for part in pieces(whole, NOTED_BYTES)]}
        line.put_grad(unit, version, self._bytes(unit, gradient))
        return {}

    def suspend(self, why: str) -> None:
        """No vault takes it. Training goes on; the guarantee does not."""
        self._suspended = why
        print(
            f"keepstep: state of rank {self._me.rank} that no other rank has is not kept "
            f"anywhere until the next migration: {why}",
            file=sys.stderr,
            flush=True,
        )

    def _update_of(self, updating: bool) -> bytes:
        """What the update of this step will be made with, and which optimizers made the last."""
        optimizers = self._me.optimizers
        hyper = {
            name: [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            for name, optimizer in optimizers.items()
        }
        scaling = {
            name: {key: getattr(o, key) for key in ("grad_scale", "found_inf") if hasattr(o, key)}
            for name, o in optimizers.items()
        }
        return codec.dumps_inline(
            {"hyper": hyper, "scaling": scaling, "updating": updating, "before": self.updated}
        )

    def before_update(self, name: str) -> None:
        """Another optimizer of the same step: its gradients must be those that were published."""
        if not self.needed:
            return
        for unit in self.units:
            if unit.optimizer != name or unit.parameter is None:
                continue
            gradient = unit.parameter.grad
            now = _content(gradient) if gradient is not None else None
            if now != self._published.get(unit.index):
                raise UsageError(
                    f"the gradient of {unit.name} changed after the step's first optimizer update",
                    hint="it has no replica, so it must be final when the first optimizer of a "
                    "step begins: compute all gradients first, or make two steps of it",
                )

    # ------------------------------------------------------------------ in a newcomer

    def restore(
        self,
        missing: frozenset[str],
        version: int,
        updated: list[str],
        fetch: Callable[[], tuple[vault.Fetched, str]],
    ) -> str:
        """Bring everything to `version`; how, in words. Raises ShardsMissing, and what `fetch`
        raises."""
        known = {unit.name for unit in self.units} | {n for u in self.units for n in u.buffers}
        if not missing <= known:
            names = ", ".join(sorted(missing - known)[:3])
            raise ShardsMissing(f"no rank has {names}, and redundancy is {self.mode}")
        fetched, where = fetch()
        if not fetched.layout.startswith(self._content):
            raise ShardsMissing("the vault holds another layout than this process has built")
        oldest = Replay(self._me, self.units).run(fetched, version, updated)
        self.updated = updated
        steps = version - oldest
        return (
            f"{fetched.bytes} bytes of {len(self.units)} units from {where} "
            f"(up to {steps} step{'s' if steps != 1 else ''} replayed)"
        )

    def fetch(self, rank: int, holders: list[Address], version: int) -> tuple[vault.Fetched, str]:
        """What was kept for a rank, and where, in words. Raises ShardsMissing, or
        blobs.HoldersUnreachable when somebody who may have it did not answer."""
        me = self._me
        silent: list[str] = []
        why = "nobody holds a vault"
        for holder in holders:
            try:
                found = vault.fetch(holder, me.welcome.token, rank, version)
                whose = "the buddy" if self._parity is None else "its own agent"
                return found, f"the vault of {whose}"
            except OSError as error:
                silent.append(f"{holder.host}:{holder.port}: {error}")
            except lane.VaultLacks as error:
                why = str(error)
        if self._parity is not None:
            try:
                return rebuild.rebuild(holders, me.welcome.token, rank, version)
            except rebuild.NotRebuilt as error:
                why = f"{why}; {error}"
            except OSError as error:
                silent.append(str(error))
        if silent:
            raise blobs.HoldersUnreachable(f"the vault of rank {rank}: {'; '.join(silent)}")
        raise ShardsMissing(f"state of rank {rank} at step {version} is in no vault: {why}")


def _content(gradient: torch.Tensor) -> Any:
    """Versions of sharded tensors do not count what `_foreach` operations do to them."""
    part = shards.local(gradient).detach()
    if part.device.type == "cpu" or not part.numel():
        return xxhash.xxh3_128_digest(view(part))
    return tuple(int(number) for number in numbers(part))


def _require_same_kind(name: str, parameter: Any, gradient: torch.Tensor) -> None:
    if not same_kind(parameter, gradient):
        raise UsageError(
            f"the gradient of {name} is {gradient.layout} {gradient.dtype}, and the parameter is "
            f"{parameter.dtype}: it has no replica, and such a gradient cannot be kept",
            hint="use dense gradients of the parameter's own type, or a layout with replicas",
        )


def _forget_later(addresses: list[Address], token: str, rank: int, generation: int) -> None:
    """The memory of vaults that are not used any more is freed beside the training."""

    def ask() -> None:
        for address in addresses:
            # Its node may be gone, or another process of this rank may write there.
            with contextlib.suppress(OSError, KeepstepError):
                vault.forget(address, token, rank, generation)

    threading.Thread(target=ask, name="keepstep-forget", daemon=True).start()
