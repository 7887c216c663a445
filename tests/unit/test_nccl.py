"""What needs no GPU of the NCCL half: a communicator that has failed by itself is told of."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from keepstep.worker.groups import nccl


def test_a_failed_communicator_is_told_of_although_nobody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nccl, "WATCH_S", 0.01)
    monkeypatch.setattr(nccl, "WATCH_PATIENCE_S", 0.1)
    monkeypatch.setattr(nccl, "WATCH_AGAIN_S", 0.3)
    trouble, heard, twice = [""], list[tuple[float, str]](), threading.Event()

    def tell(reason: str) -> None:
        heard.append((time.monotonic(), reason))
        if len(heard) == 2:
            twice.set()

    class Enough(Exception):
        pass

    def failed() -> str:
        if over.is_set():
            raise Enough
        return trouble[0]

    over = threading.Event()
    monkeypatch.setattr(nccl, "failed", failed)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)

    def watch() -> None:
        with pytest.raises(Enough):
            nccl._watch(torch.device("cuda", 0), tell)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        began = time.monotonic()
        trouble[0] = "NCCL: remote process exited or there was a network error"
        assert twice.wait(30), heard
    finally:
        over.set()
        thread.join()
    assert heard[0][0] - began >= 0.1  # who asks by himself comes first
    assert heard[1][0] - heard[0][0] >= 0.3
    assert {reason for _, reason in heard} == {trouble[0]}
