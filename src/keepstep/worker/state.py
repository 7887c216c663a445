"""Everything of a rank that is equal on its replicas: models, optimizers, registered objects.

A state is a set of named tensors plus *meta*, one codec document that says how to put them back:

    model/<model>/<parameter or buffer>     optim/<optimizer>/<parameter index>/<key>
    optim/<optimizer>/group/<index>/<key>   optim/<optimizer>/extra/<n>   object/<name>/<n>

Tensors that are the same memory appear once, under the first name. A source exports references to
its live tensors; a newcomer prepares a place for every byte (its own tensor where memory layouts
agree), has them filled from outside, and finishes. Optimizers are filled directly and not by
load_state_dict, which casts and so is not exact. Gradients do not travel: at a boundary they are
absent or about to be zeroed, and only which of the two is kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from keepstep.errors import UsageError
from keepstep.worker import codec

Table = dict[str, tuple[str, tuple[int, ...], tuple[int, ...], str]]


HASHED_BYTES_MAX = 256 << 10
_ticket = itertools.count()


class _Place(NamedTuple):
    name: str
    tensors: dict[str, Any]  # a module's _buffers
    key: str


class Registered(Protocol):
    def save(self) -> Any: ...
    def load(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Exported:
    """References to live tensors: valid while the rank holds still."""

    tensors: dict[str, Tensor]
    meta: bytes

    @property
    def bytes_total(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass
class _Import:
    meta: dict[str, Any]
    # where bytes arrive, and where they belong if that is another tensor
    landing: dict[str, Tensor] = field(default_factory=dict)
    final: dict[str, Tensor] = field(default_factory=dict)


def dense(tensor: Tensor) -> bool:
    """Its bytes are one block of memory without holes, in whatever order of dimensions."""
    plain = not tensor.is_conj() and not tensor.is_neg()
    return plain and (tensor.is_contiguous() or _permuted(tensor))


def _permuted(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size if size != 1 else 1
    return True


def memory(tensor: Tensor) -> memoryview:
    """The bytes of a dense CPU tensor, writable and in place."""
    assert tensor.device.type == "cpu" and dense(tensor)
    if tensor.nbytes == 0:
        return memoryview(bytearray())
    block: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    block.keep = tensor  # the view may be the last to know a temporary
    return memoryview(block).cast("B")


def on_cpu(tensor: Tensor) -> Tensor:
    """Itself if its bytes can be read where they are, else a dense copy."""
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and dense(tensor):
        return tensor
    return tensor.resolve_conj().resolve_neg().cpu().contiguous()


class StateSet:
    def __init__(
        self,
        models: dict[str, nn.Module],
        optimizers: dict[str, Optimizer],
        objects: Mapping[str, Registered],
    ) -> None:
        self.models = models
        self.optimizers = optimizers
        self.objects = objects
        self._import: _Import | None = None
        self._buffers: list[_Place] | None = None

    # -- export

    def export(self) -> Exported:
        tensors = self._model_tensors()
        meta: dict[str, Any] = {
            "optimizers": {name: self._export_optimizer(name, tensors) for name in self.optimizers},
            "objects": {name: self._export_object(name, tensors) for name in self.objects},
            "gradients": [parameter.grad is not None for _, parameter in self._parameters()],
        }
        meta["table"] = {name: describe(tensor) for name, tensor in tensors.items()}
        return Exported(tensors, codec.dumps_inline(meta))

    def _model_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        seen: set[Any] = set()
        for model, module in self.models.items():
            for named in (module.named_parameters(), module.named_buffers()):
                for name, tensor in named:
                    key = _identity(tensor)
                    if key not in seen:
                        seen.add(key)
                        tensors[f"model/{model}/{name}"] = tensor.detach()
        return tensors

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for model, module in self.models.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"model/{model}/{name}", parameter

    def _export_optimizer(self, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        optimizer = self.optimizers[name]
        index = {id(parameter): i for i, parameter in enumerate(_flat(optimizer))}
        names: dict[int, str] = {}
        state: dict[int, Any] = {}
        for parameter, entry in optimizer.state.items():
            if id(parameter) not in index:
                raise UsageError(
                    f"optimizer {name} keeps state for something that is none of its parameters",
                    hint="remove it, or carry it with ks.register(name, save, load)",
                )
            i = index[id(parameter)]
            state[i] = entry
            if isinstance(entry, dict):
                names |= {id(v): f"{i}/{k}" for k, v in entry.items() if isinstance(v, Tensor)}
        groups = []
        for i, group in enumerate(optimizer.param_groups):
            hyper = {key: value for key, value in group.items() if key != "params"}
            groups.append((len(group["params"]), hyper))
            names |= {id(v): f"group/{i}/{k}" for k, v in hyper.items() if isinstance(v, Tensor)}
        data, found = codec.dumps({"state": dict(sorted(state.items())), "groups": groups})
        full = [f"optim/{name}/{names.get(id(t), f'extra/{n}')}" for n, t in enumerate(found)]
        tensors |= {key: t.detach() for key, t in zip(full, found, strict=True)}
        return {"data": data, "tensors": full}

    def _export_object(self, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
        data, found = codec.dumps(self.objects[name].save())
        full = [f"object/{name}/{n}" for n in range(len(found))]
        tensors |= {key: t.detach() for key, t in zip(full, found, strict=True)}
        return {"data": data, "tensors": full}

    # -- import

    def prepare_import(self, meta: bytes) -> dict[str, Tensor]:
        """CPU tensors, each one dense block laid out as in the source, to be filled."""
        parsed = codec.loads_inline(meta)
        table: Table = parsed["table"]
        own = self._model_tensors()
        _require_same_models(own, table)
        for name, tensors in self._existing_optimizer_tensors(parsed).items():
            own.setdefault(name, tensors)
        pending = _Import(parsed)
        for name, (dtype_name, shape, stride, device) in table.items():
            dtype = codec.dtype_named(dtype_name)
            place = own.get(name)
            if place is None or place.dtype != dtype or tuple(place.shape) != shape:
                place = torch.empty_strided(shape, stride, dtype=dtype, device=_device(device))
            pending.final[name] = place
            direct = place.device.type == "cpu" and place.stride() == stride and dense(place)
            pending.landing[name] = (
                place if direct else torch.empty_strided(shape, stride, dtype=dtype)
            )
        self._import = pending
        return dict(pending.landing)

    def _existing_optimizer_tensors(self, meta: dict[str, Any]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in meta["optimizers"]:
            optimizer = self.optimizers.get(name)
            if optimizer is None:
                raise UsageError(f"this rank has no optimizer {name!r}, but the source has one")
            for i, parameter in enumerate(_flat(optimizer)):
                entry = optimizer.state.get(parameter)
                if isinstance(entry, dict):
                    for key, value in entry.items():
                        if isinstance(value, Tensor):
                            found[f"optim/{name}/{i}/{key}"] = value.detach()
        return found

    @torch.no_grad()
    def finish_import(self) -> None:
        """The landing tensors are full: take the state over. Does nothing without an import."""
        pending, self._import = self._import, None
        if pending is None:
            return
        for name, place in pending.final.items():
            if place is not pending.landing[name]:
                place.copy_(pending.landing[name])
        for name, entry in pending.meta["optimizers"].items():
            tree = codec.loads(entry["data"], [pending.final[key] for key in entry["tensors"]])
            _fill_optimizer(name, self.optimizers[name], tree)
        parameters = [parameter for _, parameter in self._parameters()]
        for parameter, present in zip(parameters, pending.meta["gradients"], strict=True):
            parameter.grad = torch.zeros_like(parameter) if present else None
        for name, entry in pending.meta["objects"].items():
            if name not in self.objects:
                raise UsageError(
                    f"the source has a registered object {name!r}, this rank has not",
                    hint="register the same objects on all ranks, before the first step",
                )
            tree = codec.loads(entry["data"], [pending.final[key] for key in entry["tensors"]])
            self.objects[name].load(tree)

    def abandon_import(self) -> None:
        self._import = None

    # -- digest

    def digest(self) -> str:
        """sha256 over everything, for tests and demonstrations."""
        exported = self.export()
        digest = hashlib.sha256(exported.meta)
        for name in sorted(exported.tensors):
            digest.update(name.encode())
            digest.update(memory(on_cpu(exported.tensors[name])))
        return digest.hexdigest()

    # -- buffers that forward mutates: per-rank side state

    def _buffer_places(self) -> list[_Place]:
        # The dictionaries are cached, not the tensors: modules may assign a new one.
        if self._buffers is None:
            seen: set[tuple[int, str]] = set()
            self._buffers = []
            for model, root in self.models.items():
                for prefix, module in root.named_modules():
                    for key in module._buffers:
                        if (id(module), key) not in seen:
                            seen.add((id(module), key))
                            name = (
                                f"model/{model}/{prefix}.{key}"
                                if prefix
                                else f"model/{model}/{key}"
                            )
                            self._buffers.append(_Place(name, module._buffers, key))
        return self._buffers

    def buffer_versions(self) -> dict[str, int]:
        """A number per buffer that changes when its content may have changed."""
        return {
            place.name: _version(place.tensors[place.key])
            for place in self._buffer_places()
            if place.tensors.get(place.key) is not None
        }

    def mutated_buffers(self, baseline: dict[str, int]) -> list[str]:
        now = self.buffer_versions()
        return [name for name, version in now.items() if baseline.get(name) != version]

    def get_buffers(self, names: Iterable[str]) -> dict[str, Tensor]:
        wanted = set(names)
        return {
            place.name: place.tensors[place.key].detach().clone()
            for place in self._buffer_places()
            if place.name in wanted
        }

    @torch.no_grad()
    def set_buffers(self, values: dict[str, Tensor]) -> None:
        for name, tensors, key in self._buffer_places():
            if name not in values:
                continue
            own, value = tensors[key], values[name]
            if own is not None and own.shape == value.shape and own.dtype == value.dtype:
                own.copy_(value)
            else:
                tensors[key] = value.to(own.device if own is not None else value.device, copy=True)


def _version(tensor: Tensor) -> int:
    # Autograd's version counter is not enough: batch_norm writes its running statistics without
    # touching it. So small buffers are compared by content, and those on a GPU, where looking
    # would wait for the device, count as changed every time.
    count = (id(tensor) << 64) + (tensor._version << 32)
    if tensor.nbytes > HASHED_BYTES_MAX or tensor.nbytes == 0:
        return count
    if tensor.device.type != "cpu":
        return count + next(_ticket)
    if dense(tensor):
        return count ^ xxhash.xxh3_64_intdigest(ctypes.string_at(tensor.data_ptr(), tensor.nbytes))
    return count ^ xxhash.xxh3_64_intdigest(bytes(memory(on_cpu(tensor))))


def _flat(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _identity(tensor: Tensor) -> Any:
    if tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def describe(tensor: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...], str]:
    """dtype, shape, strides of its bytes as they travel, kind of device."""
    stride = tensor.stride() if dense(tensor) else _contiguous_stride(tensor.shape)
    name = codec.dtype_name(tensor.dtype)
    return name, tuple(tensor.shape), tuple(stride), tensor.device.type


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _device(kind: str) -> torch.device:
    # The source's index is its own business: a newcomer's current device is its slot's.
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _require_same_models(own: dict[str, Tensor], table: Table) -> None:
    theirs = {name: entry for name, entry in table.items() if name.startswith("model/")}
    hint = "all ranks must build the same model; is its construction seeded or conditional?"
    for name, (dtype, shape, _, _) in theirs.items():
        if name not in own:
            raise UsageError(f"the source has a tensor {name}, this rank has not", hint=hint)
        here = (codec.dtype_name(own[name].dtype), tuple(own[name].shape))
        if here != (dtype, shape):
            raise UsageError(
                f"{name} is {dtype}{list(shape)} at the source and {here[0]}{list(here[1])} here",
                hint=hint,
            )
    for name in own:
        if name not in theirs:
            raise UsageError(f"this rank has a tensor {name}, the source has not", hint=hint)


def _fill_optimizer(name: str, optimizer: Optimizer, tree: dict[str, Any]) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != [size for size, _ in tree["groups"]]:
        raise UsageError(
            f"optimizer {name} has parameter groups of sizes {sizes} here and "
            f"{[size for size, _ in tree['groups']]} at the source",
            hint="all ranks must build the same optimizer",
        )
    parameters = _flat(optimizer)
    optimizer.state.clear()
    for index, entry in tree["state"].items():
        optimizer.state[parameters[index]] = entry
    for group, (_, hyper) in zip(optimizer.param_groups, tree["groups"], strict=True):
        for key in [key for key in group if key != "params" and key not in hyper]:
            del group[key]
        group.update(hyper)


def registered(save: Callable[[], Any], load: Callable[[Any], None]) -> Registered:
    """A Registered made of two functions."""
    return _Functions(save, load)


class _Functions:
    def __init__(self, save: Callable[[], Any], load: Callable[[Any], None]) -> None:
        self._save, self._load = save, load

    def save(self) -> Any:
        return self._save()

    def load(self, state: Any) -> None:
        self._load(state)
