"""Parts of a periodic checkpoint: written by each rank alone, sealed by one, read by all."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from keepstep.errors import PermanentError
from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.worker.checkpoint import checkpoint, periodic
from keepstep.worker.checkpoint.periodic import Periodic, owners_of, prefix
from keepstep.worker.state.objects import Registered
from keepstep.worker.state.replicated import StateSet
from keepstep.worker.state.shards import Replicas
from keepstep.worker.state.statefile import DigestMismatch

WORLD = 3


def state(seed: int, extra: dict[str, Any] | None = None) -> StateSet:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Conv1d(5, 5, 1))
    model[2].weight.data = model[2].weight.data.permute(1, 0, 2)  # dense, but not contiguous
    model.register_buffer("empty", torch.zeros(0))
    model.register_buffer("small", torch.ones(3, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * seed
    optimizer.step()
    optimizer.zero_grad()
    kept: dict[str, Any] = extra if extra is not None else {}
    objects = {"keepstep/results": Registered("keepstep/results", lambda: dict(kept), kept.update)}
    return StateSet({"0": model}, {"0": optimizer}, objects)


class Rank:
    def __init__(self, rank: int, directory: Path, seed: int = 1) -> None:
        self.said: list[Any] = []
        self.heard = threading.Event()
        held = {9: f"side {rank}".encode(), -1: f"init {rank}".encode()}
        self.results = {"loss": torch.tensor(float(rank))}
        self.live: Any = SimpleNamespace(
            rank=rank,
            world=WORLD,
            tick=9,
            version=8,
            state=state(seed, self.results),
            replicas=Replicas(rank, WORLD),
            page=SimpleNamespace(held=held.get),
            channel=SimpleNamespace(send=self._send, inbox=SimpleNamespace(snapshot=-1)),
        )
        self.periodic = Periodic(self.live, str(directory))

    def _send(self, message: Any) -> None:
        self.said.append(message)
        self.heard.set()

    def last(self) -> Any:
        assert self.heard.wait(30)
        self.heard.clear()
        return self.said[-1]


def take(ranks: list[Rank], number: int = 5) -> list[Any]:
    for rank in ranks:
        rank.periodic.take(number)
    return [rank.last() for rank in ranks]


@pytest.fixture
def ranks(tmp_path: Path) -> list[Rank]:
    return [Rank(rank, tmp_path / "job") for rank in range(WORLD)]


def sealed(ranks: list[Rank], number: int = 5, keep: tuple[str, ...] = ()) -> Path:
    take(ranks, number)
    tick = ranks[0].live.tick
    ranks[1].periodic.seal(commands.Seal(number=number, tick=tick, world=WORLD, keep=list(keep)))
    answer = ranks[1].last()
    assert isinstance(answer, m.Sealed), answer
    return Path(answer.path)


def test_what_is_read_is_what_was_there(ranks: list[Rank]) -> None:
    directory = sealed(ranks)
    assert checkpoint.tick_of(str(directory)) == 9
    for rank in range(WORLD):
        results: dict[str, Any] = {}
        fresh = state(2, results)
        assert fresh.digest() != ranks[rank].live.state.digest()
        read, missing = checkpoint.read_state(str(directory), rank, fresh)
        assert read > 0 and not missing
        assert fresh.digest() == ranks[rank].live.state.digest()
        assert results["loss"].item() == rank, "what differs between ranks is each one's own"
        assert checkpoint.read_side(str(directory), rank, "side") == f"side {rank}".encode()
        assert checkpoint.read_side(str(directory), rank, "init") == f"init {rank}".encode()


def test_what_all_ranks_hold_is_written_once(ranks: list[Rank]) -> None:
    said = take(ranks)
    assert all(isinstance(one, m.Saved) and one.snapshot_ns > 0 for one in said), said
    assert [(one.number, one.tick, one.version) for one in said] == [(5, 9, 8)] * WORLD
    total = ranks[0].live.state.export().bytes_total
    assert sum(one.bytes_written for one in said) == total + (WORLD - 1) * 4
    assert all(one.bytes_written for one in said), "and everybody has a share"


def test_pytorch_can_read_it(ranks: list[Rank]) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    directory = sealed(ranks)
    tensors = ranks[0].live.state.export().tensors
    name = "model/0/0.weight"
    found = {name: torch.zeros_like(tensors[name])}
    load(found, checkpoint_id=directory / "state", no_dist=True)
    assert torch.equal(found[name], tensors[name])


def test_the_snapshot_is_of_the_boundary_whatever_training_does_then(ranks: list[Rank]) -> None:
    before = ranks[0].live.state.digest()
    gate = threading.Event()
    real = periodic.write_part

    def slow(*args: Any) -> int:
        assert gate.wait(30)
        return real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(periodic, "write_part", slow)
        for rank in ranks:
            rank.periodic.take(5)
            with torch.no_grad():
                for parameter in rank.live.state.models["0"].parameters():
                    parameter.add_(1)
        ranks[0].periodic.take(6)  # while the last one is not finished
        skipped = ranks[0].last()
        gate.set()
        assert all(isinstance(rank.last(), m.Saved) for rank in ranks)
    assert isinstance(skipped, m.SaveFailed) and "still being written" in skipped.error
    ranks[0].periodic.seal(commands.Seal(number=5, tick=9, world=WORLD))
    fresh = state(2)
    checkpoint.read_state(ranks[0].last().path, 0, fresh)
    assert fresh.digest() == before


def test_a_number_is_taken_once(ranks: list[Rank]) -> None:
    ranks[0].live.channel.inbox.snapshot = 5
    take(ranks[:1])
    assert ranks[0].live.channel.inbox.snapshot == -1
    ranks[0].periodic.take(5)
    ranks[0].periodic.take(4)
    assert len(ranks[0].said) == 1


def test_a_part_that_is_missing_makes_no_checkpoint(ranks: list[Rank]) -> None:
    take(ranks[:2])
    ranks[0].periodic.seal(commands.Seal(number=5, tick=9, world=WORLD))
    answer = ranks[0].last()
    assert isinstance(answer, m.SaveFailed) and "rank-2.part" in answer.error


def test_a_part_of_an_earlier_one_makes_no_checkpoint(ranks: list[Rank], tmp_path: Path) -> None:
    take(ranks, 4)
    take(ranks[:2], 5)
    with pytest.raises(PermanentError, match="rank 2 for another checkpoint"):
        periodic.seal(tmp_path / "job" / "checkpoint-9", 5, WORLD)


def test_tensors_that_differ_between_ranks_are_named(tmp_path: Path) -> None:
    ranks = [Rank(rank, tmp_path / "job") for rank in range(WORLD)]
    other = nn.Linear(9, 9)
    ranks[2].live.state = StateSet({"0": other}, {}, {})
    take(ranks)
    with pytest.raises(PermanentError, match="is a tensor that"):
        periodic.seal(tmp_path / "job" / "checkpoint-9", 5, WORLD)


def test_only_the_last_two_are_kept(ranks: list[Rank]) -> None:
    paths: list[Path] = []
    for number in range(4):
        for rank in ranks:
            rank.live.tick = 9 + number
            rank.live.page = SimpleNamespace(held=lambda tick: b"x")
        paths.append(sealed(ranks, number + 5, tuple(map(str, paths[-1:]))))
    assert [path.exists() for path in paths] == [False, False, True, True]


def test_what_was_never_sealed_is_removed(ranks: list[Rank], tmp_path: Path) -> None:
    take(ranks)
    old = tmp_path / "job" / "checkpoint-9"
    assert old.exists()
    for rank in ranks:
        rank.live.tick = 11
    take(ranks, 6)
    assert not old.exists()


def test_a_disk_that_fails_is_said_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "job").write_text("a file where a directory is needed")
    rank = Rank(0, tmp_path / "job")
    (answer,) = take([rank])
    assert isinstance(answer, m.SaveFailed) and answer.error
    assert (tmp_path / "job").read_text()


def test_damage_is_noticed(ranks: list[Rank]) -> None:
    directory = sealed(ranks)
    index = msgspec.msgpack.decode((directory / "index").read_bytes())
    for piece in index:
        piece["digest"] = bytes(16)
    (directory / "index").write_bytes(msgspec.msgpack.encode(index))
    with pytest.raises(DigestMismatch, match="another digest"):
        checkpoint.read_state(str(directory), 0, state(2))


def test_the_manifest_comes_last(ranks: list[Rank]) -> None:
    take(ranks)
    directory = ranks[0].periodic._directory / "checkpoint-9"
    assert not (directory / "manifest.json").exists()
    assert sealed(ranks, 6) == directory
    manifest = json.loads((directory / "manifest.json").read_bytes())
    assert (manifest["tick"], manifest["step"], manifest["world"]) == (9, 8, WORLD)


def test_the_work_is_shared_out_in_the_same_way_everywhere() -> None:
    sizes = {f"model/{i}": 100 - i for i in range(50)}
    owners = owners_of(sizes, (3, 4, 6, 7))
    loads = [sum(size for n, size in sizes.items() if owners[n] == r) for r in (3, 4, 6, 7)]
    assert max(loads) - min(loads) <= 100
    assert owners_of(dict(reversed(sizes.items())), (3, 4, 6, 7)) == owners
    more = owners_of({**sizes, "object/x/0": 10**9}, (3, 4, 6, 7))
    assert {name: more[name] for name in owners} == owners, "whatever objects a rank has"
    assert more["object/x/0"] in (3, 4, 6, 7)


def test_names_say_which_ranks_share_a_tensor() -> None:
    assert prefix((0, 1, 2), 3) == ""
    assert prefix((1,), 3) == "rank-1/"
    assert prefix((0, 2), 3) == "rank-0-2/"
    many = prefix(range(9), 16)
    assert many.startswith("ranks-") and many != prefix(range(1, 10), 16)
