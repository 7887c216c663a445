"""Flags that training code turns and that decide what a step computes.

requires_grad of every parameter, train/eval of every module, DDP's and FSDP's marks of whether the
next forward or backward synchronises. They are equal on all replicas, change between steps as well
as inside them, and are neither tensors nor in any state_dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from keepstep.worker.state import fsdp

_DDP = ("require_forward_param_sync", "require_backward_grad_sync", "training")
_FSDP = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "unshard_in_backward")

Saved = dict[str, list[Any]]


class Flags:
    def __init__(
        self,
        models: dict[str, nn.Module],
        parameters: list[nn.Parameter],
        ddp: Callable[[], Mapping[str, Any]],
    ) -> None:
        """`ddp` finds the DDP instances, which need not be part of the models, by name."""
        self._models = models
        self._parameters = parameters
        self._ddp = ddp
        self._modules: list[nn.Module] | None = None
        self._groups: list[Any] = []

    def _look(self) -> list[nn.Module]:
        if self._modules is None:
            every = (module for model in self._models.values() for module in model.modules())
            self._modules = list(_unique(every))
            self._groups = [
                group
                for model in self._models.values()
                for module in fsdp.modules(model)
                for group in fsdp.groups(module)
            ]
        return self._modules

    def save(self) -> Saved:
        modules = self._look()
        return {
            "requires_grad": [p.requires_grad for p in self._parameters],
            "training": [module.training for module in modules],
            "ddp": [getattr(module, name) for module in self._ddps() for name in _DDP],
            "fsdp": [getattr(group, name, None) for group in self._groups for name in _FSDP],
        }

    def load(self, saved: Saved) -> None:
        modules = self._look()
        for parameter, value in zip(self._parameters, saved["requires_grad"], strict=False):
            if parameter.requires_grad != value:
                parameter.requires_grad_(value)
        for module, value in zip(modules, saved["training"], strict=False):
            module.training = value
        places = [(module, name) for module in self._ddps() for name in _DDP]
        places += [(group, name) for group in self._groups for name in _FSDP]
        for (place, name), value in zip(places, saved["ddp"] + saved["fsdp"], strict=False):
            if value is not None:
                setattr(place, name, value)

    def _ddps(self) -> list[Any]:
        """In an order that all ranks share."""
        return [module for _, module in sorted(self._ddp().items())]


def _unique(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    seen: set[int] = set()
    for module in modules:
        if id(module) not in seen:
            seen.add(id(module))
            yield module
