"""What an exception in a rank means, and faults injected on purpose."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
import torch.distributed as dist

from keepstep.model import commands
from keepstep.model import messages as m

Kind = Literal["comm", "device", "user"]

_DEVICE = re.compile(
    r"CUDA error|CUDA driver error|HIP error|hipError|cudaError|uncorrectable ECC|"
    r"unspecified launch failure|NCCL.*unhandled cuda error|\bXid\b|GPU has fallen off",
    re.IGNORECASE,
)
# The context is lost with these too, but another device would answer the same.
_BUG = re.compile(r"device-side assert|CUDA error: out of memory", re.IGNORECASE)
# NCCL's "unhandled system error" is here: it is a socket's, as a rule of a peer that is gone.
_COMM = re.compile(
    r"gloo|NCCL|RCCL|Connection (closed|reset|refused)|Broken pipe|Socket|"
    r"TCPStore|Timed out|Application timeout|remote process exited|wait.*timeout",
    re.IGNORECASE,
)


def classify(error: BaseException) -> Kind:
    """What this rank's own exception looks like; the orchestrator decides what it was."""
    text = f"{type(error).__name__}: {error}"
    if _BUG.search(text):
        return "user"
    if isinstance(error, RuntimeError) and _DEVICE.search(text):
        return "device"
    # ConnectionAbortedError is how our own waits end when an Abort comes.
    if isinstance(error, dist.DistError | ConnectionAbortedError) or (
        isinstance(error, RuntimeError | ConnectionError) and _COMM.search(text)
    ):
        return "comm"
    return "user"


def _has_own(layer: torch.nn.Module) -> bool:
    return any(p.requires_grad for p in layer.parameters(recurse=False))


class Injector:
    """Faults at named points of a step, armed by the orchestrator; each fires once."""

    def __init__(self, armed: list[commands.Arm], send: Callable[[Any], None]) -> None:
        self._armed = armed
        self._send = send
        self._hooks: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._armed)

    def begin(self, version: int, models: Iterable[torch.nn.Module]) -> None:
        """in_backward: fire when the gradient of what a layer in the middle gave out is there, or
        that of a parameter of its: a compiled model does not call hooks of its layers."""
        if any(a.step == version and a.point == "in_backward" for a in self._armed):
            layers = [layer for model in models for layer in model.modules() if _has_own(layer)]
            middle = layers[len(layers) // 2]

            def given(_: Any, args: Any, output: Any) -> None:
                for tensor in output if isinstance(output, list | tuple) else [output]:
                    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                        hook: Any = tensor.register_hook  # untyped in torch
                        hook(lambda _: self.point("in_backward", version))

            self._hooks = [middle.register_forward_hook(given)]
            for parameter in middle.parameters(recurse=False):
                if parameter.requires_grad:
                    on_gradient: Any = parameter.register_hook
                    self._hooks.append(on_gradient(lambda _: self.point("in_backward", version)))

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def point(self, name: str, version: int, victim: torch.Tensor | None = None) -> None:
        for arm in self._armed:
            if arm.point == name and arm.step == version:
                self._armed.remove(arm)
                self._fire(arm, victim)
                return

    def _fire(self, arm: commands.Arm, victim: torch.Tensor | None) -> None:
        self._send(m.InjectFired(inject=arm.inject, point=arm.point, version=arm.step))
        if arm.action == "device-error":
            raise torch.AcceleratorError(
                "CUDA error: uncorrectable ECC error encountered (injected)"
            )
        if victim is not None:
            with torch.no_grad():  # a torn update: what is read from this process now is garbage
                victim.add_(1.0)
        os.kill(os.getpid(), signal.SIGKILL if arm.action == "kill" else signal.SIGSTOP)
