"""What a transparent job does not survive ends it, and is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import command

SCRIPT = """
import os, signal
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    {end}
dist.barrier()
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ('raise ValueError("a bug")', 1, "ValueError: a bug"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 4, "survives planned moves only"),
    ],
    ids=["raises", "dies"],
)
def test_a_rank_that(end: str, code: int, said: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(end=end))
    words = ["--mode", "transparent", "--local-nodes", "2", "--nproc-per-node", "1", str(script)]
    done = command(["-m", "keepstep", "run", *words], tmp_path / "home")
    assert done.returncode == code and said in done.stderr, done.stderr[-3000:]
