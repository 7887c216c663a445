"""State that no other rank has, kept in the memory of another node (or of the own agent).

The vault holds of every *unit* (inventory.py) a base, its bytes at some version, and the gradients
of every step since. At the fence of step k it has everything up to gradient k, acknowledged; so
whatever becomes of this rank, another process can bring the base to version k, or to k+1 if the
fence passed: by the same optimizer, with the same gradients and hyperparameters, on the same kind
of device. That is exact, and nothing is computed twice (replay.py).

Bases are put while the step computes (bases.py). Gradients in host memory are put at the fence,
which waits until the vault has them; CPUs are for development, and nothing is done there to hide
that. Gradients of a GPU are sent during the last backward pass (early.py); at the fence follow
those that are not there as they are now.

With `parity` the vault is that of the own agent, and the parity of several ranks is kept besides
(parity.py). What was added to a parity cannot be taken out: what takes the place of a gradient that
was sent too early is in the step's note.

Main thread only, but for `interrupt`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from keepstep.adapters.transport.blocking import pieces
from keepstep.errors import UsageError
from keepstep.model.messages import Address
from keepstep.worker.device import cuda
from keepstep.worker.state import codec, shards
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.vault import replay, vault
from keepstep.worker.vault.bases import Bases
from keepstep.worker.vault.destination import Destination
from keepstep.worker.vault.early import EarlyPuts, same_kind, watch_clipping
from keepstep.worker.vault.gpu_staging import PinnedStaging, fingerprint
from keepstep.worker.vault.inventory import Inventory
from keepstep.worker.vault.parity import ParityLine
from keepstep.worker.vault.units import Unit, in_order, view

NOTED_BYTES = 1 << 30  # in a piece: msgpack knows none of 4 GiB


@dataclass
class _Unconfirmed:
    """What `publish` has put."""

    line: vault.VaultLine
    version: int
    update: bytes
    gradients: dict[int, torch.Tensor | None]


class Redundancy:
    def __init__(self, me: RankFacts) -> None:
        self._me = me
        self.inventory = Inventory(me)
        self._parity = ParityLine(me) if self.inventory.mode == "parity" else None
        self._bases = Bases(self.inventory, self._parity)
        self._destination = Destination(me, self.inventory, self._bases, self._parity)
        self._early: EarlyPuts | None = None  # on a GPU
        self._suspended = ""  # why nothing is kept at present
        self._published: dict[int, Any] = {}  # unit -> what its gradient was at the fence
        self._unconfirmed: _Unconfirmed | None = None
        self.updated: list[str] = []  # optimizers that made the last step's updates, in order

    @property
    def needed(self) -> bool:
        return bool(self.inventory.units)

    @property
    def units(self) -> list[Unit]:
        return self.inventory.units

    # ------------------------------------------------------------------ what is to be kept

    def find_units(self) -> None:
        """At attach."""
        if self._early is not None:
            self._early.unwatch()
        self.inventory.find()
        if self.needed:
            self._stage()

    def refresh_units(self) -> None:
        """At the first step: objects may have been registered since attach."""
        before, line = self.inventory.layout, self._destination.line
        self.find_units()
        if line is not None and self.inventory.layout != before:
            self._destination.open(line.address, fresh=True)
            self._destination.align()
        elif line is None and self._me.process.assigned is None:
            self.connect()

    def _stage(self) -> None:
        """On a GPU: prepares to copy gradients and bases while the step computes."""
        home = cuda.home
        gradients = {
            unit.index: shards.local(unit.parameter).nbytes
            for unit in self.units
            if unit.parameter is not None and unit.parameter.device == home
        }
        readers = max(self.inventory.lanes.values()) + 1
        room = self._bases.bytes_of_step
        staging = self._bases.staging
        if staging is not None and staging.made_for != (home, gradients, room, readers):
            staging.close()
            staging = None
        if staging is None and home is not None and gradients:
            try:
                staging = PinnedStaging(home, gradients, room, readers)
            except RuntimeError as error:  # everything works without, only slower
                print(f"keepstep: copies to the vault are waited for: {error}", file=sys.stderr)
        self._bases.staging = staging
        if staging is None:
            self._early = None
            return
        if self._early is None:
            self._early = EarlyPuts(staging)
            watch_clipping(self._early)
        self._early.staging = staging
        for unit in self.units:
            parameter = unit.parameter
            if parameter is None or not unit.optimizer or not parameter.requires_grad:
                continue
            # DDP reduces gradients behind the back of hooks.
            if isinstance(parameter, DTensor) or not self._me.replicas.described(parameter):
                self._early.watch(unit.index, parameter)

    # ------------------------------------------------------------------ where it is kept

    def connect(self) -> None:
        self._destination.connect()

    def reconnect(self) -> None:
        self._suspended = ""
        self._destination.reconnect()

    def took_over(self, holders: list[Address]) -> None:
        self._destination.took_over(holders)

    def interrupt(self) -> None:
        self._destination.interrupt()

    def suspend(self, why: str) -> None:
        """No vault takes it. Training goes on; the guarantee does not."""
        self._suspended = why
        print(
            f"keepstep: state of rank {self._me.rank} that no other rank has is not kept "
            f"anywhere until the next migration: {why}",
            file=sys.stderr,
            flush=True,
        )

    # ------------------------------------------------------------------ in a step

    def begin(self) -> None:
        """A step begins: put the bases that are due. Whatever is wrong with the line shows in the
        fence, where it can be waited for."""
        if self._early is not None:
            self._early.begin_step()
            self._early.staging.reset()
        line = self._destination.line
        if line is not None:
            self._bases.begin(line, self._me.version)

    def backward(self, last: bool) -> None:
        """A backward pass begins; `last`: of this step, as it seems."""
        line = self._destination.line
        if line is not None:
            self._bases.put_due(line, self._me.version)
        if self._early is None:
            return
        if last and self.needed and not self._suspended and line is not None:
            self._early.open(line, self._me.version)
        else:
            self._early.close()

    def backward_done(self) -> None:
        if self._early is not None:
            self._early.flush()
            self._early.staging.make_stream_wait()

    def publish(self, address: Address | None, updating: bool) -> None:
        """At the fence: all that leads to the next version is on its way to the vault. The device
        is not waited for. OSError when there is no vault."""
        self._unconfirmed = None
        if not self.needed or self._suspended:
            return
        me, early = self._me, self._early
        target = self._destination.address(address)
        version = me.version
        line = self._destination.line
        if line is None or line.address != target or line.broken:
            if self._parity is not None and early is not None and early.has_put(line):
                self._parity.give_up(version)  # it has gradients from before they were final
            line = self._destination.open(target)
        self._bases.begin(line, version)
        self._bases.put_due(line, version)
        gradients = self._put_gradients(line, version, updating)
        done = _Unconfirmed(line, version, _update(me, updating, self.updated), gradients)
        if early is None:
            _ask(done, [], {})
        else:
            early.queue_comparison(lambda unit: gradients[unit] is not None)
        self._unconfirmed = done

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
        sent = self._early.end_puts(line) if self._early is not None else set()
        for index, gradient in found.items():
            if index in sent:
                continue
            if gradient is None:
                line.put_absent(index, version)
            else:
                self.put_gradient(line, index, version, gradient)
        return found

    def put_gradient(
        self, line: vault.VaultLine, unit: int, version: int, gradient: torch.Tensor
    ) -> None:
        staging, part = self._bases.staging, shards.local(gradient)
        staged = None
        if staging is not None and staging.can_copy(part):
            staged = staging.put(line, version, {unit: part}, staging.record_event())
        if staged is None:
            line.put_grad(unit, version, self._bytes(unit, gradient))

    def _bytes(self, unit: int, gradient: torch.Tensor) -> memoryview:
        parameter = self.units[unit].parameter
        assert parameter is not None
        return view(in_order(parameter, gradient))

    def confirm(self, let_go: Callable[[], None]) -> None:
        """Behind the device: returns when the vault has all. OSError when it cannot be had.
        `let_go`: the device may wait for the host; after this it does not."""
        done = self._unconfirmed
        if done is None:
            return
        line, early, aborted = done.line, self._early, self._me.aborted
        if early is not None:
            early.staging.flush()
        if line.broken:
            line.sync(done.version, aborted)  # which says why
        if early is not None:
            self._put_changed(early, done, let_go)
        line.synced(done.version, aborted)
        for one in self.units:
            one.confirmed = one.version
        self._unconfirmed = None
        self._destination.forget_former(line.address)

    def _put_changed(
        self, early: EarlyPuts, done: _Unconfirmed, let_go: Callable[[], None]
    ) -> None:
        """What was sent before the fence and is another one now is put again, and then the vault is
        asked whether it has all."""
        line = done.line
        instead: dict[int, list[bytes] | None] = {}
        for unit in early.find_changed(line):
            if line.broken:
                line.sync(done.version, self._me.aborted)
            instead |= self._correct(early.staging, done, unit, let_go)
        _ask(done, early.scales, instead)

    def _correct(
        self, staging: PinnedStaging, done: _Unconfirmed, unit: int, let_go: Callable[[], None]
    ) -> dict[int, list[bytes] | None]:
        """Gives what the note has to say of it."""
        gradient, line, version = done.gradients[unit], done.line, done.version
        if gradient is None:
            if self._parity is not None:
                return {unit: None}
            line.put_absent(unit, version)
            return {}
        if self._parity is None and staging.put_again(line, unit, version, gradient):
            return {}
        if gradient.device.type != "cpu":
            let_go()
        if self._parity is not None:
            whole = self._bytes(unit, gradient)
            return {unit: [bytes(part) for part in pieces(whole, NOTED_BYTES)]}
        line.put_grad(unit, version, self._bytes(unit, gradient))
        return {}

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
        fetch: Callable[[], tuple[vault.FetchedShards, str]],
    ) -> str:
        """Bring everything to `version`; how, in words. Raises ShardsMissing, and what `fetch`
        raises."""
        how = replay.restore(self._me, self.inventory, missing, version, updated, fetch)
        self.updated = updated
        return how

    def fetch(
        self, rank: int, holders: list[Address], version: int
    ) -> tuple[vault.FetchedShards, str]:
        """What was kept for a rank, and where, in words. Raises ShardsMissing, or
        blobs.HoldersUnreachable when somebody who may have it did not answer."""
        token, parity = self._me.welcome.token, self._parity is not None
        return replay.fetch(token, rank, holders, version, parity=parity)


def _ask(done: _Unconfirmed, scales: list[Any], instead: dict[int, list[bytes] | None]) -> None:
    """Nothing of it counts before all ranks have passed the fence."""
    note = {"update": done.update, "clipped": scales, "instead": instead}
    done.line.note(done.version, codec.dumps_inline(note))
    done.line.ask(done.version)


def _update(me: RankFacts, updating: bool, before: list[str]) -> bytes:
    """What the update of this step will be made with, and which optimizers made the last."""
    hyper = {
        name: [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        for name, optimizer in me.optimizers.items()
    }
    scaling = {
        name: {key: getattr(o, key) for key in ("grad_scale", "found_inf") if hasattr(o, key)}
        for name, o in me.optimizers.items()
    }
    return codec.dumps_inline(
        {"hyper": hyper, "scaling": scaling, "updating": updating, "before": before}
    )


def _content(gradient: torch.Tensor) -> Any:
    """Versions of sharded tensors do not count what `_foreach` operations do to them."""
    part = shards.local(gradient).detach()
    if part.device.type == "cpu" or not part.numel():
        return xxhash.xxh3_128_digest(view(part))
    return tuple(int(number) for number in fingerprint(part))


def _require_same_kind(name: str, parameter: Any, gradient: torch.Tensor) -> None:
    if not same_kind(parameter, gradient):
        raise UsageError(
            f"the gradient of {name} is {gradient.layout} {gradient.dtype}, and the parameter is "
            f"{parameter.dtype}: it has no replica, and such a gradient cannot be kept",
            hint="use dense gradients of the parameter's own type, or a layout with replicas",
        )
