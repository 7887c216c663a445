"""Words of an agent to a rank, as tests of the protocol of a rank send them."""

from __future__ import annotations

from typing import Any

from keepstep.model import commands
from keepstep.model import messages as m

HERE, THERE = m.Address("h", 1), m.Address("h", 2)


def held(generation: int) -> m.Held:
    return m.Held(generation=generation, tick=7, version=5, serve=HERE, pid=1)


def abort(generation: int) -> commands.Abort:
    return commands.Abort(generation=generation, reason="")


def swap(generation: int, **more: Any) -> commands.Swap:
    return commands.Swap(generation=generation, buddy=HERE, **more)


ASSIGN = commands.Assign(rank=1, generation=3, master=HERE, buddy=HERE)


def copy(generation: int) -> commands.Copy:
    return commands.Copy(generation=generation, tick=7, sources=[], holders=[])


def copied(generation: int) -> m.Copied:
    return m.Copied(
        generation=generation, tick=7, bytes_copied=1, copy_ns=1, sources=[], side_state="buddy"
    )


def ready() -> m.Ready:
    return m.Ready(generation=3, arrived_ns=1, warm_ns=1)
