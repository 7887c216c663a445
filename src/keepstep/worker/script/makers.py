"""Which node stands for a value, by its type: a node class, LEAF (plain and immutable) or OPAQUE
(left alone)."""

from __future__ import annotations

import argparse
import io
import types
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, Final

import numpy
import torch

from keepstep.worker.script import frames, graph, iterators, values
from keepstep.worker.script.contents import Blob, Items, IteratorNode
from keepstep.worker.script.frame_names import FrameNames
from keepstep.worker.script.memory_files import MemoryFile
from keepstep.worker.script.namespaces import (
    ClassNames,
    DictNames,
    FunctionNames,
    Holder,
    Nothing,
    SlotNames,
    inside_function,
)
from keepstep.worker.script.nodes import LEAF, OPAQUE, Graph, VariableNode
from keepstep.worker.script.torch_names import DataNames, NetworkNames, OptimizerNames

_BAGS: Final = (types.SimpleNamespace, argparse.Namespace)
_LISTS: Final = (list, deque)
_DATA: Final = tuple(f"torch.utils.data.{name}" for name in ("dataset", "sampler", "distributed"))
_DICTS: Final = (dict, OrderedDict, Counter, defaultdict)


def maker_of(kind: type) -> Any:
    if kind in _DICTS or kind in _LISTS or kind is set:
        return Items
    if kind in (torch.Tensor, torch.nn.Parameter, numpy.ndarray, bytearray, array):
        return Blob
    if kind is io.BytesIO or kind is io.StringIO:
        return MemoryFile
    if kind is types.GeneratorType:
        return FrameNames
    if kind is types.BuiltinFunctionType or kind is numpy.ufunc:
        return values.home_of
    if kind in iterators.KINDS or iterators.is_unset(kind):
        return IteratorNode
    if issubclass(kind, tuple):
        return tuple
    if values.is_leaf_type(kind) or kind is frozenset:
        return LEAF
    if issubclass(kind, torch.nn.Module):
        return NetworkNames
    if kind is types.FunctionType:
        return _function_maker
    if issubclass(kind, type):
        return _class_maker
    if issubclass(kind, torch.optim.Optimizer) and not graph.user_code(kind):
        return OptimizerNames
    if kind in _BAGS or graph.user_code(kind) or graph.helper(kind):
        if issubclass(kind, dict | list | set | deque):
            return Items
        return DictNames if kind.__dictoffset__ and not _slotted(kind) else SlotNames
    if kind.__module__ in _DATA:
        return DataNames
    if kind is types.MethodType or graph._entered(kind, False) or kind.__name__ == "partial":
        return Holder
    return OPAQUE


def _slotted(kind: type) -> bool:
    return any(vars(base).get("__slots__") for base in kind.__mro__)


def _function_maker(graph_: Graph, value: Any, label: str, depth: int) -> VariableNode:
    own = frames.origin(value.__code__.co_filename) != "skipped"
    if value.__dict__ or (own and inside_function(value)):
        return FunctionNames(graph_, value, label, depth)
    return Nothing(graph_, value, label, depth)


def _class_maker(graph_: Graph, value: Any, label: str, depth: int) -> VariableNode:
    kind = ClassNames if graph.user_code(value) else Nothing
    return kind(graph_, value, label, depth)
