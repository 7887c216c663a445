"""Witnesses name what differs, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from keepstep.worker.state.cells import Cells
from keepstep.worker.state.objects import Registered, digests
from keepstep.worker.state.replicated import StateSet
from keepstep.worker.state.shards import Replicas
from keepstep.worker.state.witness import (
    SLICE_BYTES,
    Agreement,
    Replicated,
    by_class,
    differing,
    of_classes,
)


def meet(one: Agreement, other: Agreement, rates: list[Any], other_rates: list[Any]) -> str:
    words = [one.words("adam", rates), other.words("adam", other_rates)]
    low, high = (tuple(map(pick, *words)) for pick in (min, max))
    kind = one.judge("step", low, high)
    assert kind == other.judge("step", low, high), "all ranks come to the same answer"
    return kind


def test_ranks_that_disagree_about_the_update_are_told_at_once() -> None:
    one, other = Agreement(), Agreement()
    words = [one.words("adam", []), other.words("", [])]
    low, high = (tuple(map(pick, *words)) for pick in (min, max))
    assert one.judge("step", low, high) == "update"


def test_learning_rates_count_once_all_ranks_have_agreed() -> None:
    one, other = Agreement(), Agreement()
    assert [meet(one, other, [0.1], [0.1]) for _ in range(3)] == ["", "", ""]
    assert meet(one, other, [0.1], [0.2]) == "learning-rate"
    assert meet(one, other, [0.1], [0.2]) == "", "a job that is told to go on goes on"


def test_stages_that_differ_from_the_start_are_not_compared() -> None:
    one, other = Agreement(), Agreement()
    for _ in range(5):
        one.begin()
        other.begin()
        one.collective("send", [torch.zeros(2)])
        assert meet(one, other, [0.1], [0.1]) == ""


def rank(seed: int) -> tuple[nn.Module, Any, Replicated]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200))
    average = {"mean": torch.zeros(3), "seen": torch.zeros(2)}
    objects = {"average": Registered("average", lambda: dict(average), average.update)}
    replicas = Replicas(0, 2)
    state = StateSet({"m": net}, {}, objects, replicas)
    warned: list[str] = []
    live: Any = SimpleNamespace(
        state=state, cells=Cells({"m": net}), replicas=replicas, objects=objects,
        warn=warned.append, warned=warned, tick=5,
    )  # fmt: skip
    return net, live, Replicated(live, lambda name, _: setattr(objects[name], "per_rank", True))


def test_replicas_that_are_equal_agree_and_buffers_of_a_rank_do_not_count() -> None:
    (one, _, mine), (_, _, theirs) = rank(1), rank(1)
    one[1].running_mean.fill_(3.0)
    for tick in range(4):
        mine.enter(tick)
        theirs.enter(tick)
    assert not differing([mine.found(full=False), theirs.found(full=False)])
    assert not differing([mine.found(full=True), theirs.found(full=True)])


def test_one_changed_number_is_found_within_one_turn_and_by_name() -> None:
    (one, _, mine), (_, _, theirs) = rank(1), rank(1)
    one[0].weight.data[150, 7] += 1e-6
    turns = sum(1 + p.nbytes // SLICE_BYTES for p in one.parameters()) + 2
    for tick in range(turns):
        mine.enter(tick)
        theirs.enter(tick)
    assert differing([mine.found(full=False), theirs.found(full=False)])
    (name,) = differing([mine.table(), theirs.table()])
    assert name.endswith("|model/m/0.weight")


def told(*ranks: Replicated) -> list[dict[str, str]]:
    """What each tells of its table."""
    tables = [replicated.table() for replicated in ranks]
    classes = differing([by_class(table) for table in tables])
    return [of_classes(table, classes) for table in tables]


def test_only_classes_that_differ_are_told_by_name() -> None:
    ranks = parts(0, 0)
    everybody = [replicated for _, replicated in ranks]
    assert told(*everybody) == [{}] * 4
    ranks[3][0].state.parts()[0]["model/m/0.weight"].data[0, 0] += 1
    tables = told(*everybody)
    whole = [replicated.table() for replicated in everybody]
    assert differing(tables) == differing(whole)
    kept = [{n: x for n, x in table.items() if n.startswith("plain|")} for table in whole]
    assert tables == kept and tables[:2] == [{}, {}], (
        "the first stage has nothing in common with it"
    )
    assert len(kept[3]) < len(whole[3])


def test_whoever_has_no_class_that_differs_tells_nothing() -> None:
    one = {"a|x": "1", "b|y": "2"}
    assert of_classes(one, {"c"}) == {}
    assert of_classes(one, {"b", "c"}) == {"b|y": "2"}


def test_an_objects_tensor_that_differs_is_each_ranks_own_from_then_on() -> None:
    (_, live, mine), (_, other, theirs) = rank(1), rank(1)
    other.objects["average"].save()["seen"].fill_(5.0)
    names = differing([mine.table(), theirs.table()])
    assert mine.keep_apart(names) == set() and theirs.keep_apart(names) == set()
    assert live.objects["average"].own == {1} and "'average'" in live.warned[0]
    assert not differing([mine.table(), theirs.table()])


def test_what_a_roll_back_leaves_changed_is_seen() -> None:
    net, _, mine = rank(1)
    mine.enter(0)
    assert not mine.changed_since_entry(0)
    for parameter in net.parameters():
        parameter.data.mul_(2)
    assert mine.changed_since_entry(0)


def registered(live: Any, name: str) -> None:
    live.objects[name] = Registered(name, dict, lambda _: None)


def test_what_only_some_ranks_have_registered_is_their_own() -> None:
    (_, one, mine), (_, other, theirs) = rank(0), rank(0)
    registered(one, "ema")
    for live in (one, other):
        registered(live, "scheduler")
        live.objects["counter"] = Registered("counter", dict, lambda _: None, per_rank=True)
    everybody = [mine.holdings(), theirs.holdings()]
    assert mine.unmet and theirs.unmet
    assert mine.keep_alone(everybody, True) and not theirs.keep_alone(everybody, True)
    assert [n for n, item in one.objects.items() if item.per_rank] == ["ema", "counter"]
    assert [n for n, item in other.objects.items() if item.per_rank] == ["counter"]
    assert not mine.unmet and not theirs.unmet
    assert not mine.keep_alone([mine.holdings(), theirs.holdings()], True), "it is known by now"
    mine.forget()
    assert mine.unmet, "who comes in a recovery has not been told"


def alike(*ranks: Replicated) -> bool:
    low = tuple(map(min, *(one.words() for one in ranks)))
    return Replicated.agree(low)


def entered(live: Any, replicated: Replicated) -> dict[str, str]:
    replicated.objects = digests([(item, item.snapshot()) for item in live.objects.values()])
    return replicated.objects


def test_a_small_object_that_comes_to_differ_is_each_ranks_own() -> None:
    (_, one, mine), (_, other, theirs) = rank(0), rank(0)
    assert entered(one, mine) == entered(other, theirs) and alike(mine, theirs)
    one.objects["average"].load({"mean": torch.ones(3)})
    entered(one, mine)
    assert not alike(mine, theirs)
    everybody = [mine.holdings(), theirs.holdings()]
    assert not mine.keep_alone(everybody, False), "behind a recovery it may be wrong"
    assert differing([mine.table(), theirs.table()])
    assert mine.keep_alone(everybody, True) and theirs.keep_alone(everybody, True)
    assert one.objects["average"].per_rank and other.objects["average"].per_rank
    entered(one, mine), entered(other, theirs)
    assert alike(mine, theirs)


def test_a_newcomer_tells_what_its_rank_had_when_the_transaction_began() -> None:
    (_, one, mine), (_, other, theirs) = rank(0), rank(0)
    entered(other, theirs)
    mine.inherit(dict.fromkeys(entered(one, mine), "another"))
    assert not alike(mine, theirs)
    names = differing([mine.table(), theirs.table()])
    assert {name.partition("|")[2] for name in names} == {"object average"}
    one.tick, other.tick = one.tick + 1, other.tick + 1
    assert alike(mine, theirs), "it is over with the transaction"


def test_a_newcomer_whose_object_is_not_what_its_rank_had_does_not_agree() -> None:
    (_, one, mine), (_, other, theirs) = rank(0), rank(0)
    mine.inherit(entered(other, theirs))
    one.objects["average"].load({"mean": torch.ones(3)})
    entered(one, mine)
    assert not alike(mine, theirs)
    names = differing([mine.table(), theirs.table()])
    assert "object average" in {name.partition("|")[2] for name in names}
    assert mine.small() != theirs.small(), "as its own newcomer would hear"


def parts(*seeds: int) -> list[tuple[Any, Replicated]]:
    """Ranks of a first stage, one for each seed, and as many of a second one."""
    found = []
    for stage in (False, True):
        for seed in seeds:
            _, live, replicated = rank(seed)
            live.state.replicas.plain_equal = stage
            found.append((live, replicated))
    return found


def gathered(ranks: list[tuple[Any, Replicated]], undisturbed: bool = True) -> list[bool]:
    for live, replicated in ranks:
        entered(live, replicated)
    everybody = [replicated.holdings() for _, replicated in ranks]
    return [replicated.keep_alone(everybody, undisturbed) for _, replicated in ranks]


def test_parts_of_the_model_that_have_the_same_objects_are_compared_with_each_other() -> None:
    ranks = parts(0, 0)
    assert gathered(ranks) == [False] * 4
    ranks[0][0].objects["average"].load({"mean": torch.ones(3)})
    entered(*ranks[0])
    assert not alike(*(replicated for _, replicated in ranks))
    assert gathered(ranks) == [True] * 4, "each rank's own, whatever its part of the model is"
    for one in ranks:
        entered(*one)
    assert alike(*(replicated for _, replicated in ranks))


def test_parts_of_the_model_that_have_other_objects_take_turns() -> None:
    ranks = parts(0, 0)
    everybody = [replicated for _, replicated in ranks]
    for live, _ in ranks[:2]:
        registered(live, "of-the-first-stage")
        live.objects["average"].load({"mean": torch.ones(3)})
    for live, replicated in ranks:
        entered(live, replicated)
    assert not alike(*everybody)
    assert gathered(ranks) == [False] * 4

    def turns() -> list[bool]:
        found = []
        for live, replicated in ranks:
            entered(live, replicated)
        for _ in range(2):
            found.append(alike(*everybody))
            for live, _ in ranks:
                live.tick += 1
        return found

    assert turns() == [True, True]
    ranks[3][0].objects["average"].load({"mean": torch.full((3,), 7.0)})
    assert sorted(turns()) == [False, True], "seen when its part has its turn"


def test_an_object_that_only_some_ranks_take_for_small_is_not_asked_for_again() -> None:
    (_, one, mine), (_, other, theirs) = rank(0), rank(0)
    other.objects["average"].large = True
    ranks = [(one, mine), (other, theirs)]
    assert entered(one, mine) != entered(other, theirs) and not alike(mine, theirs)
    assert gathered(ranks) == [False, False]
    assert alike(mine, theirs)


def test_small_is_what_is_small_now() -> None:
    (_, one, _), value = rank(0), {"rows": torch.zeros(4)}
    item = one.objects["rows"] = Registered("rows", lambda: dict(value), value.update)
    assert not item.large and "rows" in digests([(item, item.snapshot())])
    small = item.digest()
    value["rows"] = torch.zeros(100_000)
    assert "rows" not in digests([(item, item.snapshot())])
    large = item.digest()
    value["rows"][7] = 1.0
    assert item.digest() == large != small, "its tensors are compared with all others"


def test_an_object_that_becomes_large_has_changed() -> None:
    _, live, mine = rank(0)
    registered(live, "rows")
    mine._me.tick = 1
    mine.enter_objects({"rows": "as it was", "of another rank": "too"})
    mine.met()
    mine._me.tick = 2
    mine.enter_objects({})
    assert mine.first == {"rows"}


def test_ranks_with_another_part_of_the_model_register_what_they_like() -> None:
    ranks = parts(0, 0)
    for live, _ in ranks[:2]:
        registered(live, "of-the-first-stage")
    assert gathered(ranks) == [False] * 4


def test_what_a_rank_has_that_is_alone_with_its_part_is_its_own() -> None:
    """No other rank could give it to a newcomer. What has tensors is in the vault."""
    ranks = parts(0)
    count = {"seen": 0}
    for (live, _), name in zip(ranks, ("of-the-first-stage", "of-the-second-stage"), strict=True):
        live.objects["count"] = Registered("count", lambda: dict(count), lambda _: None)
        registered(live, name)
    assert gathered(ranks) == [True, True]
    assert not any(live.objects["count"].per_rank for live, _ in ranks), "all have it alike"
    count["seen"] = 1
    entered(*ranks[0])
    count["seen"] = 2
    entered(*ranks[1])
    everybody = [replicated.holdings() for _, replicated in ranks]
    assert [replicated.keep_alone(everybody, True) for _, replicated in ranks] == [True, True]
    assert all(live.objects["count"].per_rank for live, _ in ranks)
    assert not any(live.objects["average"].per_rank for live, _ in ranks)


def test_a_newcomer_that_is_alone_with_its_part_is_compared_with_its_rank() -> None:
    ranks = parts(0)
    (one, mine), _ = ranks
    mine.inherit(dict.fromkeys(entered(one, mine), "another"))
    assert gathered(ranks) == [False, False]
    assert all(replicated.wrong == {"average"} for _, replicated in ranks)
    names = differing([replicated.table() for _, replicated in ranks])
    assert {name.partition("|")[2] for name in names} == {"object average"}
    assert mine.keep_apart(names) == names, "even if nothing has disturbed the job"
    assert differing(told(*(replicated for _, replicated in ranks))) == names, "none else has it"


def test_a_part_without_a_turn_has_not_been_compared() -> None:
    ranks = parts(0, 0)
    for live, _ in ranks[:2]:
        registered(live, "of-the-first-stage")
    assert gathered(ranks) == [False] * 4
    kept = []
    for live, replicated in ranks[::2]:
        replicated.first = {"average"}
        replicated.met()
        kept.append(replicated.first)
        live.tick += 1
        replicated.met()
        assert not replicated.first and replicated.changing == {"average"}
    assert sorted(map(len, kept)) == [0, 1]


def test_what_a_transaction_changes_for_the_first_time_is_told() -> None:
    _, live, mine = rank(0)
    entered(live, mine)
    assert mine.first_changes() == {}
    live.objects["average"].load({"mean": torch.ones(3)})
    assert mine.first_changes() == {"average": live.objects["average"].snapshot()}
    live.objects["average"].load({"mean": torch.ones(100_000)})
    assert mine.first_changes() == {}, "it has become too large"
    live.objects["average"].load({"mean": torch.ones(3)})
    mine.changing = {"average"}
    assert mine.first_changes() == {}
