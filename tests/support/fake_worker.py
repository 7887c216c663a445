"""What the agent's tests run in place of keepstep.worker; the first argument says what it does.

It has no tests of its own: it is a program, started by the agent under test.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from typing import Any

import msgspec

from keepstep.model import commands
from keepstep.model import messages as m
from keepstep.model.page import CAPACITY_DEFAULT, FIELDS, MAGIC, PAGE_BYTES, SLOT_HEADER, WHERE
from keepstep.model.wire import HEADER, frame

PR_SET_PDEATHSIG = 1


class FakeWorker:
    def __init__(self) -> None:
        self.control = socket.socket(fileno=int(os.environ["KEEPSTEP_CONTROL_FD"]))
        self.page = mmap.mmap(int(os.environ["KEEPSTEP_PAGE_FD"]), 0)
        self.decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(commands.WorkerCommand)
        self.put("capacity", CAPACITY_DEFAULT)
        self.put("where", WHERE.index("compute"))
        self.put("magic", MAGIC)

    def put(self, name: str, value: int) -> None:
        self.page[FIELDS[name] : FIELDS[name] + 8] = value.to_bytes(8, "little")

    def publish(self, slot: int, tick: int, data: bytes) -> None:
        at = PAGE_BYTES + slot * CAPACITY_DEFAULT
        header = SLOT_HEADER.pack(2, tick, len(data), zlib.crc32(data))
        self.page[at : at + len(header) + len(data)] = header + data

    def say(self, message: m.WorkerMessage) -> None:
        self.control.sendall(frame(message))

    def hear(self) -> Any:
        (length,) = HEADER.unpack(self.control.recv(HEADER.size, socket.MSG_WAITALL))
        return self.decoder.decode(self.control.recv(length, socket.MSG_WAITALL))

    def train(self) -> None:
        step = 0
        while True:
            step += 1
            self.put("heartbeat_ns", time.monotonic_ns())
            for name in ("marks", "version", "tick"):
                self.put(name, step)
            self.put("commit_ns", time.monotonic_ns())
            time.sleep(0.01)

    def prepare(self, mode: str) -> str:
        """What this mode does first; the answer is what it reports as its park point."""
        match mode:
            case "exit":
                print("\n".join(f"line {i}" for i in range(100)))
                self.say(m.Failure(generation=0, error_kind="user", error="last", version=3))
                sys.exit(7)
            case "flood":
                self.control.sendall(HEADER.pack(1 << 31))
            case "garbage":
                self.control.sendall(HEADER.pack(3) + b"\xff\xff\xff")
            case "stubborn":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            case "blobs":
                self.publish(0, 4, b"tick four" * 1000)
                self.publish(1, 5, b"tick five")
                self.publish(2, -1, b"init")
            case "child":
                return str(subprocess.Popen(["sleep", "1000"]).pid)
            case "escapee":
                return str(subprocess.Popen(["sleep", "1000"], process_group=0).pid)
            case "env":
                return json.dumps(dict(os.environ))
            case "train" | "stall" | "spin":
                self.put("heartbeat_ns", time.monotonic_ns())
                self.put("stepping", 1)
        return ""

    def run(self, mode: str) -> None:
        welcome = self.hear()
        assert isinstance(welcome, commands.Welcome) and welcome.token, welcome
        self.say(m.Parked(where=self.prepare(mode), warm_ns=1))
        if mode == "train":
            threading.Thread(target=self.train, daemon=True).start()
        while mode == "spin":
            pass
        while True:
            command = self.hear()
            print("heard", command, flush=True)
            match command:
                case commands.Arm():
                    self.say(m.InjectFired(inject=command.inject, point="x", version=1))
                case commands.Leave():
                    sys.exit(0)
                case commands.Hold():
                    self.put("hold", 1)
                    self.say(m.Swapped(generation=command.generation, swap_ns=1))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    FakeWorker().run(sys.argv[1])
