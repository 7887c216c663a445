"""Scripts that know nothing of Keepstep, moved with what they have on a GPU; bits are compared.

Two nodes of one machine share the GPUs: a process moves into other namespaces and comes back to
the same device. Needs CRIU and root besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from keepstep.native import criu
from tests.support.job import Job, Result
from tests.support.moving import SCRIPT, Faults, Transparent, launching, missing
from tests.support.torchrun import run_plain
from tests.support.verdict import Verdict

Launch = Callable[..., Transparent]
Reference = Callable[..., Future[list[Result]]]
PHASES = {"gpu-offload", "gpu-lock", "gpu-checkpoint", "gpu-stow", "dump", "stream", "restore"}
PHASES |= {"gpu-fetch", "gpu-restore"}
WORDS = ("--device", "cuda")


@pytest.fixture
def launch(tmp_path: Path, jobs: list[Job]) -> Iterator[Launch]:
    if reason := missing():
        pytest.skip(reason)
    yield from launching(tmp_path, jobs, *WORDS)


def moved(it: Transparent, rank: int) -> None:
    timings = it.moved(rank).timings_ms
    assert set(timings) >= PHASES, timings
    print({name: round(ms) for name, ms in timings.items()})


@pytest.fixture
def reference(tmp_path: Path) -> Iterator[Reference]:
    """Beside the job that is held against it."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda world, *words: pool.submit(
            run_plain, tmp_path / "plain", world, [*WORDS, *words], SCRIPT
        )


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("way", "words"),
    [("fast", ()), ("driver", ()), ("fast", ("--workers", "2"))],
    ids=["fast", "driver", "loader-workers"],
)
def test_one_process(
    way: str,
    words: tuple[str, ...],
    launch: Launch,
    reference: Reference,
    verdict: Verdict,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Model, AdamW, and random numbers of the device."""
    if way == "driver":
        monkeypatch.setenv("KEEPSTEP_OFFLOAD", "0")
    expected = reference(1, *words)
    it = launch(*words, nodes=1)
    it.train()
    for _ in range(2):
        moved(it, 0)
    it.job.finish()
    verdict.identical(it.job, expected.result(), faults=0, incidents=2)


@pytest.mark.timeout(280)
@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="needs two GPUs: NCCL's kernels wait for each other, and a restored process is not "
    "switched away from within a kernel (docs/decisions/0028)",
)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_under_nccl(
    layout: str,
    launch: Launch,
    reference: Reference,
    verdict: Verdict,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Moved, undone after the GPU was given up, moved again."""
    real = criu.find()[0]
    for name in ("KEEPSTEP_CRIU", "FAULT_FILE", "FAULT_STRUCK"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("REAL_CRIU", " ".join(real))
    faults = Faults(tmp_path)
    expected = reference(2, "--layout", layout)
    it = launch("--layout", layout)
    it.train()
    moved(it, 1)
    faults.set("restore-fails")
    it.job.spare_parked()
    incident = it.migrate(0)
    assert incident.outcome == "ABORTED" and incident.steps_lost == 0, incident.reason
    faults.clear()
    moved(it, 0)
    it.job.finish()
    verdict.identical(it.job, expected.result(), faults=1)
