"""Results that are kept for newcomers hold nothing else alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.worker import codec
from keepstep.worker.position import Tracker
from keepstep.worker.results import RESULT_BYTES_MAX, keep
from keepstep.worker.tree import MISSING


def test_a_kept_loss_does_not_hold_its_graph() -> None:
    tracker = Tracker()
    activation = torch.ones(4, requires_grad=True) * 2
    loss = activation.sum()
    seen = weakref.ref(activation)
    tracker.commit("train", True, keep({"loss": loss, "parts": [loss * 2, 3]}))
    tracker.commit("single", True, keep(loss))
    del activation, loss
    gc.collect()
    assert seen() is None
    kept = tracker.results["train"]
    assert kept["loss"].item() == 8.0 and not kept["loss"].requires_grad
    assert kept["parts"][0].item() == 16.0 and kept["parts"][1] == 3
    assert not tracker.results["single"].requires_grad


def test_a_kept_result_is_a_copy() -> None:
    batch = torch.zeros(1000)
    metrics: dict[str, Any] = {"loss": torch.ones(())}
    view, kept = keep(batch[:2]), keep(metrics)
    batch.fill_(9.0)
    metrics["loss"].zero_()
    metrics.clear()
    assert view.tolist() == [0.0, 0.0] and kept["loss"].item() == 1.0
    assert view.untyped_storage().nbytes() == 8, "a small view keeps no large batch"


@pytest.mark.parametrize(
    "result", [None, True, 3, 2.5, "text", b"bytes", (1, [2]), {"a": np.float32(1.5)}]
)
def test_plain_results_are_kept_as_they_are(result: Any) -> None:
    assert keep(result) == result
    codec.dumps_inline(keep(result))


endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize(
    "result",
    [
        object(),
        endless,
        {"logits": torch.zeros(RESULT_BYTES_MAX)},
        torch.zeros(RESULT_BYTES_MAX),
        torch.zeros(3).to_sparse(),
        "x" * (RESULT_BYTES_MAX + 1),
    ],
    ids=["object", "endless", "large inside", "large", "sparse", "long"],
)
def test_what_can_not_travel_is_not_kept(result: Any) -> None:
    assert keep(result) is MISSING
    tracker = Tracker()
    tracker.results["train"] = "of the step before"
    tracker.commit("train", True, keep(result))
    assert tracker.results == {}
