"""What an exception of a rank is taken for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from keepstep.worker.step.failures import classify


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), "device"),
        (RuntimeError("CUDA error: unspecified launch failure"), "device"),
        (RuntimeError("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus"), "device"),
        (dist.DistBackendError("NCCL error: unhandled cuda error"), "device"),
        # A peer that died: its sockets, and what NCCL makes of them.
        (dist.DistBackendError("NCCL error: unhandled system error"), "comm"),
        (dist.DistBackendError("NCCL communicator was aborted on rank 2"), "comm"),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234"), "comm"),
        (ConnectionAbortedError("aborted while the device was at work"), "comm"),
        # Another device would answer the same.
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), "user"),
        (torch.AcceleratorError("CUDA error: out of memory"), "user"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), "user"),
        (ValueError("CUDA error is a nice name for a variable"), "user"),
        (RuntimeError("a maxid that is not known"), "user"),
    ],
)
def test_kind_of(error: Exception, kind: str) -> None:
    assert classify(error) == kind
