"""The plugin under injected faults, driven as NCCL drives it: nothing lost, nothing wrong."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import Watch, draw
from rig import Rig, rig

pytestmark = pytest.mark.usefixtures("can_make_networks")

FAULTS = int(os.environ.get("KEEPSTEP_NET_FAULTS", "60"))
SEED = int(os.environ.get("KEEPSTEP_NET_SEED", "1"))
QUICK = {"KEEPSTEP_NET_HOLD_MS": "20"}  # a flapping path comes back soon: more faults per minute


@dataclass(frozen=True)
class Soaked:
    fired: dict[str, int]
    messages: int
    bytes: int
    corrupt: int
    missing: int


def soak(made: Rig, faults: int, seed: int, *words: str, helpers: str) -> Soaked:
    """So many faults on one pair; then everything has arrived, once and right."""
    stop = made.folder / "stop"
    env = {**QUICK, "KEEPSTEP_NET_HELPERS": helpers}
    ends = made.pair("--size", "mix", "--stop", str(stop), *words, **env)
    watch = Watch(made, ends)
    choose = random.Random(seed)
    watch.settle()
    for _ in range(faults):
        # Half of the faults meet paths that have not recovered from the last one.
        settled = choose.random() < 0.5
        if settled:
            watch.settle()
        watch.inject(draw(made, ends, choose), settled)
    watch.settle()
    stop.touch()
    sender, receiver = ends
    sent, received = sender.result(), receiver.result()
    sent.assert_clean()
    received.assert_clean()
    assert sent.lane("send")["messages"] == received.lane("receive")["messages"]
    assert sender.close() == 0 and receiver.close() == 0
    lane = received.lane("receive")
    missing = abs(sent.lane("send")["messages"] - lane["messages"])
    return Soaked(watch.fired, lane["messages"], lane["bytes"], lane["corrupt"], missing)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("abi,helpers", [(6, "1"), (8, "0"), (11, "1")])
def test_faults_of_all_kinds_lose_nothing(folder: Path, abi: int, helpers: str) -> None:
    with rig(folder) as made:
        words = ("--abi", str(abi), "--verify", "2")
        told = soak(made, FAULTS // 3, SEED + abi, *words, helpers=helpers)
    assert sum(told.fired.values()) == FAULTS // 3
