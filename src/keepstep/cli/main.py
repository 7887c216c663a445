"""`keepstep`: the command line's root.

Commands are imported when they are asked for, so that `keepstep --help` and the operator commands
do not pay for the server, and an optional command (demo) may be absent.

Errors: one line and a hint on stderr. Exit code 2 for whatever the caller can put right, 3 for a
failure of the infrastructure. A traceback means a bug in Keepstep.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import MutableMapping, Sequence

import click

from keepstep.cli import surroundings
from keepstep.errors import KeepstepError, UsageError

COMMANDS = {
    "run": "keepstep.cli.run:run",
    "rehearse": "keepstep.cli.rehearse:rehearse",
    "status": "keepstep.cli.operate:status",
    "jobs": "keepstep.cli.operate:jobs",
    "nodes": "keepstep.cli.operate:nodes",
    "incidents": "keepstep.cli.operate:incidents",
    "migrate": "keepstep.cli.operate:migrate",
    "drain": "keepstep.cli.operate:drain",
    "rebalance": "keepstep.cli.operate:rebalance",
    "proceed": "keepstep.cli.operate:proceed",
    "stop": "keepstep.cli.operate:stop",
    "taint": "keepstep.cli.operate:taint",
    "untaint": "keepstep.cli.operate:untaint",
    "spares": "keepstep.cli.operate:spares",
    "inject": "keepstep.cli.operate:inject",
    "ledger": "keepstep.cli.operate:ledger",
    "orchestrator": "keepstep.cli.orchestrator_command:orchestrator",
    "net": "keepstep.cli.net:net",
    "token": "keepstep.cli.token:token",
    "agent": "keepstep.cli.agent_command:agent",
    "slurm": "keepstep.cli.slurm:slurm",
    "kubernetes": "keepstep.cli.kubernetes:kubernetes",
    "demo": "keepstep.cli.demo:demo",
    "sim": "keepstep.cli.sim:sim",
    "doctor": "keepstep.cli.doctor:doctor",
}
OPTIONAL = frozenset({"demo"})
USAGE_EXIT = 2
FAILURE_EXIT = 3


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for name in COMMANDS if name not in OPTIONAL or _exists(name)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command


def _exists(name: str) -> bool:
    return importlib.util.find_spec(COMMANDS[name].partition(":")[0]) is not None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Keep a PyTorch training job going while its ranks are moved and replaced."""


def main(arguments: Sequence[str] | None = None) -> None:
    sys.exit(invoke(arguments))


def invoke(
    arguments: Sequence[str] | None = None, environ: MutableMapping[str, str] = os.environ
) -> int:
    """Run one command line and return its exit code."""
    around = surroundings.read(environ)
    try:
        code = cli.main(arguments, prog_name="keepstep", standalone_mode=False, obj=around)
        return code if isinstance(code, int) else 0
    except UsageError as error:
        return _fail(error.message, error.hint, USAGE_EXIT)
    except KeepstepError as error:
        return _fail(error.message, error.hint, FAILURE_EXIT)
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stderr.write(error.format_message() + "\n")
        return USAGE_EXIT
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "keepstep"
        return _fail(error.format_message(), f"{where} --help", USAGE_EXIT)
    except click.ClickException as error:
        return _fail(error.format_message(), "", USAGE_EXIT)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BrokenPipeError:
        # `keepstep status | head`: the reader has seen enough.
        sys.stderr.close()
        return 0


def _fail(message: str, hint: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    if hint:
        sys.stderr.write(f"hint: {hint}\n")
    return code
