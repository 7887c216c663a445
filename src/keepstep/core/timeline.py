"""When an incident was in which phase, and what the ranks measured on the way.

Phases are kept as marks; a phase lasts until the next mark. A second fault takes an incident
back to RESERVE, so a phase can appear more than once and the list tells the story in order.
Durations that ranks measured themselves (copy, rewire, pause) are taken from their messages:
their clocks know nothing of the network between them and the core.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep.model.messages import Copied, Ready, Restored, Resumed, Swapped
from keepstep.model.views import PhaseView

MS = 1e6


@dataclass(slots=True)
class Timeline:
    opened_at: int
    marks: list[tuple[str, int]] = field(default_factory=list)
    timings_ms: dict[str, float] = field(default_factory=dict)
    pause_ms: float = 0.0

    def mark(self, phase: str, now: int) -> None:
        if not self.marks or self.marks[-1][0] != phase:
            self.marks.append((phase, now))

    def longest(self, what: str, ns: int) -> None:
        """Ranks work in parallel: the slowest one is what counted."""
        self.timings_ms[what] = max(self.timings_ms.get(what, 0.0), ns / MS)

    def ready(self, message: Ready) -> None:
        self.longest("newcomer_build", message.arrived_ns)
        self.longest("warm_up", message.warm_ns)

    def copied(self, message: Copied) -> None:
        self.longest("copy", message.copy_ns)

    def restored(self, message: Restored) -> None:
        self.longest("dump", message.dump_ns)
        self.longest("stream", message.stream_ns)
        self.longest("restore", message.restore_ns)
        for name, ns in message.gpu_ns.items():
            self.longest(name, ns)

    def swapped(self, message: Swapped) -> None:
        self.longest("rewire", message.swap_ns)

    def resumed(self, message: Resumed, swapped_at: int, now: int) -> None:
        if message.abort_ns:
            self.longest("abort", message.abort_ns)
        if swapped_at:
            self.longest("first_step", max(0, now - swapped_at))
        if message.last_commit_ns:  # a newcomer has none
            gap = message.first_commit_ns - message.last_commit_ns - message.median_step_ns
            self.pause_ms = max(self.pause_ms, gap / MS)

    def phases(self, until: int) -> list[PhaseView]:
        ends = [at for _, at in self.marks[1:]] + [until] * bool(self.marks)
        return [
            PhaseView(
                phase=phase,
                start_ns=max(0, start - self.opened_at),
                duration_ms=max(0, end - start) / MS,
            )
            for (phase, start), end in zip(self.marks, ends, strict=True)
        ]


def source_sentence(copies: list[Copied]) -> str:
    """ "rank 0, rank 1 + side state from own-agent"."""
    if not copies:
        return ""
    ranks = sorted({rank for copied in copies for rank in copied.sources})
    sides = sorted({copied.side_state for copied in copies})
    tensors = ", ".join(f"rank {rank}" for rank in ranks) or "checkpoint"
    restored = "".join(f" + {copied.restored}" for copied in copies if copied.restored)
    return f"{tensors}{restored} + side state from {', '.join(sides)}"
