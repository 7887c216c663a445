"""Which processes a rank in a capsule consists of, as /proc of the caller shows them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            listed = Path(f"/proc/{pid}/task/{task}/children").read_text()
            found += [int(child) for child in listed.split()]
    return found


def tree(pid: int) -> list[int]:
    """It and all that came from it."""
    return [pid, *(one for child in children(pid) for one in tree(child))]


def inner_pid(capsule: int) -> int | None:
    """The rank inside a capsule: the capsule's child is the first process of the namespace, and
    its child that leads a session is the rank."""
    for first in children(capsule):
        for pid in children(first):
            with contextlib.suppress(OSError):
                if os.getsid(pid) == pid:
                    return pid
    return None
