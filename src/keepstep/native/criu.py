"""CRIU for process images: found, or unpacked into the cache folder. Never installed system-wide.

`python -m keepstep.native.criu` (make setup-criu) fetches it with the machine's own apt, from the
archive that the machine already uses, but from its newest suite and with a state of its own: no
package of the system is touched, and its lists do not change. CRIU comes with the C library
that it was built against and is run by that library's loader. Everything lands in one folder that
appears by one rename.

Needed is 4.2: earlier versions cannot dump a process with any inet socket on kernels from 6.16 on.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from keepstep.errors import UsageError
from keepstep.native.build import cache_folder

VERSION_MIN = (4, 2)
SUITE = "sid"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
STEP_S_MAX = 120.0
HINT = "run `make setup-criu`, or name one with KEEPSTEP_CRIU"


def _folder() -> Path:
    return cache_folder() / f"criu-{platform.machine()}"


def _unpacked(root: Path) -> list[str]:
    """Run by the loader beside it: the system's C library may be older than CRIU needs."""
    programs = [*root.glob("usr/sbin/criu"), *root.glob("sbin/criu")]
    loaders = sorted(root.glob("usr/lib/*/ld-linux-*.so.*"))
    if not programs or not loaders:
        return []
    return [str(loaders[0]), "--library-path", str(loaders[0].parent), str(programs[0])]


def version(command: list[str]) -> tuple[int, ...]:
    """Empty: that is no CRIU that runs here."""
    try:
        said = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=STEP_S_MAX
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    found = re.search(r"Version:\s*v?(\d+(?:\.\d+)*)", said)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def images_folder() -> Path:
    """Where images of processes land: memory, not disk. An operator may name another tmpfs."""
    return Path(os.environ.get("KEEPSTEP_IMAGES", "/dev/shm"))


@cache
def find() -> tuple[list[str], tuple[int, ...]]:
    """The command that runs CRIU, and its version. UsageError: there is none that is new enough."""
    candidates = []
    if chosen := os.environ.get("KEEPSTEP_CRIU"):
        candidates.append([chosen])
    else:
        candidates.append(_unpacked(_folder()))
        if installed := shutil.which("criu"):
            candidates.append([installed])
    seen = []
    for command in filter(None, candidates):
        number = version(command)
        if number >= VERSION_MIN:
            return command, number
        seen.append(f"{command[-1]} is {'.'.join(map(str, number)) or 'no program that runs here'}")
    least = ".".join(map(str, VERSION_MIN))
    there = f": {'; '.join(seen)}" if seen else ""
    raise UsageError(f"there is no CRIU >= {least}{there}", hint=HINT)


# ------------------------------------------------------------------------------------------- set-up


def _run(*command: str, config: Path | None = None) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    if config is not None:
        environment["APT_CONFIG"] = str(config)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=STEP_S_MAX
    )
    if done.returncode != 0:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise UsageError(f"{command[0]} {command[1]} failed: {''.join(last)}", hint=HINT)
    return done.stdout


def archive() -> str:
    """Where this machine gets its own distribution from."""
    names = Path("/etc/os-release").read_text()
    found = re.search(r"^VERSION_CODENAME=(\S+)$", names, re.MULTILINE)
    listed = _run("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)")
    for line in listed.splitlines():
        address, _, release = line.partition(" ")
        if found is not None and release == found[1]:
            return address
    raise UsageError("apt has no archive of this machine's own release", hint=HINT)


def write_apt_config(scratch: Path) -> Path:
    """Of an apt whose state, cache and sources are in that folder."""
    config = scratch / "apt.conf"
    config.write_text(
        f'Dir::State "{scratch}/state";\nDir::State::status "{scratch}/status";\n'
        f'Dir::Cache "{scratch}/cache";\nDir::Etc::sourcelist "{scratch}/sources.list";\n'
        'Dir::Etc::sourceparts "/dev/null";\nAPT::Sandbox::User "root";\n'
    )
    return config


def _fetch(scratch: Path, root: Path) -> None:
    for name in ("state/lists/partial", "cache/archives/partial"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()
    (scratch / "sources.list").write_text(f"deb [signed-by={KEYRING}] {archive()} {SUITE} main\n")
    config = write_apt_config(scratch)
    _run("apt-get", "update", "-qq", config=config)
    options = ("-y", "-qq", "--no-install-recommends", "--download-only")
    _run("apt-get", "install", *options, "criu", config=config)
    for package in sorted((scratch / "cache/archives").glob("*.deb")):
        _run("dpkg-deb", "-x", str(package), str(root))


def install() -> list[str]:
    """Unpacks it unless it is there. UsageError says what is missing."""
    folder = _folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _unpacked(folder):
            if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
                raise UsageError("there is no apt on this machine to fetch CRIU with", hint=HINT)
            with tempfile.TemporaryDirectory(prefix=".criu-", dir=folder.parent) as name:
                root = Path(name) / "root"
                root.mkdir()
                _fetch(Path(name), root)
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(root, folder)
    return find()[0]


def main() -> int:
    try:
        command = find()[0]
    except UsageError:
        try:
            command = install()
        except (UsageError, OSError, subprocess.TimeoutExpired) as error:
            print(f"SKIPPED: no CRIU, so processes cannot be moved as a whole: {error}")
            return 0
    print(" ".join(command))
    return 0


if __name__ == "__main__":
    sys.exit(main())
