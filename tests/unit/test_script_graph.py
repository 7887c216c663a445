"""The walk over a script's objects: what it finds, by which path, and what it leaves alone."""

from __future__ import annotations

import collections
import functools
import random
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Subset, TensorDataset

from keepstep.worker.script import frames, graph


def streams(roots: dict[str, Any], **options: Any) -> graph.Found:
    return graph.find(roots, lambda x: isinstance(x, random.Random | torch.Generator), **options)


class Holder:
    shared = random.Random(1)

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)


class Slotted:
    __slots__ = ("__private", "empty", "rng")

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.__private = random.Random(2)


class Trap:
    """Every way to be asked that runs code of the user's."""

    def __init__(self) -> None:
        object.__setattr__(self, "rng", random.Random(1))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"asked for {name}")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise AssertionError("shown")

    def __bool__(self) -> bool:
        raise AssertionError("judged")

    @property
    def value(self) -> int:
        raise AssertionError("property read")


def test_containers_and_instances_are_entered():
    rng = [random.Random(i) for i in range(7)]
    roots = {
        "globals": {"rng": rng[0], "many": [1, (rng[1],)], "by": {3: rng[2], "a b": rng[3]}},
        "trainer": Holder(augment=Holder(_rng=rng[4]), queue=collections.deque([rng[5]])),
        "one": {rng[6]},
    }
    found = streams(roots)
    assert {
        "globals.rng",
        "globals.many[1][0]",
        "globals.by[3]",
        "globals.by['a b']",
        "trainer.augment._rng",
        "trainer.queue[0]",
        "one{random.Random}",
        "trainer<class>.shared",
    } == set(found)
    assert found["trainer.augment._rng"] is rng[4]


def test_functions_partials_and_methods_are_entered():
    gen, other, third = torch.Generator(), random.Random(1), random.Random(2)

    def train_step(x: int, rng: random.Random = other, *, kw: random.Random = third) -> Any:
        return gen, rng, kw

    @functools.wraps(train_step)
    def wrapper() -> Any:
        return train_step

    holder = Holder(rng=random.Random(3))
    holder.method = types.MethodType(train_step, holder)
    found = streams({"train_step": wrapper, "hook": functools.partial(print, holder.method)})
    assert set(found) == {
        "train_step<closure>.gen",
        "train_step<default>[0]",
        "train_step<default>.kw",
        "hook.args[0].__self__.rng",
        "hook.args[0].__self__<class>.shared",
    }


def test_loaders_are_entered_however_deep():
    gen, inner = torch.Generator(), random.Random(1)
    data = Subset(TensorDataset(torch.zeros(8)), range(8))
    sampler = RandomSampler(data, generator=gen)
    loader = DataLoader(
        data, batch_sampler=BatchSampler(sampler, 2, False), collate_fn=Holder(rng=inner).__eq__
    )
    found = streams({"loader": loader})
    assert found["loader.batch_sampler.sampler.generator"] is gen
    loader = DataLoader(data, shuffle=True, generator=gen, collate_fn=functools.partial(max, inner))
    assert set(streams({"loader": loader})) == {"loader.generator", "loader.collate_fn.args[0]"}


def test_modules_of_the_user_are_entered_but_not_their_tensors():
    class Drop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gen = torch.Generator()
            self.weight = torch.nn.Parameter(torch.zeros(3))

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(Drop()))
    visited = []

    def wanted(thing: Any) -> bool:
        visited.append(type(thing))
        return isinstance(thing, torch.Generator)

    assert set(graph.find({"model": model}, wanted)) == {"model.1.0.gen"}
    assert torch.nn.Parameter not in visited


def test_slots_are_read_and_unset_ones_passed():
    assert set(streams({"x": Slotted()})) == {"x.rng", "x.__private"}


def test_suspended_generators_are_entered():
    def draw() -> Any:
        rng = random.Random(1)
        while True:
            yield rng.random()

    stream = draw()
    assert not streams({"stream": stream})
    next(stream)
    assert set(streams({"stream": stream})) == {"stream<locals>.rng"}


def test_no_code_of_the_user_runs():
    trap = Trap()
    found = streams({"trap": trap, "inside": [{trap: trap}, {trap}, (trap,)]})
    assert set(found) == {"trap.rng"}
    assert graph.follow({"trap": trap}, found.routes["trap.rng"]) is found["trap.rng"]


def test_the_shortest_path_names_a_shared_object_and_the_order_is_stable():
    rng = random.Random(1)
    roots = {"far": Holder(a=Holder(b=rng)), "near": Holder(z=rng, y=rng)}
    for _ in range(3):
        found = streams(roots)
        assert [p for p in found if "class" not in p] == ["near.z"]
        assert found.aliases["near.y"] == found.aliases["far.a.b"] == "near.z"


def test_cycles_bounds_and_cuts():
    knot: list[Any] = []
    knot.append(knot)
    assert not streams({"knot": knot}).cut_at
    deep: Any = random.Random(1)
    for _ in range(40):
        deep = [deep]
    found = streams({"deep": deep})
    assert not found and found.cut_at.startswith("deep[0]")
    found = streams({"many": [Holder() for _ in range(200)]}, limit=50)
    assert found.cut_at


def test_several_of_one_type_in_a_set_are_marked():
    found = streams({"pool": {random.Random(1), random.Random(2)}})
    assert len(found) == 2 and all(graph.UNORDERED in path for path in found)


def test_library_objects_are_not_entered():
    roots = {"modules": [random, torch], "pattern": __import__("logging").getLogger()}
    assert not streams(roots)


def test_routes_follow_what_the_path_holds_now():
    holder = Holder(augment=Holder(rng=random.Random(1)))
    roots = {"trainer": holder}
    found = streams(roots)
    route = found.routes["trainer.augment.rng"]
    assert graph.follow(roots, route) is holder.augment.rng
    holder.augment.rng = random.Random(2)
    assert graph.follow(roots, route) is holder.augment.rng
    del holder.augment
    assert graph.follow(roots, route) is None


def test_every_kind_of_member_can_be_followed():
    gen = torch.Generator()

    first, second = random.Random(1), random.Random(2)

    def step(rng: Any = first, *, kw: Any = second) -> Any:
        return gen

    def lazily() -> Any:
        rng = random.Random(3)
        yield rng

    running = lazily()
    next(running)
    key = object()
    model = torch.nn.Sequential(torch.nn.ReLU())
    model[0].extra = 1
    roots = {
        "a": [step, Slotted(), running, Holder(), {random.Random(4)}],
        "b": {key: random.Random(5), 2: random.Random(6)},
        "c": functools.partial(print, random.Random(7), kw=random.Random(8)),
        "d": Holder(rng=random.Random(9)).__init__,
        "e": random.Random(10).random,
    }
    found = streams(roots)
    assert len(found) == 14
    for path, thing in found.items():
        assert graph.follow(roots, found.routes[path]) is thing, path


@pytest.mark.parametrize(
    ("thing", "whose"),
    [
        (random, "library"),
        (torch.nn.Linear, "library"),
        (pytest, "installed"),
        (Holder, "user"),
        (graph, "library"),
        (sys.modules[__name__], "user"),
    ],
)
def test_whose_code_it_is(thing: Any, whose: str):
    assert graph.origin(thing) == whose
    assert graph.user_code(thing) == (whose == "user")


def test_what_pip_has_put_into_a_folder_of_the_search_path_is_not_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lib/theirs/part.py", "lib/alone.py", "lib/train.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    record = tmp_path / "lib" / "theirs-1.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("theirs/part.py,sha256=1,0\nalone.py,,\ntheirs-1.0.dist-info/RECORD,,\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    found = {name: frames.origin(str(tmp_path / "lib" / name)) for name in ("alone.py", "train.py")}
    assert found == {"alone.py": "library", "train.py": "script"}
    assert frames.origin(str(tmp_path / "lib/theirs/part.py")) == "library"
    assert frames.origin(str(tmp_path / "elsewhere/alone.py")) == "script"
