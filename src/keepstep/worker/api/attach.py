"""`keepstep.attach`: check what the user gave, and make a session of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from keepstep.errors import UsageError
from keepstep.worker.api.plain import PlainSession
from keepstep.worker.script import children, refusals, roots
from keepstep.worker.state import loose, roundtrip
from keepstep.worker.state.objects import registered

_session: PlainSession | None = None


def _named(things: Any, kind: type, what: str) -> dict[str, Any]:
    if isinstance(things, kind):
        return {"0": things}
    if isinstance(things, Mapping):
        named = dict(things)
    elif isinstance(things, Sequence):
        named = {str(i): x for i, x in enumerate(things)}
    else:
        named = {"0": things}
    for name, thing in named.items():
        if not isinstance(thing, kind):
            raise UsageError(
                f"attach: {what} {name!r} is of type {type(thing).__name__}, not {kind.__name__}",
                hint=f"give one {kind.__name__}, or a list or dict of them",
            )
    return named


def attach(
    model: Any, optimizer: Any, scheduler: Any = None, process: Any = None, **objects: Any
) -> PlainSession:
    global _session
    if _session is not None:
        raise UsageError(
            "keepstep.attach was called twice in one process",
            hint="attach once, with lists of models and optimizers if there are several",
        )
    roots.claim_caller()
    models = _named(model, torch.nn.Module, "model")
    optimizers = _named(optimizer, torch.optim.Optimizer, "optimizer")
    if not any(True for x in models.values() for _ in x.parameters()):
        raise UsageError(
            "attach: the model has no parameters", hint="attach the model that is trained"
        )
    for name, item in optimizers.items():
        if isinstance(item, torch.optim.LBFGS):
            raise UsageError(
                f"attach: optimizer {name!r} (LBFGS) evaluates closures inside its update",
                hint="use an optimizer whose step() takes no closure",
            )
    if scheduler is not None:
        several = scheduler if isinstance(scheduler, list | tuple) else [scheduler]
        for index, item in enumerate(several):
            objects[f"scheduler{index if index else ''}"] = item
    objects = {name: item for name, item in objects.items() if item is not None}
    for name, item in objects.items():
        # Refused before anything is changed.
        roundtrip.check(registered(name, item, None, per_rank=False), optimizers.values())
    if process is None:
        session = _attach_plain()
    else:
        from keepstep.worker.api.session import attach_rank
        from keepstep.worker.groups import groups, reducers

        refusals.at_attach(models.values(), optimizers, reducers.ddp_modules(refresh=True))
        children.refuse_living()
        groups.refuse_unknown()
        refusals.watch()
        if found := loose.parameters(models.values(), optimizers):
            models[loose.NAME] = loose.Loose(found)
        session = attach_rank(process, models, optimizers)
    _session = session
    for name, item in objects.items():
        session.register(name, item)
    session.begin()
    return session


def _attach_plain() -> PlainSession:
    if os.environ.get("RANK", "0") == "0":
        print(
            "keepstep: not started by `keepstep run`, so this training is not protected",
            file=sys.stderr,
            flush=True,
        )
    return PlainSession()


def current() -> PlainSession | None:
    return _session
