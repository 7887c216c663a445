"""Where batches come from in scripts that people write, one per `--case`; see CASES below.

Nothing is registered but the history, and no case says a word to Keepstep about its generators.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

import keepstep

BATCH, STEPS, WIDTH = 4, 5, 8
SIZE = BATCH * STEPS


def features(index: int, noise: float) -> torch.Tensor:
    return torch.arange(WIDTH, dtype=torch.float32).add(index).mul(0.1).sin() + noise * 0.01


class Rows(Dataset[Any]):
    """Samples with noise from `source`: a generator of its own, or one of the process."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return SIZE

    def noise(self) -> float:
        if isinstance(self.source, torch.Generator):
            return float(torch.rand((), generator=self.source))
        return float(self.source.random()) if self.source is not None else float(torch.rand(()))

    def __getitem__(self, index: int) -> Any:
        return index, features(index, self.noise())


class Stream(IterableDataset[Any]):
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(SIZE):
            index = self.rng.randrange(1000)
            yield index, features(index, self.rng.random())


class Counting(Sampler[int]):
    """Counts its own epochs, as nobody calls set_epoch."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch = seed, 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        order = random.Random(1000 * self.seed + self.epoch)
        return iter(order.sample(range(SIZE), SIZE))

    def __len__(self) -> int:
        return SIZE


class Drawing(Sampler[int]):
    """Draws indices one by one from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = numpy.random.default_rng(seed)

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(self.rng.integers(SIZE))

    def __len__(self) -> int:
        return SIZE


def shuffled(source: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Rows(source), BATCH, shuffle=True, **options)


def seeded(rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(50 + rank)


CASES: dict[str, Callable[[int], Iterable[Any]]] = {
    "persistent": lambda r: shuffled(num_workers=1, persistent_workers=True),
    "persistent, own generator in two workers": lambda r: shuffled(
        numpy.random.default_rng(r), num_workers=2, persistent_workers=True
    ),
    "workers that draw": lambda r: shuffled(random.Random(r), num_workers=2),
    "generator in the batch sampler": lambda r: DataLoader(
        Rows(None), batch_sampler=BatchSampler(Drawing(r), BATCH, True)
    ),
    "counts its own epochs": lambda r: DataLoader(Rows(None), BATCH, sampler=Counting(r)),
    "dataset with random": lambda r: shuffled(random.Random(r)),
    "dataset with numpy": lambda r: shuffled(numpy.random.default_rng(r)),
    "dataset with torch": lambda r: shuffled(seeded(r)),
    "iterable": lambda r: DataLoader(Stream(r), BATCH),
    "iterable, pulled by the step": lambda r: DataLoader(Stream(r), BATCH),
    "drawn by the script": lambda r: [torch.zeros(1)] * STEPS,
    "workers, pulled by the step": lambda r: shuffled(random.Random(r), num_workers=1),
}


def main(args: argparse.Namespace) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.2), nn.Linear(16, WIDTH))
    torch.manual_seed(100 + rank)
    random.seed(rank)
    ddp = nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    history: list[Any] = []
    ks = keepstep.attach(ddp, sgd)
    ks.register(
        "history",
        lambda: list(history),
        lambda s: history.__setitem__(slice(None), s),
        per_rank=True,
    )
    gen = seeded(rank)
    loader = CASES[args.case](rank)
    pulled = "pulled" in args.case

    @ks.step
    def train(given: Any) -> None:
        if pulled:
            given = next(given)
        if args.case == "drawn by the script":
            ids = torch.randint(SIZE, (BATCH,), generator=gen)
            given = ids, torch.stack([features(int(i), 0.0) for i in ids])
        ids, x = given
        sgd.zero_grad()
        loss = nn.functional.mse_loss(ddp(x + random.random() * 1e-3), x.roll(1, 1))
        loss.backward()
        history.append([ks.committed_step, ids.tolist(), loss.item()])
        sgd.step()

    for epoch in ks.epochs(3):
        batches = ks.batches(loader)
        if pulled:
            while ks.committed_step < (epoch + 1) * STEPS:
                train(batches)
        else:
            for batch in batches:
                train(batch)
    dist.barrier()
    finish(args, rank, net, history, [gen.get_state().tolist(), random.random()])


def finish(args: argparse.Namespace, rank: int, net: Any, history: Any, streams: Any) -> None:
    state = {
        "model": {k: v.numpy().tobytes().hex() for k, v in net.state_dict().items()},
        "samples": [[step, ids] for step, ids, _ in history],
        "losses": [loss for _, _, loss in history],
        "streams": [streams, torch.get_rng_state().tolist(), repr(random.getstate())],
    }
    digest = hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
    target = Path(args.out) / f"rank-{rank}.json"
    target.with_suffix(".tmp").write_text(json.dumps({"sha256": digest, "state": state}))
    target.with_suffix(".tmp").rename(target)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--case", required=True, choices=CASES)
    main(parser.parse_args())
