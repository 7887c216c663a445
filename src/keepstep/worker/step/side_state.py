"""Side state: what only this rank has, published before its fence for whoever may replace it.

Random streams, gradients that outlive a step, buffers and registered objects of its own, its
position, variables and results. What becomes known only when the transaction has ended (a result, a
draw behind the update) follows as its late part; what the rank noted of a step's inputs when it
began stays with its own agent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from keepstep.errors import UsageError
from keepstep.model.page import NOTE_TICK
from keepstep.worker.script.position import Tracker
from keepstep.worker.script.rank_streams import RankStreams
from keepstep.worker.script.variables import Variables
from keepstep.worker.state import codec
from keepstep.worker.state.gradients import Gradients
from keepstep.worker.state.rank import RankFacts
from keepstep.worker.state.step_inputs import Inputs
from keepstep.worker.step.finish import Behind
from keepstep.worker.step.publishing import Publisher

SIDE_BYTES_MAX: Final = 60 << 20  # it travels in one frame
CARRIED_BYTES_MAX: Final = 32 << 20  # of gradients in the side state
# What may change behind a fence: in the late part, and in words.
BEHIND: Final = {
    "variables": "variables",
    "streams": "streams",
    "objects": "registered objects",
    "gradients": "gradients",
}


class Parts(NamedTuple):
    """Where it is collected."""

    tracker: Tracker
    streams: RankStreams
    variables: Variables
    gradients: Gradients


class SideState:
    def __init__(self, rank: RankFacts, parts: Parts, publisher: Publisher) -> None:
        self._rank = rank
        self._parts = parts
        self._publisher = publisher
        self.inputs = Inputs()
        self.behind = Behind()
        self._carries_on = False  # gradients are added up over several steps, if the fence passes
        self._streams = b""  # as published at the last fence
        self._objects = b""  # likewise; empty: there are none of this rank alone
        self._gradients = b""  # likewise; empty: none outlive the step
        self._noted: dict[str, str] = {}  # digests of objects
        self.first_changes: Callable[[], dict[str, bytes]] = dict
        self.left_out: set[str] = set()  # what the script has besides, and nobody carries
        self._first: dict[str, bytes] = {}  # as published at the last fence
        self._locals: dict[str, Any] = {}  # of the step, that have come from the device

    def _carried(self, step: bool, updating: bool) -> dict[int, torch.Tensor]:
        """Gradients that the next step may add to, by parameter."""
        gradients = self._parts.gradients
        self._carries_on = False
        if not updating and not step and not gradients.carrying:
            return {}
        if updating and not gradients.outliving:
            return {}
        found = gradients.to_carry(updating)
        self._carries_on = bool(found) and not updating
        size = sum(g.nbytes for g in found.values())
        if size > CARRIED_BYTES_MAX:
            raise UsageError(
                f"gradients of {size >> 20} MiB outlive a step, more than can be published with "
                "every step: a rank that is lost in between could not be replaced exactly",
                hint="make one @ks.step call of all micro-batches of an update",
            )
        return found

    def make(
        self,
        site: str,
        step: bool,
        updating: bool = True,
        position: Any = None,
        result: bytes | None = None,
        variables: bytes | None = None,
        rest: list[dict[str, Any]] | None = None,
    ) -> bytes:
        """Version tick+1 of what only this rank has, as it will be if the fence passes.
        `updating`: an optimizer is about to use up the gradients."""
        self._first = {}
        if position is None:
            self._first = self.first_changes()
            position = self._parts.tracker.position(site, step, result, variables)
        self._rank.cells.fence()
        self._streams = self._parts.streams.capture()
        carried = self._carried(step, updating)
        # Of a step without an update nothing comes behind the fence.
        outliving = updating and bool(self._parts.gradients.outliving)
        self._gradients = codec.dumps_inline(carried) if outliving else b""
        objects = self._own_objects()
        self._objects = (
            codec.dumps_inline(objects) if objects["per_rank"] or objects["own"] else b""
        )
        data = codec.dumps_inline(
            {
                "gradients": carried,
                "tick": self._rank.tick + 1,
                "version": self._rank.version + step,
                "streams": self._streams,
                "late": self.behind.changes(site) if updating else [],
                "behind": self.behind.export(),
                "site": site,
                "rest": rest,
                "position": position,
                "cells": self._rank.cells.side(),
                "first": self._first,
                "left_out": sorted(self.left_out),
                **objects,
            }
        )
        if len(data) > SIDE_BYTES_MAX:
            raise self._too_large(len(data))
        return data

    def _own_objects(self) -> dict[str, Any]:
        """Of what is registered, what only this rank has."""
        return {
            "per_rank": {n: o.save() for n, o in self._rank.objects.items() if o.per_rank},
            "own": {n: o.own_tensors() for n, o in self._rank.objects.items() if o.own},
        }

    def _too_large(self, size: int) -> UsageError:
        parts = {f"buffer {n}": _bytes_of(value) for n, value in self._rank.cells.side().items()}
        parts |= self._parts.variables.heavy()
        for name, item in self._rank.objects.items():
            if item.per_rank or item.own:
                parts[f"registered object {name!r}"] = item.size
        name, largest = max(parts.items(), key=lambda one: one[1], default=("the script", 0))
        cure = "make it smaller, or a buffer that changes only behind the optimizer's update and "
        cure += "alike on all ranks, or register such a thing with ks.register(name, save, load)"
        if name.startswith("registered object"):
            cure = "keep it on all ranks and alike: a replacement then copies it from another rank"
        return UsageError(
            f"what only this rank has is {size >> 20} MiB, and it is published with every step; "
            f"the largest part is {name} ({largest >> 20} MiB), which changes and may differ "
            "between ranks",
            hint=f"the limit is {SIDE_BYTES_MAX >> 20} MiB: {cure}",
        )

    def note_inputs(self, arguments: Any, objects: dict[str, str]) -> None:
        """A transaction begins: a newcomer that has to repeat it must come to the same arguments of
        a step, and find small objects as they are here."""
        self.inputs.enter(arguments)
        self._noted = objects
        self._publish_note()

    def complete_note(self) -> None:
        """What lay on the device, if it has just become known."""
        if self.inputs.complete():
            self._publish_note()

    def _publish_note(self) -> None:
        note = {"tick": self._rank.tick, "objects": self._noted, **self.inputs.note()}
        self._rank.page.publish(NOTE_TICK, codec.dumps_inline(note))

    def publish_late(
        self,
        site: str,
        result: bytes | None,
        variables: bytes | None,
        foreseen: bool,
        mark: str,
    ) -> None:
        """The transaction has ended: what was not known in its fence. To the own agent, and to the
        buddy without waiting for it. `foreseen`: the result was known."""
        late: dict[str, Any] = {} if result is None else {"result": result}
        if mark:
            late["mark"] = mark
        locals_, self._locals = self._locals, {}
        if result is None and locals_:
            late["locals"] = locals_  # it can be made again
        if variables is not None:
            late["variables"] = variables
        streams = self._parts.streams.capture()
        if streams != self._streams:
            late["streams"] = streams
        if self._objects and (objects := codec.dumps_inline(self._own_objects())) != self._objects:
            late["objects"] = objects
        if (first := self.first_changes()) != self._first:
            late["first"] = first
        if self._gradients:
            gradients = codec.dumps_inline(self._parts.gradients.to_carry(updating=True))
            if gradients != self._gradients:
                late["gradients"] = gradients
        self.behind.note(
            site, [BEHIND[n] for n in late if n in BEHIND], foreseen, self._rank.tick + 1
        )
        self._publisher.send_late(late)

    def take_behind(self, side: dict[str, Any], late: dict[str, Any]) -> None:
        """On a newcomer: what its rank knew of its step functions."""
        self.behind.load(side.get("behind", {}))
        changed = [BEHIND[name] for name in late if name in BEHIND]
        if changed and "site" in side:
            self.behind.note(side["site"], changed, True, side["tick"])

    def publish_locals(self) -> None:
        """The device has come to the fence, and so have local variables of the step that were on
        it: the rest of the step, and only that, may need them."""
        self._locals = self.behind.come()
        if self._locals and not self._rank.aborted():
            self._publisher.send_late({"locals": self._locals, "open": True})

    def apply(self, side: dict[str, Any], late: dict[str, Any]) -> None:
        """On a newcomer, where the transaction that it was published for returns."""
        self._rank.cells.put(side["cells"])
        gradients = late.get("gradients")
        self._parts.gradients.put(codec.loads_inline(gradients) if gradients else side["gradients"])
        self._parts.streams.restore(late.get("streams", side["streams"]))
        objects = codec.loads_inline(late["objects"]) if "objects" in late else side
        for name, value in objects["per_rank"].items():
            self._rank.objects[name].load(value)
        for name, tensors in objects["own"].items():
            self._rank.objects[name].put_own(tensors)
        for name, snapshot in late.get("first", side.get("first", {})).items():
            if name in self._rank.objects:
                self._rank.objects[name].load(codec.loads_inline(snapshot))

    def ahead(
        self,
        site: str,
        result: bytes | None,
        variables: bytes,
        rest: list[dict[str, Any]] | None,
    ) -> None:
        """The last backward pass of a step begins: a guess of it goes to the buddy."""
        # The tracker is no other thread's business.
        position = self._parts.tracker.position(site, True, result, variables)
        self._publisher.send_ahead(lambda: self.make(site, True, True, position, rest=rest))

    def committed(self) -> None:
        self._parts.gradients.carrying = self._carries_on


def _bytes_of(value: Any) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else len(codec.dumps_inline(value))
