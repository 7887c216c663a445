"""A real PostgreSQL server, private, for tests that need one."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import psutil

USER = "keepstep"
START_S = 30.0


def server_programs() -> Path | None:
    """The folder with initdb and postgres; Debian keeps it out of PATH."""
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return versions[-1].parent if versions else None


def unprivileged() -> str | None:
    """The server refuses to run as root; None: we are somebody else already."""
    return "nobody" if os.geteuid() == 0 else None


class Postgres:
    """One server on loopback, in a folder of its own."""

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._password = secrets.token_urlsafe(16)
        self._folder = Path(tempfile.mkdtemp(prefix="keepstep-postgres-"))
        self._data = self._folder / "data"
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = int(probe.getsockname()[1])
        self._process: subprocess.Popen[bytes] | None = None
        self._stores = 0
        secret = self._folder / "password"
        secret.write_text(self._password)
        if unprivileged():
            for path in (self._folder, secret):
                shutil.chown(path, unprivileged())
        command = [programs / "initdb", "-D", self._data, "-U", USER, "--pwfile", secret]
        command += ["-A", "scram-sha-256", "--no-sync", "--no-locale", "-E", "UTF8"]
        done = self._as_user(command)
        assert done.returncode == 0, done.stdout.decode()
        self.start()

    def _as_user(self, command: list[object]) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [str(word) for word in command],
            user=unprivileged(),
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def start(self) -> None:
        command = [self._programs / "postgres", "-D", self._data, "-p", self.port]
        command += ["-k", self._folder, "-c", "listen_addresses=127.0.0.1"]
        command += ["-c", "max_connections=50", "-c", "shared_buffers=16MB"]
        # Processes crash here, machines do not: nothing is lost without it, and it takes long.
        command += ["-c", "fsync=off"]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(word) for word in command],
                user=unprivileged(),
                cwd=self._folder,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is not for the server
            )
        end = time.monotonic() + START_S
        while not self._answers():
            said = (self._folder / "log").read_text()
            assert self._process.poll() is None and time.monotonic() < end, said
            time.sleep(0.05)

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(self.url("postgres"), connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self) -> None:
        """As a crash would: no goodbye to anybody."""
        assert self._process is not None
        self.freeze(signal.SIGCONT)
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    def freeze(self, number: int = signal.SIGSTOP) -> None:
        """The whole server stands still: connections stay open, nothing is answered."""
        assert self._process is not None
        if self._process.poll() is None:
            parent = psutil.Process(self._process.pid)
            for process in [parent, *parent.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def thaw(self) -> None:
        self.freeze(signal.SIGCONT)

    def url(self, database: str) -> str:
        return f"postgresql://{USER}:{self._password}@127.0.0.1:{self.port}/{database}"

    def beyond(self, store: str) -> str:
        """The address of `store` in other network namespaces, which see the same files."""
        path = store.replace(f"127.0.0.1:{self.port}/", "/")
        return f"{path}&host={self._folder}&port={self.port}"

    def store(self) -> str:
        """The address of a new, empty place: a schema, which costs less than a database."""
        import psycopg

        self._stores += 1
        name = f"test{self._stores}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as db:
            db.execute(f"CREATE SCHEMA {name}")
        return self.url("postgres") + f"?options=-csearch_path%3D{name}"

    def remove(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()
        shutil.rmtree(self._folder)
