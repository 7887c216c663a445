"""This process before it is a rank: its line to the agent, and the rank that it was given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.worker.line.channel import Channel
from keepstep.worker.line.page import Page


@dataclass(frozen=True)
class RankEnvironment:
    """What torchrun's variables say to the script, for Keepstep: `__main__` reads them, and writes
    those that a spare gets with its rank."""

    rank: int  # -1: a spare that has none yet
    world: int
    local_rank: int
    local_world: int
    generation: int
    master: m.Address


class OwnProcess:
    def __init__(self, channel: Channel, page: Page, environment: RankEnvironment) -> None:
        self.channel = channel
        self.page = page
        self.environment = environment
        self.assigned: commands.Assign | None = None  # newcomers only
        self.assigned_ns = 0
        self.init_record = b""  # of the rank that a newcomer replaces
        self.about: dict[str, Any] = {}  # what that rank found out at its attach
