"""How a tensor is spread over the ranks: the part that is here, and who else has the same bytes.

A DTensor says itself how it is spread: by its mesh and by one placement per dimension of it. Two
ranks hold the same bytes of it if they have the same coordinate in every dimension that is not
replicated. A plain tensor under DistributedDataParallel is the same in that module's group. About
any other plain tensor nothing is known; `Replicas.plain_equal` is what was found when the ranks
compared theirs at attach.

A *class* names such a set of ranks (a digest, short enough to be said in every Held). Equal class
and equal name on two ranks: equal bytes at every boundary. That is all that recovery needs to know
about layouts; what a class has only one rank of must be kept elsewhere (redundancy.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
import xxhash
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from keepstep.errors import RemoteProtocolError, UsageError

Spec = tuple[str, tuple[Any, ...], tuple[int, ...], tuple[int, ...]]
"""Of a DTensor: mesh, placements, global shape and strides."""

PLAIN: Final = "plain"  # class of plain tensors that no wrapper describes, equal on all ranks

_meshes: dict[str, Any] = {}
_keys: dict[Any, str] = {}  # by mesh: equal ones are one


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes that are here."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def spec(tensor: torch.Tensor) -> Spec | None:
    if not isinstance(tensor, DTensor):
        return None
    placements = tuple(_packed(placement) for placement in tensor.placements)
    return mesh_key(tensor.device_mesh), placements, tuple(tensor.shape), tuple(tensor.stride())


def wrap(part: torch.Tensor, described: Spec | None) -> torch.Tensor:
    """The inverse of `local`. Meshes are those that this process has built itself."""
    if described is None:
        return part
    key, placements, shape, stride = described
    if key not in _meshes:
        raise RemoteProtocolError(
            "a sharded tensor lies on a device mesh that this rank has not built",
            hint="all ranks must build the same meshes, and shard their models with them",
        )
    return DTensor.from_local(
        part,
        _meshes[key],
        [_unpacked(placement) for placement in placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(stride),
    )


def empty_local(described: Spec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for this rank's part of such a tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    key, placements, shape, _ = described
    size, _ = compute_local_shape_and_global_offset(
        torch.Size(shape), _meshes[key], [_unpacked(placement) for placement in placements]
    )
    return torch.empty(size, dtype=dtype, device=device)


def box(described: Spec) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Sizes and offsets of this rank's part in the whole tensor; None: it is no part of it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    key, packed, shape, _ = described
    placements = [_unpacked(placement) for placement in packed]
    if any(placement.is_partial() for placement in placements):
        return None
    size, offset = compute_local_shape_and_global_offset(
        torch.Size(shape), _meshes[key], placements
    )
    return tuple(size), tuple(offset)


def mesh_ranks(described: Spec) -> tuple[int, ...]:
    return tuple(sorted(_meshes[described[0]].mesh.flatten().tolist()))


def mesh_key(mesh: Any) -> str:
    key = _keys.get(mesh)
    if key is None:
        digest = xxhash.xxh3_64(repr((mesh.device_type, mesh.mesh_dim_names)).encode())
        digest.update(repr(tuple(mesh.mesh.shape)).encode())
        digest.update(mesh.mesh.to(torch.int64).contiguous().numpy().tobytes())
        key = _keys[mesh] = digest.hexdigest()
        _meshes.setdefault(key, mesh)
    return key


def note_meshes(tensors: Iterable[torch.Tensor]) -> None:
    """What arrives later may lie on these."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            mesh_key(tensor.device_mesh)


def _packed(placement: Any) -> Any:
    if isinstance(placement, _StridedShard):
        return ("strided", placement.dim, placement.split_factor)
    if isinstance(placement, Shard):
        return ("shard", placement.dim)
    if isinstance(placement, Replicate):
        return ("replicate",)
    if isinstance(placement, Partial):
        return ("partial", placement.reduce_op)
    raise UsageError(
        f"a tensor has the placement {placement!r}, which Keepstep does not know",
        hint="Shard, Replicate and Partial can be carried to another process",
    )


def _unpacked(packed: Any) -> Any:
    match tuple(packed):
        case ("strided", dim, factor):
            return _StridedShard(dim, split_factor=factor)
        case ("shard", dim):
            return Shard(dim)
        case ("partial", op):
            return Partial(op)
        case _:
            return Replicate()


class Replicas:
    """The classes of this rank's tensors."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.plain_equal = True
        self.ranks: dict[str, tuple[int, ...]] = {PLAIN: tuple(range(world))}
        self.unique = self._named("unique", (rank,))
        self._grouped: dict[int, str] = {}  # id of a tensor under DDP -> class
        self._known: dict[tuple[Any, Any], str] = {}  # mesh and placements -> class

    def wrapped_by_ddp(self, modules: Iterable[Any]) -> None:
        grouped: dict[int, str] = {}
        for ddp in modules:
            try:
                ranks = tuple(sorted(dist.get_process_group_ranks(ddp.process_group)))
            except (KeyError, ValueError):
                return  # the script has destroyed its groups: it is over, and all is as it was
            name = self._named("ddp", ranks)
            ignored = set(ddp.parameters_to_ignore)
            for key, tensor in (*ddp.module.named_parameters(), *ddp.module.named_buffers()):
                if key not in ignored:
                    grouped[id(tensor)] = name
        self._grouped = grouped

    def of(self, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> str:
        """The class of `tensor`, or of what an optimizer keeps for `parameter`."""
        for one in (tensor, parameter):
            if isinstance(one, DTensor):
                return self._of_mesh(one)
        grouped = self._grouped.get(id(tensor if parameter is None else parameter))
        if grouped is not None:
            return grouped
        return PLAIN if self.plain_equal else self.unique

    def described(self, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> bool:
        """Somebody says how it is spread."""
        key = id(tensor if parameter is None else parameter)
        return key in self._grouped or any(isinstance(x, DTensor) for x in (tensor, parameter))

    def _of_mesh(self, tensor: Any) -> str:
        mesh, placements = tensor.device_mesh, tensor.placements
        known = self._known.get((mesh, placements))
        if known is not None:
            return known
        found = (mesh.mesh == self.rank).nonzero()
        if not len(found):  # not one of the mesh's ranks: nothing is here
            return self.unique
        here = found[0].tolist()
        index = tuple(
            slice(None) if placement.is_replicate() else here[dim]
            for dim, placement in enumerate(placements)
        )
        ranks = tuple(sorted(mesh.mesh[index].flatten().tolist()))
        # Different shards may have the same set of ranks: the place in the mesh tells them apart.
        pattern = [None if isinstance(at, slice) else at for at in index]
        name = self._known[mesh, placements] = self._named(mesh_key(mesh), ranks, pattern)
        return name

    def _named(self, *what: Any) -> str:
        name = xxhash.xxh3_64_hexdigest(repr(what).encode())
        self.ranks.setdefault(name, what[1])
        return name

    def elsewhere(self, name: str, local_world: int) -> bool:
        """Another rank has it too; on another node, if the job has several."""
        own, several = self.rank // local_world, len(self.ranks[PLAIN]) > local_world
        return any(
            other != self.rank and (not several or other // local_world != own)
            for other in self.ranks[name]
        )
