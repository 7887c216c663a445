"""Random streams are found by the path that reaches them, and go on where they were."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy
import pytest
import torch

from keepstep.errors import UsageError
from keepstep.worker.script import roots as script
from keepstep.worker.script.hidden import hidden
from keepstep.worker.script.roots import Roots
from keepstep.worker.script.streams import EVERY, Streams
from keepstep.worker.state import rng


class Holder:
    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)


class Sub(random.Random):
    pass


class Odd(random.Random):
    def random(self) -> float:
        return 0.5


def of(space: dict[str, Any]) -> Streams:
    streams = Streams(lambda: Roots({"globals": space}, {}, ("globals",)))
    streams.discover()
    return streams


def everything() -> dict[str, Any]:
    return {
        "gen": torch.Generator().manual_seed(1),
        "py": random.Random(2),
        "sub": Holder(rng=Sub(3)),
        "rng": numpy.random.default_rng(4),
        "old": numpy.random.RandomState(5),
        "bits": numpy.random.Philox(6),
        "sfc": numpy.random.Generator(numpy.random.SFC64(7)),
        "mt": numpy.random.Generator(numpy.random.MT19937(8)),
    }


def draw(space: dict[str, Any]) -> list[Any]:
    return [
        torch.rand(2, generator=space["gen"]).tolist(),
        torch.randn(1, generator=space["gen"]).item(),
        space["py"].gauss(0, 1),
        space["sub"].rng.random(),
        space["rng"].random(),
        space["rng"].integers(0, 9, dtype=numpy.uint32),  # leaves half a word behind
        space["old"].standard_normal(),  # leaves a second Gaussian behind
        space["bits"].random_raw(),
        space["sfc"].random(),
        space["mt"].random(),
        random.random(),
        torch.rand(()).item(),
        numpy.random.rand(),
    ]


@pytest.mark.parametrize("draws", [0, 1, 2, 3])
def test_another_process_goes_on_with_every_stream(draws: int) -> None:
    space = everything()
    for _ in range(draws):
        draw(space)
    state = of(space).capture()
    expected = [draw(space) for _ in range(3)]
    other = everything()
    draw(other)
    of(other).restore(state)
    assert [draw(other) for _ in range(3)] == expected


def test_a_retry_goes_back_however_often() -> None:
    space = everything()
    streams = of(space)
    state = streams.capture()
    expected = draw(space)
    for _ in range(3):
        streams.restore(state)
        assert streams.capture() == state
        assert draw(space) == expected


def test_the_paths_are_those_of_the_script() -> None:
    streams = of(everything())
    assert set(streams.paths) == {
        "globals.gen", "globals.py", "globals.sub.rng", "globals.rng", "globals.old",
        "globals.bits", "globals.sfc", "globals.mt",
    }  # fmt: skip


def test_one_stream_by_two_names_counts_once() -> None:
    gen, rng_ = torch.Generator(), numpy.random.default_rng(1)
    space = {"a": gen, "b": [gen], "c": rng_, "d": rng_.bit_generator}
    assert of(space).paths == ["globals.a", "globals.c"]


def test_streams_of_the_process_are_not_counted_twice() -> None:
    space = {"a": torch.default_generator, "b": numpy.random.mtrand._rand, "c": random._inst}
    assert of(space).paths == []


def test_a_path_that_is_missing_is_named() -> None:
    state = of({"gen": torch.Generator(), "aug": Holder(rng=random.Random(1))}).capture()
    with pytest.raises(UsageError, match=r"not here: globals\.aug\.rng") as caught:
        of({"gen": torch.Generator()}).restore(state)
    assert caught.value.hint


def test_a_path_too_many_is_named() -> None:
    state = of({"gen": torch.Generator()}).capture()
    with pytest.raises(UsageError, match=r"only here: globals\.more"):
        of({"gen": torch.Generator(), "more": random.Random(1)}).restore(state)


def test_a_refused_restore_changes_nothing() -> None:
    state = of({"gen": torch.Generator(), "aug": random.Random(1)}).capture()
    gen = torch.Generator().manual_seed(5)
    here, process = gen.get_state(), rng.capture()
    with pytest.raises(UsageError):
        of({"gen": gen}).restore(state)
    assert torch.equal(gen.get_state(), here) and rng.capture() == process


def test_another_kind_under_the_same_name_is_refused() -> None:
    state = of({"gen": torch.Generator()}).capture()
    with pytest.raises(UsageError, match="another kind"):
        of({"gen": random.Random(1)}).restore(state)


def test_another_name_of_the_same_stream_will_do() -> None:
    gen = torch.Generator().manual_seed(3)
    state = of({"deep": Holder(inner=Holder(gen=gen))}).capture()
    other = torch.Generator()
    of({"deep": Holder(inner=Holder(gen=other)), "short": other}).restore(state)
    assert torch.equal(other.get_state(), gen.get_state())


def test_two_streams_that_are_one_here_are_refused() -> None:
    state = of({"a": torch.Generator(), "b": torch.Generator()}).capture()
    one = torch.Generator()
    with pytest.raises(UsageError, match="one and the same"):
        of({"a": one, "b": one}).restore(state)


def test_several_generators_in_a_set_are_refused() -> None:
    with pytest.raises(UsageError, match="no order") as caught:
        of({"pool": {random.Random(1), random.Random(2)}})
    assert "list" in (caught.value.hint or "")


def test_a_stream_that_replaces_another_is_found_at_once() -> None:
    space: dict[str, Any] = {"gen": torch.Generator(), "aug": Holder(rng=random.Random(1))}
    streams = of(space)
    for _ in range(5):
        streams.entering("train")
    space["gen"] = torch.Generator().manual_seed(9)
    space["aug"].rng = random.Random(9)
    streams.entering("train")
    expected = torch.rand(1, generator=space["gen"]), space["aug"].rng.random()
    other: dict[str, Any] = {"gen": torch.Generator(), "aug": Holder(rng=random.Random(1))}
    space = {"gen": torch.Generator().manual_seed(9), "aug": Holder(rng=random.Random(9))}
    of(other).restore(of(space).capture())
    assert (torch.rand(1, generator=other["gen"]), other["aug"].rng.random()) == expected


def test_a_stream_that_appears_is_found_when_it_is_near_or_soon() -> None:
    space: dict[str, Any] = {"holder": Holder()}
    streams = of(space)
    for _ in range(5):
        streams.entering("train")
    space["near"] = random.Random(1)
    streams.entering("train")
    assert streams.paths == ["globals.near"]
    space["holder"].far = random.Random(1)
    for _ in range(EVERY):
        streams.entering("train")
    assert streams.paths == ["globals.near", "globals.holder.far"]


def test_what_a_first_call_makes_is_part_of_its_fence() -> None:
    space: dict[str, Any] = {"holder": Holder()}
    streams = of(space)
    streams.entering("train")
    space["holder"].lazily = random.Random(1)
    streams.leaving("train")
    assert streams.paths == ["globals.holder.lazily"]


def test_locals_of_the_script_are_found_and_not_kept_alive() -> None:
    class Big:
        pass

    import weakref

    gen = torch.Generator()
    big = Big()
    gone = weakref.ref(big)
    found = script.script_roots({}, {})
    name = next(name for name in found.script if name.endswith("kept_alive()"))
    assert found.script[name]["gen"] is gen
    del found, big
    assert gone() is None


def test_a_state_of_an_older_version_is_read() -> None:
    state = rng.capture()
    expected = random.random()
    of({}).restore(state)
    assert random.random() == expected


def test_it_is_cheap_enough_for_every_step() -> None:
    space = everything() | {f"name{i}": i for i in range(100)}
    streams = of(space)

    def timed() -> float:
        begin = time.perf_counter()
        streams.entering("train")
        streams.capture()
        return time.perf_counter() - begin

    for _ in range(5):
        timed()
    assert min(timed() for _ in range(50)) < 0.001  # 0.1 ms on an idle core, with 8 generators


def test_what_cannot_be_carried_is_named() -> None:
    space = {"safe": random.SystemRandom(), "odd": Holder(x=Odd(1)), "fine": random.Random(1)}
    texts = hidden(Roots({"globals": space}, {}))
    assert len(texts) == 2
    assert texts[0].startswith("globals.safe (random.SystemRandom) asks the operating system")
    assert texts[1].startswith("globals.odd.x (") and "hint:" in texts[1]
