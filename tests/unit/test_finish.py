"""The rest of a step, made by another process with the locals of the first."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keepstep.errors import UsageError
from keepstep.worker.finish import Finishing, Locals, read_behind


class Rank:
    """A step function with something to do behind its fence."""

    def __init__(self) -> None:
        self.published: Any = None
        self.finishing: Finishing | None = None
        self.log: list[float] = []

    def fence(self) -> None:
        if self.finishing is not None:
            self.finishing.fence(Rank.train.__code__, [])
            return
        locals_ = Locals()
        locals_.needed = True
        arguments = {"self": self}
        self.published = locals_.publish(Rank.train.__code__, arguments, lambda _: False)

    def train(self, x: torch.Tensor) -> Any:
        loss, count = (x * 2).sum(), int(x.numel())
        x = x * 3  # not read behind the fence
        self.fence()
        self.log.append(loss.item())
        return {"loss": loss.item(), "mean": (loss / count).item()}

    def train_object(self, x: torch.Tensor) -> Any:
        output = object()
        self.fence_object()
        return str(output), x

    def fence_object(self) -> None:
        code = Rank.train_object.__code__
        if self.finishing is not None:
            self.finishing.fence(code, [])
            return
        locals_ = Locals()
        locals_.needed = True
        self.published = locals_.publish(code, {"self": self}, lambda _: False)


def test_only_what_is_read_behind_the_fence_is_published() -> None:
    dead = Rank()
    dead.train(torch.ones(4))
    assert set(dead.published["values"]) == {"loss", "count"} and not dead.published["lost"]


def test_a_newcomer_comes_to_the_result_of_the_rank_it_replaces() -> None:
    dead, newcomer = Rank(), Rank()
    expected = dead.train(torch.ones(4))
    newcomer.finishing = Finishing(dead.published, "train", lambda: newcomer.log.clear())
    assert newcomer.train(torch.zeros(4)) == expected
    assert newcomer.finishing.reached and newcomer.log == dead.log


def test_a_local_that_cannot_travel_is_named_when_it_is_used() -> None:
    dead, newcomer = Rank(), Rank()
    dead.train_object(torch.ones(1))
    assert dead.published["lost"] == ["output"]
    newcomer.finishing = Finishing(dead.published, "train", lambda: None)
    assert "Lost" in newcomer.train_object(torch.ones(1))[0], "the stand-in, not its own object"


def test_a_loop_around_the_fence_may_read_everything_again() -> None:
    def looping(x: int) -> int:
        first = x
        total = 0
        for turn in range(3):
            total += first + turn
            print(total)
        return total

    offset = next(
        i.offset for i in __import__("dis").get_instructions(looping) if i.argval == "print"
    )
    assert "first" in read_behind(looping.__code__, offset)


def test_parameters_lose_their_gradients_at_the_fence() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    Finishing({"values": {}, "lost": []}, "train", lambda: None).fence(None, [parameter])
    assert parameter.grad is None


def test_lost_objects_refuse_use() -> None:
    from keepstep.worker.results import Lost

    with pytest.raises(UsageError, match="output"):
        Lost("train (output)", "it cannot be carried").logits  # noqa: B018
