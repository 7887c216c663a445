"""A step's outcome belongs to all ranks: code of the user's cannot swallow it."""

from __future__ import annotations

from typing import Any, Literal
from unittest.mock import MagicMock

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from keepstep.errors import UsageError
from keepstep.worker.device import guard
from keepstep.worker.script.position import Tracker
from keepstep.worker.script.rank_streams import RankStreams
from keepstep.worker.state.gradients import Gradients
from keepstep.worker.step import updates
from keepstep.worker.step.call import BARE
from keepstep.worker.step.passes import Passes
from keepstep.worker.step.recovery import Recovery
from keepstep.worker.step.transaction import Transactions


class Broken(Recovery):
    """The first fence is interrupted and decided as told; a hold ends at once."""

    def __init__(self, live: Any, verdict: Literal["RETRY", "COMMIT"]) -> None:
        super().__init__(live)
        self.verdict = verdict
        self.held: list[int] = []

    def interrupted(self, error: Any, **given: Any) -> Literal["RETRY", "COMMIT"]:
        if self.verdict == "COMMIT":
            self._protocol._owed = 7
        else:
            given["roll_back"]()
        return self.verdict

    def hold(self, generation: int) -> None:
        self.held.append(generation)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(updates, "register_optimizer_step_pre_hook", lambda _: None)
    monkeypatch.setattr(Passes, "_watch_ddp", lambda _: None)

    def make(verdict: Literal["RETRY", "COMMIT"]) -> tuple[Any, Broken, Transactions, Any]:
        parameter = torch.nn.Parameter(torch.zeros(2))
        model = torch.nn.Module()
        model.weight = parameter
        sgd = torch.optim.SGD([parameter], lr=1.0)
        live = MagicMock(
            tick=0, version=0, generation=0, alone=True, world=1, models={"0": model},
            optimizers={"0": sgd}, parameters=[parameter], objects={}, loops=[],
            tracker=Tracker(), gradients=Gradients([parameter]), streams=RankStreams(),
            rebuilding=False,
        )  # fmt: skip
        live.injector.__bool__.return_value = False
        live.aborted.return_value = False
        live.channel.inbox.hold_generation = -1
        live.unasked.undo.return_value = ""
        live.changes.left_changed.return_value = ""
        live.side.inputs.changed.return_value = ""
        live.replicated.changed_since_entry.return_value = False
        live.replicated.due.return_value = False
        live.variables.late.return_value = None
        live.publisher.publish.side_effect = [OSError("the buddy is gone"), None, None]
        recovery = Broken(live, verdict)
        transactions = Transactions(live, recovery)
        # The hook that torch would call, without leaving it behind in torch.
        sgd.register_step_pre_hook(transactions.updates.before)
        return live, recovery, transactions, sgd

    return make


def test_a_committed_step_that_raises_is_not_mixed_with_the_next(world: Any) -> None:
    live, recovery, transactions, sgd = world("COMMIT")

    def step() -> None:
        sgd.step()
        raise ValueError("after the update")

    with pytest.raises(ValueError, match="after the update"):
        transactions.run("train:1", True, step)
    for _ in range(2):  # however often the script goes on
        with pytest.raises(UsageError, match="'train:1' raised after it was decided to commit it"):
            transactions.run("train:1", True, sgd.step)
    with pytest.raises(UsageError, match="decided to commit"):
        recovery.refuse_debt()
    assert not live.committed.called


def test_a_committed_step_is_followed_by_a_hold_at_the_next_entry(world: Any) -> None:
    """What the script does between the steps is part of the state that others then copy."""
    live, recovery, transactions, sgd = world("COMMIT")
    transactions.run("train:1", True, sgd.step)
    assert recovery.held == [] and live.committed.call_count == 1
    transactions.run("train:1", True, sgd.step)
    assert recovery.held == [7] and live.committed.call_count == 2
    transactions.carry_out_agreed()
    assert recovery.held == [7]


@pytest.mark.parametrize("step", [True, False])
def test_what_nobody_attached_is_looked_at_before_a_rank_holds(world: Any, step: bool) -> None:
    """A newcomer copies what the others have registered by then."""
    live, recovery, transactions, _ = world("RETRY")
    seen: list[str] = []
    live.unasked.look.side_effect = lambda *_: seen.append("step")
    live.unasked.look_at_models.side_effect = lambda: seen.append("section")
    transactions._pending = lambda: seen.append("hold")
    aborted = iter([True])
    live.aborted.side_effect = lambda: next(aborted, False)
    recovery.interrupted = lambda *_, **__: seen.append("interrupted")  # type: ignore[method-assign]
    live.publisher.publish.side_effect = None
    transactions.run("site:1", step, lambda: None)
    assert seen == ["step" if step else "section", "hold", "interrupted"]


def test_a_retry_that_the_step_swallows_is_retried_all_the_same(world: Any) -> None:
    live, _, transactions, sgd = world("RETRY")
    drawn: list[float] = []

    def step() -> None:
        drawn.append(torch.rand(()).item())
        try:
            sgd.step()
        except BaseException:
            torch.rand(5)  # a draw that an undisturbed run does not make

    transactions.run("train:1", True, step)
    assert drawn[0] == drawn[1] and len(drawn) == 2
    assert live.committed.call_count == 1 and live.publisher.publish.call_count == 2


def test_an_update_after_a_swallowed_retry_is_not_made(world: Any) -> None:
    _, _, transactions, sgd = world("RETRY")
    parameter = sgd.param_groups[0]["params"][0]
    updates: list[float] = []

    def step() -> None:
        parameter.grad = torch.ones(2)
        for _ in range(2):
            try:
                sgd.step()
            except BaseException:
                pass
        updates.append(parameter[0].item())

    transactions.run("train:1", True, step)
    assert updates == [0.0, -2.0]


def test_a_refusal_of_the_fence_that_the_step_swallows_is_raised(world: Any) -> None:
    live, _, transactions, sgd = world("RETRY")
    live.publisher.publish.side_effect = UsageError("too large", hint="register less")

    def step() -> None:
        try:
            sgd.step()
        except Exception:
            pass

    with pytest.raises(UsageError, match="too large"):
        transactions.run("train:1", True, step)
    assert not live.committed.called


def test_side_state_is_sent_ahead_at_the_last_backward_pass_of_a_step(world: Any) -> None:
    live, _, transactions, _ = world("RETRY")
    live.publisher.publish.side_effect = None
    seen: list[int] = []

    def passes(count: int) -> None:
        for number in range(1, count + 1):
            live.side.ahead.reset_mock()
            transactions.passes.backward_begins()
            if live.side.ahead.called:
                seen.append(number)

    for count, expected in ((2, []), (2, [2]), (3, [2]), (1, []), (1, [1])):
        seen.clear()
        transactions.run("step", True, lambda count=count: passes(count))
        assert seen == expected
    transactions.run("section", False, lambda: passes(1))
    transactions.run("section", False, lambda: passes(1))
    passes(1)  # outside of any
    assert seen == [1]


def test_a_section_is_undone_like_a_step_unless_it_is_one_collective(world: Any) -> None:
    live, _, transactions, _ = world("RETRY")
    tried: list[str] = []

    def evaluate() -> None:
        transactions.passes.saw_collective("all_reduce", (), {})
        live.changes.collective.assert_called_with("evaluate:1")
        tried.append(live.changes.enter.call_args.args)

    transactions.run("evaluate:1", False, evaluate)
    assert tried == [("evaluate:1", False)] * 2  # its first fence is interrupted
    assert live.changes.before_fence.call_count == 2 and live.changes.undo.called
    live.changes.reset_mock()
    live.publisher.publish.side_effect = [OSError("the buddy is gone"), None]
    transactions.run(f"all_reduce{BARE}", False, lambda: None)
    for name in ("enter", "before_fence", "undo", "left_changed", "collective"):
        assert not getattr(live.changes, name).called, name


def test_an_update_outside_of_steps_is_refused_if_it_changes_something(world: Any) -> None:
    live, _, _, sgd = world("RETRY")
    sgd.step()  # nothing to apply
    (parameter,) = sgd.param_groups[0]["params"]
    parameter.grad = torch.ones(2)
    with pytest.raises(UsageError, match=r"SGD.step\(\) outside of any @ks.step"):
        sgd.step()
    live.rebuilding = True
    sgd.step()
    live.rebuilding = False
    sgd.param_groups[0]["lr"] = 0.0  # torch makes the state of an optimizer so
    sgd.step()
    assert parameter.tolist() == [-1.0, -1.0]


def test_our_own_hooks_do_not_keep_an_update_from_being_guarded(world: Any) -> None:
    _, _, transactions, sgd = world("RETRY")
    assert not guard.hooked(sgd), "whatever Keepstep registers, here and globally"
    handle = register_optimizer_step_pre_hook(transactions.updates.before)
    assert not guard.hooked(sgd)
    handle.remove()
    for register in (sgd.register_step_pre_hook, register_optimizer_step_post_hook):
        theirs = register(lambda *_: None)
        assert guard.hooked(sgd)
        theirs.remove()
