"""The DistributedDataParallel models of the process, and their reducers after an abort."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from keepstep.worker.groups import frontend

_known: weakref.WeakSet[DistributedDataParallel] | None = None
_rebuilt: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def forget() -> None:
    global _known
    _known = None  # a model may be wrapped after attach: look again


def ddp_modules(refresh: bool = False) -> list[DistributedDataParallel]:
    """All DistributedDataParallel instances. Looked for once, unless `refresh`."""
    global _known
    if _known is None or refresh:
        # type() and not isinstance: lazy proxies answer isinstance by importing things.
        _known = weakref.WeakSet(
            thing for thing in gc.get_objects() if issubclass(type(thing), DistributedDataParallel)
        )
    return list(_known)


def reset(steps: int) -> None:
    """Make every reducer forget the backward that was interrupted. Call in solo mode.

    DDP moves its parameters to other buckets once, in the forward after its first backward, and
    buckets decide the order of additions. `steps`, the number the job has committed, says whether
    it is past that point. A reducer that has recorded its first backward but not yet acted on it
    then does so here, where the collective inside is local: resetting would throw the record away
    and leave it with other buckets than its peers have. If the job has not committed a step, the
    record belongs to a backward that will run again, and is dropped. (A newcomer to a job at
    version 0 must for the same reason warm up with at most one step.)

    With static_graph all this comes one step later: the first backward only counts hooks.
    """
    for module in ddp_modules():
        reducer: Any = module.reducer
        should_rebuild = bool(frontend.ext.reducer_should_rebuild(reducer))
        if not should_rebuild:
            _rebuilt.add(module)  # _reset_state forgets that it ever happened
        complete = frontend.ext.reducer_pending(reducer) == frontend.ext.reducer_size(reducer)
        rebuilt = steps > (1 if module.static_graph else 0)
        if rebuilt and should_rebuild and complete and module not in _rebuilt:
            reducer._rebuild_buckets()
            _rebuilt.add(module)
        reducer._reset_state()
        if module.static_graph and steps == 0:
            frontend.ext.restart_static_graph(reducer)
            module._static_graph_delay_allreduce_enqueued = False
