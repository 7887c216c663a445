"""`torchrun plain.py SCRIPT ARGS`: runs the script as Python does, up to the exit handlers.

Then the process ends at once, as ranks of Keepstep do. Taking the interpreter down beside the
threads of a gloo group aborts the process now and then, after all the work is done
(`terminate called without an active exception`; pytorch pull request 179291 describes it). And
groups that the script destroys are kept: a DDP model that is their last owner may wait for ever for
one of their threads, which waits for the interpreter's lock.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d


def leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def keep_groups() -> None:
    destroy, kept = dist.destroy_process_group, []

    def keeping(group: dist.ProcessGroup | None = None) -> None:
        kept.extend(c10d._world.pg_map)
        destroy(group)

    c10d.destroy_process_group = dist.destroy_process_group = keeping


if __name__ == "__main__":
    keep_groups()
    atexit.register(leave)  # first, and so the last to run
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException:
        atexit.unregister(leave)
        raise
