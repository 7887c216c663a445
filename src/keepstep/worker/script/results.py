"""What is kept of the results of steps and sections, for a newcomer that walks past them.

Kept is a copy: without the graph that led to it (which would hold a step's activations until the
next), and untouched by whatever the script does with the original. A small one goes, encoded, into
the rank's own position; from a device it comes by itself, and is there when the next position is
published. A large one is kept as it is, by reference, and reaches a newcomer from a replica, with
the state; it is used if it has the `mark` of the rank's own. What cannot travel at all is named
once, when it is first returned; a newcomer that needs what it does not get is stopped.

The result of a step that was the last, and had an update, the newcomer can make itself (finish.py).
Of a section, or a step without an update, it cannot: their results, up to a size, are published
whole at their end.

A step's result is known only at its end, behind the fence; a rank that is lost in between takes it
along. But as a rule it is a local variable of the step function that has its value at the fence
already (`return loss.detach()`). `Foresight` learns which one, and the fence publishes it.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import defaultdict
from types import CodeType, FrameType
from typing import Any, Final

import torch
import xxhash

from keepstep.errors import UsageError
from keepstep.worker.device import cuda
from keepstep.worker.device.digest import digest
from keepstep.worker.script.tree import MISSING
from keepstep.worker.state import codec, shards
from keepstep.worker.state.tensors import memory, on_cpu

RESULT_BYTES_MAX: Final = 64 << 10
WHOLE_BYTES_MAX: Final = 4 << 20
FORESEEN_ITEMS_MAX: Final = 16
NUMBERS = (bool, int, float)


class LostResult:
    """Stands in for a result that could not be carried to this process: whoever uses it is told
    why. A script that does not look at it goes on."""

    def __init__(self, site: str, why: str) -> None:
        self.__dict__.update(_site=site, _why=why)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            f"the result of {self._site!r} is used on a newcomer and could not be carried there: "
            f"{self._why}",
            hint="return numbers, strings, tensors, and lists, tuples or dicts of them",
        )

    def __getattr__(self, name: str) -> Any:
        return self._refuse()


_USES = """bool float int len iter next getitem setitem contains call add radd sub rsub mul rmul
truediv rtruediv lt le gt ge eq ne format index neg abs"""
for _name in _USES.split():
    setattr(LostResult, f"__{_name}__", LostResult._refuse)


class LostGradient(torch.Tensor):
    """Stands in for a gradient of the rank that is replaced, in a step whose update is made: it has
    one there, and nobody knows it any more."""

    @staticmethod
    def of(parameter: torch.Tensor) -> LostGradient:
        local = shards.local(parameter)
        nothing = torch.full((), math.nan, dtype=parameter.dtype, device=parameter.device)
        nothing = nothing.expand(parameter.shape)
        if local is parameter:  # another backward pass may add to it
            nothing = nothing.clone()
        made = nothing.as_subclass(LostGradient)
        made.__dict__["owner"] = weakref.ref(parameter)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in ("zero_", "_foreach_zero_"):  # zero_grad(set_to_none=False)
            for one in args[0] if isinstance(args[0], list | tuple) else args[:1]:
                cls._zero(one)
            return None
        if name in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise UsageError(
            "a step reads gradients behind its update, on a newcomer of a rank that was lost there "
            f"(Tensor.{name})",
            hint="read gradients, and their norm, before optimizer.step()",
        )

    @staticmethod
    def _zero(one: torch.Tensor) -> None:
        if not isinstance(one, LostGradient):
            one.zero_()
            return
        parameter = one.__dict__["owner"]()
        if parameter is not None and parameter.grad is one:
            parameter.grad = torch.zeros_like(parameter)


_METADATA = frozenset(
    [
        "grad_fn",
        "device",
        "dtype",
        "shape",
        "size",
        "dim",
        "layout",
        "is_sparse",
        "is_cuda",
        "requires_grad",
        "requires_grad_",
        "detach_",
        "is_leaf",
    ]
)


class Coming:
    """A small result on its way from a device."""

    def __init__(self, kept: Any, tensors: list[torch.Tensor]) -> None:
        self._kept = kept
        self._copies: dict[int, torch.Tensor] = {}
        for tensor in tensors:
            if tensor.is_cuda:
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._copies[id(tensor)] = copy.copy_(tensor, non_blocking=True)
        self._event = cuda.new_event()
        cuda.record(self._event)

    def read(self) -> bytes:
        """Waits for the device, if it has not yet come so far."""
        self._event.synchronize()
        return codec.dumps_inline(self._kept, self._copies)


def keep(result: Any) -> tuple[Any, bytes | Coming | None, str]:
    """A copy of `result`, its encoded form if that is small, and why there is none, neither copy
    (which is MISSING) nor encoded, if it cannot travel."""
    if result is None or type(result) in NUMBERS:
        return result, codec.dumps_inline(result), ""
    size, away = _survey(result)
    try:
        if away or size > RESULT_BYTES_MAX:
            codec.dumps(result)  # what cannot be, is refused here
            kept = _copied(result, clone=size <= RESULT_BYTES_MAX)
            tensors = codec.dumps(kept)[1]
            comes = size <= RESULT_BYTES_MAX and all(map(_comes, tensors))
            return kept, Coming(kept, tensors) if comes else None, ""
        data = codec.dumps_inline(result)
    except UsageError as error:
        return MISSING, None, error.message
    if len(data) > RESULT_BYTES_MAX:
        return _copied(result, clone=False), None, ""
    return codec.loads_inline(data), data, ""


def _comes(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and tensor.device.type in ("cpu", "cuda")


def waits(result: Any) -> bool:
    """Whether to read it is to wait for a device."""
    return _survey(result)[1]


def whole(result: Any) -> bytes | None:
    """Encoded, if it is not very large. Waits for the device."""
    if _survey(result)[0] > WHOLE_BYTES_MAX:
        return None
    data = codec.dumps_inline(result)
    return data if len(data) <= WHOLE_BYTES_MAX + RESULT_BYTES_MAX else None


def mark(result: Any) -> str:
    """By which a replica's can be told to be the same. Waits for the device."""
    data, tensors = codec.dumps(result)
    found = xxhash.xxh3_128(data)
    for tensor in map(shards.local, tensors):
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        on_host = tensor.device.type == "cpu"
        found.update(memory(on_cpu(tensor)) if on_host else digest(tensor))
    return found.hexdigest()


def _copied(node: Any, clone: bool) -> Any:
    if isinstance(node, torch.Tensor):
        return node.detach().clone() if clone else node.detach()
    if isinstance(node, dict):
        pairs = {key: _copied(value, clone) for key, value in node.items()}
        if isinstance(node, defaultdict):
            return defaultdict(node.default_factory, pairs)
        return type(node)(pairs)
    if isinstance(node, list | tuple):
        return type(node)(_copied(item, clone) for item in node)
    return node


def _survey(node: Any, depth: int = 0) -> tuple[int, bool]:
    """Bytes of its tensors, and whether some are on a device, where reading them would wait."""
    if isinstance(node, torch.Tensor):
        return node.numel() * node.element_size(), node.device.type != "cpu"
    if isinstance(node, dict):
        node = list(node.values())
    if not isinstance(node, list | tuple) or depth > codec.DEPTH_MAX:  # the codec refuses that
        return 0, False
    found = [_survey(item, depth + 1) for item in node]
    return sum(size for size, _ in found), any(waits for _, waits in found)


class _Leaf:
    """One number or tensor of a result: the local variable that has it at the fence."""

    def __init__(self, name: str, item: bool) -> None:
        self.name, self.item = name, item

    def of(self, values: dict[str, Any]) -> Any:
        value = values[self.name]
        return value.item() if self.item else value


class Foresight:
    """Of one step function. The plan is dropped for good when it was wrong once."""

    def __init__(self) -> None:
        self._plan: Any = None
        self._given_up = False
        self._values: dict[str, Any] = {}
        self._foreseen: bytes | None = None

    def at_fence(self, code: CodeType | None) -> bytes | None:
        """The encoded result, if it can be foreseen."""
        self._values, self._foreseen = {}, None
        frame = frame_of(code) if code is not None and not self._given_up else None
        if frame is None:
            return None
        self._values = {n: v for n, v in frame.f_locals.items() if _plain(v)}
        if self._plan is not None:
            try:
                self._foreseen = codec.dumps_inline(_follow(self._plan, self._values))
            except (KeyError, UsageError, RuntimeError):
                self._given_up = True
        return self._foreseen

    def at_end(self, result: Any, encoded: bytes | None) -> None:
        values, self._values = self._values, {}
        if self._given_up:
            return
        if self._foreseen is not None:
            self._given_up = self._foreseen != encoded
        elif encoded is None:
            self._given_up = True
        elif self._plan is None and values:
            self._plan = _plan(result, values, 0)
            self._given_up = self._plan is None


def frame_of(code: CodeType) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _plain(value: Any) -> bool:
    if type(value) in NUMBERS:
        return True
    if not isinstance(value, torch.Tensor) or type(value) is not torch.Tensor:
        return False
    small = value.numel() * value.element_size() <= RESULT_BYTES_MAX
    return small and value.device.type == "cpu" and value.layout is torch.strided


def _plan(node: Any, values: dict[str, Any], depth: int) -> Any:
    """The result with a leaf for every number and tensor; None if one is nowhere."""
    if node is None or isinstance(node, str):
        return node if node is not None else ()
    if isinstance(node, torch.Tensor) or type(node) in NUMBERS:
        return _leaf(node, values)
    if depth > 2 or type(node) not in (list, tuple, dict) or len(node) > FORESEEN_ITEMS_MAX:
        return None
    items = node.items() if isinstance(node, dict) else enumerate(node)
    planned = {key: _plan(item, values, depth + 1) for key, item in items}
    if any(item is None for item in planned.values()):
        return None
    return planned if isinstance(node, dict) else type(node)(planned.values())


def _leaf(node: Any, values: dict[str, Any]) -> _Leaf | None:
    for name, value in values.items():
        if isinstance(node, torch.Tensor):
            if isinstance(value, torch.Tensor) and _same(node, value):
                return _Leaf(name, False)
        elif type(value) is type(node) and value == node:
            return _Leaf(name, False)
        elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.item() == node:
            return _Leaf(name, True)
    return None


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(one.detach(), other.detach())


def _follow(plan: Any, values: dict[str, Any]) -> Any:
    if isinstance(plan, _Leaf):
        return plan.of(values)
    if isinstance(plan, dict):
        return {key: _follow(item, values) for key, item in plan.items()}
    if plan == ():
        return None
    if isinstance(plan, list | tuple):
        return type(plan)(_follow(item, values) for item in plan)
    return plan
