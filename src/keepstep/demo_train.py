"""What `keepstep demo` trains: a small character-level GPT on text that it makes up itself.

An ordinary DDP script with the usual sources of state that can differ after a fault: dropout,
AdamW, a learning-rate schedule, a shuffling DistributedSampler, one random stream per rank. At its
end every rank writes digests of all of it. It is started with `keepstep run -m` and imported by
nobody; the command line itself never loads torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import keepstep

SUBJECTS = ["the rank", "a spare", "one node", "the agent", "this step", "the fence", "a batch"]
VERBS = ["waits for", "takes over", "leaves", "follows", "commits", "replays", "remembers"]
CHARACTERS = "abcdefghijklmnopqrstuvwxyz .\n"
CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 48, 96, 4, 3, 4


def make_text(sentences: int = 4000) -> str:
    draw = random.Random(2718)  # its own generator: the text is the same in every process
    lines = []
    for _ in range(sentences):
        first, second = draw.sample(SUBJECTS, 2)
        lines.append(f"{first} {draw.choice(VERBS)} {second}")
    return ".\n".join(lines) + ".\n"


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Pieces of the text and the same shifted by one: predict the next character."""

    def __init__(self, text: str, count: int) -> None:
        index = {character: i for i, character in enumerate(CHARACTERS)}
        self._data = torch.tensor([index[character] for character in text])
        self._starts = torch.linspace(0, len(text) - CONTEXT - 2, count).long()

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        start = int(self._starts[i])
        piece = self._data[start : start + CONTEXT + 1]
        return piece[:-1], piece[1:]


class DemoLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        qkv = self.qkv(self.before_attention(x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=0.1 if self.training else 0.0
        )
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        mixed: Tensor = x + self.mlp(self.before_mlp(x))
        return mixed


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(CHARACTERS), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(DemoLayer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def digest(thing: Any) -> str:
    """sha256 over nested state: tensors by their bytes, everything else by its repr."""
    sha = hashlib.sha256()

    def add(x: Any) -> None:
        if isinstance(x, Tensor):
            sha.update(f"{x.dtype}{tuple(x.shape)}".encode())
            sha.update(x.detach().contiguous().numpy().tobytes())
        elif isinstance(x, dict):
            for key in x:
                sha.update(f"{key}:".encode())
                add(x[key])
        elif isinstance(x, list | tuple):
            sha.update(f"[{len(x)}]".encode())
            for part in x:
                add(part)
        else:
            sha.update(f"{x!r};".encode())

    add(thing)
    return sha.hexdigest()


class DemoPace:
    """Steps take at least `step_s`, ten times that while `slow` exists, no more than they need
    once `hurry` does.

    The demo kills, drains and taints a *running* training. On a fast or a busy machine the few
    steps would be over before a new spare has started, so they wait; waiting changes no number."""

    def __init__(self, folder: Path, step_s: float) -> None:
        self._hurry, self._slow = folder / "hurry", folder / "slow"
        self._step_s = step_s
        self._last_s = 0.0

    def wait(self) -> None:
        while not self._hurry.exists():
            end_s = self._last_s + self._step_s * (10 if self._slow.exists() else 1)
            if time.monotonic() >= end_s:
                break
            time.sleep(0.01)
        self._last_s = time.monotonic()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--steps-per-epoch", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0, help="at least that long")
    return parser.parse_args()


def main() -> None:
    args = parse()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = Gpt()
    # From here on every rank draws its own dropout.
    torch.manual_seed(100 + rank)
    random.seed(100 + rank)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    total = args.epochs * args.steps_per_epoch
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=total)
    data = Windows(make_text(), args.steps_per_epoch * BATCH * world)
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    losses: list[float] = []

    ks = keepstep.attach(model, optimizer, scheduler=schedule)
    ks.register(
        "losses", lambda: list(losses), lambda s: losses.__setitem__(slice(None), s), per_rank=True
    )

    @ks.step
    def train_step(inputs: Tensor, targets: Tensor) -> None:
        logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        losses.append(loss.item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    pace = DemoPace(args.out, args.step_s)
    for epoch in ks.epochs(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in ks.batches(loader):
            pace.wait()
            train_step(inputs, targets)
    dist.barrier()
    write_result(args.out / f"rank-{rank}.json", net, optimizer, schedule, losses)


def write_result(
    target: Path, net: Gpt, optimizer: Any, schedule: Any, losses: list[float]
) -> None:
    result = {
        "digests": {
            "parameters": digest(net.state_dict()),
            "optimizer": digest(optimizer.state_dict()),
            "scheduler": digest(schedule.state_dict()),
            "rng": digest([torch.get_rng_state(), random.getstate()]),
            "losses": digest(losses),
        },
        "steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "parameters": sum(p.numel() for p in net.parameters()),
    }
    draft = target.with_suffix(".tmp")
    draft.write_text(json.dumps(result))
    draft.replace(target)  # a reader never sees half a result


if __name__ == "__main__":
    main()
