"""The undisturbed run that a job is held against: the same script under plain torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support.job import DEADLINE_S, Result, environment, results
from tests.support.scripts import PLAIN, SCRIPT

Reference = Callable[..., list[Result]]


def run_plain(out: Path, world: int, script_args: list[str], script: Path = SCRIPT) -> list[Result]:
    """The numbers everything is held against."""
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--log-dir", str(out / "logs")]
    command += ["--nproc-per-node", str(world), str(PLAIN)]
    command += [str(script), "--out", str(out), *script_args]
    done = subprocess.run(
        command, env=environment(out), capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return results(out, world)


def differences(a: list[Result], b: list[Result]) -> list[str]:
    """Which parts of which rank differ; empty means bit-identical."""
    found = []
    for rank, (x, y) in enumerate(zip(a, b, strict=True)):
        if x["sha256"] != y["sha256"]:
            parts = [k for k in x["state"] if x["state"][k] != y["state"][k]]
            found.append(f"rank {rank}: {', '.join(parts)}")
    return found


def once_each(
    factory: pytest.TempPathFactory,
    keep: Callable[[tuple[str, ...]], Iterable[str]],
    usual: Path = SCRIPT,
) -> Reference:
    """Runs a script once per set of the arguments that change numbers, which `keep` tells."""
    known: dict[tuple[Any, ...], list[Result]] = {}

    def get(world: int, *script_args: str, script: Path = usual) -> list[Result]:
        words = list(keep(script_args))
        key = (world, script, *words)
        if key not in known:
            known[key] = run_plain(factory.mktemp("plain"), world, words, script)
        return known[key]

    return get
