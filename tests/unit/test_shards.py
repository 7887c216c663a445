"""Classes of replicas, as every rank of a world would compute them by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from keepstep.errors import RemoteProtocolError
from keepstep.worker.state import codec, shards
from keepstep.worker.state.replicated import StateSet
from keepstep.worker.state.shards import PLAIN, Replicas

WORLD = 4


@contextmanager
def seated(rank: int, world: int = WORLD) -> Iterator[Replicas]:
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield Replicas(rank, world)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        shards._meshes.clear()
        shards._keys.clear()


def on_all_ranks(make: Callable[[], torch.Tensor]) -> list[tuple[str, tuple[int, ...]]]:
    found = []
    for rank in range(WORLD):
        with seated(rank) as replicas:
            name = replicas.of(make())
            found.append((name, replicas.ranks[name]))
    return found


def sharded(*names: str, shape: tuple[int, ...], placements: list[Any]) -> torch.Tensor:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return distribute_tensor(torch.ones(8, 8), mesh, placements, src_data_rank=None)


def test_every_shard_of_one_dimension_is_alone() -> None:
    found = on_all_ranks(lambda: sharded("dp", shape=(4,), placements=[Shard(0)]))
    assert [ranks for _, ranks in found] == [(0,), (1,), (2,), (3,)]
    assert len({name for name, _ in found}) == 4


def test_a_dimension_of_replicas_pairs_equal_shards() -> None:
    found = on_all_ranks(
        lambda: sharded("r", "s", shape=(2, 2), placements=[Replicate(), Shard(0)])
    )
    assert [ranks for _, ranks in found] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert found[0][0] == found[2][0] != found[1][0] == found[3][0]


def test_replicated_on_the_whole_mesh() -> None:
    found = on_all_ranks(
        lambda: sharded("r", "s", shape=(2, 2), placements=[Replicate(), Replicate()])
    )
    assert {ranks for _, ranks in found} == {(0, 1, 2, 3)} and len({n for n, _ in found}) == 1


def test_two_layouts_of_one_group_of_ranks_are_different_classes() -> None:
    rows = on_all_ranks(lambda: sharded("a", "b", shape=(2, 2), placements=[Shard(0), Shard(1)]))
    columns = on_all_ranks(lambda: sharded("b", "a", shape=(2, 2), placements=[Shard(1), Shard(0)]))
    assert not {name for name, _ in rows} & {name for name, _ in columns}


def test_replicas_on_the_own_node_do_not_count_in_a_job_of_several_nodes() -> None:
    with seated(0) as replicas:
        name = replicas.of(sharded("s", "r", shape=(2, 2), placements=[Shard(0), Replicate()]))
        assert replicas.ranks[name] == (0, 1)
        assert not replicas.elsewhere(name, local_world=2)
        assert replicas.elsewhere(name, local_world=1)
        assert replicas.elsewhere(name, local_world=4)  # there is one node only
        assert replicas.elsewhere(PLAIN, local_world=2)
        assert not replicas.elsewhere(replicas.unique, local_world=4)


def test_plain_tensors_are_what_the_comparison_at_attach_said() -> None:
    with seated(1) as replicas:
        tensor = torch.ones(2)
        assert replicas.of(tensor) == PLAIN and not replicas.described(tensor)
        replicas.plain_equal = False
        assert replicas.of(tensor) == replicas.unique


def test_parameters_under_ddp_belong_to_its_group_but_for_ignored_ones() -> None:
    with seated(2) as replicas:
        net = nn.Linear(2, 2)
        ddp = nn.parallel.DistributedDataParallel(net)
        ddp.parameters_to_ignore = {"bias"}
        replicas.wrapped_by_ddp([ddp])
        assert replicas.ranks[replicas.of(net.weight)] == (0, 1, 2, 3)
        assert replicas.of(torch.zeros(2, 2), net.weight) == replicas.of(net.weight)
        assert replicas.of(net.bias) == PLAIN
        known = replicas.of(net.weight)
        dist.destroy_process_group()  # as scripts do at their end
        replicas.wrapped_by_ddp([ddp])
        assert replicas.of(net.weight) == known


def test_a_sharded_tensor_survives_the_codec() -> None:
    with seated(3):
        before = sharded("dp", shape=(4,), placements=[Shard(0)])
        shards.note_meshes([before])
        after = codec.loads_inline(codec.dumps_inline({"x": before}))["x"]
        assert after.placements == before.placements and after.shape == before.shape
        assert torch.equal(after.to_local(), before.to_local())
        data = codec.dumps_inline(before)
    with pytest.raises(RemoteProtocolError, match="mesh that this rank has not built"):
        codec.loads_inline(data)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10)
        self.plain = nn.Linear(10, 3)


def sharded_net() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    net = Net()
    parallelize_module(net, mesh["tp"], {"up": ColwiseParallel()}, src_data_rank=None)
    fully_shard(net, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return net, optimizer


def test_sharded_state_is_taken_from_a_rank_of_the_same_classes() -> None:
    with seated(0) as replicas:
        net, optimizer = sharded_net()
        source = StateSet({"m": net}, {"o": optimizer}, {}, replicas)
        exported = source.export()
        twin, other = sharded_net()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        target = StateSet({"m": twin}, {"o": other}, {}, replicas)
        landing = target.prepare_import(exported.meta)
        assert target.missing == set()
        for name, place in landing.items():
            place.copy_(exported.tensors[name])
        target.finish_import()
        assert target.digest() == source.digest()


def test_what_no_source_has_is_named() -> None:
    with seated(0) as replicas:
        net, optimizer = sharded_net()
        meta = StateSet({"m": net}, {"o": optimizer}, {}, replicas).export().meta
    with seated(3) as replicas:
        net, optimizer = sharded_net()
        target = StateSet({"m": net}, {"o": optimizer}, {}, replicas)
        landing = target.prepare_import(meta)
        assert target.missing == {f"model/m/{name}" for name, _ in net.named_parameters()}
        assert not [name for name in landing if name.startswith("model/")]
