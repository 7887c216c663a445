"""`keepstep orchestrator` that kills itself at a chosen append to its ledger.

While the file named by BRAIN_PLAN exists ("before 3" or "after 3"), appends are counted; at the
third one the process dies by SIGKILL, before the records are written or when they are durable and
nothing has been sent yet. The file is removed at that moment: it fires once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from keepstep.adapters.store.sqlite import SqliteLedger
from keepstep.cli.main import main
from keepstep.model.records import Record

plan = Path(os.environ["BRAIN_PLAN"])
append = SqliteLedger.append
seen = 0


def append_or_die(self: SqliteLedger, records: Sequence[Record]) -> None:
    global seen
    when, number = "", 0
    if records and plan.exists():
        seen += 1
        when, _, nth = plan.read_text().partition(" ")
        number = int(nth)
    fatal = when != "" and seen >= number
    if not fatal or when == "after":
        append(self, records)
    if fatal:
        kinds = ", ".join(type(record).__name__ for record in records)
        (plan.parent / "died-at").write_text(kinds)
        plan.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    SqliteLedger.append = append_or_die  # type: ignore[method-assign]
    main()
