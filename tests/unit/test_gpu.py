"""The GPU half of process images against a driver in host memory (fake_cuda.c)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from keepstep.agent import areas, gpu
from keepstep.errors import PermanentError, TransientError
from keepstep.model.agent_messages import Gpu
from keepstep.native import segments

FAKE = Path(__file__).parent / "fake_cuda.c"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tool = shutil.which("gcc") or shutil.which("cc") or shutil.which("g++")
    if tool is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("cuda")
    path = folder / "libcuda.so.1"
    language = ["-x", "c"] if not tool.endswith("g++") else ["-x", "c++", "-fpermissive"]
    words = [tool, *language, "-shared", "-fPIC", "-Wall", "-Wextra", "-w", str(FAKE), "-o"]
    subprocess.run([*words, str(path)], check=True)
    shutil.copyfile(path, folder / "libcudart.so.13")
    return path


@pytest.fixture
def fake(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """A copy of its own, and so with its own state."""
    copy = tmp_path / library.name
    shutil.copyfile(library, copy)
    monkeypatch.setenv("KEEPSTEP_LIBCUDA", str(copy))
    return ctypes.CDLL(str(copy))


def card(number: int, name: str = "one") -> Gpu:
    return Gpu(uuid=str(uuid.UUID(int=number)), name=name, memory=1 << 30)


# ------------------------------------------------------------------------------------------- driver


def test_a_process_is_frozen_and_thawed(fake: ctypes.CDLL) -> None:
    driver = gpu.GpuDriver()
    assert driver.state(7) == "RUNNING" and driver.restore_thread(7) == 8
    assert set(driver.freeze(7, 1234).took_ns) == {"gpu-lock", "gpu-checkpoint"}
    assert driver.state(7) == "CHECKPOINTED"
    assert ctypes.c_uint.in_dll(fake, "fake_timeout_ms").value == 1234
    assert set(driver.thaw(7)) == {"gpu-restore"}
    assert driver.state(7) == "RUNNING"
    assert driver.thaw(7) == {}  # it runs: nothing to do


def test_gpus_have_their_names(fake: ctypes.CDLL) -> None:
    first, second = gpu.GpuDriver().gpus()
    assert (first.name, first.memory) == ("Fake 0", 1 << 30)
    assert second.uuid == str(uuid.UUID(bytes=b"\x11" * 16))


@pytest.mark.parametrize("call", ["cuCheckpointProcessLock", "cuCheckpointProcessCheckpoint"])
def test_who_cannot_be_frozen_runs_on(
    call: str, fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = gpu.GpuDriver()
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"{call}=600")
    with pytest.raises(gpu.CudaError, match=f"{call}: CUDA_ERROR_NOT_READY .work on the GPU"):
        driver.freeze(7)
    assert driver.state(7) == "RUNNING"


def test_a_driver_that_breaks_the_process_says_so(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = gpu.GpuDriver()
    failing = "cuCheckpointProcessCheckpoint=999,cuCheckpointProcessUnlock=999"
    monkeypatch.setenv("FAKE_CUDA_FAIL", failing)
    with pytest.raises(PermanentError, match="and it did not come back"):
        driver.freeze(7)
    ctypes.c_int.in_dll(fake, "fake_state").value = 3
    with pytest.raises(PermanentError, match="in state FAILED"):
        driver.thaw(7)


def test_an_old_driver_is_refused(fake: ctypes.CDLL) -> None:
    version = ctypes.c_int.in_dll(fake, "fake_version")
    version.value = 12_040
    with pytest.raises(PermanentError, match="too old"):
        gpu.GpuDriver()
    version.value = 12_080
    driver = gpu.GpuDriver()
    driver.freeze(7)
    with pytest.raises(PermanentError, match="only on the GPU that it had"):
        driver.thaw(7, [(card(1).uuid, card(2).uuid)])
    driver.thaw(7)


def test_pairs_reach_the_driver(fake: ctypes.CDLL) -> None:
    driver = gpu.GpuDriver()
    driver.freeze(7)
    driver.thaw(7, [(card(1).uuid, card(3).uuid), (card(2).uuid, card(4).uuid)])
    assert ctypes.c_uint.in_dll(fake, "fake_pair_count").value == 2
    raw = bytes((ctypes.c_ubyte * 64).in_dll(fake, "fake_pairs"))
    assert [int.from_bytes(raw[at : at + 16]) for at in range(0, 64, 16)] == [1, 3, 2, 4]


def test_every_gpu_gets_one_place() -> None:
    there, here = [card(1), card(2), card(3)], [card(4), card(5), card(6)]
    found = gpu.pairs(there, here, card(2).uuid, 0)
    assert dict(found)[card(2).uuid] == card(4).uuid
    assert sorted(old for old, _ in found) == [one.uuid for one in there]
    assert sorted(new for _, new in found) == [one.uuid for one in here]
    assert gpu.pairs(there, there[::-1], card(2).uuid, 0) == []
    with pytest.raises(PermanentError, match="sees 3 GPUs, and here are 1"):
        gpu.pairs(there, here[:1], card(2).uuid, 0)
    with pytest.raises(PermanentError, match="slot 3"):
        gpu.pairs(there, here, card(2).uuid, 3)


# ------------------------------------------------------------------------------------------- helper


def test_a_helper_calls_the_driver(fake: ctypes.CDLL) -> None:
    helper = gpu.Helper()
    facts = helper.facts()
    assert facts.version == 13_000 and [one.name for one in facts.gpus] == ["Fake 0", "Fake 1"]
    assert "gpu-checkpoint" in helper.freeze(7, 10).took_ns
    with pytest.raises(TransientError, match="CUDA_ERROR_ILLEGAL_STATE"):
        helper.freeze(7, 10)  # it was somebody else's: nothing is undone
    assert not helper.alive


def test_a_driver_that_hangs_is_left_alone(
    fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", "hang=1")
    helper = gpu.Helper()
    helper.facts()
    with pytest.raises(TransientError, match="did not freeze in 0 s"):
        helper.freeze(7, 0.2)
    assert not helper.alive
    with pytest.raises(TransientError, match="ended the helper"):
        helper.thaw(7, 10)


def test_a_helper_without_a_driver_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPSTEP_LIBCUDA", "libno-such-cuda.so")
    helper = gpu.Helper()
    with pytest.raises(PermanentError, match="there is no CUDA driver"):
        helper.facts()
    helper.close()


# ----------------------------------------------------------------------------------------- segments

SEGMENTS = """
import ctypes, os, sys
folder, library = sys.argv[1], ctypes.CDLL(None)
runtime = ctypes.CDLL("libcudart.so.13", ctypes.RTLD_GLOBAL)
u64 = ctypes.c_ulonglong
def allocate(size):
    at = ctypes.c_void_p()
    assert library.cudaMalloc(ctypes.byref(at), ctypes.c_size_t(size)) == 0
    return at
def move(what):
    error = ctypes.create_string_buffer(500)
    parts = (3,) if what == "save" else ()
    code = getattr(library, "keepstep_segments_" + what)(
        folder.encode(), *parts, error, ctypes.c_size_t(500))
    return code, error.value.decode()
def numbers():
    known, present = u64(), u64()
    library.keepstep_segments_bytes(ctypes.byref(known), ctypes.byref(present))
    return known.value, present.value
sizes = [40 << 20, 1 << 20, (17 << 20) + 5, 100]
places = [allocate(size) for size in sizes]
contents = [os.urandom(size) for size in sizes]
for at, data in zip(places, contents):
    ctypes.memmove(at, data, len(data))
total = (40 << 20) + (2 << 20) + (18 << 20)
assert numbers() == (total, total), numbers()
os.environ["FAKE_CUDA_FAIL"] = ""
libc = ctypes.CDLL(None)
libc.setenv(b"FAKE_CUDA_FAIL", b"cuMemcpyDtoHAsync=700", 1)
code, error = move("save")
assert code == -1 and "cuMemcpyDtoHAsync" in error and numbers() == (total, total), error
libc.setenv(b"FAKE_CUDA_FAIL", b"", 1)
for name in os.listdir(folder):
    os.unlink(os.path.join(folder, name))
assert move("save") == (0, ""), "saved"
assert numbers() == (total, 0)
assert sum(os.path.getsize(os.path.join(folder, n)) for n in os.listdir(folder)) == total
assert move("save")[0] == -1  # twice
late = allocate(6 << 20)  # segments come and go while the others are away
ctypes.memmove(late, b"late" * (6 << 18), 6 << 20)
assert library.cudaFree(places.pop(1)) == 0
del contents[1]
places.append(late)
contents.append(b"late" * (6 << 18))
total += (6 << 20) - (2 << 20)
assert numbers() == (total, 6 << 20), numbers()
libc.setenv(b"FAKE_CUDA_FAIL", b"cuMemCreate=2", 1)
code, error = move("load")
assert code == -1 and "old address" in error, error
libc.setenv(b"FAKE_CUDA_FAIL", b"", 1)
assert move("load") == (0, ""), "loaded"
assert numbers() == (total, total)
for at, data in zip(places, contents):
    assert ctypes.string_at(at, len(data)) == data
for at in places:
    assert library.cudaFree(at) == 0
assert numbers() == (0, 0)
managed, shared = ctypes.c_int(), ctypes.c_int()
at = ctypes.c_void_p()
library.cudaMallocManaged(ctypes.byref(at), ctypes.c_size_t(10), 1)
library.keepstep_segments_calls(ctypes.byref(managed), ctypes.byref(shared))
assert (managed.value, shared.value) == (1, 0)
print("good")
"""


def test_segments_come_back_where_they_were(library: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "LD_PRELOAD": str(segments.ensure()),
        "LD_LIBRARY_PATH": str(library.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", SEGMENTS, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "good\n", done.stderr


# -------------------------------------------------------------------------------------------- areas


MIB = 1 << 20
ARENA = areas.ARENA_BYTES


def mapped(start: int, end: int, rights: str = "rw-p", name: str = "") -> areas.Mapping:
    return areas.Mapping(start * MIB, end * MIB, rights, name)


def test_new_memory_is_told_from_old() -> None:
    before = [mapped(10, 20), mapped(40, 41, "r--p")]
    after = [
        mapped(10, 30),  # grown together with the old one
        mapped(34, 39, name="/a/file"),
        mapped(39, 46),  # around what was there
        mapped(50, 52),
        mapped(64, 74),  # aligned like an arena, but nothing follows it
        mapped(90, 100, name="[heap]"),
    ]
    found = [(20, 30), (41, 46), (64, 74)]
    assert areas.new_areas(before, after, False) == in_bytes(found)
    assert areas.new_areas(after, after, False) == []
    other = mapped(200, 201, "r-xp", "/usr/lib/libjemalloc.so.2")
    assert areas.new_areas(before, [*after, other], False) == []


def in_bytes(found: list[tuple[int, int]]) -> list[areas.Area]:
    return [(start * MIB, end * MIB) for start, end in found]


def test_mallocs_arenas_are_left_alone() -> None:
    assert areas.new_areas([], [mapped(128, 140), mapped(140, 192, "---p")], False) == []
    assert areas.new_areas([], [mapped(192, 256)], False) == []
    # As seen: the driver's area ends where an arena begins, and both are one mapping.
    merged = [mapped(70, 140), mapped(140, 192, "---p")]
    assert areas.new_areas([], merged, False) == in_bytes([(70, 128)])
    assert areas.new_areas([mapped(128, 140)], merged, False) == in_bytes([(70, 128)])
    assert areas.new_areas([], [mapped(130, 140), mapped(140, 192, "---p")], False) == []


def test_stacks_of_new_threads_are_left_alone() -> None:
    after = [mapped(9, 10, "---p"), mapped(10, 18), mapped(30, 40)]
    assert areas.new_areas([], after, True) == in_bytes([(30, 40)])
    assert areas.new_areas([], after, False) == in_bytes([(10, 18), (30, 40)])


STOPPED = """
import threading, time
for _ in range(3):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("here", flush=True)
input()
"""


def threads(pid: int) -> dict[int, str]:
    """Their states: t is stopped by somebody who traces it."""
    found = {}
    for path in Path(f"/proc/{pid}/task").iterdir():
        found[int(path.name)] = (path / "stat").read_text().rpartition(")")[2].split()[0]
    return found


def test_all_threads_but_one_are_stopped_and_go_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        pid = process.pid
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        assert areas.thread_of(pid, pid) == pid and areas.thread_of(pid, 1) is None
        with areas.others_stopped(pid, pid):
            seen = threads(pid)
            assert len(seen) == 4 and seen.pop(pid) != "t" and set(seen.values()) == {"t"}
        assert "t" not in threads(pid).values()
        process.communicate(b"\n", timeout=20)
        assert process.returncode == 0


# It stops indeed, but whoever asked is not told.
STUCK = """
import os, sys
from keepstep.agent import areas
areas.STOP_S_MAX = 0.1
os.waitpid = lambda *_: (0, 0)
try:
    with areas.others_stopped(int(sys.argv[1]), int(sys.argv[1])):
        print("all stopped")
except areas.TransientError as error:
    print(error)
"""


def test_a_thread_that_does_not_stop_goes_on_with_the_end_of_who_asked() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        words = [sys.executable, "-c", STUCK, str(process.pid)]
        done = subprocess.run(words, capture_output=True, text=True)
        assert "does not stop" in done.stdout, done
        assert "t" not in threads(process.pid).values()
        process.communicate(b"\n", timeout=20)


AREAS = """
import ctypes, hashlib, mmap, os, resource, signal, sys
folder, limit, library = sys.argv[1], int(sys.argv[2]), ctypes.CDLL(sys.argv[3])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
mib = 1 << 20
kinds = [
    os.urandom(10 * mib) + bytes(20 * mib) + (os.urandom(4096) + bytes(4096)) * 1280,
    bytes(6 * mib),
    os.urandom(5 * mib - 4096),
]
places = []
for data in kinds:
    private = mmap.mmap(-1, len(data), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    private[:] = data
    places.append(private)
starts = [ctypes.addressof(ctypes.c_char.from_buffer(place)) for place in places]
assert library.keepstep_areas_watch(folder.encode(), 8, 3) == 0
assert library.keepstep_areas_watch(folder.encode(), 8, 3) == 0  # once is enough
print(*(f"{at} {at + len(data)}" for at, data in zip(starts, kinds)), flush=True)
for line in sys.stdin:
    assert all(place[:] == data for place, data in zip(places, kinds)), "not what it was"
    if line == "again\\n":
        assert library.keepstep_areas_watch(folder.encode(), 8, 3) == 0
    print("good", flush=True)
"""


class AreaProcess:
    def __init__(self, folder: Path, limit: int = 0) -> None:
        words = [sys.executable, "-c", AREAS, str(folder), str(limit), str(segments.ensure())]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        numbers = list(map(int, self._process.stdout.readline().split()))
        self.areas = list(zip(numbers[::2], numbers[1::2]))

        self.lives = lambda: areas.runs(self._process.pid)

    def resident(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) << 10

    def right(self, word: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "good\n"

    def end(self) -> None:
        self._process.communicate(timeout=20)
        assert self._process.returncode == 0


def test_areas_go_into_files_without_their_zeros_and_come_back(tmp_path: Path) -> None:
    it = AreaProcess(tmp_path)
    for _ in range(2):
        before = it.resident()
        assert areas.stow(tmp_path, it.areas, 20, it.lives) == "" and areas.stowed(tmp_path)
        assert before - it.resident() > 24 << 20  # zeros do not come back as memory
        files = list(tmp_path.glob("part-*"))
        assert {path.name for path in files} <= {"part-8", "part-9", "part-10"}
        assert sum(path.stat().st_size for path in files) < 26 << 20
        areas.fetch(tmp_path, 20, it.lives)
        assert not list(tmp_path.iterdir())
        it.right("again")
    it.end()


def test_areas_stay_where_they_were_if_there_is_no_room(tmp_path: Path) -> None:
    it = AreaProcess(tmp_path, limit=3 << 20)
    assert "File too large" in areas.stow(tmp_path, it.areas, 20, it.lives)
    assert not areas.stowed(tmp_path) and not list(tmp_path.iterdir())
    it.right("again")
    # Nobody waits for the answer, and the process is asked to bring back what it never moved.
    with pytest.raises(TransientError, match=r"did not answer areas-stow in 0 s"):
        areas.stow(tmp_path, it.areas, 0.0, it.lives)
    areas.fetch(tmp_path, 20, it.lives)
    assert not list(tmp_path.iterdir())
    it.right("check")
    it.end()


def test_areas_come_back_although_nobody_waited_until_they_were_away(tmp_path: Path) -> None:
    it = AreaProcess(tmp_path)
    for _ in range(2):  # also with what the time before has left
        with pytest.raises(TransientError, match=r"did not answer areas-stow in 0 s"):
            areas.stow(tmp_path, it.areas, 0.0, it.lives)
        assert areas.stowed(tmp_path)
        areas.fetch(tmp_path, 20, it.lives)
        it.right("again")
    assert not list(tmp_path.iterdir())
    it.end()


def test_areas_that_are_lost_are_not_taken_for_moved(tmp_path: Path) -> None:
    (tmp_path / areas.STOWED).write_text("no room; and it did not come back: a file is gone")
    with pytest.raises(TransientError, match="the driver's memory is lost"):
        areas.stow(tmp_path, [(0, 1 << 24)], 5, lambda: True)
    assert areas.stowed(tmp_path)
    with pytest.raises(TransientError, match="did not come back: no room"):
        areas.fetch(tmp_path, 5, lambda: True)


def test_nobody_waits_for_a_process_that_has_ended(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(TransientError, match="has ended before areas-stow"):
        areas.stow(tmp_path, [(0, 1 << 24)], 5, lambda: areas.runs(process.pid))
