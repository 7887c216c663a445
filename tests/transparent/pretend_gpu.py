"""train.py without a GPU, but with memory that the fake driver (unit/fake_cuda.c) has made.

What is there changes with every step and is checked after the last. Nobody but the runtime needs
to be deceived: torch computes on the CPU.
"""

import ctypes
import hashlib
import os
import runpy
import socket
import types
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

SIZE = 48 << 20
library = ctypes.CDLL(None)


def pretend() -> None:
    from keepstep.worker.transparent import device

    said = types.SimpleNamespace(uuid="10101010-1010-1010-1010-101010101010")
    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda _: said
    torch.cuda.memory_reserved = lambda _: SIZE
    torch.cuda.synchronize = torch.cuda.empty_cache = lambda *_: None
    device.settle_in = lambda: None  # so that its health is looked at on the CPU


def allocate() -> int:
    at = ctypes.c_void_p()
    assert library.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(SIZE)) == 0
    return at.value


def main() -> None:
    if "KEEPSTEP_MODE" not in os.environ:  # plain torchrun: the numbers are the same
        runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
        return
    runtime = ctypes.CDLL("libcudart.so.13", ctypes.RTLD_GLOBAL)
    runtime.fake_thread()
    named = socket.socket(socket.AF_UNIX)  # as CUDA's driver has one
    name = f"\0keepstep-test-{os.environ['RANK']}-{os.getpid()}"
    named.bind(name.ljust(108, "\0"))  # all the room that a name has
    named.listen()
    pretend()
    at = allocate()
    content = bytearray(os.urandom(1 << 20) * (SIZE >> 20))
    ctypes.memmove(at, bytes(content), SIZE)
    steps = 0

    def write(*_: object) -> None:
        nonlocal steps
        place = steps * 999_983 % (SIZE - 8)
        ctypes.memmove(at + place, steps.to_bytes(8, "little"), 8)
        content[place : place + 8] = steps.to_bytes(8, "little")
        steps += 1

    register_optimizer_step_pre_hook(write)
    runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
    found = hashlib.sha256(ctypes.string_at(at, SIZE)).digest()
    assert found == hashlib.sha256(content).digest(), "device memory is not what it was"
    areas = ctypes.c_int.in_dll(runtime, "fake_areas").value
    print(f"device memory is right after {steps} steps, the driver's {areas} times")


if __name__ == "__main__":
    main()
