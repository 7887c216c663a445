"""Real CRIU, real namespaces, real jobs; held against plain torchrun bit by bit.

`make test` runs the cells marked `always`, `--transparent-all` every one. Where CRIU, root or
namespaces are missing all of them are skipped, and say which.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "chaos"))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from harness import Job, Verdict, run_plain, wait_for

from keepstep.agent import preflight
from keepstep.errors import UsageError
from keepstep.native import criu

SCRIPT = Path(__file__).parent / "train.py"
FAULTY = Path(__file__).parent / "faulty_criu.sh"
NUMBERS = ("--layout", "--workers", "--accumulate", "--optimizers", "--epochs")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--transparent-all", action="store_true", help="every cell, not a sample")


def missing() -> str:
    """Why nothing can be moved as a whole here; empty if it can."""
    trouble = preflight.host().trouble
    if trouble:
        return "; ".join(trouble)
    words = ["unshare", "--pid", "--mount", "--fork", "--mount-proc", "true"]
    done = subprocess.run(words, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"namespaces cannot be made here: {done.stderr.strip()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if item.path.parent == Path(__file__).parent]
    if mine and (reason := missing()):
        for item in mine:
            item.add_marker(pytest.mark.skip(reason=f"SKIPPED: {reason}"))
    by_hand = config.getoption("-k") or any("::" in arg for arg in config.args)
    if config.getoption("--transparent-all", default=False) or by_hand:
        return
    dropped = [item for item in mine if not item.get_closest_marker("always")]
    items[:] = [item for item in items if item not in dropped]
    if dropped:
        config.hook.pytest_deselected(items=dropped)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """What plain torchrun computes with the options that change numbers."""
    known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def get(world: int, *words: str) -> list[dict[str, Any]]:
        pairs = (pair for pair in itertools.pairwise(words) if pair[0] in NUMBERS)
        chosen = [word for pair in pairs for word in pair]
        key = (world, *chosen)
        if key not in known:
            known[key] = run_plain(tmp_path_factory.mktemp("plain"), world, chosen, SCRIPT)
        return known[key]

    return get


class Transparent:
    """A job whose ranks move as images, and what is done to it."""

    def __init__(
        self, tmp_path: Path, *words: str, nodes: int = 2, each: int = 1, **more: Any
    ) -> None:
        self.job = Job(
            *("--mode", "transparent", "--local-nodes", str(nodes), "--nproc-per-node", str(each)),
            *("--spare-nodes", "1", *more.pop("options", ())),
            script_args=[*words, "--destroy", "--slow", "yes"],
            world=nodes * each,
            script=more.pop("script", SCRIPT),
            out=tmp_path / "out",
            **more,
        )

    def train(self) -> None:
        """Until it trains and has a spare."""
        self.job.until(lambda s: s["state"] == "running", "training")
        self.job.spare_parked()
        self.job.until_step(self.job.step() + 2)

    def node(self, rank: int) -> str:
        return str(self.job.rank(rank)["node"])

    def migrate(self, rank: int) -> dict[str, Any]:
        """Asked for, and its end."""
        before = len(self.incidents())
        answer = self.job.post("migrate", {"ranks": [rank], "reason": "test"})
        assert answer.status_code < 300, answer.text
        return self.ended(before)

    def incidents(self) -> list[dict[str, Any]]:
        client = self.job._connect()
        assert client is not None
        answer = client.get(f"/v1/jobs/{self.job.job}/watch", params={"since": 0, "wait_s": 0})
        found: list[dict[str, Any]] = answer.json()["incidents"]
        return sorted(found, key=lambda incident: incident["opened_at_ns"])

    def ended(self, before: int) -> dict[str, Any]:
        def done() -> dict[str, Any] | None:
            self.job.status()
            if self.job.process.poll() is not None:
                raise AssertionError(f"the job has ended\n{self.job.output()[-6000:]}")
            found = self.incidents()[before:]
            over = bool(found) and all(i["outcome"] != "OPEN" for i in found)
            return found[0] if over else None

        incident: dict[str, Any] = wait_for(done, "the end of the move")
        step = self.job.step()
        self.job.until_step(step + 2)  # it trains
        return incident

    def moved(self, rank: int) -> dict[str, Any]:
        """A move that must succeed."""
        old = self.node(rank)
        self.job.spare_parked()
        incident = self.migrate(rank)
        assert incident["outcome"] == "RESOLVED", incident["reason"]
        assert self.node(rank) != old
        assert {"dump", "stream", "restore"} <= set(incident["timings_ms"]), incident
        return incident


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Transparent]]:
    started: list[Transparent] = []

    def begin(*words: str, **more: Any) -> Transparent:
        started.append(Transparent(tmp_path, *words, **more))
        return started[-1]

    yield begin
    for one in started:
        one.job.kill()
        left = list(Path("/dev/shm").glob(f"keepstep-{one.job.job}-*"))
        assert not left, f"images were left behind: {left}"


@pytest.fixture
def verdict(request: pytest.FixtureRequest) -> Verdict:
    return Verdict(request.node.name)


class Faults:
    """A CRIU that fails as it is told: one word in a file, until it is taken back."""

    def __init__(self, folder: Path) -> None:
        self.file, self.struck = folder / "fault", folder / "struck"
        program = folder / "criu"
        program.write_text(FAULTY.read_text())
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        os.environ["KEEPSTEP_CRIU"] = str(program)
        os.environ["FAULT_FILE"], os.environ["FAULT_STRUCK"] = str(self.file), str(self.struck)

    def set(self, word: str) -> None:
        self.struck.unlink(missing_ok=True)
        self.file.write_text(word)

    def clear(self) -> None:
        assert self.struck.exists(), "the fault never fired"
        self.file.unlink()

    def until_struck(self) -> None:
        wait_for(self.struck.exists, "the fault")


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Faults:
    for name in ("KEEPSTEP_CRIU", "FAULT_FILE", "FAULT_STRUCK"):
        monkeypatch.setenv(name, "")
    try:
        real = criu.find.__wrapped__()[0] if not os.environ["KEEPSTEP_CRIU"] else []
    except UsageError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("REAL_CRIU", " ".join(real))
    return Faults(tmp_path)


@pytest.fixture
def small_tmpfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "images"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", str(folder)], check=True)
    monkeypatch.setenv("KEEPSTEP_IMAGES", str(folder))
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
    shutil.rmtree(folder, ignore_errors=True)
