"""What a rank's state is: the export of models, optimizers and registered objects.

See replicated.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer

from keepstep.errors import UsageError
from keepstep.worker.device.digest import digest
from keepstep.worker.state import codec, fsdp, gradients, shards
from keepstep.worker.state.shards import Replicas
from keepstep.worker.state.tensors import describe, identity, memory, on_cpu

GRADIENT_BYTES_MAX = 256 << 20  # of gradients that travel although none is known to be used again


class Registrable(Protocol):
    own: set[int]

    def save(self) -> Any: ...
    def load(self, state: Any) -> None: ...
    def own_tensors(self) -> dict[int, Tensor]: ...
    def put_own(self, values: dict[int, Tensor]) -> None: ...


@dataclass(frozen=True)
class Exported:
    """References to live tensors: valid while the rank holds still."""

    tensors: dict[str, Tensor]  # what is here of each
    meta: bytes
    classes: dict[str, str]  # name -> class
    specs: dict[str, shards.Spec | None] = field(default_factory=dict)  # how each is spread

    @property
    def bytes_total(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Export:
    def __init__(
        self,
        models: dict[str, nn.Module],
        optimizers: dict[str, Optimizer],
        objects: Mapping[str, Registrable],
        replicas: Replicas | None = None,
        ddp: Callable[[], Iterable[Any]] = tuple,
        outliving: Callable[[], bool] = bool,
    ) -> None:
        """`outliving`: whether gradients are known to outlive a step."""
        self.models = models
        self.optimizers = optimizers
        self.objects = objects
        self.replicas = replicas or Replicas(0, 1)
        self._ddp = ddp
        self.outliving = outliving

    def export(self) -> Exported:
        tensors, classes, meta = self._gathered()
        specs = {name: shards.spec(tensor) for name, tensor in tensors.items()}
        meta["table"] = {n: (*describe(t), specs[n], classes[n]) for n, t in tensors.items()}
        parts = {name: shards.local(tensor) for name, tensor in tensors.items()}
        return Exported(parts, codec.dumps_inline(meta), classes, specs)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The tensors of an export and their classes, without how to put them back."""
        tensors, classes, _ = self._gathered()
        return {name: shards.local(tensor) for name, tensor in tensors.items()}, classes

    def _gathered(self) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
        self.replicas.wrapped_by_ddp(self._ddp())
        tensors = self._model_tensors()
        classes = {name: self.replicas.of(tensor) for name, tensor in tensors.items()}
        meta: dict[str, Any] = {
            "optimizers": {o: self._export_optimizer(o, tensors, classes) for o in self.optimizers},
            "objects": {name: self._export_object(name, tensors, classes) for name in self.objects},
        }
        meta["gradients"] = self._export_gradients(tensors, classes)
        return tensors, classes, meta

    def _export_gradients(
        self, tensors: dict[str, Tensor], classes: dict[str, str]
    ) -> dict[str, int]:
        """Those that are alive travel if it is known that gradients outlive a step, or where it is
        cheap: in the first steps it is not known yet."""
        kinds = {name: gradients.kind(p.grad) for name, p in self.parameters()}
        found = {
            name: (p, p.grad)
            for name, p in self.parameters()
            if p.grad is not None and kinds[name] == gradients.ALIVE and not p.grad.is_sparse
        }
        size = sum(shards.local(gradient).nbytes for _, gradient in found.values())
        for name, (parameter, gradient) in found.items():
            if self.outliving() or size <= GRADIENT_BYTES_MAX:
                tensors[f"grad/{name}"] = gradient
                classes[f"grad/{name}"] = self.replicas.of(gradient, parameter)
        return kinds

    def undescribed(self) -> dict[str, Tensor]:
        """Plain tensors of which nobody says how they are spread over the ranks."""
        self.replicas.wrapped_by_ddp(self._ddp())
        found = {n: t for n, t in self._model_tensors().items() if not self.replicas.described(t)}
        for name in self.objects:
            _, tensors = codec.dumps(self.objects[name].save())
            found |= {
                f"object/{name}/{n}": t
                for n, t in enumerate(tensors)
                if not self.replicas.described(t)
            }
        return found

    def classes(self) -> frozenset[str]:
        """Of everything this rank has."""
        self.replicas.wrapped_by_ddp(self._ddp())
        found = {self.replicas.of(tensor) for tensor in self._model_tensors().values()}
        for name in self.objects:
            found |= {self.replicas.of(t) for t in codec.dumps(self.objects[name].save())[1]}
        return frozenset(found)

    def named_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers, shared ones once; sharded ones as DTensors."""
        return self._model_tensors()

    def _model_tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        seen: set[Any] = set()
        for model, module in self.models.items():
            fsdp.reshard(module)
            for named in (module.named_parameters(), module.named_buffers()):
                for name, tensor in named:
                    key = identity(shards.local(tensor))
                    if key not in seen:
                        seen.add(key)
                        tensors[f"model/{model}/{name}"] = tensor
        return tensors

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        seen: set[int] = set()
        for model, module in self.models.items():
            for name, parameter in module.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"model/{model}/{name}", parameter

    def _export_optimizer(
        self, name: str, tensors: dict[str, Tensor], classes: dict[str, str]
    ) -> dict[str, Any]:
        """Entry by entry: a newcomer may take those of its parameters from several sources."""
        optimizer = self.optimizers[name]
        index = {id(parameter): i for i, parameter in enumerate(flat(optimizer))}
        entries: dict[int, Any] = {}
        for parameter, entry in optimizer.state.items():
            if id(parameter) not in index:
                raise UsageError(
                    f"optimizer {name} keeps state for something that is none of its parameters",
                    hint="remove it, or carry it with ks.register(name, save, load)",
                )
            i = index[id(parameter)]
            data, found = codec.dumps(entry)
            keys = {id(v): k for k, v in entry.items()} if isinstance(entry, dict) else {}
            full = [f"optim/{name}/{i}/{keys.get(id(t), f'#{n}')}" for n, t in enumerate(found)]
            tensors |= zip(full, found, strict=True)
            classes |= {
                key: self.replicas.of(t, parameter) for key, t in zip(full, found, strict=True)
            }
            entries[i] = {"data": data, "tensors": full, "of": self.replicas.of(parameter)}
        hyper = [
            {key: value for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        data, found = codec.dumps(hyper)
        full = [f"optim/{name}/group/{n}" for n in range(len(found))]
        tensors |= zip(full, found, strict=True)
        classes |= {key: self.replicas.of(t) for key, t in zip(full, found, strict=True)}
        return {
            "entries": dict(sorted(entries.items())),
            "sizes": [len(group["params"]) for group in optimizer.param_groups],
            "names": self.group_names(optimizer),
            "groups": {"data": data, "tensors": full},
        }

    def group_names(self, optimizer: Optimizer) -> list[list[str]]:
        names = {id(p): name for name, p in self.parameters()}
        return [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]

    def _export_object(
        self, name: str, tensors: dict[str, Tensor], classes: dict[str, str]
    ) -> dict[str, Any]:
        data, found = codec.dumps(self.objects[name].save())
        full = [f"object/{name}/{n}" for n in range(len(found))]
        tensors |= zip(full, found, strict=True)
        classes |= {key: self.replicas.of(t) for key, t in zip(full, found, strict=True)}
        return {"data": data, "tensors": full}

    # -- digest

    def fingerprint(self) -> dict[str, bytes]:
        """Digests of everything a replica shares, by name: of tensors, of what else objects and
        optimizers have, and of all that is no tensor under "meta"."""
        exported = self.export()
        found = {
            name: digest(tensor)
            if tensor.device.type != "cpu"
            else xxhash.xxh3_128_digest(memory(on_cpu(tensor)))
            for name, tensor in exported.tensors.items()
        }
        meta = codec.loads_inline(exported.meta)
        for kind in ("object", "optimizer"):
            for name, entry in meta[f"{kind}s"].items():
                found[f"{kind} {name}"] = xxhash.xxh3_128_digest(codec.dumps_inline(entry))
        return {**found, "meta": xxhash.xxh3_128_digest(exported.meta)}

    def digest(self) -> str:
        """sha256 over everything, for tests and demonstrations."""
        exported = self.export()
        digest = hashlib.sha256(exported.meta)
        for name in sorted(exported.tensors):
            digest.update(name.encode())
            digest.update(memory(on_cpu(exported.tensors[name])))
        return digest.hexdigest()


def flat(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
