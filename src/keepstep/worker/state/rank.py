"""What one rank is and has: the facts that other rooms read.

Only `worker/step` changes them; it also has the parts that act on them (publishing, recovery,
transactions). Nobody below it knows these.
"""

from __future__ import annotations

import sys

import torch

from keepstep.worker.line.process import OwnProcess
from keepstep.worker.state.cells import Cells
from keepstep.worker.state.objects import Registered
from keepstep.worker.state.replicated import StateSet
from keepstep.worker.state.shards import Replicas


class RankFacts:
    state: StateSet  # what replicas share; made anew when something is registered

    def __init__(
        self,
        process: OwnProcess,
        rank: int,
        world: int,
        models: dict[str, torch.nn.Module],
        optimizers: dict[str, torch.optim.Optimizer],
    ) -> None:
        self.process = process
        self.channel = process.channel
        self.page = process.page
        self.welcome = process.channel.welcome
        self.rank = rank
        self.world = world
        self.local_world = process.environment.local_world
        self.models = models
        self.optimizers = optimizers
        self.objects: dict[str, Registered] = {}
        self.parameters = _all_parameters(models, optimizers)
        self.cells = Cells(models)
        self.replicas = Replicas(rank, world)
        self.tick = 0
        self.version = 0
        self.generation = 0
        self.alone = world == 1  # no peers: fences pass by themselves
        self.done = False
        self.rebuilding = False  # updates are made again that the rank before has made

    def aborted(self) -> bool:
        return self.channel.inbox.aborted(self.generation)

    def warn(self, text: str) -> None:
        print(f"keepstep: {text}", file=sys.stderr, flush=True)


def _all_parameters(
    models: dict[str, torch.nn.Module], optimizers: dict[str, torch.optim.Optimizer]
) -> list[torch.nn.Parameter]:
    seen: dict[int, torch.nn.Parameter] = {}
    for model in models.values():
        for parameter in model.parameters():
            seen.setdefault(id(parameter), parameter)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen.setdefault(id(parameter), parameter)
    return list(seen.values())
