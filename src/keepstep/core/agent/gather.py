"""What all ranks of a node answer, said at once.

Theory of operation. What all ranks are told together (`TellRanks`) opens a gate of the orchestrator
when the last of them has answered. So nothing is lost if an answer waits for those of the other
ranks of the same node: the gate waits for them as well. Nobody waits for a clock. What is kept is
said as soon as the last of them has answered, *before* anything else is said (a rank that ends or
fails will never answer, and order stays what it was), at the next look at the processes, and when
the stream breaks. So a rank that hangs costs the others' answers less than one period of looks.

Only plain answers wait. One that leads elsewhere (an error, an end, another generation than the one
that was asked for, somebody who was asked alone) is passed on at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from keepstep.model.agent_messages import WorkerSaid, WorkersSaid
from keepstep.model.commands import Abort, Decide, Hold, Stage, Swap, WorkerCommand
from keepstep.model.messages import Held, Report, Resumed, Staged, Swapped, WorkerMessage

ANSWERS: dict[type[WorkerCommand], tuple[type[WorkerMessage], ...]] = {
    Abort: (Report,),
    Decide: (Held,),
    Hold: (Held,),
    Stage: (Staged,),
    Swap: (Swapped, Resumed),
}


def _is_plain(said: WorkerMessage) -> bool:
    if isinstance(said, Report):
        return said.error_kind in ("", "comm") and not said.done
    return not (isinstance(said, Held) and said.done)


class Gather:
    def __init__(self) -> None:
        # kind of answer -> generation, and who has yet to give it
        self._awaited: dict[type[WorkerMessage], tuple[int, set[str]]] = {}
        self._kept: list[WorkerSaid] = []

    def expect(self, command: WorkerCommand, workers: Iterable[str]) -> None:
        """They have been told this together."""
        for kind in ANSWERS.get(type(command), ()):
            self._awaited[kind] = (getattr(command, "generation", 0), set(workers))

    def give_up(self, worker: str) -> None:
        """It will not answer any more."""
        for _, workers in self._awaited.values():
            workers.discard(worker)

    def keep(self, message: WorkerSaid) -> bool:
        """True: it waits until `drain`. False: it is to be passed on."""
        generation, workers = self._awaited.get(type(message.said), (-1, set()))
        if message.worker not in workers or not _is_plain(message.said):
            return False
        if getattr(message.said, "generation", -1) != generation:
            return False
        workers.remove(message.worker)
        self._kept.append(message)
        return True

    def complete(self, kind: type[WorkerMessage]) -> bool:
        return not self._awaited[kind][1]

    def drain(self) -> WorkerSaid | WorkersSaid | None:
        """Everything that was kept, in order."""
        kept, self._kept = self._kept, []
        if len(kept) > 1:
            return WorkersSaid(said=kept)
        return kept[0] if kept else None
