"""This process before it is a rank: its line to the agent, and the rank that it was given."""

from __future__ import annotations

from typing import Any

from keepstep.model import messages as m
from keepstep.worker.line.channel import Channel
from keepstep.worker.line.page import Page


class Process:
    def __init__(self, channel: Channel, page: Page) -> None:
        self.channel = channel
        self.page = page
        self.assigned: m.Assign | None = None  # newcomers only
        self.assigned_ns = 0
        self.init_record = b""  # of the rank that a newcomer replaces
        self.about: dict[str, Any] = {}  # what that rank found out at its attach
