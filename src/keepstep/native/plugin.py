"""Compiles native/net_plugin, the network plugin for NCCL and RCCL, with plain g++.

It needs no headers but the C library's and fits any torch, so its cache key is only machine, flags
and sources. NCCL and RCCL look for different file names; both are there.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from functools import cache
from pathlib import Path

from keepstep.native.build import cache_folder, compiler, once, run_all

SOURCES = Path(__file__).parent / "net_plugin"
NCCL_NAME = "libnccl-net-keepstep.so"
RCCL_NAME = "librccl-net-keepstep.so"
# NCCL unloads plugins while their threads run (nodelete), and the host program may carry another
# libstdc++ (static, and only the tables are exported).
FLAGS = ["-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra"]
LINK = ["-static-libstdc++", "-static-libgcc", "-Wl,-z,nodelete", "-Wl,-z,now"]


@cache
def ensure() -> Path:
    """The folder with the plugin under both names; builds it if it is not there."""
    digest = hashlib.sha256(" ".join([*FLAGS, *LINK]).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    folder = cache_folder() / f"net-{platform.machine()}-{digest.hexdigest()[:16]}"
    once(folder, build)
    return folder


def build(folder: Path, extra: tuple[str, ...] = ()) -> None:
    """Into a folder that exists; `extra` flags are for tests (sanitizers)."""
    tool = compiler()
    print("keepstep: compiling the network plugin", file=sys.stderr, flush=True)
    hint = "the compiler needs C++17 (g++ >= 9)"
    objects = []
    commands = []
    for source in sorted(SOURCES.glob("*.cpp")):
        objects.append(str(folder / f"{source.stem}.o"))
        commands.append([tool, *FLAGS, *extra, "-c", str(source), "-o", objects[-1]])
    run_all(commands, hint)
    exports = f"-Wl,--version-script={SOURCES / 'exports.map'}"
    library = str(folder / NCCL_NAME)
    static = LINK if not extra else LINK[2:]  # a sanitizer brings its own libraries
    run_all(
        [[tool, "-shared", "-pthread", *extra, *objects, *static, exports, "-o", library]], hint
    )
    for name in objects:
        os.unlink(name)
    shutil.copyfile(folder / NCCL_NAME, folder / RCCL_NAME)
