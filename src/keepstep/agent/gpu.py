"""The GPU half of a process image: the CUDA driver's own checkpoint calls, in a process beside.

    RUNNING -- lock --> LOCKED -- checkpoint --> CHECKPOINTED
    CHECKPOINTED -- restore --> LOCKED -- unlock --> RUNNING

A locked process waits in whatever CUDA call it makes next; a checkpointed one has no device, no
open descriptor of the driver and its device memory in its own host memory, where CRIU finds it. The
calls are made from outside, by `python -m keepstep.agent.gpu`, which needs libcuda and no context:
a driver that hangs or dies takes that helper along, and not the agent. It starts (and lets the
driver start) before anything is held.

`Driver` is libcuda by ctypes, as its documentation gives the structures. `freeze` and `thaw` look
at the state first, so that each may be called again, and `freeze` undoes what it did if it fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from keepstep.agent import areas
from keepstep.agent.process_tree import inner_pid
from keepstep.errors import KeepstepError, PermanentError, TransientError
from keepstep.model.agent_messages import Gpu
from keepstep.native import libcuda

CHECKPOINT_CALLS = 12_080  # the driver's version of CUDA: 12.8, driver 570
OTHER_GPUS = 13_000  # restore on other GPUs than before: 13.0, driver 580
ILLEGAL_STATE = 401
LOCK_MS = 10_000
THAW_S_MAX = 120.0
START_S_MAX = 60.0  # the first program that opens a GPU waits for its firmware

STATES = ("RUNNING", "LOCKED", "CHECKPOINTED", "FAILED", "CHECKPOINTING", "RESTORING")
# What the driver's numbers mean here; all others have their name only.
MEANINGS = {
    2: "there is not enough memory on the host or on the GPU",
    100: "there is no GPU",
    101: "the GPUs named are not those of the image",
    201: "the process has no CUDA context",
    304: "the operating system refused it: is the process alive, and has the agent CAP_SYS_PTRACE?",
    401: "the process is in another state than that",
    600: "work on the GPU did not end in time",
    800: "it is not permitted",
    801: "this GPU, or something that the process uses (UVM, IPC, MIG, MPS), does not support it",
    803: "the kernel's driver and libcuda are of different versions",
}


class CudaError(PermanentError):
    def __init__(self, call: str, code: int, name: str) -> None:
        self.code = code
        meaning = MEANINGS.get(code)
        super().__init__(f"{call}: {name}{f' ({meaning})' if meaning else ''}")


# ------------------------------------------------------------------------------------------- driver


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


class _Pair(ctypes.Structure):
    _fields_ = [("old", _Uuid), ("new", _Uuid)]


class _LockArgs(ctypes.Structure):
    _fields_ = [
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    ]


class _RestoreArgs(ctypes.Structure):
    _fields_ = [
        ("pairs", ctypes.POINTER(_Pair)),
        ("count", ctypes.c_uint),
        ("padding", ctypes.c_uint),
        ("reserved", ctypes.c_uint64 * 6),
    ]


def pairs(there: Sequence[Gpu], here: Sequence[Gpu], used: str, slot: int) -> list[tuple[str, str]]:
    """Which GPU takes the place of which: the driver wants every GPU that the process could see
    named, each once. Empty: they are the same ones. `used` is the process's own GPU, which becomes
    the one of `slot` here; the others are only named. PermanentError: it does not work out."""
    if {gpu.uuid for gpu in there} == {gpu.uuid for gpu in here}:
        return []
    if len(there) != len(here):
        raise PermanentError(f"the process sees {len(there)} GPUs, and here are {len(here)}")
    if not 0 <= slot < len(here):
        raise PermanentError(f"there is no GPU for slot {slot} here")
    others = [gpu.uuid for index, gpu in enumerate(here) if index != slot]
    return [
        (gpu.uuid, here[slot].uuid if gpu.uuid == used else others.pop(0))
        for gpu in sorted(there, key=lambda gpu: gpu.uuid != used)
    ]


class Frozen(msgspec.Struct, frozen=True):
    took_ns: dict[str, int] = {}
    areas: list[areas.Area] = []  # of host memory, which the driver alone uses until it restores


class GpuDriver:
    """PermanentError: there is none that can do this."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL(libcuda.name())
        except OSError as error:
            raise PermanentError(f"there is no CUDA driver: {error}") from error
        self._call("cuInit", 0)
        number = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        self.version = number.value
        if self.version < CHECKPOINT_CALLS or not hasattr(self._cuda, "cuCheckpointProcessLock"):
            raise PermanentError(
                f"the CUDA driver is too old for snapshots of processes: {self.version} is before "
                f"{CHECKPOINT_CALLS}",
                hint="driver 570 or newer",
            )

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._cuda, name)(*args)
        if code != 0:
            words = ctypes.c_char_p()
            self._cuda.cuGetErrorName(code, ctypes.byref(words))
            raise CudaError(name, code, words.value.decode() if words.value else f"error {code}")

    def gpus(self) -> list[Gpu]:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return [self._gpu(index) for index in range(count.value)]

    def _gpu(self, index: int) -> Gpu:
        name, number = ctypes.create_string_buffer(100), _Uuid()
        memory, device = ctypes.c_size_t(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), index)
        self._call("cuDeviceGetName", name, len(name), device)
        self._call("cuDeviceGetUuid_v2", ctypes.byref(number), device)
        self._call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        own = str(uuid.UUID(bytes=bytes(number.bytes)))
        return Gpu(uuid=own, name=name.value.decode(), memory=memory.value)

    def state(self, pid: int) -> str:
        state = ctypes.c_int()
        self._call("cuCheckpointProcessGetState", pid, ctypes.byref(state))
        return STATES[state.value] if 0 <= state.value < len(STATES) else f"state {state.value}"

    def restore_thread(self, pid: int) -> int:
        """The only thread of the process that must be able to run for a restore."""
        number = ctypes.c_int()
        self._call("cuCheckpointProcessGetRestoreThreadId", pid, ctypes.byref(number))
        return number.value

    def lock(self, pid: int, timeout_ms: int = LOCK_MS) -> None:
        args = _LockArgs(timeout_ms=timeout_ms)
        self._call("cuCheckpointProcessLock", pid, ctypes.byref(args))

    def checkpoint(self, pid: int) -> None:
        self._call("cuCheckpointProcessCheckpoint", pid, None)

    def restore(self, pid: int, places: Sequence[tuple[str, str]] = ()) -> None:
        if not places:
            self._call("cuCheckpointProcessRestore", pid, None)
            return
        if self.version < OTHER_GPUS:
            raise PermanentError(
                "this CUDA driver restores a process only on the GPU that it had",
                hint="driver 580 or newer",
            )
        table = (_Pair * len(places))()
        for pair, (old, new) in zip(table, places):
            pair.old.bytes[:] = uuid.UUID(old).bytes
            pair.new.bytes[:] = uuid.UUID(new).bytes
        args = _RestoreArgs(pairs=table, count=len(places))
        self._call("cuCheckpointProcessRestore", pid, ctypes.byref(args))

    def unlock(self, pid: int) -> None:
        self._call("cuCheckpointProcessUnlock", pid, None)

    # ------------------------------------------------------------------ whole

    def freeze(self, pid: int, timeout_ms: int = LOCK_MS) -> Frozen:
        """Until it is checkpointed. If it fails, the process is as it was, as far as the driver
        can: else the error says so. TransientError: a thread of it is stopped as long as this
        process lives."""
        began = time.monotonic_ns()
        try:
            self.lock(pid, timeout_ms)
            locked = time.monotonic_ns()
            taken = self._checkpoint_alone(pid)
        except CudaError as error:
            if error.code == ILLEGAL_STATE:
                raise  # it is somebody else's
            try:
                self.thaw(pid)
            except KeepstepError as worse:
                raise PermanentError(
                    f"{error.message}; and it did not come back: {worse}"
                ) from error
            raise
        took = {"gpu-lock": locked - began, "gpu-checkpoint": time.monotonic_ns() - locked}
        return Frozen(took_ns=took, areas=taken)

    def _checkpoint_alone(self, pid: int) -> list[areas.Area]:
        """The memory that the driver took for it; empty if that cannot be told."""
        thread = None
        with contextlib.suppress(CudaError, OSError):
            thread = areas.thread_of(pid, self.restore_thread(pid))
        if thread is not None:
            with contextlib.suppress(OSError), areas.others_stopped(pid, thread):
                known, before = areas.threads(pid), areas.mappings(pid)
                self.checkpoint(pid)
                threads = bool(areas.threads(pid) - known)
                return areas.new_areas(before, areas.mappings(pid), threads)
        if self.state(pid) != "CHECKPOINTED":
            self.checkpoint(pid)
        return []

    def thaw(self, pid: int, places: Sequence[tuple[str, str]] = ()) -> dict[str, int]:
        """Until it runs, from whatever state."""
        began = time.monotonic_ns()
        took = {}
        if self.state(pid) == "CHECKPOINTED":
            self.restore(pid, places)
            took["gpu-restore"] = time.monotonic_ns() - began
        if self.state(pid) == "LOCKED":
            self.unlock(pid)
        if (state := self.state(pid)) != "RUNNING":
            raise PermanentError(f"the driver has process {pid} in state {state}")
        return took


# ------------------------------------------------------------------------------------------- helper


class Facts(msgspec.Struct, frozen=True):
    """The first line of the helper."""

    version: int = 0
    gpus: list[Gpu] = []
    error: str = ""


class GpuOrder(msgspec.Struct, frozen=True):
    what: Literal["freeze", "thaw", "thaw-in"]
    pid: int  # in the last case that of a capsule: what lives in it is meant
    timeout_ms: int = LOCK_MS
    places: list[tuple[str, str]] = []


class Answer(Frozen, frozen=True):
    error: str = ""


class Helper:
    """One beside the agent, or beside a capsule. Not for several threads at once."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "keepstep.agent.gpu"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._facts: Facts | None = None

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def facts(self) -> Facts:
        """PermanentError: the driver cannot do it."""
        if self._facts is None:
            self._facts = msgspec.json.decode(self._line(START_S_MAX, "start"), type=Facts)
        if self._facts.error:
            raise PermanentError(self._facts.error)
        return self._facts

    def freeze(self, pid: int, seconds_max: float) -> Frozen:
        """If it fails, this helper ends, and with it whatever it has stopped goes on."""
        try:
            return self._do(GpuOrder(what="freeze", pid=pid), seconds_max)
        except TransientError:
            self.close()
            raise

    def thaw(
        self, pid: int, seconds_max: float, places: Sequence[tuple[str, str]] = ()
    ) -> dict[str, int]:
        order = GpuOrder(what="thaw", pid=pid, places=list(places))
        return self._do(order, seconds_max).took_ns

    def thaw_in(
        self, capsule: int, seconds_max: float, places: Sequence[tuple[str, str]]
    ) -> dict[str, int]:
        order = GpuOrder(what="thaw-in", pid=capsule, places=list(places))
        return self._do(order, seconds_max).took_ns

    def _do(self, order: GpuOrder, seconds_max: float) -> Frozen:
        self.facts()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # its last word, or none, is read below
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            self._process.stdin.flush()
        answer = msgspec.json.decode(self._line(seconds_max, order.what), type=Answer)
        if answer.error:
            raise TransientError(f"the GPU's part failed: {answer.error}")
        return answer

    def _line(self, seconds_max: float, what: str) -> bytes:
        """One line comes in one write: it is there whole, or not at all."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds_max)[0]:
            self.close()
            raise TransientError(f"the CUDA driver did not {what} in {seconds_max:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise TransientError(f"the CUDA driver ended the helper that called it ({what})")
        return line

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def in_one_line(error: KeepstepError) -> str:
    return f"{error.message} (hint: {error.hint})" if error.hint else error.message


def main() -> int:
    def say(words: msgspec.Struct) -> None:
        sys.stdout.buffer.write(msgspec.json.encode(words) + b"\n")
        sys.stdout.buffer.flush()

    try:
        driver = GpuDriver()
        say(Facts(version=driver.version, gpus=driver.gpus()))
    except KeepstepError as error:
        say(Facts(error=in_one_line(error)))
        return 1
    for line in sys.stdin.buffer:  # until the agent or the capsule is gone
        order = msgspec.json.decode(line, type=GpuOrder)
        try:
            pid = order.pid if order.what != "thaw-in" else inner_pid(order.pid)
            if pid is None:
                say(Answer(error="the process has ended"))
            elif order.what == "freeze":
                frozen = driver.freeze(pid, order.timeout_ms)
                say(Answer(took_ns=frozen.took_ns, areas=frozen.areas))
            else:
                say(Answer(took_ns=driver.thaw(pid, order.places)))
        except KeepstepError as error:
            say(Answer(error=in_one_line(error)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
