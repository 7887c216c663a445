"""Where the driver's library is. KEEPSTEP_LIBCUDA says it where the loader does not find it."""

from __future__ import annotations

import os


def name() -> str:
    return os.environ.get("KEEPSTEP_LIBCUDA", "libcuda.so.1")


def present() -> bool:
    """Whether there is a GPU of NVIDIA's, without starting its driver."""
    return os.path.exists("/dev/nvidiactl") or "KEEPSTEP_LIBCUDA" in os.environ
