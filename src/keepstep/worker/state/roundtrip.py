"""At attach: what a registered object saves, its load must restore.

A retry and a newcomer both rely on `load(save())`. A load that adds instead of setting (Megatron's
scheduler adds num_steps) is silently wrong after the first fault, so it is tried here:

    save, save              the same both times, or nothing can be compared at all
    load, save              what was saved comes back
    load another, load, save    ... also over another state: a counter that is still 0 hides a load
                            that adds. The other state is the saved one with every number one
                            higher; an object that refuses it is not tried with it

Numbers are compared bit by bit, tensors by their bytes, dictionaries without regard to order. The
object is left as it was, with the very tensors it had; so are all random streams and the
hyperparameters of the optimizers, which loads of schedulers write to.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from keepstep.errors import UsageError
from keepstep.worker.device.digest import digest
from keepstep.worker.state import codec, rng, shards
from keepstep.worker.state.objects import Registered

PERTURBED_BYTES_MAX = 1 << 20  # of a tensor
_HINT = (
    "load_state_dict(state_dict()) must set everything and add nothing; wrap the object with "
    "ks.register(name, save, load) where it cannot be changed"
)


def check(item: Registered, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    hyper = [{k: v for k, v in g.items() if k != "params"} for g in groups]
    values = [_copied(h) for h in hyper]
    streams = rng.capture()
    try:
        _check(item)
    finally:
        rng.restore(streams)
        for group, references, copies in zip(groups, hyper, values, strict=True):
            for key in [k for k in group if k != "params" and k not in references]:
                del group[key]
            group.update(references)
            for key, value in references.items():
                if isinstance(value, torch.Tensor):
                    with torch.no_grad():
                        value.copy_(copies[key])


def _check(item: Registered) -> None:
    live = _Saved(item.save())
    again = _Saved(item.save())
    if path := _difference(live.tree, again.tree):
        raise UsageError(
            f"save of {item.name!r} gives another state every time: {path}",
            hint="save() must return the state alone: no clock, no random number, no counter of "
            "its own calls",
        )
    try:
        kept = live.copy()
    except torch.OutOfMemoryError:
        return  # too large to have twice: the witnesses of later steps compare it across replicas
    _load(item, kept.copy())
    restored = _Saved(item.save())
    _require_same(item, kept.tree, restored.tree)
    if _perturb(item, kept):
        restored = _Saved(item.save())
        _require_same(item, kept.tree, restored.tree)
    if list(map(_memory, live.tensors)) != list(map(_memory, restored.tensors)):
        # The load took over the tensors it was given. Others may hold the ones that were there.
        _load(item, _Saved(live.tree))
        if _difference(kept.tree, _Saved(item.save()).tree):  # it does not stand its own tensors
            _load(item, kept.copy())


class _Saved:
    """What codec makes of a state: the containers anew, the tensors themselves."""

    def __init__(self, state: Any) -> None:
        self.data, self.tensors = codec.dumps(state)
        self.tree = codec.loads(self.data, self.tensors)

    def copy(self) -> _Saved:
        twins = [tensor.detach().clone() for tensor in self.tensors]
        return _Saved(codec.loads(self.data, twins))


def _memory(tensor: torch.Tensor) -> int:
    return shards.local(tensor).data_ptr()


def _copied(hyper: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in hyper.items()}


def _load(item: Registered, state: _Saved) -> None:
    try:
        item.load(state.tree)
    except Exception as error:
        raise UsageError(
            f"load of {item.name!r} does not take what save gave: {type(error).__name__}: {error}",
            hint=_HINT,
        ) from error


def _require_same(item: Registered, before: Any, after: Any) -> None:
    if path := _difference(before, after):
        raise UsageError(
            f"load of {item.name!r} does not restore what it saved: {path}", hint=_HINT
        )


def _perturb(item: Registered, kept: _Saved) -> bool:
    """Load another state, then the saved one again. Whether there was another one."""
    other, changed = _raised(kept.copy().tree)
    if not changed:
        return False
    try:
        item.load(other)
    except Exception:  # not a state that it can have
        pass
    _load(item, kept.copy())
    return True


def _raised(node: Any) -> tuple[Any, bool]:
    """The same tree with every number one higher, and whether there was one."""
    if isinstance(node, dict):
        pairs = {key: _raised(value) for key, value in node.items()}
        return type(node)({k: v for k, (v, _) in pairs.items()}), any(c for _, c in pairs.values())
    if type(node) in (list, tuple):
        items = [_raised(value) for value in node]
        return type(node)(v for v, _ in items), any(c for _, c in items)
    if type(node) is int:
        return node + 1, True
    if type(node) is float and math.isfinite(node):
        return node + 1.0, True
    if isinstance(node, torch.Tensor) and _is_numeric(node):
        with torch.no_grad():
            return node + 1, True
    return node, False


def _is_numeric(tensor: torch.Tensor) -> bool:
    """Bytes and lists of indices may be anything: the state of a generator, an order of samples."""
    small = shards.local(tensor).nbytes <= PERTURBED_BYTES_MAX
    counter = tensor.dtype is torch.int64 and tensor.dim() == 0
    return small and (tensor.is_floating_point() or counter)


# ------------------------------------------------------------------------------------ comparing


def _difference(before: Any, after: Any) -> str:
    """The first place that differs, in words; empty if none does."""
    return next(_differences(before, after, ()), "")


def _differences(a: Any, b: Any, path: tuple[Any, ...]) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in [*a, *(k for k in b if k not in a)]:
            if key not in a or key not in b:
                yield f"{_place((*path, key))} {'appears' if key in b else 'is gone'}"
            else:
                yield from _differences(a[key], b[key], (*path, key))
    elif type(a) is not type(b):
        yield f"{_place(path)} {_short(a)} -> {_short(b)}"
    elif isinstance(a, list | tuple):
        if len(a) != len(b):
            yield f"{_place(path)} {len(a)} -> {len(b)} items"
        for index, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _differences(x, y, (*path, index))
    elif not _same_leaf(a, b):
        yield f"{_place(path)} {_short(a)} -> {_short(b)}"


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        one, other = shards.local(a).detach(), shards.local(b).detach()
        described = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        return described and (one is other or digest(one) == digest(other))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    return codec.dumps_inline(a) == codec.dumps_inline(b)


def _place(path: tuple[Any, ...]) -> str:
    return f"key {'.'.join(map(str, path))}" if path else "the whole of it"


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.numel() == 1 and not shards.spec(value):
            return repr(value.detach().cpu().item())
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
