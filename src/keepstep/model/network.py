"""What the network plugin says to its agent, and what is shown of it."""

from __future__ import annotations

import msgspec


class PathEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One datagram of the plugin. Unknown events and fields are left alone: it may be newer."""

    # path-up, path-down, path-suspect, all-down, back, gave-up (of one communicator);
    # link-up, link-down (of an interface); stats (of all communicators of a process)
    event: str
    pid: int
    at_ns: int = 0
    comm: str = ""
    role: str = ""
    path: int = -1
    interface: str = ""
    local: str = ""
    remote: str = ""
    reason: str = ""
    stalled_ms: int = 0
    comms: int = 0
    comms_up: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    resent_chunks: int = 0
    resent_bytes: int = 0
    downs: int = 0
    suspects: int = 0


class PathView(msgspec.Struct, frozen=True, kw_only=True):
    """One interface of a node, summed over the processes there that use it."""

    interface: str
    state: str  # up, degraded (some communicators have lost it), down
    local: str = ""
    processes: int = 0
    comms: int = 0
    comms_up: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    resent_bytes: int = 0
    faults: int = 0  # within the window that policy looks at
    stalled_ms: int = 0
