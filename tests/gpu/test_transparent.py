"""Scripts that know nothing of Keepstep, moved with what they have on a GPU; bits are compared.

Two nodes of one machine share the GPU: the process moves into other namespaces and comes back to
the same device. Needs CRIU and root besides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Verdict, run_plain

sys.path.insert(0, str(Path(__file__).parents[1] / "transparent"))

from moving import SCRIPT, Faults, Transparent, missing

from keepstep.native import criu

Launch = Callable[..., Transparent]
PHASES = {"gpu-offload", "gpu-lock", "gpu-checkpoint", "dump", "stream", "restore", "gpu-restore"}
WORDS = ("--device", "cuda")


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    if reason := missing():
        pytest.skip(reason)
    started: list[Transparent] = []

    def begin(*words: str, **more: Any) -> Transparent:
        started.append(Transparent(tmp_path, *WORDS, *words, **more))
        return started[-1]

    yield begin
    for one in started:
        one.job.kill()
        left = list(Path("/dev/shm").glob(f"keepstep-{one.job.job}-*"))
        assert not left, f"images were left behind: {left}"


def moved(it: Transparent, rank: int) -> None:
    timings = it.moved(rank)["timings_ms"]
    assert set(timings) >= PHASES, timings
    print({name: round(ms) for name, ms in timings.items()})


@pytest.mark.timeout(280)
@pytest.mark.parametrize("way", ["fast", "driver"])
def test_one_process(
    way: str, launch: Launch, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Model, AdamW, random numbers of the device, and loader workers that were forked."""
    if way == "driver":
        monkeypatch.setenv("KEEPSTEP_OFFLOAD", "0")
    it = launch("--workers", "2", nodes=1)
    it.train()
    for _ in range(2):
        moved(it, 0)
    it.job.finish()
    expected = run_plain(tmp_path / "plain", 1, [*WORDS, "--workers", "2"], SCRIPT)
    verdict.identical(it.job, expected, faults=0, incidents=2)


@pytest.mark.timeout(280)
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_two_ranks_under_nccl(
    layout: str, launch: Launch, verdict: Verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = criu.find()[0]
    for name in ("KEEPSTEP_CRIU", "FAULT_FILE", "FAULT_STRUCK"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("REAL_CRIU", " ".join(real))
    faults = Faults(tmp_path)
    it = launch("--layout", layout)
    it.train()
    moved(it, 1)
    faults.set("restore-fails")
    it.job.spare_parked()
    incident = it.migrate(0)
    assert incident["outcome"] == "ABORTED" and incident["steps_lost"] == 0, incident
    faults.clear()
    moved(it, 0)
    it.job.finish()
    expected = run_plain(tmp_path / "plain", 2, [*WORDS, "--layout", layout], SCRIPT)
    verdict.identical(it.job, expected, faults=1)
