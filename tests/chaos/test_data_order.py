"""A killed rank's successor trains on the samples that the dead one would have: data_order.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.data_order import CASES, STEPS
from tests.support.job import Job, inject
from tests.support.scripts import DATA_ORDER
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict

Start = Callable[..., Job]


# In the middle of a step, and between the last one of an epoch and the next epoch.
IN_STEP = f"rank=1,step={STEPS + 2},point=in_backward"
AT_END = f"rank=0,step={2 * STEPS - 1},point=after_step"


@pytest.mark.cost(18)
@pytest.mark.parametrize(
    ("case", "fault"),
    [(case, IN_STEP) for case in CASES]
    + [("persistent, own generator in two workers", AT_END), ("counts its own epochs", AT_END)],
    ids=lambda value: {IN_STEP: "in a step", AT_END: "at an epoch's end"}.get(value, value),
)
def test_kill_in_the_second_epoch_of_data_that_is(
    case: str, fault: str, start: Start, reference: Reference, verdict: Verdict
) -> None:
    job = start(
        "--nproc-per-node", "2", "--spares", "1", *inject(f"kill:{fault}"),
        world=2, script=DATA_ORDER, script_args=["--case", case],
    )  # fmt: skip
    job.finish()
    expected = reference(2, "--case", case, script=DATA_ORDER)
    verdict.identical(job, expected, faults=1, incidents=1)
