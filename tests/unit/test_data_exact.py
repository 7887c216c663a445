"""A rank that dies after any step is continued by another process, batch by batch, draw by draw.

The script below is walked twice: once undisturbed, once by a process that ends after some step and
another that is led to its place. Both must see the same samples and draw the same numbers.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
)

from keepstep.errors import UsageError
from keepstep.worker.script.batches import Loop
from keepstep.worker.script.position import Tracker
from keepstep.worker.script.rank_streams import RankStreams
from keepstep.worker.script.roots import Roots
from keepstep.worker.script.tree import MISSING
from keepstep.worker.state import codec

SIZE, BATCH, EPOCHS = 12, 2, 3


class Plain(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return index


class Noisy(Plain):
    """Draws for every sample, from `which`."""

    def __init__(self, which: str) -> None:
        self.which = which
        self.rng: Any = None
        self.served = 0
        if which == "own random":
            self.rng = random.Random(5)
        elif which == "own numpy":
            self.rng = numpy.random.default_rng(5)
        elif which == "own torch":
            self.rng = torch.Generator().manual_seed(5)

    def __getitem__(self, index: int) -> Any:
        return index, self.noise()

    def noise(self) -> float:
        self.served += 1
        if self.which == "lazily made" and self.rng is None:
            self.rng = numpy.random.default_rng(7)
        if self.which == "counter":
            return float(self.served)
        if self.which in ("own random", "own numpy", "lazily made"):
            return float(self.rng.random())
        if self.which == "own torch":
            return float(torch.rand((), dtype=torch.float64, generator=self.rng))
        if self.which == "random":
            return random.random()
        if self.which == "numpy":
            return float(numpy.random.rand())
        return float(torch.rand((), dtype=torch.float64))


class Stream(IterableDataset[Any]):
    def __init__(self, which: str) -> None:
        self.source = Noisy(which)

    def __iter__(self) -> Iterator[Any]:
        for index in range(SIZE):
            yield index, self.source.noise()


class Counting(Sampler[int]):
    """Shuffles by an epoch that it counts itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(
            torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        )

    def __len__(self) -> int:
        return SIZE


class Lazy(Sampler[int]):
    """Makes its generator when it is first iterated, and draws one index at a time."""

    rng: random.Random

    def __iter__(self) -> Iterator[int]:
        if not hasattr(self, "rng"):
            self.rng = random.Random(3)
        for _ in range(SIZE):
            yield self.rng.randrange(SIZE)

    def __len__(self) -> int:
        return SIZE


class Nested:
    """A batch sampler of the user's own making, around another sampler."""

    def __init__(self) -> None:
        self.inner = BatchSampler(
            RandomSampler(range(SIZE), generator=torch.Generator().manual_seed(4)), BATCH, False
        )

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class Wrapping(DataLoader[Any]):
    """Iterates in a way of its own, as loaders of some frameworks do."""

    def __iter__(self) -> Any:
        yield from super().__iter__()


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(8)


def noisy(which: str, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Noisy(which), BATCH, shuffle=True, **options)


SOURCES = [
    "own random",
    "own numpy",
    "own torch",
    "lazily made",
    "counter",
    "random",
    "numpy",
    "torch",
]

IN_PROCESS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: DataLoader(Plain(), BATCH, shuffle=True),
    "generator": lambda: DataLoader(Plain(), BATCH, shuffle=True, generator=generator()),
    "generator in the sampler": lambda: DataLoader(
        Plain(), BATCH, sampler=RandomSampler(Plain(), generator=generator())
    ),
    "with replacement": lambda: DataLoader(
        Plain(),
        BATCH,
        sampler=RandomSampler(Plain(), replacement=True, num_samples=40, generator=generator()),
    ),
    "generator in the batch sampler": lambda: DataLoader(
        Plain(), batch_sampler=BatchSampler(RandomSampler(Plain(), generator=generator()), 2, True)
    ),
    "nested": lambda: DataLoader(Plain(), batch_sampler=Nested()),
    "counts epochs": lambda: DataLoader(Plain(), BATCH, sampler=Counting()),
    "lazy sampler": lambda: DataLoader(Plain(), BATCH, sampler=Lazy()),
    "loader of its own kind": lambda: Wrapping(Noisy("own numpy"), BATCH, shuffle=True),
    "subset": lambda: DataLoader(
        ConcatDataset([Subset(Noisy("own random"), range(6)), Noisy("own numpy")]), BATCH, True
    ),
    "iterable": lambda: DataLoader(Stream("own random"), BATCH),
    "iterable torch": lambda: DataLoader(Stream("own torch"), BATCH),
    "iterable counter": lambda: DataLoader(Stream("counter"), BATCH),
    "iterable without a loader": lambda: Stream("own numpy"),
    **{f"noisy: {which}": noisy(which) for which in SOURCES},
}

PARALLEL: dict[str, Callable[[], Any]] = {
    "one worker": noisy("random", num_workers=1),
    "two workers": noisy("own random", num_workers=2),
    "two workers, torch": noisy("torch", num_workers=2),
    "two workers, lazily made": noisy("lazily made", num_workers=2),
    "two workers, counter": noisy("counter", num_workers=2),
    "one persistent": noisy("nothing", num_workers=1, persistent_workers=True),
    "two persistent": noisy("own numpy", num_workers=2, persistent_workers=True),
    "two persistent, torch": noisy("torch", num_workers=2, persistent_workers=True),
    "persistent, own generator": lambda: DataLoader(
        Noisy("numpy"),
        BATCH,
        shuffle=True,
        num_workers=1,
        persistent_workers=True,
        generator=generator(),
    ),
    "persistent, counts epochs": lambda: DataLoader(
        Plain(), BATCH, sampler=Counting(), num_workers=1, persistent_workers=True
    ),
    "persistent, lazy sampler": lambda: DataLoader(
        Plain(), BATCH, sampler=Lazy(), num_workers=2, persistent_workers=True
    ),
    "iterable": lambda: DataLoader(Stream("own random"), BATCH, num_workers=2),
    "iterable, persistent": lambda: DataLoader(
        Stream("own random"), BATCH, num_workers=1, persistent_workers=True
    ),
}


class Rank:
    """A process: its script, from the top or from where another one ended."""

    def __init__(self, make: Callable[[], Any], side: dict[str, Any] | None = None) -> None:
        value = 99 if side else 1
        random.seed(value), numpy.random.seed(value), torch.manual_seed(value)
        self.tracker = Tracker()
        self.seen: list[Any] = []
        self.walked: list[Any] = []
        self.side = side
        self.loader = make()
        self.gen = torch.Generator().manual_seed(6)  # of the script itself
        self.loops: list[Loop] = []
        self.streams = RankStreams(self.roots)
        if side is not None:
            self.tracker.walk_to(side["position"])

    def roots(self) -> Roots:
        space = {"loader": self.loader, "gen": self.gen}
        loaders = {f"loader{i}": x.loader for i, x in enumerate(self.loops) if not x.pos.closed}
        return Roots({"globals": space}, loaders, ("globals",))

    def run(self, stop: int = 10_000, leave: int = 10_000) -> dict[str, Any] | None:
        """The side state of step `stop`, if it was made. Loops are left after `leave` batches."""
        level, epoch = self.tracker.open_epochs()
        while epoch < EPOCHS:
            self.tracker.next_epoch(level, epoch)
            loop = Loop(self.tracker, self.loader, self.streams)
            self.loops.append(loop)
            for count in itertools.count(1):
                try:
                    batch = loop.next()
                except StopIteration:
                    break
                side = self.turn(epoch, batch, stop)
                if side is not None:
                    return side
                if loop.pos.yields >= leave:
                    loop.close()
                    break
                assert count < 1000
            epoch = level.epoch + 1
        return None

    def turn(self, epoch: int, batch: Any, stop: int) -> dict[str, Any] | None:
        values = [x.tolist() if hasattr(x, "tolist") else x for x in _flat(batch)]
        about = (values, torch.rand((), generator=self.gen).item(), random.random())
        if self.tracker.begin("train", True) is not MISSING:
            self.walked.append(about)
            if self.tracker.replay is None:
                assert self.side is not None
                self.streams.restore(self.side["rng"])
            return None
        self.streams.entering("train")
        self.tracker.in_txn = True
        drawn = (torch.rand(()).item(), numpy.random.rand(), random.random())
        self.seen.append((self.tracker.stack[1].epoch, about, drawn))
        self.streams.leaving("train")
        tree = self.tracker.position("train", True)
        side = codec.dumps_inline({"position": tree, "rng": self.streams.capture()})
        self.tracker.in_txn = False
        self.tracker.commit("train", True, None)
        self.loops[-1].end_transaction()
        return codec.loads_inline(side) if len(self.seen) == stop else None


def _flat(batch: Any) -> list[Any]:
    return list(batch) if isinstance(batch, list | tuple) else [batch]


def continued(make: Callable[[], Any], stop: int, leave: int = 10_000) -> None:
    whole = Rank(make)
    assert whole.run(leave=leave) is None
    first = Rank(make)
    side = first.run(stop, leave)
    assert side is not None, "the rank has fewer steps than that"
    for loop in first.loops:
        loop.close()
    second = Rank(make, side)
    assert second.run(leave=leave) is None
    assert first.seen + second.seen == whole.seen
    assert second.walked == [first.seen[-1][1]]  # the batch it was led to, and what followed


@pytest.mark.parametrize("stop", [1, 2, 6, 7, 9, 15])
@pytest.mark.parametrize("case", IN_PROCESS)
def test_data_of_this_process(case: str, stop: int) -> None:
    continued(IN_PROCESS[case], stop)


@pytest.mark.parametrize(
    ("case", "stop"),
    [(case, 8 if "persistent" in case else 4) for case in PARALLEL]
    + [("two persistent", 3), ("two workers", 3)],
)
def test_data_of_worker_processes(case: str, stop: int) -> None:
    continued(PARALLEL[case], stop)


@pytest.mark.parametrize("stop", [2, 5, 8])
@pytest.mark.parametrize("case", ["generator", "lazy sampler", "noisy: own numpy", "iterable"])
def test_loops_that_are_left_early(case: str, stop: int) -> None:
    continued(IN_PROCESS[case], stop, leave=4)


@pytest.mark.parametrize("stop", [6])
@pytest.mark.parametrize("case", ["two persistent", "one worker", "iterable, persistent"])
def test_loops_over_workers_that_are_left_early(case: str, stop: int) -> None:
    continued(PARALLEL[case], stop, leave=4)


def test_an_iterable_whose_stream_other_code_uses_is_refused() -> None:
    class Shared(Rank):
        def turn(self, epoch: int, batch: Any, stop: int) -> dict[str, Any] | None:
            self.loader.dataset.source.rng.random()
            return super().turn(epoch, batch, stop)

    make = IN_PROCESS["iterable"]
    side = Shared(make).run(4)
    assert side is not None
    with pytest.raises(UsageError, match=r"globals\.loader\.dataset\.source\.rng is drawn from"):
        Shared(make, side).run()


def test_batches_pulled_by_another_thread_are_refused() -> None:
    loop = Loop(Tracker(), DataLoader(Plain()))
    raised: list[UsageError] = []

    def pull() -> None:
        try:
            loop.next()
        except UsageError as error:
            raised.append(error)

    thread = threading.Thread(target=pull, name="prefetch")
    thread.start()
    thread.join()
    assert "another thread (prefetch)" in str(raised[0]) and raised[0].hint
