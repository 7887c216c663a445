"""Scripts that know nothing of Keepstep, moved with what they have on a GPU; bits are compared.

Two nodes of one machine share the GPUs: a process moves into other namespaces and comes back to
the same device. Needs CRIU and root besides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Verdict, ending, run_plain

sys.path.insert(0, str(Path(__file__).parents[1] / "transparent"))

from moving import SCRIPT, Faults, Transparent, missing, no_images_left

from keepstep.native import criu

Launch = Callable[..., Transparent]
Reference = Callable[..., Future[list[dict[str, Any]]]]
PHASES = {"gpu-offload", "gpu-lock", "gpu-checkpoint", "gpu-stow", "dump", "stream", "restore"}
PHASES |= {"gpu-fetch", "gpu-restore"}
WORDS = ("--device", "cuda")


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launch]:
    if reason := missing():
        pytest.skip(reason)
    with ending(request) as jobs:

        def begin(*words: str, **more: Any) -> Transparent:
            started = Transparent(tmp_path, *WORDS, *words, **more)
            jobs.append(started.job)
            return started

        yield begin
    no_images_left(jobs)


def moved(it: Transparent, rank: int) -> None:
    timings = it.moved(rank)["timings_ms"]
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
    assert incident["outcome"] == "ABORTED" and incident["steps_lost"] == 0, incident["reason"]
    faults.clear()
    moved(it, 0)
    it.job.finish()
    verdict.identical(it.job, expected.result(), faults=1)
