"""Positions of iterators: read from one, set on another of the same kind."""

from __future__ import annotations

import collections
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from torch.utils.data import DataLoader

from keepstep.errors import UsageError
from keepstep.worker.script import iterators

KINDS: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: iter([1, 2, 3, 4, 5]),
    "tuple": lambda: iter((1, 2, 3, 4, 5)),
    "str": lambda: iter("abcde"),
    "wide str": lambda: iter("abcdé"),
    "range": lambda: iter(range(2, 30, 3)),
    "reversed list": lambda: reversed([1, 2, 3, 4, 5]),
    "reversed tuple": lambda: reversed((1, 2, 3, 4, 5)),
    "dict": lambda: iter(dict.fromkeys("abcde")),
    "dict items": lambda: iter(dict.fromkeys("abcde").items()),
    "enumerate": lambda: enumerate("abcde", 7),
    "count": lambda: itertools.islice(itertools.count(3), 9),
    "zip": lambda: zip(range(9), "abcde", strict=False),
    "map": lambda: map(str.upper, iter("abcde")),
    "filter": lambda: filter(None, iter([1, 0, 2, 3, 0, 4, 5])),
    "islice with steps": lambda: itertools.islice(range(100), 3, 60, 7),
    "chain": lambda: itertools.chain([1, 2], (3, 4), "xyz"),
    "nested": lambda: enumerate(zip(itertools.count(), enumerate([5, 6, 7, 8]), strict=False)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("drawn", [0, 1, 3])
def test_another_iterator_goes_on_where_the_first_one_stood(kind: str, drawn: int) -> None:
    first, second = KINDS[kind](), KINDS[kind]()
    for _ in range(drawn):
        next(first)
    if drawn:
        next(second)  # a newcomer stands inside its first iteration
    iterators.set_position(second, iterators.position(first), "here")
    assert list(itertools.islice(second, 20)) == list(itertools.islice(first, 20))


@pytest.mark.parametrize("kind", ["list", "range", "enumerate", "count"])
def test_an_iterator_is_put_back_for_a_retry(kind: str) -> None:
    iterator = KINDS[kind]()
    next(iterator)
    before = iterators.position(iterator)
    expected = next(iterator)
    if kind == "list" or (kind == "range" and sys.version_info < (3, 12)):  # later: forward only
        iterators.set_position(iterator, before, "here")
        assert next(iterator) == expected


def test_a_range_that_began_later_goes_on_with_the_same_numbers() -> None:
    """`range(ks.committed_step, steps)` begins elsewhere in a newcomer."""
    first, second = iter(range(100)), iter(range(57, 100))
    for _ in range(59):
        next(first)
    next(second)
    iterators.set_position(second, iterators.position(first), "here")
    assert next(second) == 59


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (iter(range(10)), iter(range(20))),
        (iter([1]), iter((1,))),
        (iter({1, 2, 3}), iter({1, 2, 3})),
        (itertools.count(1), itertools.count(1, 2)),
    ],
)
def test_what_cannot_be_set_is_refused_by_name(first: Any, second: Any) -> None:
    next(first)
    with pytest.raises(UsageError, match=r"main \(train.py:3\)") as refused:
        iterators.set_position(second, iterators.position(first), "main (train.py:3)")
    assert "hint:" in str(refused.value)


def test_generators_below_other_iterators_are_found() -> None:
    def numbers() -> Iterator[int]:
        yield from (1, 2)

    a, b = numbers(), numbers()
    assert list(iterators.generators(enumerate(zip(a, [1], b, strict=False)))) == [a, b]


def test_sources_are_the_iterators_nobody_can_read() -> None:
    class Own:
        def __iter__(self) -> Own:
            return self

        def __next__(self) -> int:
            return 1

    own = Own()
    assert list(iterators.sources(enumerate(own))) == [own]


@pytest.mark.parametrize(
    "make",
    [
        lambda: itertools.cycle("abc"),
        lambda: itertools.cycle([[1], [2], [3]]),
        lambda: itertools.accumulate([1, 2, 3, 4, 5]),
        lambda: itertools.permutations("abc"),
        lambda: itertools.zip_longest("abcde", "ab"),
        lambda: iter(collections.deque("abcde")),
        lambda: iter(DataLoader(list(range(9)))),
    ],
)
def test_what_cannot_be_put_anywhere_says_where_it_is(make: Callable[[], Any]) -> None:
    mine, theirs = make(), make()
    for moves in range(5):
        place = msgspec.msgpack.decode(msgspec.msgpack.encode(iterators.position(theirs)))
        iterators.set_position(mine, place, "x")
        next(theirs)
        place = msgspec.msgpack.decode(msgspec.msgpack.encode(iterators.position(theirs)))
        with pytest.raises(UsageError, match=r"the \w+ x stands elsewhere here"):
            iterators.set_position(mine, place, "x")
        next(mine)
        assert iterators.position(mine) == place, moves
