"""Compiles native/torch_ext with plain g++ against the installed torch, without importing it.

The result lives in <cache>/<key>/, where the key covers everything that makes a binary unusable
elsewhere: torch's version and place (its libraries are found by rpath), the Python ABI, the
machine and the sources. A folder appears by one rename, so whoever sees it sees it complete; a
file lock keeps concurrent processes from compiling the same thing twice.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from keepstep.errors import UsageError

EXTENSION = "keepstep_ext"
SOURCES = Path(__file__).parent / "torch_ext"
_IN_PROCESS = [
    "solo_backend.cpp",
    "gloo_waits.cpp",
    "numbers.cpp",
    "samples.cpp",
    "sender.cpp",
    "send.cpp",
    "digests.cpp",
]
_FLAGS = ["-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-DUSE_DISTRIBUTED", "-w"]


@dataclass(frozen=True)
class Artifacts:
    extension: Path
    store_host: Path


@dataclass(frozen=True)
class _Torch:
    version: str
    folder: Path


def _torch() -> _Torch:
    spec = importlib.util.find_spec("torch")  # finds without importing
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("torch is not installed", hint="install torch >= 2.11")
    return _Torch(importlib.metadata.version("torch"), Path(spec.submodule_search_locations[0]))


def cache_folder() -> Path:
    if chosen := os.environ.get("KEEPSTEP_NATIVE_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "keepstep"


def _key(torch: _Torch) -> str:
    digest = hashlib.sha256(str(torch.folder).encode())
    digest.update(" ".join(_FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    tag = sys.implementation.cache_tag
    return f"torch-{torch.version}-{tag}-{platform.machine()}-{digest.hexdigest()[:16]}"


@cache
def ensure() -> Artifacts:
    """Builds what is missing; returns at once when it is there."""
    torch = _torch()
    folder = cache_folder() / _key(torch)
    once(folder, lambda scratch: _build(torch, scratch))
    return Artifacts(folder / f"{EXTENSION}.so", folder / "keepstep-store")


def once(folder: Path, fill: Callable[[Path], None]) -> None:
    """The folder appears as `fill` left a scratch folder, whole or not at all."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return
        scratch = Path(tempfile.mkdtemp(prefix=".build-", dir=folder.parent))
        try:
            fill(scratch)
            scratch.chmod(0o755)
            os.rename(scratch, folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def compiler() -> str:
    found = shutil.which(os.environ.get("CXX", "g++"))
    if found is None:
        raise UsageError(
            "no C++ compiler found: Keepstep's native parts cannot be built",
            hint="install g++ (Debian/Ubuntu: apt install g++) or set CXX",
        )
    return found


def run_all(commands: Sequence[Sequence[str]], hint: str) -> None:
    """All at once; the first that fails is the error."""
    jobs = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        for command in commands
    ]
    outputs = [job.communicate()[0] for job in jobs]
    for job, output in zip(jobs, outputs, strict=True):
        if job.returncode != 0:
            raise UsageError(
                f"{commands[0][0]} failed with code {job.returncode}:\n{output.strip()[-3000:]}",
                hint=hint,
            )


def _build(torch: _Torch, scratch: Path) -> None:
    tool = compiler()
    print("keepstep: compiling native parts for torch", torch.version, file=sys.stderr, flush=True)
    run_all(
        [
            _command(tool, torch, _IN_PROCESS, scratch / f"{EXTENSION}.so", ["-shared"]),
            _command(tool, torch, ["store_host.cpp"], scratch / "keepstep-store", []),
        ],
        hint=f"torch {torch.version} may be untested, or the compiler lacks C++20 "
        "(g++ >= 11) or the Python headers (python3-dev)",
    )


def _command(
    tool: str, torch: _Torch, sources: list[str], target: Path, extra: list[str]
) -> list[str]:
    include = torch.folder / "include"
    lib = torch.folder / "lib"
    command = [tool, *_FLAGS, *extra, "-o", str(target)]
    command += [str(SOURCES / source) for source in sources]
    command += [f"-I{include}", f"-I{include / 'torch/csrc/api/include'}"]
    command += [f"-I{sysconfig.get_paths()['include']}"]
    # CUDA builds of libtorch_cpu need libraries that only its own rpath finds: not our business.
    command += [f"-L{lib}", "-ltorch_cpu", "-lc10"]
    return [*command, f"-Wl,-rpath,{lib}", "-Wl,--allow-shlib-undefined"]
