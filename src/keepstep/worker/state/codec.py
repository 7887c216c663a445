"""Nested Python state to bytes and back, without pickle.

State crosses the network and lies in files, and unpickling runs code of the sender's choosing;
so only data travels. Scalars of msgpack are themselves; everything else is an array that begins
with a tag. Tensors are either listed beside the bytes (`dumps`, for state that is moved in place
and in bulk) or embedded (`dumps_inline`, for small side state).

What cannot be encoded is refused by its place in the tree, never approximated.
"""

from __future__ import annotations

import ast
import ctypes
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, Final

import msgspec
import torch
from torch.distributed.tensor import DTensor

from keepstep.errors import RemoteProtocolError, UsageError
from keepstep.worker.device import cuda
from keepstep.worker.state import shards

DEPTH_MAX = 100

_LIST: Final = 0
_TUPLE: Final = 1
_DICT: Final = 2
_SET: Final = 3
_FROZENSET: Final = 4
_BIG_INT: Final = 5
_COMPLEX: Final = 6
_ARRAY: Final = 7
_ARRAY_SCALAR: Final = 8
_TENSOR: Final = 9
_TENSOR_INLINE: Final = 10
_DTYPE: Final = 11
_DEVICE: Final = 12
_SIZE: Final = 13
_RAW_STR: Final = 14
_ORDERED: Final = 15
_COUNTER: Final = 16
_BYTEARRAY: Final = 17
_SHARD_INLINE: Final = 18

_PLAIN = (type(None), bool, float, bytes)
_SEQUENCES: dict[Any, int] = {
    list: _LIST,
    tuple: _TUPLE,
    set: _SET,
    frozenset: _FROZENSET,
    torch.Size: _SIZE,
}
_MAPPINGS: dict[Any, int] = {
    dict: _DICT,
    defaultdict: _DICT,
    OrderedDict: _ORDERED,
    Counter: _COUNTER,
}
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()

EncodeTensor = Callable[[torch.Tensor], list[Any]]


def dumps(tree: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The tree, and its tensors in the order in which they were met (each once)."""
    tensors: list[torch.Tensor] = []
    index: dict[int, int] = {}

    def outside(tensor: torch.Tensor) -> list[Any]:
        if id(tensor) not in index:
            index[id(tensor)] = len(tensors)
            tensors.append(tensor)
        return [_TENSOR, index[id(tensor)]]

    return _encoder.encode(_pack(tree, outside, (), 0)), tensors


def loads(data: bytes, tensors: list[torch.Tensor]) -> Any:
    return _decode(data, tensors)


def dumps_inline(tree: Any, copies: dict[int, torch.Tensor] | None = None) -> bytes:
    """`copies`: of tensors that lie on a device, in host memory, by the id of the original."""
    if copies is None:
        return _encoder.encode(_pack(tree, _inline, (), 0))
    return _encoder.encode(_pack(tree, lambda x: _inline(x, copies.get(id(x))), (), 0))


def loads_inline(data: bytes) -> Any:
    return _decode(data, [])


# ------------------------------------------------------------------------------------- encoding


def _pack(node: Any, tensor: EncodeTensor, path: tuple[Any, ...], depth: int) -> Any:
    kind = type(node)
    if kind in _PLAIN:
        return node
    if kind is int:
        return node if -(1 << 63) <= node < 1 << 64 else [_BIG_INT, hex(node)]
    if kind is str:
        if node.isascii():
            return node
        return _pack_str(node)
    if depth > DEPTH_MAX:
        raise _refused(node, path, f"nested deeper than {DEPTH_MAX} levels, or contains itself")
    if kind in _SEQUENCES:
        tag = _SEQUENCES[kind]
        items = [_pack(item, tensor, (*path, i), depth + 1) for i, item in enumerate(node)]
        if tag in (_SET, _FROZENSET):
            items.sort(key=_encoder.encode)  # equal sets give equal bytes
        return [tag, *items]
    if kind in _MAPPINGS:
        packed: list[Any] = [_MAPPINGS[kind]]
        for key, value in node.items():
            here = (*path, key)
            packed.append(_pack_key(key, tensor, here, depth + 1))
            packed.append(_pack(value, tensor, here, depth + 1))
        return packed
    return _pack_leaf(node, kind, tensor, path)


def _pack_str(node: str) -> Any:
    try:
        node.encode()
    except UnicodeEncodeError:
        return [_RAW_STR, node.encode("utf-8", "surrogatepass")]
    return node


def _pack_key(key: Any, tensor: EncodeTensor, path: tuple[Any, ...], depth: int) -> Any:
    if isinstance(key, torch.Tensor):
        raise _refused(key, path, "a tensor is the key of a dictionary")
    return _pack(key, tensor, path, depth)


def _pack_leaf(node: Any, kind: type, tensor: EncodeTensor, path: tuple[Any, ...]) -> Any:
    if kind in _TENSORS:
        if node.layout is not torch.strided or node.is_quantized or node.device.type == "meta":
            raise _refused(node, path, "only dense tensors with data are supported")
        return tensor(node)
    if kind is complex:
        return [_COMPLEX, node.real, node.imag]
    if kind is bytearray:
        return [_BYTEARRAY, bytes(node)]
    if kind is torch.dtype:
        return [_DTYPE, dtype_name(node)]
    if kind is torch.device:
        return [_DEVICE, str(node)]
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(node, numpy.generic):
        if node.dtype.hasobject:
            raise _refused(node, path, f"numpy dtype {node.dtype}")
        return [_ARRAY_SCALAR, _array_type(node.dtype), node.tobytes()]
    if numpy is not None and kind is numpy.ndarray:
        if node.dtype.hasobject:
            raise _refused(node, path, f"numpy dtype {node.dtype}")
        return [_ARRAY, _array_type(node.dtype), list(node.shape), node.tobytes()]
    raise _refused(node, path, f"objects of {kind.__module__}.{kind.__qualname__}")


def _array_type(dtype: Any) -> str:
    """As text. One with fields has a list of them."""
    import numpy

    return dtype.str if dtype.fields is None else repr(numpy.lib.format.dtype_to_descr(dtype))


def _array_type_of(text: str) -> Any:
    import numpy

    if not text.startswith("["):
        return numpy.dtype(text)
    return numpy.lib.format.descr_to_dtype(ast.literal_eval(text))


def _refused(node: Any, path: tuple[Any, ...], reason: str) -> UsageError:
    place = "state" + "".join(f"[{key!r}]" for key in path)
    return UsageError(
        f"{place} cannot be carried to another process: {reason}",
        hint="reduce it to numbers, strings, containers and tensors with "
        "ks.register(name, save, load)",
    )


# -------------------------------------------------------------------------------------- tensors


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise RemoteProtocolError(f"unknown dtype {name!r}", hint="use one torch on all nodes")
    return dtype


def _inline(tensor: torch.Tensor, copy: torch.Tensor | None = None) -> list[Any]:
    described = shards.spec(tensor)
    if described is not None:
        key, placements, shape, stride = described
        packed = [list(placement) for placement in placements]
        return [
            _SHARD_INLINE,
            _inline(shards.local(tensor)),
            key,
            packed,
            list(shape),
            list(stride),
        ]
    plain = copy
    if plain is None:
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""
    return [
        _TENSOR_INLINE,
        dtype_name(tensor.dtype),
        list(tensor.shape),
        data,
        _device_name(tensor),
    ]


def _device_name(tensor: torch.Tensor) -> str:
    """The same on all ranks for what lies where its rank computes."""
    if tensor.device == cuda.home:
        return tensor.device.type
    return "" if tensor.device.type == "cpu" else str(tensor.device)


def _shard_from(part: Any, key: str, placements: Any, shape: Any, stride: Any) -> torch.Tensor:
    described = (key, tuple(map(tuple, placements)), tuple(shape), tuple(stride))
    return shards.wrap(_tensor_from(*part[1:]), described)


def _tensor_from(dtype: str, shape: list[int], data: bytes, device: str) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype_named(dtype))
    if tensor.nbytes != len(data):
        raise RemoteProtocolError(f"a tensor of {tensor.nbytes} bytes came with {len(data)}")
    if data:
        ctypes.memmove(tensor.data_ptr(), data, len(data))
    if not device:
        return tensor
    # Devices are numbered by slot: what lay on its rank's lies on this rank's.
    return tensor.to(cuda.home if device.startswith("cuda") and cuda.home else device)


# ------------------------------------------------------------------------------------- decoding


def _decode(data: bytes, tensors: list[torch.Tensor]) -> Any:
    try:
        return _unpack(_decoder.decode(data), tensors)
    except (
        msgspec.DecodeError,
        LookupError,
        TypeError,
        ValueError,
        RuntimeError,
        RecursionError,
    ) as error:
        raise RemoteProtocolError(f"malformed state: {error}") from error


def _unpack(node: Any, tensors: list[torch.Tensor]) -> Any:
    if type(node) is not list:
        return node
    tag = node[0]
    make = _SEQUENCE_OF.get(tag)
    if make is not None:
        return make(_unpack(item, tensors) for item in node[1:])
    if tag in _MAPPING_OF:
        pairs = iter(node[1:])
        return _MAPPING_OF[tag](
            {_unpack(key, tensors): _unpack(value, tensors) for key, value in zip(pairs, pairs)}
        )
    if tag == _TENSOR:
        return tensors[node[1]]
    if tag == _TENSOR_INLINE:
        return _tensor_from(*node[1:])
    if tag == _SHARD_INLINE:
        return _shard_from(*node[1:])
    if tag in (_ARRAY, _ARRAY_SCALAR):
        import numpy

        if tag == _ARRAY_SCALAR:
            return numpy.frombuffer(node[2], dtype=_array_type_of(node[1]))[0]
        if not node[3]:
            return numpy.empty(node[2], dtype=_array_type_of(node[1]))
        flat = numpy.frombuffer(bytearray(node[3]), dtype=_array_type_of(node[1]))
        return flat.reshape(node[2])
    return _LEAF_OF[tag](*node[1:])


_SEQUENCE_OF: dict[int, Callable[[Any], Any]] = {
    _LIST: list,
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _SIZE: torch.Size,
}
_MAPPING_OF: dict[int, Callable[[Any], Any]] = {
    _DICT: dict,
    _ORDERED: OrderedDict,
    _COUNTER: Counter,
}
_LEAF_OF: dict[int, Callable[..., Any]] = {
    _BIG_INT: lambda text: int(text, 16),
    _COMPLEX: complex,
    _DTYPE: dtype_named,
    _DEVICE: torch.device,
    _RAW_STR: lambda data: data.decode("utf-8", "surrogatepass"),
    _BYTEARRAY: bytearray,
}
