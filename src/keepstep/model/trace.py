"""What a rank writes down when a run is traced (`keepstep rehearse`): one JSON line per look.

Values are text that is equal exactly when the value is: a number as Python prints it, anything
larger as a digest of its bytes. Each group maps the name of a thing to its value.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# Read by the worker, set by whoever starts the job.
FOLDER = "KEEPSTEP_TRACE"  # where rank-R.jsonl is written and `gate` is looked for
STEPS_MAX = "KEEPSTEP_STEPS_MAX"  # the script ends where it would begin this step
GATE = "gate"  # file in FOLDER: a number; no step or section begins at that version or beyond it

# Groups in the order in which a difference is named: what explains the others comes first.
GROUPS = (
    "generator",
    "batch",
    "learning rate",
    "hyperparameter",
    "registered state",
    "tensor",
    "mode",
    "result",
    "variable",
)


class TraceLine(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`entry`: a step or section is about to begin (again after each fault); `commit`: it is done,
    with its result; `end`: the script is over."""

    kind: Literal["entry", "commit", "end"]
    pid: int
    tick: int  # of the transaction that begins or was committed
    version: int  # steps committed before it
    site: str = ""
    step: bool = False
    where: list[int] = []  # epochs, and batches taken in the innermost loop
    groups: dict[str, dict[str, str]] = {}  # see GROUPS


def file_name(rank: int) -> str:
    return f"rank-{rank}.jsonl"
