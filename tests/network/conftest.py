from __future__ import annotations

from pathlib import Path

import pytest

from tests.network.rig import why_not


@pytest.fixture(scope="session")
def can_make_networks() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short path: names of unix sockets have 107 bytes."""
    return tmp_path_factory.mktemp("n")
