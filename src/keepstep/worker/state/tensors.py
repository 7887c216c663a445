"""Tensors as bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from keepstep.worker.state import codec


def plain(tensor: Tensor) -> bool:
    """Its bytes are what it is; torch may note a sign, or a conjugate, without writing it."""
    return not tensor.is_conj() and not tensor.is_neg()


def dense(tensor: Tensor) -> bool:
    """Its bytes are one block of memory without holes, in whatever order of dimensions."""
    return plain(tensor) and (tensor.is_contiguous() or _permuted(tensor))


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


def describe(tensor: Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...], str]:
    """dtype, shape, strides of its bytes as they travel, kind of device."""
    stride = tensor.stride() if dense(tensor) else _contiguous_stride(tensor.shape)
    name = codec.dtype_name(tensor.dtype)
    return name, tuple(tensor.shape), tuple(stride), tensor.device.type


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def identity(tensor: Tensor) -> Any:
    if tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
