"""Results that are kept for newcomers hold nothing else alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.errors import UsageError
from keepstep.worker.script import results
from keepstep.worker.script.position import Tracker
from keepstep.worker.script.results import RESULT_BYTES_MAX, Foresight, LostResult, keep
from keepstep.worker.script.tree import MISSING
from keepstep.worker.state import codec


def test_a_kept_loss_does_not_hold_its_graph() -> None:
    tracker = Tracker()
    activation = torch.ones(4, requires_grad=True) * 2
    loss = activation.sum()
    seen = weakref.ref(activation)
    tracker.commit("train", True, *keep({"loss": loss, "parts": [loss * 2, 3]})[:2])
    tracker.commit("single", True, *keep(loss)[:2])
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
    view, kept = keep(batch[:2])[0], keep(metrics)[0]
    batch.fill_(9.0)
    metrics["loss"].zero_()
    metrics.clear()
    assert view.tolist() == [0.0, 0.0] and kept["loss"].item() == 1.0
    assert view.untyped_storage().nbytes() == 8, "a small view keeps no large batch"


@pytest.mark.parametrize(
    "result", [None, True, 3, 2.5, "text", b"bytes", (1, [2]), {"a": np.float32(1.5)}]
)
def test_plain_results_are_kept_as_they_are(result: Any) -> None:
    kept, encoded, why = keep(result)
    assert kept == result and not why
    assert encoded is not None and codec.loads_inline(encoded) == result


endless: list[Any] = []
endless.append(endless)


@pytest.mark.parametrize(
    "result",
    [object(), endless, torch.zeros(3).to_sparse()],
    ids=["object", "endless", "sparse"],
)
def test_what_can_not_travel_is_not_kept(result: Any) -> None:
    kept, encoded, why = keep(result)
    assert kept is MISSING and encoded is None and "cannot be carried" in why
    tracker = Tracker()
    tracker.results["train"] = "of the step before"
    tracker.commit("train", True, kept, encoded)
    assert tracker.results == {}


@pytest.mark.parametrize(
    "result",
    [{"logits": torch.zeros(RESULT_BYTES_MAX)}, "x" * (RESULT_BYTES_MAX + 1)],
    ids=["tensor", "text"],
)
def test_what_is_large_is_kept_for_replicas_alone(result: Any) -> None:
    kept, encoded, why = keep(result)
    assert encoded is None and not why
    assert codec.dumps_inline(kept) == codec.dumps_inline(result)


def test_whoever_uses_a_lost_result_is_told_why() -> None:
    lost = LostResult("train:1", "objects of type X")
    for use in (lambda: lost.item(), lambda: float(lost), lambda: lost + 1, lambda: lost["a"]):
        with pytest.raises(UsageError, match=r"'train:1' .* objects of type X"):
            use()


class Step:
    """A step function that is looked at in its fence, as the transaction does."""

    def __init__(self) -> None:
        self.foresight = Foresight()
        self.published: list[bytes | None] = []

    def run(self, other: bool = False) -> Any:
        result = self.train(torch.rand(()), other)
        self.foresight.at_end(result, keep(result)[1])
        return result

    def train(self, x: torch.Tensor, other: bool) -> Any:
        loss, count = x * 2, 7
        self.published.append(self.foresight.at_fence(Step.train.__code__))
        return {"loss": loss.item() if not other else 0.5, "n": [count, loss.detach()]}


def test_a_result_is_foreseen_from_the_variables_of_its_function() -> None:
    step = Step()
    step.run()
    assert step.published == [None], "nothing is known in the first step"
    for _ in range(3):
        result = step.run()
        published = step.published[-1]
        assert published is not None and codec.loads_inline(published) == result


def test_foresight_that_was_wrong_once_is_given_up() -> None:
    step = Step()
    for _ in range(2):
        step.run()
    step.run(other=True)
    step.run()
    assert step.published[-1] is None


def test_a_replicas_large_result_is_told_by_its_mark() -> None:
    mine = {"features": torch.arange(40_000.0), "name": "epoch 3"}
    same = {"features": torch.arange(40_000.0), "name": "epoch 3"}
    assert results.mark(mine) == results.mark(same)
    for other in (
        {**mine, "name": "epoch 4"},
        {**mine, "features": torch.arange(40_000.0).view(200, 200)},
        {**mine, "features": torch.arange(40_000.0).roll(1)},
        {**mine, "features": torch.arange(40_000)},
    ):
        assert results.mark(other) != results.mark(mine)


def test_results_are_published_whole_up_to_a_size() -> None:
    features = torch.randn(1 << 20)
    data = results.whole([features, 7])
    assert data is not None
    found = codec.loads_inline(data)
    assert torch.equal(found[0], features) and found[1] == 7
    assert results.whole(torch.zeros((1 << 20) + 1)) is None
    assert results.whole([float(n) for n in range(1 << 19)]) is None


def test_a_result_may_be_on_its_way_when_it_is_committed() -> None:
    tracker, asked = Tracker(), []

    def read() -> bytes:
        asked.append(1)
        return codec.dumps_inline(1.5)

    tracker.commit("train", True, 1.5, read)
    assert not asked, "nobody waits for the device yet"
    for _ in range(2):
        entry = tracker.position("train", True)["log"][0]
        assert codec.loads_inline(entry["r"]) == 1.5
    assert asked == [1]
