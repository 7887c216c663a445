"""The graph of nodes: what is found, where it hangs, and what has changed.

Every type of value has a maker, decided once per type: a node class, LEAF (plain and immutable) or
OPAQUE (left alone). `scan` looks at namespaces whose dicts have changed (versions.py), at
everything that has no version, and at the frames of the running call.
"""

from __future__ import annotations

import functools
import types
from array import array
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy
import torch

from keepstep.worker.script import frames, graph, values
from keepstep.worker.script.blocks import Block
from keepstep.worker.script.contents import Blob, Items, IteratorNode
from keepstep.worker.script.frame_names import FrameNames
from keepstep.worker.script.makers import maker_of
from keepstep.worker.script.namespaces import DictNames, Holder, Names
from keepstep.worker.script.nodes import LEAF, OPAQUE, Graph, VariableNode, suffix
from keepstep.worker.script.reads import Reads
from keepstep.worker.script.torch_names import (
    DataNames,
    NetworkNames,
    OptimizerNames,
    ParameterNames,
    RegisteredNames,
)
from keepstep.worker.script.weight_views import View

DEPTH_MAX: Final = 12
NODES_MAX: Final = 20_000
HELPERS_MAX: Final = 2_000  # of them, in objects of installed packages

# Of tensors whose bytes numpy can look at.
_NUMPY: Final = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
    | {torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128}
)
_CALLED: Final = (types.FunctionType, types.MethodType, type, functools.partial)


def _begins(key: Any, name: Any) -> bool:
    """It is of something in a tuple of this name, or in a tuple inside of it."""
    while key.__class__ is tuple:
        key = key[0]
        if key == name:
            return True
    return False


class Named(Protocol):
    """What is attached, by name."""

    def name_of(self, thing: Any) -> str | None: ...
    def names_by_id(self) -> dict[int, str]: ...
    def owner_of(self, tensor: Any) -> tuple[str, Any] | None: ...
    def named(self, name: str) -> Any: ...


class Nameless:
    def name_of(self, thing: Any) -> str | None:
        return None

    def names_by_id(self) -> dict[int, str]:
        return {}

    def owner_of(self, tensor: Any) -> tuple[str, Any] | None:
        return None

    def named(self, name: str) -> Any:
        raise LookupError(name)


class Discovery(Graph):
    """Finds what hangs in the graph."""

    def __init__(
        self,
        known: Callable[[Any], bool],
        attached: Callable[[torch.Tensor], bool],
        names: Named | None = None,
    ) -> None:
        """`known(thing)`: others carry it; `attached(tensor)`: they carry its memory."""
        super().__init__()
        self.known, self.attached, self.names = known, attached, names or Nameless()
        self.excluded: frozenset[int] = frozenset()  # arguments of the call, which may be large
        self.handed: frozenset[int] = frozenset()  # of these, what ks.batches has handed out
        self.reads = Reads()
        self.read: set[int] = set()  # ids of tensors that steps read now
        self.helpers = 0  # nodes in objects of installed packages
        self._looked_at: list[VariableNode] = []  # without a version: scanned every time
        self._makers: dict[type, Any] = {}
        self._packing: VariableNode | None = None

    # -------------------------------------------------------------- finding

    def root(self, name: str, make: Callable[..., Names], target: Any) -> Names:
        found = self.roots.get(name)
        if found is None:
            found = self.roots[name] = make(self, target, name, 0)
            if not isinstance(found, FrameNames):
                self._register(found)
        assert isinstance(found, Names)
        return found

    def adopt(
        self, value: Any, parent: VariableNode, key: Any, label: str = "", maker: Any = None
    ) -> Any:
        """A node below `parent`, LEAF, or OPAQUE."""
        kind = value.__class__
        if kind in values.SCALARS:
            return LEAF
        node = self.nodes.get(id(value))
        if isinstance(node, Block) and node.target is not value:  # it was another one's address
            self._drop(node)
            node = None
        if node is None:
            maker = maker or self._makers.get(kind)
            if maker is None:
                maker = self._makers[kind] = maker_of(kind)
            if maker is LEAF:
                return LEAF
            if maker is values.home_of:
                return LEAF if values.home_of(value) else OPAQUE
            if kind is tuple or maker is tuple:
                return self._adopt_tuple(value, parent, key)
            if kind is numpy.ndarray and value.dtype == object and value.ndim == 1:
                maker = Items
            if maker is Blob and self._lies_in_a_weight(value):
                maker = View
            elif maker is Blob and not self._small(value):
                maker = Block if self._may_change(value) else OPAQUE
                if maker is Block and self.records.of(value) is None:
                    self.omit(f"{parent.label} (with its many large tensors)")
                    maker = OPAQUE
            if maker is DictNames and self.known(value):
                optimizer = isinstance(value, torch.optim.Optimizer)
                maker = OptimizerNames if optimizer else RegisteredNames
            if maker is OPAQUE or not self._suits(value, maker):
                return OPAQUE
            helps = parent.helps or graph.helper(kind)
            if helps and isinstance(parent, FrameNames) and parent.foreign():
                return OPAQUE
            if graph.helper(kind) and graph.is_outside(value):
                return OPAQUE
            label = label or f"{parent.label}{suffix(key)}"
            if self._full(parent, helps):
                if (
                    not self.told.cut_at
                    and maker not in (NetworkNames, ParameterNames)
                    and (maker is not Items or value)
                ):
                    self.told.cut_at.append(label)
                return OPAQUE
            node = maker(self, value, label, parent.depth + 1)  # type: ignore[operator]
            node.helps = helps
            self.helpers += helps
            self._register(node)
            node.scan(self)
        looping = parent.still or (parent.depth == 0 and key.__class__ is tuple)
        still = looping and isinstance(node, IteratorNode | FrameNames)
        node.still = still and (node.still or not node.parents)
        node.parents[parent.number, key] = parent
        node.entry = None
        parent.children[key] = node
        return OPAQUE if self._left_alone(node) else node

    def _left_alone(self, node: VariableNode) -> bool:
        """What names lead here is not carried."""
        if isinstance(node, Block):
            return not node.small and (node.address not in self.read or node.too_large(self))
        if isinstance(node, Holder):
            return not isinstance(node.target, _CALLED)
        if isinstance(node, DataNames):
            return bool(node.opaque)
        return isinstance(node, Items) and node.not_plain

    def _suits(self, value: Any, maker: Any) -> bool:
        if maker is Blob or maker is Block or maker is View:
            return True
        if maker is FrameNames:
            return frames.origin(value.gi_code.co_filename) != "skipped"
        if maker is OptimizerNames:
            return self.known(value)
        if maker is NetworkNames or maker is RegisteredNames:
            return True
        return id(value) not in self.handed and not self.known(value)

    def _full(self, parent: VariableNode, helps: bool) -> bool:
        if parent.depth >= DEPTH_MAX or len(self.nodes) >= NODES_MAX:
            return True
        return helps and self.helpers >= HELPERS_MAX

    def leave_alone(self, kind: type) -> None:
        """Loops hand out objects of this class: they are batches, and the walk has them."""
        if graph.helper(kind):
            self._makers[kind] = OPAQUE

    def _small(self, value: Any) -> bool:
        if isinstance(value, bytearray | array):
            return len(value) * getattr(value, "itemsize", 1) <= values.BYTES_MAX
        if isinstance(value, torch.Tensor) and not _plain(value):
            return False
        if value.nbytes > values.BYTES_MAX or id(value) in self.handed:
            return False
        if isinstance(value, torch.Tensor):
            if value.device.type != "cpu" or value.grad_fn is not None or self.known(value):
                return False
            return value.dtype in _NUMPY and not (value.is_conj() or value.is_neg())
        return not value.dtype.hasobject

    def _may_change(self, value: Any) -> bool:
        """Of a tensor or array that is not small."""
        if isinstance(value, bytearray | array) or id(value) in self.excluded:
            return False
        if isinstance(value, torch.Tensor):
            if not _plain(value):
                return False
            # A step that reads it may go back through its graph, which cannot be carried.
            if value.grad_fn is not None and (
                value.nbytes > values.BYTES_MAX or id(value) in self.read
            ):
                return False
            return not (value.is_meta or self.known(value) or self.attached(value))
        return not value.dtype.hasobject and bool(value.flags.writeable)

    def _adopt_tuple(self, value: Any, parent: VariableNode, key: Any) -> Any:
        result: Any = LEAF
        for i, item in enumerate(value):
            if item.__class__ in values.SCALARS:
                continue
            if self.adopt(item, parent, (key, i)) is OPAQUE:
                result = OPAQUE
        return result

    def _register(self, node: VariableNode) -> None:
        self.nodes[id(node.target)] = node
        versioned = isinstance(node, Items) and isinstance(node.target, dict)
        if not versioned and not isinstance(node, DictNames | Holder):
            self._looked_at.append(node)
        if isinstance(node, Blob | Block):
            self.memory.lay(node)

    def release(self, parent: VariableNode, key: Any) -> None:
        """The binding is gone; so is the node, if it was the last."""
        child = parent.children.pop(key, None)
        if child is None:
            for inner in [k for k in parent.children if _begins(k, key)]:
                self.unlink(parent.children.pop(inner), parent, inner)
            return
        self.unlink(child, parent, key)

    def unlink(self, child: VariableNode, parent: VariableNode, key: Any) -> None:
        child.parents.pop((parent.number, key), None)
        child.entry = None
        if not child.parents and self.nodes.get(_address(child)) is child:
            self._drop(child)

    def _drop(self, node: VariableNode) -> None:
        if self.journal is not None:
            node.scan(self)  # it may have changed before it was let go
        self.helpers -= node.helps
        node.helps = False
        self.nodes.pop(_address(node), None)
        self.fleeting.pop(node, None)
        self.left.pop(node, None)
        self.carry.pop(node, None)
        self.memory.move_out(node)
        if isinstance(node, NetworkNames):
            node.unwatch(self)
        if isinstance(node, DictNames):
            self.versions.forget(node.names)
        elif isinstance(node, Items) and isinstance(node.target, dict):
            self.versions.forget(node.target)
        elif node in self._looked_at:
            self._looked_at.remove(node)
        for key in list(node.children):
            self.release(node, key)

    def forget_dead(self, node: VariableNode) -> None:
        """Its object is gone, and nobody has said so."""
        for (_, key), parent in list(node.parents.items()):
            if parent.children.get(key) is node:
                del parent.children[key]
        node.parents.clear()
        for key in list(node.children):
            self.release(node, key)
        if isinstance(node, NetworkNames):
            node.unwatch(self)
        self.fleeting.pop(node, None)
        self.carry.pop(node, None)
        self.helpers -= node.helps
        node.helps = False

    def sweep(self) -> None:
        """Drop what only refers to itself."""
        reached: set[int] = set()
        todo: list[VariableNode] = list(self.roots.values())
        while todo:
            node = todo.pop()
            if node.number not in reached:
                reached.add(node.number)
                todo.extend(node.children.values())
        for node in [n for n in self.nodes.values() if n.number not in reached]:
            self._drop(node)

    # -------------------------------------------------------------- looking

    def scan(self) -> None:
        self.read = self.reads.ids()
        for node in self.versions.changed():
            node.scan(self)
        for node in tuple(self._looked_at):
            node.scan(self)
        for root in self.roots.values():
            if isinstance(root, FrameNames) and root.target is not None:
                root.scan(self)

    def missed(self) -> list[str]:
        """What changes, is not carried, and is read by steps."""
        left = [node for node in self.left if isinstance(node, Items) and node.not_plain]
        read = self.reads.containers() if left else ()
        return sorted(node.label for node in left if id(node.target) in read)

    # -------------------------------------------------------------- packing

    def name_of(self, thing: Any) -> str | None:
        return self.names.name_of(thing) if self.known(thing) else None

    def names_by_id(self) -> dict[int, str]:
        return self.names.names_by_id()

    def owner_of(self, tensor: Any) -> tuple[str, Any] | None:
        return self.names.owner_of(tensor)

    def _lies_in_a_weight(self, value: Any) -> bool:
        if type(value) is not torch.Tensor or not _plain(value) or value.grad_fn is not None:
            return False
        if id(value) in self.excluded or self.known(value) or not self.attached(value):
            return False
        return self.owner_of(value) is not None

    def pack(self, value: Any, node: VariableNode) -> Any:
        self._packing = node
        return values.pack(value, self._refer)

    def _refer(self, value: Any) -> int | None:
        found = self.nodes.get(id(value))
        if found is None:
            return None
        if self._left_alone(found):
            raise values.NotPlain
        assert self._packing is not None
        self._packing.refers.append(found)
        return found.number


def _plain(tensor: torch.Tensor) -> bool:
    """Its elements lie in memory as they are. Sparse tensors do not even know their size."""
    return tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)


def _address(node: VariableNode) -> int:
    return node.address if isinstance(node, Block) else id(node.target)
