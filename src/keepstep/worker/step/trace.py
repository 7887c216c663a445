"""A written trace of a rank, for `keepstep rehearse`: what it had wherever a step began.

On when KEEPSTEP_TRACE names a folder; otherwise `active` is None and nothing is paid but a look at
it. Each rank appends lines (model/trace.py) to its own file:

    entry   where a step or section begins, and again where a retry of it begins: everything that
            a fault must leave as it was. Code between two steps has run by then, so what it did is
            in the line of the step after it
    commit  the result of the step or section
    end     the script is over: as entry, for what the script did last

A rank that is replaced goes on in the same file; a newcomer writes the entry of the transaction at
which it joins once more. Every line is flushed, so a kill takes none that was written.

The same place is where a rehearsal takes hold of a run: no transaction begins at the version in the
file `gate` or beyond it (a fault then waits for a spare, whatever the speed of the script), and the
script ends, as if it were over, where it would begin step KEEPSTEP_STEPS_MAX.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
import torch
import xxhash

from keepstep.model import trace as model
from keepstep.model.commands import WorkerSettings
from keepstep.worker.state import rng, value_text
from keepstep.worker.state.export import flat
from keepstep.worker.step.live_rank import LiveRank

GATE_POLL_S: Final = 0.02


class Trace:
    def __init__(self, folder: Path, steps_max: int) -> None:
        self._folder = folder
        self._steps_max = steps_max
        self._encoder = msgspec.json.Encoder()
        self._file: Any = None
        self._module: dict[str, Any] = {}  # the script's globals: its frames are gone at the end

    # ------------------------------------------------------------------ called by transactions

    def entry(self, live: LiveRank, site: str, step: bool, call: Any) -> None:
        """A transaction is about to begin. Does not return where the rehearsal ends."""
        self._wait_at_gate(live)
        if step and 0 < self._steps_max <= live.version:
            raise SystemExit(0)  # all ranks get here: they make the same steps in the same order
        function = getattr(call, "_function", None)
        frame = sys._getframe(1)
        self._module = value_text.globals_of_script(frame)
        groups = self._state(live, frame, function)
        groups["batch"] = _arguments(function, call)
        self._write(live, "entry", site, step, groups)

    def committed(self, live: LiveRank, site: str, step: bool, result: Any) -> None:
        """Before the tick counts on."""
        self._write(live, "commit", site, step, {"result": value_text.parts("result", result)})

    def end(self, live: LiveRank) -> None:
        groups = self._state(live, None, None)
        groups["variable"] = value_text.of_module(self._module)
        self._write(live, "end", "", False, groups)

    # ------------------------------------------------------------------ inside

    def _wait_at_gate(self, live: LiveRank) -> None:
        path = self._folder / model.GATE
        while not live.aborted():
            try:
                if live.version < int(path.read_text() or "0"):
                    return
            except FileNotFoundError:
                return
            live.page.mark()  # it does not hang
            time.sleep(GATE_POLL_S)

    def _state(
        self, live: LiveRank, frame: FrameType | None, function: Any
    ) -> dict[str, dict[str, str]]:
        plain, streams = value_text.variables(frame, function)
        exported = live.state.export().tensors
        # Gradients of a step that is over are nobody's business.
        exported = {name: x for name, x in exported.items() if not name.startswith("grad/")}
        registered: dict[str, str] = {}
        for name, item in live.objects.items():
            registered |= value_text.parts(name, item.save())
        rates, hyper = _hyper(live)
        return {
            "generator": {**_generators(), **streams},
            "learning rate": rates,
            "hyperparameter": hyper,
            "registered state": registered,
            "tensor": {
                name: value_text.of_tensor(tensor)
                for name, tensor in exported.items()
                if not name.startswith("object/")
            },
            "mode": _modes(live),
            "variable": plain,
        }

    def _write(
        self, live: LiveRank, kind: Any, site: str, step: bool, groups: dict[str, dict[str, str]]
    ) -> None:
        line = model.TraceLine(
            kind=kind,
            pid=os.getpid(),
            tick=live.tick,
            version=live.version,
            site=site,
            step=step,
            where=_where(live),
            groups={name: found for name, found in groups.items() if found},
        )
        if self._file is None:
            self._file = (self._folder / model.file_name(live.rank)).open("ab", buffering=0)
            self._file.write(b"\n")  # whoever had this rank may have been killed within a line
        self._file.write(self._encoder.encode(line) + b"\n")


def _generators() -> dict[str, str]:
    """The process's own streams. Of CUDA only that of the rank's device: its number is its slot's
    business."""
    state: dict[str, Any] = msgspec.msgpack.decode(rng.capture())
    device = state.pop("device", 0)
    if "cuda" in state:
        state["cuda"] = state["cuda"][device]
    return {name: xxhash.xxh3_64_hexdigest(repr(value).encode()) for name, value in state.items()}


def _hyper(live: LiveRank) -> tuple[dict[str, str], dict[str, str]]:
    """(learning rates, whatever else optimizers keep that is no tensor of their state)."""
    rates: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, optimizer in live.optimizers.items():
        for index, group in enumerate(optimizer.param_groups):
            where = f"optimizer {name} group {index}"
            for key, value in group.items():
                if key == "lr":
                    rates |= value_text.parts(where, value)
                elif key != "params":
                    others |= value_text.parts(f"{where} {key}", value)
        for index, parameter in enumerate(flat(optimizer)):
            entry = optimizer.state.get(parameter, {})
            for key, value in entry.items() if isinstance(entry, dict) else ():
                if not isinstance(value, torch.Tensor):
                    others |= value_text.parts(f"optimizer {name} state {index} {key}", value)
    return rates, others


def _modes(live: LiveRank) -> dict[str, str]:
    """Which modules train and which parameters are frozen, model by model."""
    found = {}
    for name, module in live.models.items():
        training = {path for path, part in module.named_modules() if part.training}
        frozen = {path for path, p in module.named_parameters() if not p.requires_grad}
        text = f"{sorted(training)} {sorted(frozen)}"
        found[f"model {name}"] = (
            f"{len(training)} modules train, {len(frozen)} parameters frozen "
            f"{xxhash.xxh3_64_hexdigest(text.encode())}"
        )
    return found


def _arguments(function: Any, call: Any) -> dict[str, str]:
    code = getattr(function, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    found: dict[str, str] = {}
    for index, value in enumerate(getattr(call, "_args", ())):
        name = names[index] if index < len(names) else f"argument {index}"
        found |= value_text.parts(name, value)
    for name, value in getattr(call, "_kwargs", {}).items():
        found |= value_text.parts(name, value)
    return found


def _where(live: LiveRank) -> list[int]:
    """Epochs from the outside in, then how many batches the innermost loop has handed out."""
    stack = live.tracker.stack
    epochs = [level.epoch for level in stack if level.kind == "epochs"]
    loops = [loop for level in stack for loop in level.loops]
    return [*epochs, loops[-1].yields if loops else 0]


active: Trace | None = None


def start(settings: WorkerSettings) -> None:
    """At attach."""
    global active
    if settings.trace:
        active = Trace(Path(settings.trace), settings.steps_max)
