"""Everything here needs a GPU and NCCL; two to five ranks share one. `--gpu-report FILE` keeps what
happened. CI has no GPU, so reports of runs by hand are kept under benchmarks/results."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import reporting
from tests.support.job import Job, Result
from tests.support.torchrun import run_plain

HERE = Path(__file__).parent
SCRIPT = HERE / "train.py"
# Ranks on one GPU talk as if they were on several machines.
NCCL = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_MAX_NCHANNELS": "2",
}


def _missing() -> str:
    if not dist.is_nccl_available():
        return "needs a torch with NCCL"
    return "" if torch.cuda.is_available() else "needs a GPU"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _missing()
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.gpu)
            if missing:
                item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session", autouse=True)
def nccl_on_one_gpu() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in NCCL}
    os.environ.update(NCCL)
    yield
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)


@pytest.fixture(scope="session")
def reference(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Future[list[Result]]]]:
    """What plain torchrun computes for the same arguments: once per set of arguments, and beside
    the job that will be held against it."""
    known: dict[tuple[Any, ...], Future[list[Result]]] = {}
    pool = ThreadPoolExecutor(1)

    def get(world: int, *script_args: str) -> Future[list[Result]]:
        words = iter(script_args)
        kept = [word for word in words if not (word == "--slow" and next(words))]
        key = (world, *kept)
        if key not in known:
            folder = tmp_path_factory.mktemp("plain")
            known[key] = pool.submit(run_plain, folder, world, kept, SCRIPT)
        return known[key]

    yield get
    pool.shutdown()


@pytest.fixture
def start(jobs: list[Job]) -> Callable[..., Job]:
    def begin(*options: str, **kwargs: Any) -> Job:
        jobs.append(Job(*options, script=SCRIPT, **kwargs))
        return jobs[-1]

    return begin


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path = session.config.getoption("--gpu-report")
    if path:
        about = {
            "command": "make test-gpu",
            "machine": f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
        reporting.write_verdicts(path, exitstatus, **about)
