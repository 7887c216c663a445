"""What must be kept elsewhere: state of this rank that no rank on another node has.

It is made up of units: a parameter with its optimizer's state, all buffers together, or a
registered object. Whoever takes over the rank finds the same units, because it runs the same
script; `content` says whether it did.

What the user keeps besides (averages of sharded weights) is not an optimizer's business: such an
object must say how it follows from the parameters (`after_update`), and then all bases are of one
version, because it may depend on any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import xxhash

from keepstep.errors import UsageError
from keepstep.worker.device import cuda
from keepstep.worker.state import codec, shards
from keepstep.worker.state.export import flat
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.vault import vault
from keepstep.worker.vault.units import Unit, described, part_of, view, views


class Inventory:
    def __init__(self, me: RankFacts) -> None:
        self._me = me
        self.mode = me.welcome.settings.redundancy
        self.units: list[Unit] = []
        self.lanes: dict[int, int] = {}  # unit or slice -> lane of the line
        self.one_version = False  # all bases are of one
        self.unprotected = 0  # tensors that are nowhere else
        self.first_unprotected = ""

    def find(self) -> None:
        """What has no replica where a failure of this node would leave it."""
        self.units = []
        me = self._me
        if me.world == 1:
            return  # with its only rank all that could decide how to go on is lost
        local_world, settings = me.local_world, me.welcome.settings

        def alone(tensor: torch.Tensor) -> bool:
            return not me.replicas.elsewhere(me.replicas.of(tensor), local_world)

        tensors = me.state.named_tensors()
        lonely = {name: tensor for name, tensor in tensors.items() if alone(tensor)}
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
        self.one_version = bool(objects) or self.mode == "parity"
        self._add_tensors(tensors if objects else lonely)
        for name in objects:
            self._add(Unit(0, f"object/{name}", object=name))
        sizes = {unit.index: unit.size for unit in self.units}
        # Slices are for GPUs: on CPUs there are none unless the user says so.
        slice_bytes = vault.SLICE_BYTES if cuda.home is not None else 0
        slices = vault.sliced(sizes, self.gradient_bytes, slice_bytes, settings.vault_slice)
        self.lanes = vault.lanes_of(slices, local_world, settings.vault_lanes)

    def _add_tensors(self, tensors: Mapping[str, torch.Tensor]) -> None:
        owners = {
            id(p): (name, place)
            for name, optimizer in self._me.optimizers.items()
            for place, p in enumerate(flat(optimizer))
        }
        buffers = []
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.nn.Parameter):
                buffers.append(name)
                continue
            optimizer, place = owners.get(id(tensor), ("", 0))
            self._add(Unit(0, name, tensor, optimizer, place))
        if buffers:
            self._add(Unit(0, "buffers", buffers=buffers))

    def _add(self, unit: Unit) -> None:
        unit.index = len(self.units)
        self.units.append(unit)
        unit.size = sum(len(view) for view in self.base(unit)) + self._state_to_come(unit)

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

    # ------------------------------------------------------------------ how much it is

    @property
    def kept_bytes(self) -> int:
        return sum(unit.size for unit in self.units)

    @property
    def gradient_bytes(self) -> dict[int, int]:
        """By unit, as far as it is a parameter."""
        return {
            unit.index: shards.local(unit.parameter).nbytes
            for unit in self.units
            if unit.parameter is not None
        }

    @property
    def layout(self) -> bytes:
        """What the units are, and how they are cut; who only reads need not know that."""
        return self.content + xxhash.xxh3_64_digest(repr(sorted(self.lanes)).encode())

    @property
    def content(self) -> bytes:
        digest = xxhash.xxh3_128()
        for unit in self.units:
            digest.update(f"{unit.index} {unit.name} {unit.optimizer} {unit.place}\n".encode())
        return digest.digest()

    def digest(self) -> bytes:
        """Of all bytes, as they are now."""
        digest = xxhash.xxh3_128()
        for unit in self.units:
            for data in self.base(unit):
                digest.update(data)
        return digest.digest()

    # ------------------------------------------------------------------ its bytes

    def base(self, unit: Unit) -> list[memoryview | bytes]:
        return views(self.parts(unit))

    def parts(self, unit: Unit) -> list[memoryview | bytes | torch.Tensor]:
        """What a base is made of. What lies on a device is for somebody else to fetch."""
        if unit.parameter is not None:
            optimizer = self._me.optimizers.get(unit.optimizer)
            entry = optimizer.state.get(unit.parameter) if optimizer is not None else None
            data, found = codec.dumps(entry)
            return [data, *map(part_of, [unit.parameter, *found]), *map(described, found)]
        if unit.object:
            data, found = codec.dumps(self._me.objects[unit.object].save())
            return [data, *map(part_of, found), *map(described, found)]
        named = self._me.state.named_tensors()
        found = [named[name] for name in unit.buffers]
        # A forward pass may write to them while the line reads.
        copies = [shards.local(tensor).detach().clone() for tensor in found]
        return [b"", *map(view, copies), *map(described, found)]
