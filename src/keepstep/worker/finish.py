"""The rest of a step behind its fence, made again by the newcomer of a rank that was lost in it.

Theory of operation
-------------------
A rank that dies behind the fence of step T, before T has ended, takes with it what T's function
does after the update: its result, a counter that it raises, numbers that it draws. All others have
T behind them, so the newcomer must get there too. What replicas share it copies; the rest it makes
itself. It has T's arguments, because its walk stands in the call of T, and the rank has published,
in the fence, the local variables that the function still reads (`Locals`). So the newcomer runs the
function once more, alone, as in its warm-up, up to the update. There its locals, the script's
variables, random streams and cells are set to what they were in the fence, and the function goes on
from there to its end. Whatever that does to state that replicas share is overwritten at the next
entry (newcomer.py).

Locals are published only for functions in which something happens behind the fence that was not
foreseen in it; which ones are needed is read from the byte code.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, Final

import torch

from keepstep.errors import UsageError
from keepstep.worker import codec, cuda
from keepstep.worker.results import RESULT_BYTES_MAX, Lost, frame_of
from keepstep.worker.script import frames

LATE_BYTES_MAX: Final = 4 << 20  # of a tensor
OVERHEAD_BYTES: Final = 256  # of its encoding


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
    return frozenset(names if loops else behind)


class Locals:
    """Of one step function, as they go into the side state."""

    def __init__(self) -> None:
        self.needed = False  # something happens behind the fence
        self.late = False  # and more comes of it than the result

    def publish(
        self, code: CodeType | None, arguments: dict[str, Any], knows: Callable[[Any], bool]
    ) -> dict[str, Any] | None:
        """`knows(thing)`: it is part of what is attached."""
        frame = frame_of(code) if code is not None and self.needed else None
        if frame is None:
            return None
        given = {id(value) for value in arguments.values()}
        values: dict[str, tuple[bytes, bool]] = {}
        lost: list[str] = []
        for name in read_behind(frame.f_code, frame.f_lasti):
            value = frame.f_locals.get(name)
            if name not in frame.f_locals or id(value) in given:
                continue
            if _same_here(value) or knows(value):
                continue
            data = _encoded(value, self.late)
            if data is None:
                lost.append(name)
            else:
                values[name] = data
        return {"values": values, "lost": sorted(lost)}


def _same_here(value: Any) -> bool:
    """The newcomer's own function makes the same of it: functions, modules, and the like."""
    return callable(value) and not isinstance(value, torch.Tensor)


def _encoded(value: Any, late: bool) -> tuple[bytes, bool] | None:
    """With whether it lies on a device. Reading it there waits, so that is done only where the
    newcomer cannot do without."""
    limit, away = RESULT_BYTES_MAX, False
    if isinstance(value, torch.Tensor):
        away = value.device.type != "cpu"
        limit = LATE_BYTES_MAX if late else RESULT_BYTES_MAX
        if value.nbytes > limit or (away and (not late or value.device.type != "cuda")):
            return None
        value = value.detach().cpu() if away else value
    try:
        data = codec.dumps_inline(value)
    except UsageError:
        return None
    return (data, away) if len(data) <= limit + OVERHEAD_BYTES else None


def _decoded(data: bytes, away: bool) -> Any:
    value = codec.loads_inline(data)
    return value.to(cuda.home) if away else value


class Finishing:
    """On a newcomer: one run of the function, from the fence on as the rank that is replaced."""

    def __init__(self, published: dict[str, Any], site: str, at_fence: Callable[[], None]) -> None:
        self._published = published
        self._site = site
        self._at_fence = at_fence
        self.reached = False

    def fence(self, code: CodeType | None, parameters: list[torch.nn.Parameter]) -> None:
        """Called where the first update begins."""
        if self.reached:
            return
        self.reached = True
        self._at_fence()
        for parameter in parameters:
            parameter.grad = None  # the update is made already
        frame = frame_of(code) if code is not None else None
        if frame is not None:
            self._set(frame)

    def _set(self, frame: FrameType) -> None:
        values = {n: _decoded(*x) for n, x in self._published["values"].items()}
        for name in self._published["lost"]:
            why = "it is a local variable that cannot be carried to another process"
            values[name] = Lost(f"{self._site} ({name})", why)
        frames.write(frame, values)
