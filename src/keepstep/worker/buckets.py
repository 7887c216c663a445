"""DDP's buckets travel with the state.

Buckets decide in which order gradients are added up, so a newcomer must have exactly those of its
peers, however far its own warm-up got. DDP moves parameters between buckets once, early in a run;
what it has arrived at is read from a holder and set on the newcomer.
"""

from __future__ import annotations

from typing import Any

import torch

from keepstep.worker import extension, groups


def _reducer_parameters(module: Any) -> list[torch.nn.Parameter]:
    parameters: list[torch.nn.Parameter] = module._build_params_for_reducer()[0]
    return parameters


def _modules(parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
    """DDP instances, named by the place of their first parameter among the attached ones."""
    place = {id(p): i for i, p in enumerate(parameters)}
    found = {}
    for module in groups.ddp_modules():
        own = _reducer_parameters(module)
        if own and id(own[0]) in place:
            found[str(place[id(own[0])])] = module
    return found


def layouts(parameters: list[torch.nn.Parameter]) -> dict[str, list[list[int]]]:
    get = extension.load().get_buckets
    return {name: get(module.reducer) for name, module in _modules(parameters).items()}


def set_layouts(parameters: list[torch.nn.Parameter], wanted: dict[str, list[list[int]]]) -> None:
    """On a newcomer, in solo mode. Also forgets the warm-up's backward."""
    current = layouts(parameters)
    for name, module in _modules(parameters).items():
        module.reducer._reset_state()
        if name in wanted and wanted[name] != current[name]:
            extension.load().set_buckets(module.reducer, wanted[name])
