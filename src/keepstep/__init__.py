"""Keepstep: a distributed PyTorch training job outlives its ranks.

ks = keepstep.attach(model, optimizer, scheduler=scheduler)

@ks.step
def train_step(batch): ...

for epoch in ks.epochs(10):
    for batch in ks.batches(loader):
        train_step(batch)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keepstep.errors import (
    KeepstepError,
    PermanentError,
    ProtocolError,
    TransientError,
    UsageError,
)

if TYPE_CHECKING:
    from keepstep.worker.api.plain import PlainSession

__version__ = "0.1.0"

__all__ = [
    "KeepstepError",
    "PermanentError",
    "ProtocolError",
    "TransientError",
    "UsageError",
    "__version__",
    "attach",
    "is_newcomer",
]

_process: Any = None  # set by the worker's bootstrap; None outside a Keepstep job


def attach(model: Any, optimizer: Any, scheduler: Any = None, **objects: Any) -> PlainSession:
    """Protect a training loop. `model` and `optimizer` may be lists or dicts of several; further
    keywords name objects with state_dict/load_state_dict (scaler=..., ema=...)."""
    from keepstep.worker.api import attach as attaching

    return attaching.attach(model, optimizer, scheduler, process=_process, **objects)


def is_newcomer() -> bool:
    """True in a process that took over the rank of another: skip what must happen only once
    (creating directories, opening a run in a tracker)."""
    return _process is not None and _process.assigned is not None
