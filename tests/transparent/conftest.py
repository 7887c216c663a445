"""Real CRIU, real namespaces, real jobs; held against plain torchrun bit by bit.

`make test` runs the cells marked `always`, `--transparent-all` every one. Where CRIU, root or
namespaces are missing all of them are skipped, and say which.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.errors import UsageError
from keepstep.native import criu
from tests.support import sampling
from tests.support.job import Job
from tests.support.moving import (
    FAKE_CUDA,
    SCRIPT,
    Cuda,
    Faults,
    Launch,
    launching,
    missing,
)
from tests.support.torchrun import Reference, once_each

NUMBERS = ("--layout", "--workers", "--accumulate", "--optimizers", "--epochs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = sampling.of_folder(items, Path(__file__).parent)
    if mine and (reason := missing()):
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=f"SKIPPED: {reason}"))
    if config.getoption("--transparent-all") or sampling.chosen_by_hand(config):
        return
    dropped = [item for item in mine if not item.get_closest_marker("always")]
    sampling.drop(config, items, dropped)
    if dropped:
        count = f"transparent: {len(mine) - len(dropped)} of {len(mine)} tests"
        sampling.say(config, f"{count}; --transparent-all runs every one")


def _of_numbers(words: tuple[str, ...]) -> list[str]:
    pairs = (pair for pair in itertools.pairwise(words) if pair[0] in NUMBERS)
    return [word for pair in pairs for word in pair]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """What plain torchrun computes with the options that change numbers."""
    return once_each(tmp_path_factory, _of_numbers, SCRIPT)


@pytest.fixture
def launch(tmp_path: Path, jobs: list[Job]) -> Iterator[Launch]:
    yield from launching(tmp_path, jobs)


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    for name in ("KEEPSTEP_CRIU", "FAULT_FILE", "FAULT_STRUCK"):
        monkeypatch.setenv(name, "")
    try:
        real = criu.find.__wrapped__()[0] if not os.environ["KEEPSTEP_CRIU"] else []
    except UsageError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("REAL_CRIU", " ".join(real))
    return Faults(tmp_path)


@pytest.fixture
def small_tmpfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "images"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(folder)], check=True)
    monkeypatch.setenv("KEEPSTEP_IMAGES", str(folder))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    tool = shutil.which("gcc") or shutil.which("cc")
    if tool is None:
        pytest.skip("there is no C compiler")
    path = tmp_path / "libcuda.so.1"
    subprocess.run([tool, "-shared", "-fPIC", str(FAKE_CUDA), "-o", str(path)], check=True)
    shutil.copyfile(path, tmp_path / "libcudart.so.13")
    fake = Cuda(tmp_path)
    monkeypatch.setenv("KEEPSTEP_LIBCUDA", str(path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("FAKE_CUDA_FAIL_ONCE", str(fake.once))
    monkeypatch.setenv("FAKE_CUDA_STATE", str(fake.state))
    return fake
