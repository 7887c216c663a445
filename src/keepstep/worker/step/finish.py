"""The rest of a step behind its fence, made again by the newcomer of a rank that was lost in it.

Theory of operation
-------------------
A rank that dies behind the fence of step T, before T has ended, takes with it what T's function
does after the update: its result, a counter that it raises, numbers that it draws. All others have
T behind them, so the newcomer must get there too. What replicas share it copies; the rest it makes
itself. It has T's arguments, because its walk stands in the call of T, and the rank has published,
in the fence, the local variables that the function still reads, those of functions that it calls to
make the update, and what waits on their value stacks. So the newcomer runs the function once more,
alone, as in its warm-up, up to the update. There all of these, the script's variables, random
streams and cells are set to what they were in the fence, and the function goes on from there to its
end. Whatever that does to state that replicas share is overwritten at the next entry (newcomer.py).

An object that the script's variables lead to is not published a second time: the newcomer's own is
set in place. Of a tensor that lies in the memory of a weight, or of a variable (`row = bank[3]`),
only where it lies is published, and the newcomer's is a view of its own weight or variable. Of
other objects that cannot be carried a script's function gets a stand-in that refuses to be used; a
library's keeps its own (a wrapper around the optimizer). Stand-ins take the place of gradients too,
those of weights and those of inputs: nobody has them any more.

Locals are published for functions whose result could not be foreseen, or in which more happens
behind the fence (`Behind`), and in the first call of each, of which nothing is known. Which are
needed is read from the byte code. Tensors on a device are not waited for: they follow when the
device has come to the fence, before anybody passes it. A function may do something behind its
fence for the first time, of which a local is lost. Other ranks, who have done it too, tell the
newcomer so, and it is stopped.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

import numpy
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from keepstep.errors import UsageError
from keepstep.worker.device import cuda
from keepstep.worker.script import frames, sharing, stack, values
from keepstep.worker.script.results import RESULT_BYTES_MAX, LostGradient, LostResult
from keepstep.worker.state import codec, shards

LATE_BYTES_MAX: Final = 4 << 20  # of a tensor
OVERHEAD_BYTES: Final = 256  # of its encoding
RESULT: Final = "result"
PLAIN, DEVICE, PACKED, LYING = "", "device", "packed", "lying"  # how it is encoded
_LIES: Final = "keepstep/lies"
_DATA: Final = (torch.Tensor, numpy.ndarray, complex, list, tuple, dict, set, frozenset)

Carried = tuple[bytes, str]
Part = dict[str, Any]  # of one function that runs: name, values, lost
# Who else lies in a tensor's memory, and its name (live.py).
LyingWith = Callable[[Any], "tuple[list[Any], Any] | None"]
Reach = Callable[[list[Any]], Any]


@functools.lru_cache(maxsize=64)
def read_behind(code: CodeType, offset: int) -> frozenset[str]:
    """Local variables that the function may read behind the instruction at `offset`."""
    names: set[str] = set()
    behind: set[str] = set()
    loops = False
    for instruction in dis.get_instructions(code):
        if "JUMP" in instruction.opname and instruction.offset > offset:
            target = instruction.argval
            loops = loops or (isinstance(target, int) and target <= offset)
        if instruction.opname.startswith("LOAD_FAST"):
            value = instruction.argval
            found = set(value) if isinstance(value, tuple) else {value}
            names |= found
            if instruction.offset > offset:
                behind |= found
    # Functions that are made here, and called behind, read cells.
    return frozenset(names if loops else behind) | frozenset(code.co_cellvars)


class Behind:
    """What the step functions of a rank do behind their fences. A rank's own: others may do other
    things there."""

    def __init__(self) -> None:
        # By site: what changes, and since which tick. A function that has ended once has an entry.
        self._since: dict[str, dict[str, int]] = {}
        self._coming: _Coming | None = None

    def note(self, site: str, changed: Iterable[str], foreseen: bool, tick: int) -> None:
        """A call has ended."""
        since = self._since.setdefault(site, {})
        for name in changed if foreseen else (*changed, RESULT):
            since.setdefault(name, tick)

    def changes(self, site: str) -> list[str]:
        return sorted(self._since.get(site, {}).keys() - {RESULT})

    def export(self) -> dict[str, dict[str, int]]:
        return self._since

    def load(self, since: dict[str, dict[str, int]]) -> None:
        """As the rank had it that this process replaces. A first call is a first call here too: it
        foresees nothing."""
        self._since = {site: found for site, found in since.items() if found}

    def locals_of(
        self,
        site: str,
        code: CodeType | None,
        arguments: dict[str, Any],
        knows: Callable[[Any], bool],
        lying_with: LyingWith = lambda _: None,
    ) -> list[Part] | None:
        """As they go into the side state, if they are needed: of each function from the step's own
        inward. `knows(thing)`: it is part of what is attached, or of the script's variables."""
        since = self._since.get(site)
        needed = since is None or bool(since)
        running = frames.script_frames(code) if code is not None and needed else []
        if not running:
            return None
        more = since is None or since.keys() != {RESULT}
        given = {id(value) for value in arguments.values() if not _scalar(value)}
        parts: list[Part] = []
        lost: dict[str, Any] = {}
        for depth, frame in enumerate(running):
            found = {name: x for name, x in _read(frame).items() if id(x) not in given}
            found = {n: x for n, x in found.items() if not (_same_here(x) or knows(x))}
            encoded = {name: _encoded(value, more, lying_with) for name, value in found.items()}
            missing = [name for name, data in encoded.items() if data is None]
            if frames.origin(frame.f_code.co_filename) == "library":
                missing = [name for name in missing if isinstance(found[name], torch.Tensor)]
            lost.update({f"{depth} {name}": found[name] for name in missing})
            values_ = {name: data for name, data in encoded.items() if data is not None}
            parts.append(
                {"name": frame.f_code.co_qualname, "values": values_, "lost": sorted(missing)}
            )
        self._coming = _Coming(lost)
        return parts

    def come(self) -> dict[str, Carried]:
        """Of the lost ones, those that have come from the device since."""
        coming, self._coming = self._coming, None
        return coming.read() if coming is not None else {}


class _Coming:
    """Small tensors on their way from a device, which nobody waits for."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._event: Any = None
        self._copies: dict[str, torch.Tensor] = {}
        for name, value in values.items():
            plain = _plain(value)
            if plain and value.is_cuda and value.nbytes <= RESULT_BYTES_MAX:
                copy = torch.empty_like(value, device="cpu", pin_memory=True)
                self._copies[name] = copy.copy_(value.detach(), non_blocking=True)
        if self._copies:
            self._event = cuda.new_event()
            cuda.record(self._event)

    def read(self) -> dict[str, Carried]:
        if self._event is None or not self._event.query():
            return {}
        return {name: (codec.dumps_inline(copy), DEVICE) for name, copy in self._copies.items()}


def new_behind(since: dict[str, dict[str, int]], site: str, tick: int) -> list[str]:
    """What another rank has changed behind the fence of `tick` as never before."""
    return sorted(n for n, at in since.get(site, {}).items() if n != RESULT and at == tick)


def _read(frame: FrameType) -> dict[str, Any]:
    """What the function still needs: local variables, and data that waits until its call returns
    (of iterators, `with` blocks and methods the newcomer has its own)."""
    names = read_behind(frame.f_code, frame.f_lasti)
    found = {name: value for name, value in frames.read(frame).items() if name in names}
    waiting = stack.operands(frame)
    return found | {n: x for n, x in waiting.items() if _scalar(x) or isinstance(x, _DATA)}


def _scalar(value: Any) -> bool:
    """The same object may stand for many."""
    return type(value) in values.SCALARS or isinstance(value, enum.Enum)


def _same_here(value: Any) -> bool:
    """The newcomer's own function makes the same of it: functions, modules, and the like."""
    if isinstance(value, ModuleType):
        return True
    return callable(value) and not isinstance(value, torch.Tensor)


def _plain(value: Any) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested


def _encoded(value: Any, more: bool, lying_with: LyingWith) -> Carried | None:
    """With how to decode it. To read what lies on a device is to wait for it, so that is done only
    where `more` than a result may come of it: the newcomer cannot do without."""
    try:
        told = _told(value, lying_with)
        if told is not value:
            return codec.dumps_inline(told), LYING
    except (LookupError, TypeError, ValueError, UsageError):
        return None
    limit, away = RESULT_BYTES_MAX, False
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested:
            return None
        away = value.device.type != "cpu"
        limit = LATE_BYTES_MAX if more else RESULT_BYTES_MAX
        if value.nbytes > limit or (away and (not more or value.device.type != "cuda")):
            return None
        value = value.detach().cpu() if away else value
    how = DEVICE if away else PLAIN
    try:
        data = codec.dumps_inline(value)
    except UsageError:
        try:
            data, how = values.encode(values.pack(value, lambda _: None)), PACKED
        except values.NotPlain:
            return None
    return (data, how) if len(data) <= limit + OVERHEAD_BYTES else None


def _told(value: Any, lying_with: LyingWith, depth: int = 0) -> Any:
    """With the names and places of tensors and arrays that are, or lie in the memory of, others;
    itself, if there are none."""
    if depth > codec.DEPTH_MAX:
        raise LookupError
    kind = type(value)
    if isinstance(value, torch.Tensor | numpy.ndarray):
        other = lying_with(value)
        return value if other is None else {_LIES: _place(value, *other)}
    if kind is dict:
        told = {key: _told(item, lying_with, depth + 1) for key, item in value.items()}
        return told if any(told[key] is not value[key] for key in told) else value
    if kind in (list, tuple):
        items = [_told(item, lying_with, depth + 1) for item in value]
        return kind(items) if any(a is not b for a, b in zip(items, value)) else value
    for tensor in _tensors([value]):
        if lying_with(tensor) is not None:
            raise LookupError
    return value


def _place(value: Any, name: list[Any], other: Any) -> list[Any]:
    if value is other:
        return [name]
    there, here = sharing.place(shards.local(other)), sharing.place(value)
    if there is None or here is None:
        raise LookupError
    like = value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
    about = [list(like.shape), like.dtype, like.requires_grad, like is not value]
    return [name, here[1] - there[1], sharing.layout(value), *about]


def _found(told: Any, reach: Reach) -> Any:
    """The same in this process."""
    if type(told) is dict and _LIES in told:
        name, *where = told[_LIES]
        other = reach(name)
        if not where:
            return other
        offset, steps, shape, dtype, needs_grad, array = where
        like = torch.empty(shape, dtype=dtype, device="meta")
        if isinstance(other, numpy.ndarray):
            other = torch.from_numpy(other)
        found = sharing.Memory(shards.local(other), 0).view(offset, steps, like)
        return found.numpy() if array else found.requires_grad_(needs_grad)
    if type(told) is dict:
        return {key: _found(item, reach) for key, item in told.items()}
    if type(told) in (list, tuple):
        return type(told)(_found(item, reach) for item in told)
    return told


def _decoded(data: bytes, how: str, reach: Reach) -> Any:
    if how == PACKED:
        return values.unpack(values.decode(data), _nowhere)
    value = codec.loads_inline(data)
    if how == LYING:
        return _found(value, reach)
    return value.to(cuda.home) if how == DEVICE else value


def _tensors(values_: Iterable[Any], depth: int = 0) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for value in values_ if depth < codec.DEPTH_MAX else ():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, dict):
            found += _tensors(value.values(), depth + 1)
        elif isinstance(value, list | tuple | deque | set):
            found += _tensors(value, depth + 1)
    return found


def _lose_gradient(tensor: torch.Tensor, mine: torch.Tensor) -> None:
    """It has one there if the newcomer's own has."""
    if (mine.is_leaf or mine.retains_grad) and mine.grad is not None:
        tensor.grad = LostGradient.of(tensor)


def _autocast() -> bool:
    """With copies of weights."""
    on = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    return on and torch.is_autocast_cache_enabled()


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _nowhere(_: int) -> Any:
    raise AssertionError("a local variable refers to nothing else")


def with_locals(rest: list[Part], found: dict[str, Carried]) -> list[Part]:
    """`found` were lost, and have come after all."""
    complete: list[Part] = []
    for depth, part in enumerate(rest):
        came = {name: found.get(f"{depth} {name}") for name in part["lost"]}
        more = {name: data for name, data in came.items() if data is not None}
        lost = [name for name in part["lost"] if name not in more]
        complete.append({**part, "values": {**part["values"], **more}, "lost": lost})
    return complete


class Finishing:
    """On a newcomer: one run of the function, from the fence on as the rank that is replaced.
    `at_fence` sets what the rank had there, and says which gradients are among it: those that
    outlive updates."""

    def __init__(
        self,
        published: list[Part],
        site: str,
        at_fence: Callable[[], Iterable[torch.nn.Parameter]],
        reach: Reach = lambda _: None,
    ) -> None:
        self._published = published
        self._site = site
        self._at_fence = at_fence
        self._reach = reach
        self.reached = False
        self._cast = False  # the update is inside an autocast
        self._hidden: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def fence(
        self,
        code: CodeType | None,
        parameters: list[torch.nn.Parameter],
        arguments: Iterable[Any] = (),
    ) -> None:
        """Called where the first update begins. `arguments` of the step."""
        if self.reached:
            return
        self.reached = True
        self._cast = _autocast()
        carried = set(map(id, self._at_fence()))
        for parameter in parameters:
            if id(parameter) not in carried:
                _lose_gradient(parameter, parameter)
        for tensor in _tensors(arguments):
            _lose_gradient(tensor, tensor)
        running = frames.script_frames(code) if code is not None else []
        there, here = [p["name"] for p in self._published], [f.f_code.co_qualname for f in running]
        if here != there:
            raise UsageError(
                f"step {self._site!r} comes to its update by {' > '.join(here)} on the newcomer, "
                f"and by {' > '.join(there)} in the rank that is replaced",
                hint="let the step make its update in the same place in every process",
            )
        for frame, part in zip(running, self._published, strict=True):
            self._set(frame, part)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Forward passes behind the update, inside the autocast of before it."""
        clear = torch.clear_autocast_cache

        def cleared() -> None:
            self._cast = False
            clear()

        watched = register_module_forward_pre_hook(self.forward)
        torch.clear_autocast_cache = cleared  # an autocast calls it when it ends
        try:
            yield
        finally:
            torch.clear_autocast_cache = clear
            watched.remove()

    def forward(self, module: torch.nn.Module, _: Any) -> None:
        """Autocast has copies of the weights of before the update: they are lost."""
        if not (self._cast and _autocast()):
            return
        own = [p for p in module._parameters.values() if p is not None]
        if any(p.requires_grad and p.dtype == torch.float32 for p in own):
            raise UsageError(
                f"a forward pass of {type(module).__name__} behind the update of step "
                f"{self._site!r}, inside the autocast of before the update, on a newcomer of a "
                "rank that was lost there",
                hint="end that torch.autocast before the update, and open another one behind it",
            )

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        """The update is made already: without gradients it changes nothing."""
        for parameter in _parameters(optimizer):
            if parameter.grad is not None:
                self._hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def after_update(self) -> None:
        for parameter, gradient in self._hidden:
            if parameter.grad is None:
                parameter.grad = gradient
        self._hidden = []

    def end(self, parameters: list[torch.nn.Parameter]) -> None:
        self._hidden = []
        for parameter in parameters:
            if type(parameter.grad) is LostGradient:
                parameter.grad = None

    def _set(self, frame: FrameType, part: Part) -> None:
        found: dict[str, Any] = {}
        lost = list(part["lost"])
        for name, data in part["values"].items():
            try:
                encoded, how = data
                found[name] = _decoded(encoded, how, self._reach)
            except (LookupError, ValueError):  # what it is a view of is not here
                lost.append(name)
        for name in lost:
            why = "it is a local variable that cannot be carried to another process"
            found[name] = LostResult(f"{self._site} ({name})", why)
        mine = frames.read(frame)
        for name, value in found.items():
            for one, other in zip(_tensors([value]), _tensors([mine.get(name)])):
                _lose_gradient(one, other)
        waiting = {name for name in found if name.startswith(stack.OPERAND)}
        for name in waiting:
            stack.set_operand(frame, name, found.pop(name))
        frames.write(frame, found)
