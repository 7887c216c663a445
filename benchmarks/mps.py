"""Processes that share a GPU: in turns, each for some milliseconds, or at once by NVIDIA's MPS.

In turns a collective of two ranks on one GPU costs two turns, however fast the network is; at once
it costs what the network does.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator

CONTROL = "nvidia-cuda-mps-control"


@contextlib.contextmanager
def sharing(at_once: bool) -> Iterator[None]:
    """For processes that are started inside."""
    if not at_once:
        yield
        return
    if shutil.which(CONTROL) is None:
        raise SystemExit(f"--mps: {CONTROL} is not on this machine")
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
    before = {name: os.environ.get(name) for name in names}
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ.update(dict.fromkeys(names, folder))
        subprocess.run([CONTROL, "-d"], check=True)
        try:
            yield
        finally:
            subprocess.run([CONTROL], input="quit\n", text=True, check=True)
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value
