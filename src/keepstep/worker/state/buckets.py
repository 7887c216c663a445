"""DDP's buckets travel with the state.

Buckets decide in which order gradients are added up, so a newcomer must have exactly those of its
peers, however far its own warm-up got. DDP moves parameters between buckets once, early in a run;
what it has arrived at is read from a holder and set on the newcomer. With gradient_as_bucket_view
it also matters whether a gradient is a view of its bucket already: DDP scales the two kinds
differently, which shows in the last bit.
"""

from __future__ import annotations

import weakref
from typing import Any, TypedDict

import torch

from keepstep.worker.device import extension
from keepstep.worker.groups import reducers

_first: weakref.WeakKeyDictionary[Any, torch.nn.Parameter | None] = weakref.WeakKeyDictionary()


def _first_parameter(module: Any) -> torch.nn.Parameter | None:
    """Of its reducer, which keeps the parameters that it was made with: one that is frozen later
    stays among them."""
    if module not in _first:
        _first[module] = next(iter(module._build_params_for_reducer()[0]), None)
    return _first[module]


def modules(parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    """DDP instances, named by the place of their first parameter among the attached ones."""
    place = {id(p): i for i, p in enumerate(parameters)}
    found = {}
    for module in reducers.ddp_modules():
        first = _first_parameter(module)
        if first is not None and id(first) in place:
            found[str(place[id(first)])] = module
    return found


class Layout(TypedDict):
    """Of one reducer; parameters are named by their index in it."""

    buckets: list[list[int]]
    viewed: list[int]  # whose gradients are views of their bucket (gradient_as_bucket_view)


def layouts(parameters: list[torch.nn.Parameter]) -> dict[str, Layout]:
    native = extension.load()
    return {
        name: {
            "buckets": native.get_buckets(module.reducer),
            "viewed": native.viewed_grads(module.reducer),
        }
        for name, module in modules(parameters).items()
    }


def set_layouts(parameters: list[torch.nn.Parameter], wanted: dict[str, Layout]) -> None:
    """On a newcomer, in solo mode, after its gradients were made absent or zero."""
    native = extension.load()
    forget_backward()
    for name, module in modules(parameters).items():
        if name not in wanted:
            continue
        if wanted[name]["buckets"] != native.get_buckets(module.reducer):
            native.set_buckets(module.reducer, wanted[name]["buckets"])
        native.view_grads(module.reducer, wanted[name]["viewed"])


def forget_backward() -> None:
    """What a newcomer has computed alone. A reducer that remembers it would arrange its buckets
    anew in its next forward, by a collective that no other rank takes part in."""
    for module in reducers.ddp_modules():
        module.reducer._reset_state()
