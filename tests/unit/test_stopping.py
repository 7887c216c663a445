"""Ranks agree on a step to stop at without waiting in any other."""

from __future__ import annotations

import threading
from datetime import timedelta

from torch.distributed import HashStore

from keepstep.worker.transparent.same_step import ScriptStopping


def store() -> HashStore:
    made = HashStore()
    made.set_timeout(timedelta(seconds=10))
    return made


def last(stopping: ScriptStopping, count: int, patience_s: float = 10.0) -> bool:
    return stopping.reached(count, patience_s)


def test_ranks_train_on_until_all_have_joined_and_stop_at_one_count() -> None:
    keys = store()
    ranks = [ScriptStopping(keys, rank, 2) for rank in range(2)]
    assert not last(ranks[0], 5)  # alone: it trains on
    assert not last(ranks[0], 6)
    assert not last(ranks[1], 6)  # all there: the goal is 7
    stopped: list[bool] = []
    waits = threading.Thread(target=lambda: stopped.append(last(ranks[0], 7)))
    waits.start()
    assert last(ranks[1], 7)
    waits.join()
    assert stopped == [True]


def test_a_rank_that_is_past_the_goal_makes_all_go_on_and_the_margin_grows() -> None:
    keys = store()
    ranks = [ScriptStopping(keys, rank, 2) for rank in range(2)]
    assert not last(ranks[0], 3)
    assert not last(ranks[1], 1)  # goal 4
    assert not last(ranks[0], 9)  # never saw it
    assert not last(ranks[1], 4)  # hears so, and goes on
    assert not any(rank.joined for rank in ranks)
    assert not last(ranks[0], 10)
    assert not last(ranks[1], 5)  # next goal: 10 + 4
    stopped: list[bool] = []
    waits = threading.Thread(target=lambda: stopped.append(last(ranks[1], 14)))
    waits.start()
    assert last(ranks[0], 14)
    waits.join()
    assert stopped == [True]


def test_who_does_not_come_is_not_waited_for_and_in_the_end_it_is_given_up() -> None:
    keys = store()
    ranks = [ScriptStopping(keys, rank, 2) for rank in range(2)]
    for count in range(10_000):
        if ranks[1].failed:
            break
        assert not last(ranks[0], 2 * count, 0.01)
        assert not last(ranks[0], 2 * count + 1, 0.01)
        assert not last(ranks[1], count, 0.01)
    assert ranks[1].failed


def test_ranks_that_count_different_things_are_told_so_at_once() -> None:
    keys = store()
    ranks = [ScriptStopping(keys, rank, 2) for rank in range(2)]
    assert not last(ranks[0], 20_000)
    assert not last(ranks[1], 10_000)
    assert not last(ranks[0], 20_001)
    assert all(rank.failed for rank in ranks)


def test_a_script_that_ended_lets_the_others_go() -> None:
    keys = store()
    ranks = [ScriptStopping(keys, rank, 2) for rank in range(2)]
    assert not last(ranks[0], 1)
    assert not last(ranks[1], 1)
    ranks[1].never()
    assert not last(ranks[0], 2)


def test_where_all_stand_they_wait_for_the_last() -> None:
    keys = store()
    ranks = [ScriptStopping(keys, rank, 2) for rank in range(2)]
    met = threading.Event()

    def meet() -> None:
        ranks[0].meet(10)
        met.set()

    waits = threading.Thread(target=meet)
    waits.start()
    assert not met.is_set()  # the other one has not come
    ranks[1].meet(10)
    waits.join(10)
    assert met.is_set()
    ScriptStopping(store(), 0, 2).meet(0.05)  # not for ever
