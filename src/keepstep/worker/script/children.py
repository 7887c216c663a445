"""Living child processes of the script at attach.

A newcomer runs the script again and so starts children of its own. What the old ones knew is not
carried: a replay buffer, an environment, a `multiprocessing.Manager` would begin anew without a
word. So a living child is refused, unless it is one of those that hold nothing a step depends on.

A child whose environment has KEEPSTEP_BYSTANDER is one the user vouches for (a tracker, a monitor).
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable
from typing import Any

import psutil  # type: ignore[import-untyped]

from keepstep.errors import UsageError

VOUCHED = "KEEPSTEP_BYSTANDER"
# Parts of the command line. Compilers and helpers of multiprocessing; trackers only take notes.
_HELPERS = (
    "torch/_inductor/compile_worker",
    "torch._inductor.compile_worker",
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "multiprocessing/resource_tracker",
    "torch/bin/torch_shm_manager",
    "torch_shm_manager",
)
_PROGRAMS = ("wandb-core", "wandb-service", "gpu_stats", "wandb-xpu", "ptxas", "nvcc", "ninja")


def refuse_living() -> None:
    try:
        found = psutil.Process().children()
    except psutil.Error:
        return
    if not found:
        return
    known = _loader_workers() | _helper_pids()
    for child in found:
        said = _described(child)
        if child.pid not in known and said and not _vouched(child.pid):
            raise UsageError(
                f"attach: the script has a living child process ({said}): what it keeps is not "
                "carried to a newcomer",
                hint="end it before attach and keep its state in the script, or start it with "
                f"{VOUCHED}=1 in its environment if no step depends on it",
            )


def _described(child: psutil.Process) -> str:
    """Empty for one that has ended meanwhile, or that is known to hold nothing."""
    try:
        if child.status() == psutil.STATUS_ZOMBIE:
            return ""
        words = child.cmdline()
        line = " ".join(words)
        program = os.path.basename(words[0]) if words else child.name()
    except psutil.Error:
        return ""
    if program in _PROGRAMS or any(part in line for part in _HELPERS):
        return ""
    name = _multiprocessing_name(child.pid)
    return f"pid {child.pid}, {name or line[:80] or program}"


def _multiprocessing_name(pid: int) -> str:
    """A forked child has its parent's command line, which says nothing."""
    module: Any = sys.modules.get("multiprocessing.process")
    for process in list(module._children) if module is not None else ():
        if process.pid == pid:
            return f"{type(process).__name__} {process.name!r}"
    return ""


def _vouched(pid: int) -> bool:
    try:
        return VOUCHED in psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return False


def _loader_workers() -> set[int]:
    """Of DataLoader iterators that live: their position travels with ks.batches."""
    module: Any = sys.modules.get("torch.utils.data.dataloader")
    if module is None:
        return set()
    kind = module._BaseDataLoaderIter  # StatefulDataLoader's too
    iterators: Iterable[Any] = (x for x in gc.get_objects() if issubclass(type(x), kind))
    return {w.pid for x in iterators for w in getattr(x, "_workers", ()) if w.pid is not None}


def _helper_pids() -> set[int]:
    found: set[int] = set()
    tracker: Any = sys.modules.get("multiprocessing.resource_tracker")
    server: Any = sys.modules.get("multiprocessing.forkserver")
    for holder, attribute in (
        (getattr(tracker, "_resource_tracker", None), "_pid"),
        (getattr(server, "_forkserver", None), "_forkserver_pid"),
    ):
        pid = getattr(holder, attribute, None)
        if isinstance(pid, int):
            found.add(pid)
    return found
