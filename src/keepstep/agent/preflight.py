"""Whether a process can be moved as a whole, and whether a place could take it.

CRIU notices much of this itself, but late, when all ranks stand; and some of it never: a pipe whose
other end is outside is dumped without a word, and whoever writes to it after the restore waits for
ever. So the tree of a rank is looked at while it trains, and what cannot go along is named.

`compare` is pure; everything else reads /proc of this machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from keepstep.agent import gpu
from keepstep.agent.process_tree import tree
from keepstep.errors import KeepstepError, UsageError
from keepstep.model.agent_messages import Host
from keepstep.model.image import ImageFacts
from keepstep.native import criu, libcuda

# Bits of CapEff, from linux/capability.h.
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_PTRACE": 19, "CAP_SYS_ADMIN": 21}
CAPABILITIES |= {"CAP_CHECKPOINT_RESTORE": 40}
INET = ("tcp", "tcp6", "udp", "udp6", "raw", "raw6")
HARMLESS_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
ANONYMOUS = ("eventpoll", "eventfd", "timerfd", "signalfd", "inotify", "pidfd")
# What a process of CUDA has open while it runs, and not when the driver has taken its snapshot.
NVIDIA = "/dev/nvidia"
AMD = "an AMD GPU: CRIU's amdgpu plugin was never run with Keepstep"
DEVICES = {
    "/dev/infiniband": "an RDMA device",
    NVIDIA: "a GPU",
    "/dev/kfd": AMD,
    "/dev/dri": AMD,
}
MPS_FOLDER = "/tmp/nvidia-mps"
# From linux/netlink.h, linux/sock_diag.h and linux/unix_diag.h.
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_DUMP = 4, 20, 0x301
UDIAG_SHOW_PEER, UNIX_DIAG_PEER = 4, 2
SPARE_SHARE = 1.2  # of the image: what is allocated anew on the way


# --------------------------------------------------------------------------------------------- host


def free() -> tuple[int, int]:
    """Bytes of memory, and where images land."""
    room = os.statvfs(criu.images_folder())
    return int(psutil.virtual_memory().available), room.f_bavail * room.f_frsize


def host() -> Host:
    """This machine. `trouble` says why no image can be taken or woken here."""
    trouble = []
    number = ""
    try:
        number = ".".join(map(str, criu.find()[1]))
    except UsageError as error:
        trouble.append(f"{error.message} (hint: {error.hint})")
    held = int(re.findall(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[0], 16)
    missing = [name for name, bit in CAPABILITIES.items() if not held >> bit & 1]
    if missing:
        trouble.append(f"the agent lacks {', '.join(missing)} (hint: run it as root)")
    if shutil.which("nsenter") is None:
        trouble.append("there is no nsenter (hint: install util-linux)")
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), ":")
    driver = _driver()
    return Host(
        kernel=platform.release(),
        machine=platform.machine(),
        features=sorted(flags.partition(":")[2].split()),
        criu=number,
        trouble=trouble,
        gpus=driver.gpus,
        cuda=driver.version,
        gpu_trouble=driver.error,
    )


def _driver() -> gpu.Facts:
    """Of NVIDIA's GPUs, if there are any; its `error` says why processes on them cannot move."""
    if not libcuda.present():
        return gpu.Facts()
    helper = gpu.Helper()
    try:
        return helper.facts()
    except KeepstepError as error:
        return gpu.Facts(error=gpu.in_one_line(error))
    finally:
        helper.close()


def compare(
    facts: ImageFacts,
    here: Host,
    *,
    memory: int,
    room: int,
    size: Callable[[str], int],
) -> list[str]:
    """Why this place cannot take that process, in words. `size`: of a file here, -1: there is none;
    `memory` is free here, `room` where the image lands."""
    wrong = [*compare_hosts(facts.host, here)]
    other = [path for path, bytes_there in facts.files if size(path) != bytes_there]
    other += [path for path in facts.paths if size(path) < 0]
    if other:
        more = f" and {len(other) - 3} more" if len(other) > 3 else ""
        wrong.append(f"not the same here: {', '.join(other[:3])}{more}")
    if facts.gpu:
        wrong += compare_gpus(facts.host, here, facts.gpu)
    need = int(facts.image_bytes * SPARE_SHARE) + facts.gpu_bytes
    if room < need:
        wrong.append(f"the image needs {need >> 20} MiB of tmpfs, {room >> 20} MiB are free")
    # The image, and the process made of it; what it fetches itself never is in its memory.
    twice = 2 * need - (facts.gpu_bytes if facts.offloads else 0)
    if memory < twice:
        wrong.append(f"{twice >> 20} MiB of memory are needed, {memory >> 20} MiB are free")
    return wrong


def compare_gpus(there: Host, here: Host, used: str = "") -> list[str]:
    """`used`: the UUID of one; otherwise any of them may be meant."""
    wrong = [f"GPU: {one}" for one in (there.gpu_trouble, here.gpu_trouble) if one]
    if not here.gpus:
        return [*wrong, "there is no GPU here"]
    if there.cuda != here.cuda:
        wrong.append(
            f"the driver is of CUDA {_dotted(there.cuda)} there, {_dotted(here.cuda)} here"
        )
    moved = [one for one in there.gpus if not used or one.uuid == used]
    theirs, ours = {one.name for one in moved}, {one.name for one in here.gpus}
    if theirs - ours:
        wrong.append(f"GPU {', '.join(sorted(theirs))} there and {', '.join(sorted(ours))} here")
    elif max((one.memory for one in moved), default=0) > max(one.memory for one in here.gpus):
        wrong.append("the GPU has less memory here")
    return wrong


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def compare_hosts(there: Host, here: Host) -> list[str]:
    wrong = [*there.trouble, *here.trouble]
    for what, theirs, ours in (
        ("kernel", there.kernel, here.kernel),
        ("machine", there.machine, here.machine),
        ("CRIU", there.criu, here.criu),
    ):
        if theirs != ours and theirs and ours:
            wrong.append(f"{what} {theirs} there and {ours} here")
    if missing := sorted(set(there.features) - set(here.features)):
        wrong.append(f"this processor lacks {', '.join(missing[:5])}")
    return wrong


def file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


# --------------------------------------------------------------------------------------------- tree


@dataclass
class Scan:
    offenders: list[str] = field(default_factory=list)
    files: list[tuple[str, int]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    image_bytes: int = 0


def scan(rank: int, ours: int, on_gpu: bool = False) -> Scan:
    """The tree of the process `rank`; `ours` is the inode of its control socket. Sockets of the
    rank itself are its own to judge: it knows those of its process groups. `on_gpu`: what it has
    open of the CUDA driver is no trouble, because its driver will close that."""
    found = Scan()
    pids = tree(rank)
    inet, named = _inet_sockets(rank), unix_sockets(rank)
    pipes: dict[str, int] = {}
    sockets: dict[int, int] = {}  # inode -> process
    for pid in pids:
        for number, target in _descriptors(pid):
            if target.startswith("socket:"):
                inode = int(target[8:-1])
                sockets[inode] = pid
                if pid != rank and inode in inet:
                    found.offenders.append(f"{_who(pid)} has {inet[inode]} open (fd {number})")
                name = named.get(inode, "") if inode != ours else ""
                if name.startswith("/"):
                    found.folders.append(os.path.dirname(name))
                elif name:
                    found.names.append(name)
            elif target.startswith("pipe:"):
                pipes[target] = pid
            elif on_gpu and pid == rank and target.startswith(NVIDIA):
                continue
            elif trouble := _trouble(target):
                found.offenders.append(f"{_who(pid)} has {trouble} open: {target} (fd {number})")
            elif target.startswith("/") and os.path.exists(target):
                found.paths.append(target)
        _maps(pid, found)
        found.image_bytes += _memory(pid)
    found.offenders += _foreign_children(rank, pids) + _pipe_ends(pipes, set(pids))
    peers = unix_peers()
    found.offenders += [
        f"{_who(pid)} has a unix socket to a process outside"
        for inode, pid in sockets.items()
        if inode != ours and peers.get(inode, inode) not in sockets
    ]
    with contextlib.suppress(OSError):
        found.paths.append(os.readlink(f"/proc/{rank}/cwd"))
    found.files = sorted(set(found.files))
    found.paths = sorted({path for path in found.paths if not path.startswith(("/dev", "/proc"))})
    found.folders = sorted(set(found.folders))
    found.names = sorted(set(found.names))
    return found


def _who(pid: int) -> str:
    name = "?"
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    return f"process {pid} ({name})"


def _descriptors(pid: int) -> Iterator[tuple[int, str]]:
    with contextlib.suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                yield int(number), os.readlink(f"/proc/{pid}/fd/{number}")


def gpu_trouble(pid: int, device: str, here: Host, size: int = 0) -> list[str]:
    """Why the GPU's part of this process, `size` bytes, cannot be moved, from the looks of it."""
    if device == "hip":
        return [f"{_who(pid)} uses {AMD}"]
    found = [f"GPU: {here.gpu_trouble}"] if here.gpu_trouble else []
    folder = _environment(pid).get("CUDA_MPS_PIPE_DIRECTORY", MPS_FOLDER)
    if os.path.exists(f"/proc/{pid}/root{folder}/control"):
        found.append(f"an MPS server shares its GPU out ({folder})")
    need, memory = int(size * SPARE_SHARE), free()[0]
    if memory < need:  # it lands in memory, whoever moves it
        found.append(f"{need >> 20} MiB of memory are needed there, {memory >> 20} MiB are free")
    return found


def _environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return {}


def _trouble(target: str) -> str:
    if target.startswith("anon_inode:"):
        kind = target[11:].strip("[]")
        return "" if kind in ANONYMOUS else f"something that no image can hold ({kind})"
    for prefix, what in DEVICES.items():
        if target.startswith(prefix):
            return what
    if target.startswith(("/dev/tty", "/dev/pts")):
        return "a terminal"
    known = target.startswith("/dev/shm/") or target in HARMLESS_DEVICES
    return "a device" if target.startswith("/dev/") and not known else ""


def _inet_sockets(pid: int) -> dict[int, str]:
    found = {}
    for kind in INET:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]:
                found[int(line.split()[9])] = f"a {kind} socket"
    return found


def unix_sockets(pid: int) -> dict[int, str]:
    """inode -> name of those that have one: a path, or @ and something else."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
            fields = line.split(maxsplit=7)
            if len(fields) == 8 and fields[7].startswith(("/", "@")):
                found[int(fields[6])] = fields[7]
    return found


def unix_peers() -> dict[int, int]:
    """inode -> inode of the other end, of all connected unix sockets of this network namespace."""
    ask = struct.pack("=BBHIIIQ", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, UDIAG_SHOW_PEER, 0)
    head = struct.pack("=IHHII", 16 + len(ask), SOCK_DIAG_BY_FAMILY, NLM_DUMP, 1, 0)
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as line:
        line.sendall(head + ask)
        while True:
            data = line.recv(1 << 16)
            while data:
                length, kind = struct.unpack_from("=IH", data)
                if kind != SOCK_DIAG_BY_FAMILY:  # done, or an error
                    return found
                inode = struct.unpack_from("=I", data, 20)[0]
                at = 32
                while at + 8 <= length:
                    size, attribute = struct.unpack_from("=HH", data, at)
                    if attribute == UNIX_DIAG_PEER:
                        found[inode] = struct.unpack_from("=I", data, at + 4)[0]
                    at += max(4, -(-size // 4) * 4)
                data = data[-(-length // 4) * 4 :]


def _maps(pid: int, found: Scan) -> None:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = line.split(maxsplit=5)[5:]
            if not path or not path[0].startswith("/") or path[0].endswith(" (deleted)"):
                continue
            if path[0].startswith("/dev/infiniband"):
                found.offenders.append(f"{_who(pid)} has an RDMA device mapped")
            elif not path[0].startswith(("/dev", "/memfd:")):
                found.files.append((path[0], file_size(path[0])))


def _memory(pid: int) -> int:
    """What an image must hold: files that are mapped are found on the other side."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        sizes = re.findall(r"Rss(?:Anon|Shmem):\s*(\d+) kB", status)
        return sum(int(size) << 10 for size in sizes)
    return 0


def _foreign_children(rank: int, pids: Sequence[int]) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        own = os.readlink(f"/proc/{rank}/exe")
        for pid in pids:
            with contextlib.suppress(OSError):
                program = os.readlink(f"/proc/{pid}/exe")
                if program != own:
                    found.append(f"{_who(pid)} is a child that runs another program: {program}")
    return found


def _pipe_ends(pipes: dict[str, int], own: set[int]) -> list[str]:
    found = []
    for name in os.listdir("/proc") if pipes else ():
        if name.isdigit() and int(name) not in own:
            for _, target in _descriptors(int(name)):
                if target in pipes:
                    inside = _who(pipes.pop(target))
                    found.append(f"{inside} has a {target} to {_who(int(name))}, which stays")
    return found
