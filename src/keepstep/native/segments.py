"""Compiles native/gpu, which gives device memory back behind the same addresses (segments.cpp), and
moves what CUDA's driver has saved of it (areas.cpp), with plain g++.

It is loaded into ranks of transparent jobs. It needs no CUDA headers and fits any
torch, so its cache key is only machine, flags and sources.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from functools import cache
from pathlib import Path

from keepstep.native.build import cache_folder, compiler, once, run_all

SOURCES = Path(__file__).parent / "gpu"
NAME = "libkeepstep-segments.so"
FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
LINK = ["-static-libstdc++", "-static-libgcc", "-Wl,-z,now", "-Wl,-z,nodelete", "-ldl"]


@cache
def ensure() -> Path:
    """The library; builds it if it is not there."""
    digest = hashlib.sha256(" ".join([*FLAGS, *LINK]).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    folder = cache_folder() / f"gpu-{platform.machine()}-{digest.hexdigest()[:16]}"
    once(folder, _build)
    return folder / NAME


def _build(folder: Path) -> None:
    tool = compiler()
    print("keepstep: compiling the keeper of device memory", file=sys.stderr, flush=True)
    exports = f"-Wl,--version-script={SOURCES / 'exports.map'}"
    sources, library = map(str, sorted(SOURCES.glob("*.cpp"))), str(folder / NAME)
    command = [tool, *FLAGS, "-shared", *sources, "-o", library, *LINK, exports]
    run_all([command], hint="the compiler needs C++17 (g++ >= 9)")
