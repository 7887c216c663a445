"""What is looked at before a process is moved as a whole."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import pytest

from keepstep.agent import preflight
from keepstep.model.agent_messages import Gpu
from keepstep.model.image import Host, ImageFacts

HOST = Host(kernel="6.18", machine="x86_64", features=["avx", "sse"], criu="4.2.1")
FACTS = ImageFacts(
    host=HOST, offenders=[], files=[("/lib/a.so", 10)], paths=["/work"], image_bytes=100 << 20
)
SIZES = {"/lib/a.so": 10, "/work": 4096}


def compared(facts: ImageFacts = FACTS, here: Host = HOST, **more: int) -> list[str]:
    room = {"memory": 1 << 30, "room": 1 << 30, **more}
    return preflight.compare(facts, here, size=lambda path: SIZES.get(path, -1), **room)


def test_an_equal_place_is_good() -> None:
    assert compared() == []
    more = msgspec.structs.replace(HOST, features=["avx", "avx512f", "sse"])
    assert compared(here=more) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kernel": "6.12"}, "kernel 6.18 there and 6.12 here"),
        ({"machine": "aarch64"}, "machine x86_64 there and aarch64 here"),
        ({"criu": "4.3"}, "CRIU 4.2.1 there and 4.3 here"),
        ({"features": ["sse"]}, "lacks avx"),
        ({"trouble": ["no CRIU"]}, "no CRIU"),
    ],
)
def test_another_machine_is_named(change: dict[str, object], words: str) -> None:
    (said,) = compared(here=msgspec.structs.replace(HOST, **change))
    assert words in said


def test_files_that_differ_are_named() -> None:
    facts = msgspec.structs.replace(FACTS, files=[("/lib/a.so", 11)], paths=["/gone"])
    (said,) = compared(facts)
    assert "/lib/a.so" in said and "/gone" in said


def test_too_little_memory_is_named() -> None:
    assert "of tmpfs" in compared(room=1 << 20)[0]
    assert "of memory" in compared(memory=1 << 20)[0]


def test_what_no_image_can_hold_is_found() -> None:
    reader, writer = os.pipe()
    try:
        found = preflight.scan(os.getpid(), ours=0)
        assert os.getcwd() in found.paths
        assert any(path.endswith(".so") or ".so." in path for path, _ in found.files)
        assert found.image_bytes > 1 << 20
        assert not [one for one in found.offenders if f"pipe:[{os.fstat(reader).st_ino}]" in one]
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("anon_inode:[io_uring]", "io_uring"),
        ("/dev/infiniband/uverbs0", "RDMA"),
        ("/dev/nvidia0", "GPU"),
        ("/dev/kfd", "amdgpu"),
        ("/dev/pts/3", "terminal"),
        ("/dev/fuse", "device"),
        ("anon_inode:[eventpoll]", ""),
        ("/dev/null", ""),
        ("/dev/shm/torch_1", ""),
        ("/data/train.bin", ""),
    ],
)
def test_open_files_by_kind(target: str, words: str) -> None:
    said = preflight._trouble(target)
    assert (words in said) if words else said == ""


def test_sockets_of_a_process_are_known_by_kind() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        inode = os.fstat(listener.fileno()).st_ino
        assert preflight._inet_sockets(os.getpid())[inode] == "a tcp socket"


def test_the_other_end_of_a_unix_socket_is_known() -> None:
    here, there = socket.socketpair()
    with here, there:
        ends = [os.fstat(one.fileno()).st_ino for one in (here, there)]
        peers = preflight.unix_peers()
        assert (peers[ends[0]], peers[ends[1]]) == (ends[1], ends[0])


# ---------------------------------------------------------------------------------------------- GPU

CARD = Gpu(uuid="a", name="NVIDIA H200", memory=140 << 30)
WITH_GPU = msgspec.structs.replace(HOST, gpus=[CARD], cuda=13_000)
ON_GPU = msgspec.structs.replace(FACTS, host=WITH_GPU, gpu="a", gpu_bytes=100 << 20)


def test_an_equal_gpu_is_good() -> None:
    other = msgspec.structs.replace(CARD, uuid="b")
    assert compared(ON_GPU, WITH_GPU) == []
    assert compared(ON_GPU, msgspec.structs.replace(WITH_GPU, gpus=[other])) == []
    assert compared(FACTS, WITH_GPU) == []  # the process does not use it


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gpus": []}, "there is no GPU here"),
        ({"cuda": 12_080}, "CUDA 13.0 there, 12.8 here"),
        (
            {"gpus": [msgspec.structs.replace(CARD, name="NVIDIA B200")]},
            "GPU NVIDIA H200 there and",
        ),
        ({"gpus": [msgspec.structs.replace(CARD, memory=1 << 30)]}, "less memory"),
        ({"gpu_trouble": "the CUDA driver is too old"}, "GPU: the CUDA driver is too old"),
    ],
)
def test_another_gpu_is_named(change: dict[str, object], words: str) -> None:
    (said,) = compared(ON_GPU, msgspec.structs.replace(WITH_GPU, **change))
    assert words in said


def test_what_a_rank_moves_itself_is_not_twice_in_memory() -> None:
    need = (120 << 20) + (100 << 20)
    assert compared(ON_GPU, WITH_GPU, room=need, memory=2 * need) == []
    (said,) = compared(ON_GPU, WITH_GPU, room=need, memory=2 * need - (100 << 20))
    assert "of memory" in said
    moves = msgspec.structs.replace(ON_GPU, offloads=True)
    assert compared(moves, WITH_GPU, room=need, memory=2 * need - (100 << 20)) == []


def test_gpus_that_cannot_be_moved_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert preflight.gpu_trouble(os.getpid(), "cuda", WITH_GPU) == []
    (said,) = preflight.gpu_trouble(os.getpid(), "hip", WITH_GPU)
    assert "amdgpu plugin was never run" in said
    old = msgspec.structs.replace(WITH_GPU, gpu_trouble="the driver is too old")
    assert preflight.gpu_trouble(os.getpid(), "cuda", old) == ["GPU: the driver is too old"]
    (said,) = preflight.gpu_trouble(os.getpid(), "cuda", WITH_GPU, size=1 << 60)
    assert "of memory are needed there" in said
    (tmp_path / "control").touch()
    monkeypatch.setattr(preflight, "MPS_FOLDER", str(tmp_path))
    (said,) = preflight.gpu_trouble(os.getpid(), "cuda", WITH_GPU)
    assert "MPS server" in said


def test_names_beyond_the_file_system_are_found() -> None:
    with socket.socket(socket.AF_UNIX) as named:
        named.bind(f"\0keepstep-test-{os.getpid()}")
        assert f"@keepstep-test-{os.getpid()}" in preflight.scan(os.getpid(), ours=0).names
