"""A real Slurm cluster for all tests here; each finds and leaves its nodes idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster, missing
from labs import Lab, LocalLab, SlurmLab


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    if why := missing():
        pytest.skip(why)
    made = Cluster()
    try:
        yield made
    finally:
        made.remove()
        assert not made.folder.exists()


@pytest.fixture
def cluster(running_cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """With every node idle, before and after."""
    monkeypatch.setenv("SLURM_CONF", str(running_cluster.conf))
    with running_cluster.clean():
        yield running_cluster


@pytest.fixture(params=["local", "slurm"])
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    if request.param == "slurm":
        yield SlurmLab(request.getfixturevalue("cluster"))
        return
    made = LocalLab(tmp_path / "pool")
    try:
        yield made
    finally:
        for lease in made.scheduler.leases():
            made.scheduler.release(lease)
