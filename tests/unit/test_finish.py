"""The rest of a step, made by another process with the locals of the first."""

from __future__ import annotations

import collections
import contextlib
import enum
from typing import Any

import pytest
import torch

from keepstep.errors import UsageError
from keepstep.worker.script import sharing
from keepstep.worker.script.results import LostGradient
from keepstep.worker.step.finish import Behind, Finishing, new_behind, read_behind, with_locals


class Rank:
    """A step function with something to do behind its fence."""

    def __init__(self) -> None:
        self.published: Any = None
        self.finishing: Finishing | None = None
        self.log: list[float] = []
        self.behind = Behind()

    def fence(self) -> None:
        if self.finishing is not None:
            self.finishing.fence(Rank.train.__code__, [])
            return
        arguments, code = {"self": self}, Rank.train.__code__
        self.published = self.behind.locals_of("train", code, arguments, lambda _: False)

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
        self.published = self.behind.locals_of("train", code, {"self": self}, lambda _: False)


def test_only_what_is_read_behind_the_fence_is_published() -> None:
    dead = Rank()
    dead.train(torch.ones(4))
    assert set(dead.published[0]["values"]) == {"loss", "count"} and not dead.published[0]["lost"]


def test_a_newcomer_comes_to_the_result_of_the_rank_it_replaces() -> None:
    dead, newcomer = Rank(), Rank()
    expected = dead.train(torch.ones(4))
    newcomer.finishing = Finishing(dead.published, "train", lambda: newcomer.log.clear() or [])
    assert newcomer.train(torch.zeros(4)) == expected
    assert newcomer.finishing.reached and newcomer.log == dead.log


def test_a_local_that_cannot_travel_is_named_when_it_is_used() -> None:
    dead, newcomer = Rank(), Rank()
    dead.train_object(torch.ones(1))
    assert dead.published[0]["lost"] == ["output"]
    newcomer.finishing = Finishing(dead.published, "train", list)
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


def test_lost_objects_refuse_use() -> None:
    from keepstep.worker.script.results import LostResult

    with pytest.raises(UsageError, match="output"):
        LostResult("train (output)", "it cannot be carried").logits  # noqa: B018


def test_locals_are_published_in_the_first_call_and_where_something_happens_behind() -> None:
    rank = Rank()
    rank.train(torch.ones(1))
    assert rank.published is not None, "nothing is known of it yet"
    rank.behind.note("train", [], foreseen=True, tick=1)
    rank.train(torch.ones(1))
    assert rank.published is None
    rank.behind.note("train", [], foreseen=False, tick=2)
    rank.train(torch.ones(1))
    assert rank.published is not None and rank.behind.changes("train") == []
    rank.behind.note("train", ["variables"], foreseen=True, tick=3)
    assert rank.behind.changes("train") == ["variables"]


def test_what_is_known_goes_to_a_newcomer_whose_first_calls_are_unknown_again() -> None:
    dead, newcomer = Behind(), Behind()
    dead.note("train", ["streams"], foreseen=False, tick=4)
    dead.note("quiet", [], foreseen=True, tick=5)
    newcomer.load(dead.export())
    assert newcomer.export() == {"train": {"streams": 4, "result": 4}}


def test_a_change_is_new_in_the_call_that_makes_it_first() -> None:
    behind = Behind()
    behind.note("train", [], foreseen=False, tick=6)
    for tick in (7, 8):
        behind.note("train", ["variables"], foreseen=False, tick=tick)
    assert new_behind(behind.export(), "train", 7) == ["variables"]
    assert new_behind(behind.export(), "train", 8) == []
    assert new_behind(behind.export(), "train", 6) == [], "a result is known from a replica"
    assert new_behind(behind.export(), "other", 7) == []


def test_locals_that_come_later_are_not_lost() -> None:
    count, loss = (b"1", ""), (b"2", "device")
    step = {"name": "step", "values": {}, "lost": ["loss"]}
    helper = {"name": "helper", "values": {"count": count}, "lost": ["loss", "output"]}
    assert with_locals([step, helper], {"1 loss": loss}) == [
        step,
        {"name": "helper", "values": {"count": count, "loss": loss}, "lost": ["output"]},
    ]


class Phase(enum.Enum):
    WARM = 1
    COLD = 2


class Case:
    """A rank or a newcomer that runs one of the functions below up to its fence and on."""

    def __init__(self, published: Any = None) -> None:
        self.history: list[Any] = []
        self.behind = Behind()
        self.published = published
        self.finishing = None
        if published is not None:
            self.finishing = Finishing(published, "train", lambda: self.history.clear() or [])

    def run(self, function: Any, x: torch.Tensor) -> list[Any]:
        self.code = function.__code__
        function(self, x, True)
        return self.history

    def step(self) -> None:
        if self.finishing is not None:
            self.finishing.fence(self.code, [])
        elif self.published is None:
            arguments = {"0": self, "1": True}
            known = {id(self), id(self.history)}
            self.published = self.behind.locals_of(
                "train", self.code, arguments, lambda x: id(x) in known
            )


def in_a_helper(case: Case, x: torch.Tensor, verbose: bool) -> None:
    def update(loss: torch.Tensor) -> None:
        case.step()
        case.history.append(loss.item())

    update(x.sum())


def in_a_cell(case: Case, x: torch.Tensor, verbose: bool) -> None:
    loss = x.sum()

    def note() -> None:
        case.history.append(loss.item())

    case.step()
    note()
    case.history.extend([loss.item() * k for k in range(2)])


def like_an_argument(case: Case, x: torch.Tensor, verbose: bool) -> None:
    high, count = bool(x.sum() > 1), int(x.sum())
    case.step()
    case.history.append((high, count))


def by_another_name(case: Case, x: torch.Tensor, verbose: bool) -> None:
    log = case.history
    case.step()
    log.append(1)


def on_the_value_stack(case: Case, x: torch.Tensor, verbose: bool) -> None:
    case.history.append((x.sum().item(), case.step()))


def an_enumeration(case: Case, x: torch.Tensor, verbose: bool) -> None:
    phase = Phase.WARM if x.sum() > 1 else Phase.COLD
    case.step()
    case.history.append(1 if phase is Phase.WARM else 2)


def inside_with_and_for(case: Case, x: torch.Tensor, verbose: bool) -> None:
    with contextlib.suppress(ValueError):
        for turn in range(2):
            scale = x.sum() * turn
            case.step()
            case.history.append(scale.item())


@pytest.mark.parametrize(
    "function",
    [
        in_a_helper,
        in_a_cell,
        like_an_argument,
        by_another_name,
        on_the_value_stack,
        an_enumeration,
        inside_with_and_for,
    ],
)
def test_whatever_the_rest_of_a_step_needs_is_the_ranks(function: Any) -> None:
    dead = Case()
    expected = dead.run(function, torch.ones(4))
    newcomer = Case(dead.published)
    found = newcomer.run(function, torch.zeros(4))
    if function is inside_with_and_for:  # the turn before the fence's is the newcomer's own
        found, expected = found[:1], expected[:1]
    assert found == expected and newcomer.finishing is not None and newcomer.finishing.reached


def test_an_update_in_another_function_is_refused() -> None:
    dead, newcomer = Case(), None
    dead.run(in_a_helper, torch.ones(2))
    newcomer = Case(dead.published)
    with pytest.raises(UsageError, match="comes to its update by"):
        newcomer.run(by_another_name, torch.ones(2))


class Lying:
    """A step that works behind its fence on views of a weight, and of a table."""

    def __init__(self, start: float) -> None:
        self.weight = torch.nn.Parameter(torch.full((2, 3), start))
        self.table = torch.zeros(4, 2)
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.published: Any = None
        self.finishing: Finishing | None = None

    def lying_with(self, value: Any) -> Any:
        place = sharing.place(value)
        for name in ("weight", "table"):
            other = getattr(self, name)
            if place is not None and other.untyped_storage().data_ptr() == place[0]:
                return [name], other
        return None

    def reach(self, name: list[str]) -> Any:
        return getattr(self, name[0])

    def fence(self) -> None:
        code = Lying.train.__code__
        if self.finishing is not None:
            self.finishing.fence(code, [self.weight])
            self.finishing.before_update(self.optimizer)
        else:
            given = {"self": self}
            behind = Behind()
            self.published = behind.locals_of(
                "train", code, given, lambda _: False, self.lying_with
            )

    def train(self, i: int) -> Any:
        row, column = self.table[i], self.weight.data[:, 1]
        parts = {"views": [self.weight.data, (column, i)], "itself": [self.weight]}
        copy, array = column.clone(), self.weight.detach().numpy()
        self.weight.sum().backward()
        self.fence()
        self.optimizer.step()
        if self.finishing is not None:
            self.finishing.after_update()
        row += column
        assert parts["itself"][0] is self.weight
        views = parts["views"]
        return column - copy, views[0].sum(), views[1][0].sum(), torch.tensor(array)


def test_views_of_weights_and_tables_are_views_on_the_newcomer_too() -> None:
    dead, newcomer = Lying(5.0), Lying(7.0)
    expected = dead.train(3)
    with torch.no_grad():
        newcomer.weight.fill_(4.0)  # as after the update
    newcomer.finishing = Finishing(dead.published, "train", list, newcomer.reach)
    found = newcomer.train(0)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(newcomer.table, dead.table)


def test_gradients_of_a_step_that_is_finished_are_lost_and_refuse_to_be_read() -> None:
    newcomer = Lying(7.0)
    newcomer.weight.grad = torch.ones(2, 3)
    newcomer.finishing = Finishing([], "train", list)
    newcomer.finishing.fence(None, [newcomer.weight])
    newcomer.finishing.before_update(newcomer.optimizer)
    newcomer.optimizer.step()
    assert newcomer.weight.grad is None and torch.equal(newcomer.weight, torch.full((2, 3), 7.0))
    newcomer.finishing.after_update()
    assert newcomer.weight.grad is not None
    with pytest.raises(UsageError, match="behind its update"):
        newcomer.weight.grad.norm()
    newcomer.optimizer.zero_grad(set_to_none=False)
    assert torch.equal(newcomer.weight.grad, torch.zeros(2, 3))
    newcomer.finishing.after_update()
    newcomer.finishing.end([newcomer.weight])
    assert torch.equal(newcomer.weight.grad, torch.zeros(2, 3)), "what the step has set stays"


def test_gradients_of_inputs_are_lost_as_well() -> None:
    def step(x: torch.Tensor) -> Any:
        hidden = x * 2
        hidden.retain_grad()
        (hidden * 3).sum().backward()
        fence(x)
        return hidden, x

    published: Any = Behind().locals_of  # a rank's, and then a newcomer's
    parts: Any = None
    finishing: Finishing | None = None

    def fence(x: torch.Tensor) -> None:
        nonlocal parts
        if finishing is None:
            parts = published("train", step.__code__, {"x": x}, lambda _: False)
        else:
            finishing.fence(step.__code__, [], [x])

    step(torch.ones(2, requires_grad=True))
    finishing = Finishing(parts, "train", list)
    for tensor in step(torch.ones(2, requires_grad=True)):
        with pytest.raises(UsageError, match="behind its update"):
            tensor.grad.sign()


@pytest.mark.parametrize("kind", [collections.OrderedDict, collections.deque, "itself"])
def test_containers_that_cannot_tell_where_their_tensors_lie_are_lost(kind: Any) -> None:
    def step(rank: Lying) -> Any:
        held: Any = [rank.weight.data]
        if kind == "itself":
            held.append(held)
        else:
            held = kind(a=held[0]) if kind is collections.OrderedDict else kind(held)
        published.append(
            Behind().locals_of("step", step.__code__, {"r": rank}, lambda _: False, rank.lying_with)
        )
        return held

    published: list[Any] = []
    step(Lying(1.0))
    assert published[0][0]["lost"] == ["held"]


def test_a_second_backward_pass_may_add_to_a_lost_gradient() -> None:
    rank = Lying(1.0)
    rank.weight.grad = LostGradient.of(rank.weight)
    rank.weight.sum().backward()
    with pytest.raises(UsageError, match="behind its update"):
        rank.weight.grad.norm()


def test_gradients_that_outlive_the_update_are_those_of_the_rank() -> None:
    carried = torch.full((2, 3), 5.0)
    newcomer = Lying(7.0)
    newcomer.weight.grad = torch.ones(2, 3)

    def at_fence() -> list[torch.nn.Parameter]:
        newcomer.weight.grad = carried
        return [newcomer.weight]

    newcomer.finishing = Finishing([], "train", at_fence)
    newcomer.finishing.fence(None, [newcomer.weight])
    newcomer.finishing.before_update(newcomer.optimizer)
    newcomer.optimizer.step()
    newcomer.finishing.after_update()
    assert torch.equal(newcomer.weight, torch.full((2, 3), 7.0)), "the update is made already"
    newcomer.finishing.end([newcomer.weight])
    assert newcomer.weight.grad is carried
