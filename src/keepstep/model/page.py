"""The progress page: a memfd shared by a worker (writer) and its agent (reader).

The worker writes plain memory and the agent preads it, so neither progress nor the side state
for the own node costs a system call, and both outlive a kill -9 of the worker.

    0     header   fixed fields below, little endian, each written whole (8-byte aligned)
    4096  slots 0 to 2, capacity bytes each: side state of a tick in slot tick % 3
    4096+3*capacity  init record (tick -1), capacity bytes
    4096+4*capacity  slots 4 to 6: what became of side states at the end of their transactions
                     (`late_tick`), capacity bytes each
    4096+7*capacity  note of the step in progress (NOTE_TICK), capacity bytes

Three ticks are kept, here and by the buddy. A rank that has passed the fence of tick t - 1 makes
step t and publishes t + 1 while others may still wait in that fence. If it is lost now, all of
those who are left may be at t - 1, and go back to it: t - 1, t and t + 1 may be asked for.

A slot is: seq (u64; odd while being written), tick (i64), length (u64), crc32 (u64), data. The
reader takes a slot only if seq is even and equal before and after, and the checksum is right.
`capacity` can grow: the worker extends the file, writes all slots anew and sets `capacity` last.
"""

from __future__ import annotations

import struct

import msgspec

MAGIC = 0x4B50_5347_4501
PAGE_BYTES = 4096
SLOT_HEADER = struct.Struct("<QqQQ")
CAPACITY_DEFAULT = 256 << 10

TICKS_KEPT = 3
INIT_TICK = -1  # record of a rank's init-time collectives
NEWEST = -2  # asks for the highest tick there is
CHECKPOINT_TICK = -3  # asks for the one in the directory of the checkpoint
NOTE_TICK = -4  # what a rank notes when a step begins (its inputs): kept by the own agent alone
SLOTS = 2 * TICKS_KEPT + 2
_LATE = -16


def late_tick(tick: int) -> int:
    """Under which number the late part of a side state is kept: what its rank knew only when the
    transaction had ended (its result, what changed behind the fence)."""
    return _LATE - tick


def is_late(tick: int) -> bool:
    return tick <= _LATE


def slot_of(tick: int) -> int:
    if is_late(tick):
        return TICKS_KEPT + 1 + (_LATE - tick) % TICKS_KEPT
    if tick == NOTE_TICK:
        return SLOTS - 1
    return TICKS_KEPT if tick < 0 else tick % TICKS_KEPT


# name -> offset in the header; all are unsigned 64-bit
FIELDS = {
    "magic": 0,
    "capacity": 8,
    "heartbeat_ns": 16,  # CLOCK_MONOTONIC, written by the daemon thread
    "progress_ns": 24,  # CLOCK_MONOTONIC of the last mark
    "marks": 32,
    "version": 40,
    "tick": 48,
    "generation": 56,
    "where": 64,  # index into WHERE
    "stepping": 72,  # 1 from the first transaction or swap on: stall detection is on
    "commit_ns": 80,  # CLOCK_MONOTONIC of the last commit
    "step_ns": 88,  # smoothed step time
    "hold": 96,  # 1 while it only waits for commands: a stall is not a hang, and it cannot train
    "tick_marks": 104,  # `marks` when the tick began: what came since can be compared between ranks
    # While it holds by itself (its buddy is lost, its step has failed): CLOCK_MONOTONIC of when it
    # last asked for what it waits for. 0: it was told to hold.
    "asked_ns": 112,
    "own_ns": 120,  # median of what the last steps took before they met other ranks (pace.py)
    "own_steps": 128,  # steps that were measured
}

WHERE = (
    "starting",
    "parked",
    "building",
    "outside",
    "compute",
    "fence",
    "apply",
    "section",
    "data",
    "held",
    "done",
    "attaching",  # waits in attach for the other ranks
    "diverged",  # a witness found that numbers differ: it waits for what is to be done
)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """The header at one moment. Fields are as in `FIELDS`."""

    heartbeat_ns: int
    progress_ns: int
    marks: int
    version: int
    tick: int
    generation: int
    where: str
    stepping: bool
    commit_ns: int
    step_ns: int
    hold: bool
    tick_marks: int = 0
    asked_ns: int = 0
    own_ns: int = 0
    own_steps: int = 0
