"""Real CRIU, real namespaces, real jobs; held against plain torchrun bit by bit.

`make test` runs the cells marked `always`, `--transparent-all` every one. Where CRIU, root or
namespaces are missing all of them are skipped, and say which.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from harness import Verdict, ending, run_plain
from moving import FAKE_CUDA, SCRIPT, Cuda, Faults, Transparent, missing, no_images_left

from keepstep.errors import UsageError
from keepstep.native import criu

NUMBERS = ("--layout", "--workers", "--accumulate", "--optimizers", "--epochs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--transparent-all", action="store_true", help="every cell, not a sample")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.parent == Path(__file__).parent]
    if mine and (reason := missing()):
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=f"SKIPPED: {reason}"))
    by_hand = config.getoption("-k") or any("::" in arg for arg in config.args)
    if config.getoption("--transparent-all", default=False) or by_hand:
        return
    dropped = [item for item in mine if not item.get_closest_marker("always")]
    items[:] = [item for item in items if item not in dropped]
    if dropped:
        config.hook.pytest_deselected(items=dropped)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """What plain torchrun computes with the options that change numbers."""
    known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def get(world: int, *words: str) -> list[dict[str, Any]]:
        pairs = (pair for pair in itertools.pairwise(words) if pair[0] in NUMBERS)
        chosen = [word for pair in pairs for word in pair]
        key = (world, *chosen)
        if key not in known:
            known[key] = run_plain(tmp_path_factory.mktemp("plain"), world, chosen, SCRIPT)
        return known[key]

    return get


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Transparent]]:
    with ending(request) as jobs:

        def begin(*words: str, **more: Any) -> Transparent:
            started = Transparent(tmp_path, *words, **more)
            jobs.append(started.job)
            return started

        yield begin
    no_images_left(jobs)


@pytest.fixture
def verdict(request: pytest.FixtureRequest) -> Verdict:
    return Verdict(request.node.name)


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
