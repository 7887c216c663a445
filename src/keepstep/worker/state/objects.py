"""What the user registers besides model and optimizer, and what a step must be able to undo."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from keepstep.errors import UsageError
from keepstep.worker.state import codec, shards

SNAPSHOT_BYTES_MAX = 64 << 10
OUTGROWN_BYTES, OUTGROWN_S = 1 << 20, 0.005  # a copy that is worth a word


class Registered:
    """A named piece of state: an object with state_dict/load_state_dict, or a (save, load) pair.

    `per_rank` state differs between ranks and travels in the side state; other state must be equal
    on all replicas at every boundary.
    """

    def __init__(
        self,
        name: str,
        save: Callable[[], Any],
        load: Callable[[Any], Any],
        *,
        per_rank: bool = False,
        scaler: Any = None,
    ) -> None:
        self.name = name
        self.save = save
        self.load = load
        self.per_rank = per_rank
        self._scaler = scaler
        self.alike = False  # see changes_alike
        self.late = False  # a model that the script has made while it trained
        self.after_update: Callable[[], Any] | None = None  # called at the end of every step
        self.own: set[int] = set()  # of its tensors, those that differ between ranks (witness.py)
        # Large state is not copied at every step, unless it changes before the update
        # (parameters.py).
        data, tensors = codec.dumps(save())
        self.size = len(data) + sum(shards.local(tensor).nbytes for tensor in tensors)
        self.large = self.size > SNAPSHOT_BYTES_MAX
        self.sharded = any(isinstance(tensor, DTensor) for tensor in tensors)
        self.plain = not tensors
        self._outgrown = self.size > SNAPSHOT_BYTES_MAX  # it has been small, and that has been said

    def own_tensors(self) -> dict[int, torch.Tensor]:
        """What only this rank has of it, by place."""
        if not self.own:
            return {}
        tensors = codec.dumps(self.save())[1]
        return {n: tensors[n] for n in self.own if n < len(tensors)}

    def put_own(self, values: dict[int, torch.Tensor]) -> None:
        if values:
            data, tensors = codec.dumps(self.save())
            self.own |= values.keys()
            self.load(codec.loads(data, [values.get(n, t) for n, t in enumerate(tensors)]))

    def digest(self) -> str:
        """Without its tensors if they are large or sharded: they are compared with all others."""
        if not self.large and not self.sharded:
            whole = codec.dumps_inline(self.save())
            if len(whole) <= SNAPSHOT_BYTES_MAX:
                return hashed(whole)
        return hashed(codec.dumps(self.save())[0])

    def snapshot(self, *, changes: bool = False) -> bytes | None:
        """None: it is too large, and not known to change where it would have to be put back."""
        wanted = changes or self.per_rank or not self.large
        return codec.dumps_inline(self.save()) if wanted else None

    def outgrown(self, size: int, seconds: float) -> str:
        """Once, if its copies have become large or slow since it was registered."""
        slow = size > SNAPSHOT_BYTES_MAX and seconds > OUTGROWN_S
        if self._outgrown or not (slow or size > OUTGROWN_BYTES):
            return ""
        self._outgrown = True
        return (
            f"registered object {self.name.removeprefix('script/')!r} has grown to "
            f"{size / 2**20:.1f} MiB: copying it at the begin of every step and section takes "
            f"{seconds * 1e3:.1f} ms (hint: register it at its full size, with its tensors "
            "allocated; what is larger than 64 KiB then is copied only where a step changes it "
            "before its update)"
        )

    def small_snapshot(self) -> bytes | None:
        """If it is small as it is now, and nothing waits for a device."""
        data, tensors = codec.dumps(self.save())
        size = len(data) + sum(shards.local(tensor).nbytes for tensor in tensors)
        here = all(tensor.device.type == "cpu" for tensor in tensors)
        return codec.dumps_inline(self.save()) if here and size <= SNAPSHOT_BYTES_MAX else None

    def undo(self, snapshot: bytes | None) -> None:
        if snapshot is not None:
            self.load(codec.loads_inline(snapshot))
        if self._scaler is not None:
            # GradScaler refuses a second unscale_ until update(); an aborted step never got there.
            self._scaler._per_optimizer_states = defaultdict(_fresh_scaler_state)


Snapshots = list[tuple[Registered, bytes | None]]


def snapshots(
    items: Iterable[Registered], warn: Callable[[str], None], changing: Collection[str] = ()
) -> Snapshots:
    """`changing`: names of large ones that are copied, too."""
    found: Snapshots = []
    for item in items:
        began = time.perf_counter()
        snapshot = item.snapshot(changes=item.name in changing)
        if snapshot is not None:
            text = item.outgrown(len(snapshot), time.perf_counter() - began)
            if text:
                warn(text)
        found.append((item, snapshot))
    return found


def hashed(data: bytes) -> str:
    return str(xxhash.xxh3_64_hexdigest(data))


def _fresh_scaler_state() -> dict[str, Any]:
    from torch.amp.grad_scaler import _refresh_per_optimizer_state

    return _refresh_per_optimizer_state()


def registered(name: str, target: Any, load: Any, *, per_rank: bool) -> Registered:
    if load is not None:
        if not callable(target) or not callable(load):
            raise UsageError(
                f"register({name!r}, save, load) needs two functions",
                hint="save() returns plain state, load(state) takes it back",
            )
        return Registered(name, target, load, per_rank=per_rank)
    save, load = getattr(target, "state_dict", None), getattr(target, "load_state_dict", None)
    if not callable(save) or not callable(load):
        raise UsageError(
            f"cannot register {name!r}: {type(target).__name__} has no state_dict/load_state_dict",
            hint="use ks.register(name, save, load)",
        )
    scaler = target if hasattr(target, "_per_optimizer_states") else None
    item = Registered(name, save, load, per_rank=per_rank, scaler=scaler)
    item.alike = changes_alike(target)
    return item


def changes_alike(thing: Any) -> bool:
    """Its calls are those of the training loop, and what they do shows in the learning rates or in
    the update. Not so where they are given a number that each rank may have for itself."""
    schedulers = torch.optim.lr_scheduler
    if isinstance(thing, schedulers.ReduceLROnPlateau):
        return False
    return isinstance(thing, schedulers.LRScheduler | torch.amp.GradScaler)


def digests(snapshots: Snapshots) -> dict[str, str]:
    """Of objects that all ranks must have alike, and that are small as they are now."""
    return {
        item.name: hashed(snapshot)
        for item, snapshot in snapshots
        if snapshot is not None
        and len(snapshot) <= SNAPSHOT_BYTES_MAX
        and not (item.per_rank or item.own or item.sharded)
    }


class Undo:
    """begin(k): what a retry of the transaction must find as it was, besides cells, gradients,
    flags and the script's own variables, which know how to undo themselves."""

    def __init__(
        self,
        streams: bytes,
        optimizers: list[torch.optim.Optimizer],
        objects: Snapshots,
        flags: Any,
    ) -> None:
        self.streams = streams
        self.flags = flags
        self._groups = [
            [({k: v for k, v in g.items() if k != "params"}, list(g["params"])) for g in groups]
            for groups in (o.param_groups for o in optimizers)
        ]
        self._optimizers = optimizers
        self.objects = objects

    def undo(self) -> None:
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            del optimizer.param_groups[len(groups) :]
            for group, (saved, parameters) in zip(optimizer.param_groups, groups, strict=True):
                for key in [key for key in group if key != "params" and key not in saved]:
                    del group[key]
                group.update(saved)
                group["params"][:] = parameters
        for obj, snapshot in self.objects:
            obj.undo(snapshot)
