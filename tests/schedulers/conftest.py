"""A real Slurm cluster and a real Kubernetes control plane for all tests here; each test finds and
leaves their nodes idle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.schedulers.cluster import Cluster, missing
from tests.schedulers.control_plane import ControlPlane
from tests.schedulers.control_plane_build import missing as no_plane
from tests.schedulers.kubernetes_lab import KubernetesLab
from tests.schedulers.labs import Lab, LocalLab, SlurmLab


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


@pytest.fixture(scope="session")
def running_plane() -> Iterator[ControlPlane]:
    if why := no_plane():
        pytest.skip(why)
    made = ControlPlane()
    try:
        yield made
    finally:
        made.remove()
        assert not made.folder.exists()


@pytest.fixture
def plane(running_plane: ControlPlane) -> Iterator[ControlPlane]:
    """With every node ready and empty, before and after."""
    with running_plane.clean():
        yield running_plane


@pytest.fixture(params=["local", "slurm", "kubernetes"])
def lab(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Lab]:
    if request.param == "slurm":
        yield SlurmLab(request.getfixturevalue("cluster"))
        return
    if request.param == "kubernetes":
        yield KubernetesLab(request.getfixturevalue("plane"))
        return
    made = LocalLab(tmp_path / "pool")
    try:
        yield made
    finally:
        for lease in made.scheduler.leases():
            made.scheduler.release(lease)
