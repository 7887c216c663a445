"""A place where a script can run as usual and changes nothing of the user's.

The script must find its data and its code where they are, and may write beside them. So the folders
that it may write to keep their paths, and in a mount namespace of the run each of them is an
overlay: reading goes through to the real folder, writing lands in the scratch folder. Protected are
the working directory, the script's own, the home directory (caches), folders named by arguments and
by the environment, and what symbolic links in the working directory lead to. Mounts below a
protected folder are there read-only. Every run gets an overlay of its own and so begins with the
files that the user has.

Root may mount; others may inside a user namespace, where the system lets them have one. Where
neither works, a working directory that is small is copied; everything else is refused.

/tmp and the like are not protected (TMPDIR leads to the scratch folder instead), and neither is
what is not a file: a script that posts to a server still does. Experiment trackers are switched off
by their own variables.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from keepstep.errors import UsageError

COPY_BYTES_MAX = 200 << 20
PROBE_S = 20.0
# Not the user's, or not to be hidden: system folders and what is gone after a restart anyway.
NEVER = frozenset(
    Path(name)
    for name in (
        *("/", "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin"),
        *("/sys", "/tmp", "/usr", "/var", "/var/tmp"),
    )
)
NEVER_BELOW = tuple(Path(name) for name in ("/dev", "/proc", "/run", "/sys", "/usr", "/etc"))
_FOLDERS = ("_HOME", "_DIR", "_CACHE")  # how variables are called that name one

TRACKERS_OFF = {
    "WANDB_MODE": "disabled",
    "COMET_MODE": "disabled",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "disabled",
    "DVCLIVE_TEST": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Way = Literal["mounts", "user-mounts", "copy", "in-place"]


class Folders(NamedTuple):
    protected: list[Path]  # none of them inside another
    open: list[str]  # arguments that lead to places that cannot be protected


class Scratch(NamedTuple):
    base: Path
    way: Way
    cwd: Path
    folders: Folders
    environ: Mapping[str, str]

    def environment(self, run: Path) -> dict[str, str]:
        """For one run, whose own folder is `run`."""
        (run / "tmp").mkdir(parents=True, exist_ok=True)
        env = {name: value for name, value in self.environ.items() if name not in TORCHRUN}
        return env | {
            **TRACKERS_OFF,
            "WANDB_DIR": str(run / "tmp"),
            "MLFLOW_TRACKING_URI": (run / "tmp" / "mlruns").as_uri(),
            "TMPDIR": str(run / "tmp"),
            "KEEPSTEP_HOME": str(run / "home"),
        }

    def command(self, run: Path, command: Sequence[str]) -> tuple[list[str], Path]:
        """How to start it so that it changes nothing, and where."""
        if self.way == "in-place":
            return list(command), self.cwd
        if self.way == "copy":
            place = run / "copy"
            shutil.copytree(self.cwd, place, symlinks=True)
            return list(command), place
        text = mount_script(self.folders.protected, _mounts(), run / "mounts", self.cwd)
        return [*_UNSHARE[self.way], "sh", "-c", text, "sh", *command], Path("/")


_UNSHARE: dict[Way, list[str]] = {
    "mounts": ["unshare", "--mount", "--propagation", "private"],
    "user-mounts": ["unshare", "--user", "--map-root-user", "--mount", "--propagation", "private"],
}


def prepare(
    script: str,
    module: bool,
    args: Sequence[str],
    *,
    in_place: bool,
    environ: Mapping[str, str],
) -> Scratch:
    """Find a way that works here; the scratch folder is the caller's to remove."""
    cwd = Path.cwd()
    start = cwd if module else Path(script).resolve().parent
    folders = protected(cwd, start, args, environ)
    base = Path(tempfile.mkdtemp(prefix="ks-rehearse-", dir=_outside(folders.protected)))
    if in_place:
        return Scratch(base, "in-place", cwd, folders, environ)
    ways: list[Way] = ["mounts", "user-mounts"] if os.geteuid() == 0 else ["user-mounts"]
    try:
        for way in ways:
            scratch = Scratch(base, way, cwd, folders, environ)
            if cwd not in NEVER and _works(scratch):
                return scratch
        size = _size(cwd)
        if cwd not in NEVER and start.is_relative_to(cwd) and size <= COPY_BYTES_MAX:
            return Scratch(base, "copy", cwd, folders, environ)
    except BaseException:
        remove(base)
        raise
    remove(base)
    raise UsageError(
        f"what the script writes to {cwd} cannot be kept apart: overlay mounts are not allowed "
        f"here, and the folder is no small one that could be copied",
        hint="run it in a small copy of the project, or accept with --in-place that the script "
        "writes where it always does",
    )


def protected(cwd: Path, start: Path, args: Sequence[str], environ: Mapping[str, str]) -> Folders:
    wanted = [cwd, start]
    if environ.get("HOME"):
        wanted.append(Path(environ["HOME"]))
    wanted += [
        Path(value)
        for name, value in environ.items()
        if name.endswith(_FOLDERS) and value.startswith("/") and not name.startswith("KEEPSTEP_")
    ]
    wanted += [path.resolve() for path in _entries(cwd) if path.is_symlink() and path.is_dir()]
    left_open = []
    for argument in args:
        value = argument.partition("=")[2] or argument
        if not value.startswith("/"):
            continue
        folder = Path(value)
        while not folder.is_dir():
            folder = folder.parent
        if may_protect(folder):
            wanted.append(folder)
        elif os.access(folder, os.W_OK) and not _is_device(folder):
            left_open.append(argument)
    good = sorted({path.resolve() for path in wanted if path.is_dir()})
    good = [path for path in good if may_protect(path)]
    return Folders(
        [p for p in good if not any(p != other and p.is_relative_to(other) for other in good)],
        left_open,
    )


def may_protect(folder: Path) -> bool:
    return (
        folder not in NEVER
        and not any(folder.is_relative_to(one) for one in NEVER_BELOW)
        and os.access(folder, os.W_OK)
    )


def _is_device(folder: Path) -> bool:
    return any(folder.is_relative_to(one) for one in ("/dev", "/proc", "/sys"))


def remove(base: Path) -> None:
    """The kernel leaves a folder in each overlay that not even its owner may look into."""
    for closed in base.glob("*/mounts/*/top/work/*"):
        with contextlib.suppress(OSError):
            closed.chmod(0o700)
    shutil.rmtree(base, ignore_errors=True)


def mount_script(folders: Sequence[Path], mounts: Sequence[Path], base: Path, cwd: Path) -> str:
    """For sh, inside the namespaces. An overlay cannot always be written to the file system that
    the scratch folder is on (another overlay, in a container): then to memory."""
    lines = ["set -e"]
    for index, folder in enumerate(folders):
        here = base / str(index)
        under, top = (shlex.quote(str(here / name)) for name in ("under", "top"))
        place = shlex.quote(str(folder))
        overlay = f"mount -t overlay -o lowerdir={under},upperdir={top}/upper,workdir={top}/work"
        lines += [
            f"mkdir -p {under} {top}/upper {top}/work",
            f"mount --rbind {place} {under}",
            f"{overlay} overlay {place} 2>/dev/null || {{ mount -t tmpfs tmpfs {top}; "
            f"mkdir {top}/upper {top}/work; {overlay} overlay {place}; }}",
        ]
        for mount in mounts:
            if mount != folder and mount.is_relative_to(folder):
                inside = shlex.quote(str(here / "under" / mount.relative_to(folder)))
                point = shlex.quote(str(mount))
                lines += [
                    f"mount --rbind {inside} {point}",
                    f"mount -o remount,bind,ro {point}",
                ]
    lines += [f"cd {shlex.quote(str(cwd))}", 'exec "$@"']
    return "\n".join(lines)


def _mounts() -> list[Path]:
    """Where something is mounted, outer ones first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        text = line.split()[4]
        for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
            text = text.replace(code, char)
        found.append(Path(text))
    return sorted(set(found))


def _works(scratch: Scratch) -> bool:
    run = scratch.base / f"probe-{scratch.way}"
    mark = run / "mark"
    run.mkdir()
    command, cwd = scratch.command(run, ["sh", "-c", 'touch "$1" && echo made', "sh", str(mark)])
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, timeout=PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        made = mark.exists()  # the scratch folder itself is not hidden
        mark.unlink(missing_ok=True)
    return made and done.returncode == 0


def _outside(folders: Sequence[Path]) -> Path | None:
    """Where the scratch folder can be: not below one that an overlay will hide."""
    for name in (tempfile.gettempdir(), "/tmp", "/var/tmp", "/dev/shm"):
        path = Path(name).resolve()
        if not any(path.is_relative_to(one) for one in folders) and os.access(path, os.W_OK):
            return path
    return None


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _size(folder: Path) -> int:
    """Of its files; stops counting when it is too much."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(place, name)
            total += os.lstat(path).st_size if os.path.lexists(path) else 0
        if total > COPY_BYTES_MAX:
            break
    return total
