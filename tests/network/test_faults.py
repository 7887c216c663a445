"""The plugin under injected faults, driven as NCCL drives it: nothing lost, nothing wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.network.faults import soak
from tests.network.rig import rig

pytestmark = pytest.mark.usefixtures("can_make_networks")

FAULTS = int(os.environ.get("KEEPSTEP_NET_FAULTS", "60"))
SEED = int(os.environ.get("KEEPSTEP_NET_SEED", "1"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("abi,helpers", [(6, "1"), (8, "0"), (11, "1")])
def test_faults_of_all_kinds_lose_nothing(folder: Path, abi: int, helpers: str) -> None:
    with rig(folder) as made:
        words = ("--abi", str(abi), "--verify", "2")
        told = soak(made, FAULTS // 3, SEED + abi, *words, helpers=helpers)
    assert sum(told.fired.values()) == FAULTS // 3
