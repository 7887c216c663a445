"""Everything of a GPU rank's move but the GPU: a driver in host memory stands for CUDA's.

What the real one does is tried in tests/gpu.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.moving import Cuda, Faults, Launch, Transparent
from tests.support.torchrun import Reference
from tests.support.verdict import Verdict

SCRIPT = Path(__file__).parent / "pretend_gpu.py"


PHASES = {"gpu-offload", "gpu-checkpoint", "gpu-stow", "gpu-fetch", "gpu-restore"}


def right(it: Transparent, times: list[int]) -> None:
    """By rank: how often the driver found its own memory as it had left it."""
    output = "".join(path.read_text() for path in it.job.home.rglob("*.log"))
    found = re.findall(r"device memory is right after \d+ steps, the driver's (\d+) times", output)
    assert sorted(map(int, found)) == sorted(times), output[-3000:]


@pytest.mark.always
@pytest.mark.timeout(290)
def test_device_memory_goes_along(
    launch: Launch, reference: Reference, verdict: Verdict, cuda: Cuda
) -> None:
    it = launch(script=SCRIPT)
    it.train()
    for rank in (1, 1):
        timings = it.moved(rank).timings_ms
        assert set(timings) >= PHASES, timings
        assert cuda.state.read_text() == "0"
    it.job.finish()
    right(it, [0, 2])
    verdict.identical(it.job, reference(2), faults=0, incidents=2)


@pytest.mark.timeout(290)
def test_the_driver_can_be_left_to_move_it_all(
    launch: Launch,
    reference: Reference,
    verdict: Verdict,
    cuda: Cuda,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEEPSTEP_OFFLOAD", "0")
    it = launch(script=SCRIPT)
    it.train()
    assert set(it.moved(0).timings_ms) >= PHASES
    it.job.finish()
    right(it, [0, 1])
    verdict.identical(it.job, reference(2), faults=0, incidents=1)


@pytest.mark.timeout(290)
def test_what_fails_is_undone_or_done_by_the_driver(
    launch: Launch, reference: Reference, verdict: Verdict, cuda: Cuda, faults: Faults
) -> None:
    it = launch(script=SCRIPT, options=("--stall-timeout", "10"))
    it.train()
    before = it.holders()
    for call in ("cuCheckpointProcessCheckpoint", "cuCheckpointProcessRestore"):
        cuda.fail_once(call)
        it.job.spare_parked()
        incident = it.migrate(1)
        assert incident.outcome == "RESOLVED" and incident.attempts > 1, incident
        assert set(incident.timings_ms) >= PHASES
        cuda.struck()
    before = it.holders()
    faults.set("restore-fails")
    it.undone(it.migrate(0), "did not come to life")
    faults.clear()
    assert it.holders() == before
    cuda.fail_once("cuMemcpyDtoHAsync")
    assert set(it.moved(0).timings_ms) >= PHASES
    cuda.struck()
    it.job.finish()
    right(it, [3, 4])  # also when three spares have failed
    verdict.identical(it.job, reference(2), faults=4)
