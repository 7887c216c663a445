"""The front door of torch.distributed, watched.

Before `attach`, every rank records the results of its small collectives (seeds, run ids, object
broadcasts). A newcomer in solo mode replays the record of the rank it replaces, so its script
computes with the values that the job really agreed on. Object collectives are made of tensor
collectives, so recording those covers them.

After `attach`, the same wrappers count as progress, refuse a collective after the fence of a step,
and make a bare collective between steps a section of its own (`Bare`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from keepstep.errors import UsageError
from keepstep.worker.script import refusals
from keepstep.worker.state import codec

RESULT_BYTES_MAX = 64 << 10
# In all. It lies in the page that a rank shares with its agent, and travels in one frame (64 MiB).
RECORD_BYTES_MAX = 32 << 20

# operation -> (position, keyword) of what it writes
_OUTPUTS: dict[str, tuple[int, str] | None] = {
    "all_gather": (0, "tensor_list"),
    "all_gather_into_tensor": (0, "output_tensor"),
    "all_gather_single": (0, "output"),
    "all_reduce": (0, "tensor"),
    "all_to_all": (0, "output_tensor_list"),
    "all_to_all_single": (0, "output"),
    "barrier": None,
    "broadcast": (0, "tensor"),
    "gather": (1, "gather_list"),
    "irecv": None,
    "isend": None,
    "monitored_barrier": None,
    "recv": (0, "tensor"),
    "reduce": (0, "tensor"),
    "reduce_scatter": (0, "output"),
    "reduce_scatter_single": (0, "output"),
    "reduce_scatter_tensor": (0, "output"),
    "scatter": (0, "tensor"),
    "send": None,
}

# These meet one peer, which may be in another transaction.
_POINT_TO_POINT = frozenset({"send", "recv", "isend", "irecv"})

Gate = Callable[[str, Callable[[], Any], Any, Any], Any]


class Bare:
    """A collective between steps, as the function of a section: its result is what it writes into
    the tensors it was given, so that a newcomer that walks past it gets the same."""

    def __init__(self, name: str, call: Callable[[], Any], args: Any, kwargs: Any) -> None:
        self._call = call
        where = "outside of @ks.step and @ks.section"
        cure = "put it into a function with @ks.section"
        if name in _POINT_TO_POINT:
            raise UsageError(f"{name} {where}: it does not concern all ranks", hint=cure)
        if kwargs.get("async_op") or any(arg is True for arg in args[2:]):
            raise UsageError(f"{name} with async_op=True {where}", hint=f"wait for it, or {cure}")
        self._outputs = _outputs(name, args, kwargs) if _OUTPUTS[name] is not None else []
        size = sum(tensor.nbytes for tensor in self._outputs)
        if size > RESULT_BYTES_MAX:
            raise UsageError(
                f"{name} {where} has a result of {size} bytes, and a newcomer must get it too",
                hint=f"the limit is {RESULT_BYTES_MAX} bytes: {cure} that returns less",
            )
        self._before = [tensor.detach().clone() for tensor in self._outputs]
        self._answer: Any = None

    def __call__(self) -> Any:
        self._answer = self._call()
        return [tensor.detach().cpu() for tensor in self._outputs]

    def undo(self) -> None:
        """A retry must not reduce what is half reduced."""
        with torch.no_grad():
            for tensor, before in zip(self._outputs, self._before, strict=True):
                tensor.copy_(before)

    def give(self, values: Any) -> Any:
        with torch.no_grad():
            for tensor, value in zip(self._outputs, values, strict=True):
                tensor.copy_(value)
        return self._answer


class Recorder:
    """What the wrappers do before attach: record on a rank, replay on a newcomer."""

    def __init__(self) -> None:
        self.record: list[dict[str, Any]] = []
        self.replay: list[dict[str, Any]] | None = None
        # A result that is gone by attach was used up by something that is there, or by nothing.
        self.oversized: list[tuple[str, weakref.ref[torch.Tensor]]] = []
        self.gate: Gate | None = None  # set by attach
        self._depth = threading.local()

    def install(self) -> None:
        for name in _OUTPUTS:
            function = getattr(c10d, name, None)
            if function is None:
                continue
            wrapped = self._wrap(name, function)
            setattr(c10d, name, wrapped)
            if getattr(dist, name, None) is function:
                setattr(dist, name, wrapped)

    def _wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            here = self._depth
            if getattr(here, "inside", False):
                return function(*args, **kwargs)
            if threading.current_thread() is not threading.main_thread():
                if self.gate is not None:
                    refusals.other_thread(name)
                return function(*args, **kwargs)
            here.inside = True
            try:
                if self.gate is not None:
                    return self.gate(name, lambda: function(*args, **kwargs), args, kwargs)
                return self._before_attach(name, function, args, kwargs)
            finally:
                here.inside = False

        return wrapper

    def _before_attach(
        self, name: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        result = function(*args, **kwargs)
        if _OUTPUTS[name] is None:  # nothing to record, or not there yet
            return result
        if result is not None and hasattr(result, "wait"):
            result.wait()
        outputs = _outputs(name, args, kwargs)
        if self.replay is not None:
            self._replay(name, outputs)
        else:
            self._record(name, outputs)
        return result

    def _record(self, name: str, outputs: list[torch.Tensor]) -> None:
        small = sum(t.nbytes for t in outputs) <= RESULT_BYTES_MAX
        if not small:
            self.oversized += [(name, weakref.ref(t)) for t in outputs]
        values = [t.detach().cpu().clone() for t in outputs] if small else None
        self.record.append({"op": name, "shapes": [list(t.shape) for t in outputs], "out": values})

    def _replay(self, name: str, outputs: list[torch.Tensor]) -> None:
        assert self.replay is not None
        entry = self.replay.pop(0) if self.replay else None
        shapes = [list(t.shape) for t in outputs]
        if entry is None or entry["op"] != name or (entry["out"] and entry["shapes"] != shapes):
            raise UsageError(
                f"a newcomer's set-up called {name}{shapes} where the rank it replaces had "
                f"{entry and (entry['op'], entry['shapes'])}",
                hint="collectives before attach must be the same on every start of the script",
            )
        for target, value in zip(outputs, entry["out"] or (), strict=False):
            with torch.no_grad():
                target.copy_(value)

    def encoded(self, known: set[int], about: dict[str, Any]) -> bytes:
        """The record as side state, with what attach found out `about` the rank's tensors;
        `known` are the storages that attach protects anyway."""
        for name, kept in self.oversized:
            tensor = kept()
            if tensor is not None and tensor.untyped_storage().data_ptr() not in known:
                raise UsageError(
                    f"{name} before attach had a result of {tensor.nbytes} bytes "
                    f"(shape {list(tensor.shape)}) that is not part of the attached model",
                    hint=f"a newcomer must get it too: keep such results under {RESULT_BYTES_MAX} "
                    "bytes, move the collective into a @ks.section, or attach what it fills",
                )
        data = codec.dumps_inline({**about, "record": self.record})
        if len(data) > RECORD_BYTES_MAX:
            raise UsageError(
                f"collectives before attach had {len(data)} bytes of results",
                hint=f"the limit is {RECORD_BYTES_MAX}; move them into a @ks.section",
            )
        return data


def _outputs(name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
    where = _OUTPUTS[name]
    assert where is not None
    position, keyword = where
    value = args[position] if len(args) > position else kwargs.get(keyword)
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


front_door: Final = Recorder()  # of this process
