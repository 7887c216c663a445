"""Every example is run, as it is and with a fault; generated reference text is up to date."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import click

from keepstep.cli.main import cli

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MINIMAL = EXAMPLES / "01-ddp-minimal"
CHANGED_LINES_MAX = 10
WORLD = 2
TIMEOUT_S = 120


def run(command: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "KEEPSTEP_HOME": str(home), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", *command],
        env=env,
        cwd=MINIMAL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def torchrun(script: str, home: Path) -> subprocess.CompletedProcess[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(WORLD)]
    return run([*launcher, "--log-dir", str(home / "logs"), script], home)


def digests(output: str) -> dict[str, str]:
    """sha256 by rank, as the scripts print them."""
    return dict(re.findall(r"rank (\d+) sha256 ([0-9a-f]{64})", output))


def test_minimal_example_changes_at_most_ten_lines_of_plain_pytorch() -> None:
    plain, train = ((MINIMAL / name).read_text().splitlines() for name in ("plain.py", "train.py"))
    changes = [line for line in difflib.ndiff(plain, train) if line[:2] in ("+ ", "- ")]
    added = [line for line in changes if line.startswith("+")]
    assert 0 < len(added) <= CHANGED_LINES_MAX, "\n".join(changes)


def test_minimal_example_is_bit_identical_plain_unprotected_and_killed(tmp_path: Path) -> None:
    expected = digests(torchrun("plain.py", tmp_path).stdout)
    assert sorted(expected) == ["0", "1"]

    unprotected = torchrun("train.py", tmp_path)
    assert "not protected" in unprotected.stderr
    assert digests(unprotected.stdout) == expected

    options = ["--nproc-per-node", str(WORLD), "--spares", "1"]
    options += ["--inject", "kill:rank=1,step=20,point=in_backward"]
    killed = run(["keepstep", "run", *options, "train.py"], tmp_path)
    assert "RESOLVED" in killed.stderr, "the kill did not happen"
    assert "1 incidents, 0 steps lost" in killed.stderr
    assert digests(killed.stdout) == expected


def help_texts(command: click.Command, parent: click.Context | None, name: str) -> list[str]:
    """--help of every command below this one, 90 columns wide."""
    context = click.Context(
        command,
        parent=parent,
        info_name=name,
        terminal_width=90,
        max_content_width=90,
        help_option_names=["-h", "--help"],
    )
    if not isinstance(command, click.Group):
        return [command.get_help(context)]
    found = [(one, command.get_command(context, one)) for one in command.list_commands(context)]
    return [text for one, below in found if below for text in help_texts(below, context, one)]


def test_command_line_reference_is_what_help_says() -> None:
    page = (EXAMPLES.parent / "docs" / "reference" / "cli.md").read_text()
    boxes = re.findall(r"```text\n(.*?)\n```", page, re.DOTALL)
    assert sorted(boxes) == sorted(help_texts(cli, None, "keepstep"))
