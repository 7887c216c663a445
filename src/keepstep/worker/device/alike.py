"""Whether a newcomer computes as the rank did which it takes over.

The same script on another machine, with another library or with another flag, may choose another
kernel or another order of additions, and every number after the move would differ in its last bits.
So each rank's facts lie in its init record, and a newcomer compares its own with them:

    refused   what decides about kernels, their order or their arithmetic
    warned    what may, but is not known to (the patch version of a driver)

A refused newcomer fails with the names of what differs, and the next spare is tried.
`may_choose` names, at attach, what may choose other kernels even on an equal machine.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from keepstep.errors import UsageError

_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUDNN_CONV_WSCAP_DBG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "KMP_DETERMINISTIC_REDUCTION",
    "MKL_CBWR",
    "MKL_DEBUG_CPU_TYPE",
    "MKL_DYNAMIC",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_DYNAMIC",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
WARNED = ("NVIDIA driver", "Python patch")
_DRIVER = Path("/proc/driver/nvidia/version")


def facts(cuda: bool | None = None) -> dict[str, str]:
    """Of this process. `cuda`: whether it trains on a GPU; by itself, whether it has used one."""
    import numpy

    backends: Any = torch.backends
    found: dict[str, Any] = {
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "Python patch": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "machine": platform.machine(),
        "CPU capability": backends.cpu.get_cpu_capability(),
        "torch threads": torch.get_num_threads(),
        "torch interop threads": torch.get_num_interop_threads(),
        "default dtype": torch.get_default_dtype(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic fill": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "flush denormal": _flushes_denormals(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "mkldnn": backends.mkldnn.is_available() and backends.mkldnn.enabled,
    }
    for name in _VARIABLES:
        found[name] = os.environ.get(name, "unset")
    if _device_in_use() if cuda is None else cuda:
        found |= _of_cuda(backends)
    return {name: str(value) for name, value in found.items()}


def _of_cuda(backends: Any) -> dict[str, Any]:
    cuda: Any = torch.cuda
    if not cuda.is_available():
        return {}
    properties = cuda.get_device_properties(cuda.current_device())
    matmul, cudnn, kernels = backends.cuda.matmul, backends.cudnn, backends.cuda
    readers: dict[str, Callable[[], Any]] = {
        "GPU": lambda: properties.name,
        "GPU multiprocessors": lambda: properties.multi_processor_count,
        "GPU capability": lambda: f"{properties.major}.{properties.minor}",
        "CUDA runtime": lambda: torch.version.cuda or torch.version.hip,
        "NVIDIA driver branch": lambda: _driver().split(".")[0],
        "NVIDIA driver": _driver,
        "cuDNN": lambda: cudnn.version() if cudnn.is_available() else "none",
        "NCCL": lambda: cuda.nccl.version(),
        "cuda.matmul.allow_tf32": lambda: matmul.allow_tf32,
        "cudnn.allow_tf32": lambda: cudnn.allow_tf32,
        "fp16 reduced precision": lambda: matmul.allow_fp16_reduced_precision_reduction,
        "bf16 reduced precision": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "cudnn.benchmark": lambda: cudnn.benchmark,
        "cudnn.deterministic": lambda: cudnn.deterministic,
        "cudnn.enabled": lambda: cudnn.enabled,
        "flash attention": lambda: kernels.flash_sdp_enabled(),
        "memory efficient attention": lambda: kernels.mem_efficient_sdp_enabled(),
        "math attention": lambda: kernels.math_sdp_enabled(),
        "cuDNN attention": lambda: kernels.cudnn_sdp_enabled(),
        "BLAS library": lambda: kernels.preferred_blas_library(),
        "linalg library": lambda: kernels.preferred_linalg_library(),
    }
    return {name: _quietly(read) for name, read in readers.items()}


def _device_in_use() -> bool:
    cuda: Any = torch.cuda
    return bool(cuda.is_initialized())


def _quietly(read: Callable[[], Any]) -> Any:
    """Not every torch has every one of them, and reading the old TF32 flag raises where the new one
    was set to something that it cannot say. A newcomer reads the same then."""
    try:
        return read()
    except Exception as error:
        return type(error).__name__


def _driver() -> str:
    try:
        match = re.search(r"\d+\.\d+(\.\d+)?", _DRIVER.read_text())
    except OSError:
        return "unknown"
    return match.group(0) if match else "unknown"


def _flushes_denormals() -> bool:
    """torch can set it and not say it."""
    return bool((torch.full((), 1e-310, dtype=torch.float64) * 1.0).item() == 0.0)


def compare(theirs: Mapping[str, str], mine: Mapping[str, str]) -> list[str]:
    """Every difference, in words; what `changes_numbers` does not name may be harmless."""
    names = [*theirs, *(name for name in mine if name not in theirs)]
    return [
        f"{name} {theirs.get(name, 'unset')} there and {mine.get(name, 'unset')} here"
        for name in names
        if theirs.get(name, "unset") != mine.get(name, "unset")
    ]


def changes_numbers(difference: str) -> bool:
    """The branch of a driver compiles other code; its patch version may."""
    branch = difference.startswith("NVIDIA driver branch ")
    return branch or not difference.startswith(tuple(f"{name} " for name in WARNED))


def require(theirs: Mapping[str, str], rank: int, *, resumed: bool = False) -> None:
    """On a newcomer: refuse to compute otherwise than the rank that it replaces. A job that is
    resumed from a checkpoint may go on elsewhere, and is told what differs there."""
    found = compare(theirs, facts("GPU" in theirs)) if theirs else []
    refused = [text for text in found if changes_numbers(text) and not resumed]
    for text in found:
        if text not in refused:
            print(f"keepstep: newcomer to rank {rank}: {text}", file=sys.stderr, flush=True)
    if refused:
        raise UsageError(
            f"this process would compute otherwise than rank {rank} did: {'; '.join(refused)}",
            hint="use spares of the same kind, with the same software and settings",
        )


def may_choose(models: Iterable[torch.nn.Module]) -> list[str]:
    """What may choose other kernels from one start to the next, for a warning at attach."""
    found = []
    if torch.backends.cudnn.benchmark and _device_in_use():
        found.append(
            "torch.backends.cudnn.benchmark measures kernels and may choose others in a newcomer "
            "(hint: set it to False)"
        )
    modules = [module for model in models for module in model.modules()]
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in modules) or any(
        type(m).__name__ == "OptimizedModule" for m in modules
    )
    if not compiled:
        return found
    inductor: Any = sys.modules.get("torch._inductor.config")
    tuned = inductor is not None and (inductor.max_autotune or inductor.max_autotune_gemm)
    if tuned or any(map(_autotuned, modules)):
        found.append(
            "torch.compile with autotuning measures kernels and may choose others in a newcomer "
            "(hint: compile without max-autotune)"
        )
    dynamo: Any = sys.modules.get("torch._dynamo.config")
    if dynamo is None or (dynamo.assume_static_by_default and dynamo.automatic_dynamic_shapes):
        found.append(
            "torch.compile makes other kernels when shapes of inputs change; a newcomer compiles "
            "for the shapes it meets (hint: inputs of one shape, or torch.compile(dynamic=True))"
        )
    return found


def _autotuned(module: torch.nn.Module) -> bool:
    """As torch.compile(module, mode="max-autotune") leaves it."""
    config: Any = getattr(getattr(module, "dynamo_ctx", None), "compiler_config", None) or {}
    return bool(config.get("max_autotune") or config.get("max_autotune_gemm"))
