"""`python -m keepstep.worker SCRIPT ARGS`: a rank or a spare, started by an agent.

Everything Keepstep needs is patched in before the user's script runs; the script itself finds the
environment it knows from torchrun.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from keepstep.errors import UsageError
from keepstep.model import commands

_STARTED_NS = time.monotonic_ns()
PR_SET_PDEATHSIG = 1

# torch's watchdog must not end a process that could be recovered; detection does not rely on it.
QUIET_NCCL = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


def _die_with_agent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:
        os._exit(1)


def main() -> None:
    transparent = os.environ.get("KEEPSTEP_MODE") == "transparent"
    if transparent:  # its whole namespace dies with the agent
        os.environ.pop("LD_PRELOAD", None)  # it is loaded, and not for the script's children
    else:
        _die_with_agent()
    from keepstep.worker.line.channel import Channel
    from keepstep.worker.line.page import Page

    page = Page(int(os.environ.pop("KEEPSTEP_PAGE_FD")))
    channel = Channel(int(os.environ.pop("KEEPSTEP_CONTROL_FD")), page)
    spare = "RANK" not in os.environ
    os.environ.update(QUIET_NCCL)

    from keepstep.worker.groups import groups
    from keepstep.worker.line.process import OwnProcess
    from keepstep.worker.script import collectives

    if not transparent:
        # Before anybody has changed anything of torch, and before a spare is parked.
        import keepstep.worker.api.session  # noqa: F401
    groups.install(solo=spare)
    if transparent:
        _run_transparent(channel, page)
    collectives.front_door.install()
    process = OwnProcess(channel, page, _read_environment())
    _publish(process)
    if spare:
        _become_spare(process)
    else:
        page.where("building")
    _run_script(sys.argv[1:], partial(_failed, process), partial(_finished, process))


def _run_transparent(channel: Any, page: Any) -> NoReturn:
    from keepstep.model import messages as m
    from keepstep.worker.step import failures
    from keepstep.worker.transparent import transparent

    runtime = transparent.Runtime(channel, page, _read_environment())
    runtime.install(
        sockets=os.environ.get("KEEPSTEP_SOCKETS", ""),
        segments=os.environ.get("KEEPSTEP_SEGMENTS", ""),
    )

    def failed(text: str, error: BaseException) -> None:
        kind = "user" if isinstance(error, SystemExit) else failures.classify(error)
        channel.send(
            m.Failure(
                generation=runtime.generation,
                error_kind=kind,
                error=text[-16_000:],
                version=runtime.steps,
            )
        )
        _end(error)

    _run_script(sys.argv[1:], failed, runtime.finish)
    os._exit(0)  # what is left of the script's threads has nothing to say any more


def _read_environment() -> Any:
    from keepstep.model.messages import Address
    from keepstep.worker.line.process import RankEnvironment

    said = os.environ
    return RankEnvironment(
        rank=int(said.get("RANK", "-1")),
        world=int(said["WORLD_SIZE"]),
        local_rank=int(said["LOCAL_RANK"]),
        local_world=int(said["LOCAL_WORLD_SIZE"]),
        generation=int(said.get("KEEPSTEP_GENERATION", "0")),
        master=Address(said["MASTER_ADDR"], int(said["MASTER_PORT"])),
    )


def _publish(process: Any) -> None:
    import keepstep

    keepstep._process = process


def _become_spare(process: Any) -> None:
    # What scripts import lazily between RANK and the first step is imported before parking.
    import torch._dynamo
    import torch.optim.lr_scheduler
    import torch.utils.data
    import torch.utils.data.distributed

    if process.channel.welcome.checkpoints:
        import torch.distributed.checkpoint  # noqa: F401

    from keepstep.worker.script import parking

    parking.park_at_questions(lambda where: _wait_for_rank(process, where))


def _wait_for_rank(process: Any, where: str) -> None:
    from keepstep.core.rank import joining
    from keepstep.model import messages as m
    from keepstep.worker.device import cuda
    from keepstep.worker.script.collectives import front_door
    from keepstep.worker.state import codec

    cuda.warm_up(process.environment.local_rank)
    process.page.where("parked")
    channel = process.channel
    parked = m.Parked(where=where, warm_ns=time.monotonic_ns() - _STARTED_NS)
    command = channel.drive(joining.park(channel.inbox, parked), lambda _: os._exit(0))
    data = _init_record(process, command)
    while not data and data is not None:  # asked again if nobody has it
        command = channel.drive(joining.assigned(channel.inbox), lambda _: os._exit(0))
        data = _init_record(process, command)
    process.assigned, process.assigned_ns = command, time.monotonic_ns()
    process.page.where("building")
    os.environ["RANK"] = str(command.rank)
    os.environ["GROUP_RANK"] = str(command.rank // process.environment.local_world)
    os.environ["ROLE_RANK"] = str(command.rank)
    os.environ["MASTER_ADDR"] = command.master.host
    os.environ["MASTER_PORT"] = str(command.master.port)
    os.environ["KEEPSTEP_GENERATION"] = str(command.generation - 1)
    process.environment = _read_environment()
    if data is not None:
        process.init_record = data
        process.about = codec.loads_inline(data)
        front_door.replay = process.about.pop("record")


def _init_record(process: Any, command: Any) -> bytes | None:
    """None: there is none in the checkpoint. Empty: nobody has it, and that was said. Going on
    without it would give the script other results than the other ranks got."""
    from keepstep.model import messages as m
    from keepstep.model.page import INIT_TICK
    from keepstep.worker.checkpoint import checkpoint
    from keepstep.worker.line import blobs

    rank, token, reason = command.rank, process.channel.welcome.token, "side-state-missing"
    if command.checkpoint:
        return checkpoint.read_side(command.checkpoint, rank, "init")
    try:
        blob = blobs.fetch_surely(command.holders, token, rank, INIT_TICK, everybody=True)
        if blob is not None:
            return blob.data
        error = f"the init record of rank {rank} is held by nobody"
    except blobs.HoldersUnreachable as unreachable:
        reason, error = "side-state-unreachable", str(unreachable)
    os.write(2, f"keepstep: {error}: this process cannot take its rank over\n".encode())
    if command.presumed:
        os._exit(1)
    process.channel.send(
        m.CopyFailed(generation=command.generation, reason=reason, error=error)  # type: ignore[arg-type]
    )
    return b""


def _run_script(
    arguments: list[str],
    failed: Callable[[str, BaseException], None],
    finished: Callable[[], None],
) -> None:
    as_module = arguments[0] == "-m"
    if as_module:
        arguments = arguments[1:]
    sys.argv = arguments
    try:
        if as_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as stop:
        if stop.code not in (None, 0):
            failed(f"the script exited with {stop.code!r}", stop)
    except BaseException as error:
        text = _described(error)
        with contextlib.suppress(Exception):  # it may be the script's own
            print(text, end="", file=sys.stderr, flush=True)
        failed(text, error)
    try:
        sys.stdout.flush()
        finished()
    except UsageError as error:
        print(error, file=sys.stderr, flush=True)
        failed(str(error), error)


def _described(error: BaseException) -> str:
    """Its traceback from the script on; of a refusal, down to what was refused."""
    found = traceback.TracebackException.from_exception(error)
    stack = list(found.stack)
    while stack and stack[0].filename in (__file__, "<frozen runpy>"):
        del stack[0]
    if isinstance(error, UsageError):
        package = os.path.dirname(os.path.dirname(__file__)) + os.sep
        while len(stack) > 1 and stack[-1].filename.startswith(package):
            del stack[-1]
    found.stack = traceback.StackSummary.from_list(stack)
    return "".join(found.format())


def _failed(process: Any, text: str, error: BaseException) -> None:
    """The script is gone, so this process cannot be retried: say why, then end."""
    from keepstep.model import messages as m
    from keepstep.worker.api import attach, session
    from keepstep.worker.step import failures

    rank = attach.current()
    live = rank._live if isinstance(rank, session.Session) else None
    kind: Any = "user" if isinstance(error, SystemExit) else failures.classify(error)
    begun = live is not None and live.tick > 0
    if isinstance(error, UsageError) and not begun:
        kind = "usage"
    process.channel.send(
        m.Failure(
            generation=live.generation if live is not None else 0,
            error_kind=kind,
            error=text[-16_000:],
            version=live.version if live is not None else 0,
        )
    )
    _end(error)


def _end(error: BaseException) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    code = error.code if isinstance(error, SystemExit) else 1
    os._exit(code if isinstance(code, int) else 1)


def _finished(process: Any) -> None:
    from keepstep.model import messages as m
    from keepstep.worker.api import attach, session

    rank = attach.current()
    if isinstance(rank, session.Session):
        rank._finish()
        return
    process.page.where(
        "done"
    )  # a script that never attached: nothing to protect, nothing to wait for
    process.channel.send(m.Done(tick=0, version=0))
    process.channel.wait(lambda c: isinstance(c, commands.Finish | commands.Leave))


if __name__ == "__main__":
    main()
