"""What an optimizer keeps outside of its state_dict, in attributes of its own.

`self.t += 1` in a hand-written Adam, lists of moments beside `self.state`, the weights of a
look-ahead: no state_dict has them, and the next update depends on them. They are as equal on
replicas as the rest of the optimizer, so each is registered like other state that nobody has
attached (unasked.py), once it has changed. Parameters in it are told by their places. Values that
are no data are left to the script's variables (namespaces.py).
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Final

import torch

from keepstep.errors import UsageError
from keepstep.worker.script.values import SCALARS
from keepstep.worker.state import codec

# Of any optimizer, and what schedulers, scalers and Keepstep put there.
TORCHS: Final = frozenset(vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=1.0))) | {
    *("step", "_step_count", "_opt_called", "found_inf", "grad_scale"),
}
PREFIX: Final = "optimizer "
_PARAMETER: Final = "keepstep/parameter"
_PAIRS: Final = "keepstep/pairs"
DEPTH_MAX: Final = 4
DATA_BYTES_MAX: Final = 16 << 10  # looked at in every step; tensors have their counters
PLAIN: Final = (type(None), bool, int, float, str, tuple, list, dict, torch.Tensor)


class Attribute:
    """One of them, until it is registered."""

    def __init__(self, owner: torch.optim.Optimizer, name: str, flat: list[Any]) -> None:
        """`flat`: parameters of all optimizers."""
        self._namespace, self._name = vars(owner), name
        self._flat = flat
        self.late = False  # it was not there at first
        self._value: Any = None
        self._data = b""  # without its tensors
        self._tensors: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._contents: list[bytes] = []

    def changed(self, content: Callable[[torch.Tensor], bytes], deep: bool) -> bool:
        """Since the first look."""
        value, before = self._namespace.get(self._name), (self._data, self._contents)
        same = value is self._value and [*map(_version, self._tensors)] == self._versions
        if same and not deep and (len(self._data) > DATA_BYTES_MAX or type(value) in SCALARS):
            return False
        try:
            data, tensors = codec.dumps(self.save())
        except UsageError:  # it has become something else than data
            return False
        if deep or not same or [*map(id, tensors)] != [*map(id, self._tensors)]:
            self._contents = [content(tensor) for tensor in tensors]
        self._value, self._data, self._tensors = value, data, tensors
        self._versions = [*map(_version, tensors)]
        return self.late or (before[0] != b"" and before != (self._data, self._contents))

    def save(self) -> Any:
        places = {id(parameter): place for place, parameter in enumerate(self._flat)}
        return _told(self._namespace.get(self._name), places)

    def encodes_as(self, data: bytes) -> bool:
        try:
            return codec.dumps_inline(self.save()) == data
        except UsageError:  # it has become something else than data
            return False

    def remove(self) -> None:
        del self._namespace[self._name]

    def load(self, theirs: Any) -> None:
        with torch.no_grad():
            found = _found(theirs, self._flat)
            self._namespace[self._name] = _put(self._namespace.get(self._name), found)


def find(
    optimizers: dict[str, torch.optim.Optimizer], known: Callable[[torch.Tensor], bool]
) -> dict[str, Attribute]:
    """By path. `known(tensor)`: others carry it."""
    flat = _parameters(optimizers)
    found: dict[str, Attribute] = {}
    for path, owner, name in _all(optimizers):
        attribute = Attribute(owner, name, flat)
        try:
            tensors = codec.dumps(attribute.save())[1]
        except UsageError:
            continue
        if not any(isinstance(x, torch.nn.Parameter) or known(x) for x in tensors):
            found[path] = attribute
    return found


def count(optimizers: dict[str, torch.optim.Optimizer]) -> int:
    return sum(len(vars(optimizer)) for optimizer in optimizers.values())


def named(optimizers: dict[str, torch.optim.Optimizer], path: str) -> Attribute | None:
    """Also one that is not there yet."""
    for key, optimizer in optimizers.items():
        if path.startswith(f"{PREFIX}{key}."):
            *inner, name = path.removeprefix(f"{PREFIX}{key}.").split(".")
            owner: Any = optimizer
            for at in inner:
                owner = getattr(owner, at, None)
            if isinstance(owner, torch.optim.Optimizer):
                return Attribute(owner, name, _parameters(optimizers))
    return None


def is_data(value: Any) -> bool:
    """The codec takes it, apart from parameters."""
    try:
        codec.dumps(_told(value, {}, lenient=True))
    except UsageError:
        return False
    return True


def _parameters(optimizers: dict[str, torch.optim.Optimizer]) -> list[Any]:
    flat = [p for one in optimizers.values() for group in one.param_groups for p in group["params"]]
    return list(dict.fromkeys(flat))


def _all(
    optimizers: dict[str, torch.optim.Optimizer],
) -> Iterator[tuple[str, torch.optim.Optimizer, str]]:
    for key, optimizer in optimizers.items():
        yield from _attributes(f"{PREFIX}{key}", optimizer, 0)


def _attributes(
    path: str, optimizer: torch.optim.Optimizer, depth: int
) -> Iterator[tuple[str, torch.optim.Optimizer, str]]:
    kind: Any = type(optimizer)
    torchs = TORCHS | _stored_by_torch(kind)
    for name, value in list(vars(optimizer).items()):
        if isinstance(value, torch.optim.Optimizer) and depth < DEPTH_MAX:
            yield from _attributes(f"{path}.{name}", value, depth + 1)
        elif name not in torchs and isinstance(value, PLAIN):
            yield f"{path}.{name}", optimizer, name


def _told(value: Any, places: dict[int, int], lenient: bool = False, depth: int = 0) -> Any:
    """With the places of parameters instead of these: keys of a dict, or pairs with them."""
    if isinstance(value, torch.nn.Parameter) and (lenient or id(value) in places):
        return {_PARAMETER: places.get(id(value), 0)}
    if depth > codec.DEPTH_MAX:
        return value
    inner = functools.partial(_told, places=places, lenient=lenient, depth=depth + 1)
    if type(value) in (list, tuple):
        return type(value)(map(inner, value))
    if isinstance(value, dict) and any(isinstance(key, torch.Tensor) for key in value):
        return {_PAIRS: [[inner(key), inner(item)] for key, item in value.items()]}
    if type(value) is dict:
        return {key: inner(item) for key, item in value.items()}
    return value


def _found(value: Any, flat: list[Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_found(item, flat) for item in value)
    if type(value) is not dict:
        return value
    if _PARAMETER in value:
        return flat[value[_PARAMETER]]
    if _PAIRS in value:
        return {_found(key, flat): _found(item, flat) for key, item in value[_PAIRS]}
    return {key: _found(item, flat) for key, item in value.items()}


def _put(mine: Any, theirs: Any) -> Any:
    """The same objects, where they fit: others may refer to them."""
    if isinstance(theirs, torch.nn.Parameter):
        return theirs
    if isinstance(theirs, torch.Tensor):
        if type(mine) is torch.Tensor and mine.shape == theirs.shape:
            return mine.copy_(theirs) if mine.dtype == theirs.dtype else theirs.to(mine.device)
        return theirs
    if isinstance(theirs, dict) and isinstance(mine, dict):
        new = {key: _put(mine.get(key), value) for key, value in theirs.items()}
        mine.clear()
        mine.update(new)
        return mine
    if isinstance(theirs, list) and isinstance(mine, list):
        mine[:] = [_put(a, b) for a, b in zip(mine + [None] * len(theirs), theirs)]
        return mine
    return theirs


@functools.cache
def _stored_by_torch(kind: Any) -> frozenset[str]:
    """Marks of torch's own classes, such as whether a fused update has checked its tensors."""
    functions = [
        inspect.unwrap(value)
        for base in kind.__mro__
        if base.__module__.startswith("torch.")
        for value in vars(base).values()
        if isinstance(value, FunctionType)
    ]
    return frozenset(
        instruction.argval
        for function in functions
        for before, instruction in itertools.pairwise(dis.get_instructions(function))
        if instruction.opname == "STORE_ATTR" and before.argval == "self"
    )


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
