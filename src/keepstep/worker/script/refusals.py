"""What cannot be protected is refused by name, before it trains or where it is first used.

Each of these keeps something from step to step that nobody carries to a newcomer, or updates
parameters where no fence can stand in front of the update:

    communication hooks with state       PowerSGD's error feedback, counters, other generators
    local SGD, model averaging           replicas differ between the averages
    ZeroRedundancyOptimizer              its shards are known to nobody but itself
    Join with uneven inputs              ranks make different numbers of steps
    torch RPC                            state of other processes, reached outside the groups
    optimizers inside backward           updates begin before all gradients are complete
    loops over a DataLoader itself       a replacement would not know where to go on
    collectives of other threads         their place among the steps is a matter of chance

`at_attach` looks at what is there, `watch` refuses what comes later. Both are for protected jobs: a
script that runs without Keepstep is left as it is.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from keepstep.errors import UsageError
from keepstep.worker.script import frames, iterators, stack
from keepstep.worker.state import fsdp

_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
EXACT_HOOKS = {
    _HOOKS + "default_hooks": {"allreduce_hook", "fp16_compress_hook", "bf16_compress_hook"},
    _HOOKS + "debugging_hooks": {"noop_hook"},
    _HOOKS + "quantization_hooks": {
        "quantization_pertensor_hook",
        "quantization_perchannel_hook",
    },
    _HOOKS + "mixed_precision_hooks": {"_reducer_allreduce_and_upcast_hook"},
}
VOUCHED = "keepstep_exact"  # attribute of a hook whose author says that it keeps nothing

_OPTIMIZERS = {
    "ZeroRedundancyOptimizer": "shard with torch.distributed.fsdp.fully_shard instead",
    "PostLocalSGDOptimizer": "average gradients in every step (DistributedDataParallel does)",
}
_AVERAGERS = "torch.distributed.algorithms.model_averaging.averagers"
_UPDATE_AFTER = "call optimizer.step() after backward(), inside the @ks.step function"
_watching = False


def at_attach(
    models: Iterable[torch.nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    wrapped: Iterable[DistributedDataParallel],
) -> None:
    """`wrapped`: every DistributedDataParallel of the process."""
    for name, optimizer in optimizers.items():
        _refuse_optimizer(name, optimizer)
    for ddp in wrapped:
        for hook, _ in getattr(ddp, "_comm_hooks", ()):
            refuse_hook(hook)
        if ddp._join_config.enable:
            raise _uneven()
    for model in models:
        for hook in fsdp.hooks(model):
            refuse_hook(hook)
        for name, parameter in model.named_parameters():
            if getattr(parameter, "_in_backward_optimizers", None):
                raise UsageError(
                    f"attach: parameter {name} has an optimizer that runs inside backward "
                    "(_apply_optimizer_in_backward)",
                    hint=_UPDATE_AFTER,
                )
    _refuse_averagers()
    if _rpc_is_up():
        raise _rpc("attach: torch.distributed.rpc is initialised")


def _refuse_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _OPTIMIZERS and kind.__module__.startswith("torch.distributed.optim"):
            raise UsageError(
                f"attach: optimizer {name!r} ({kind.__name__}) cannot be protected",
                hint=_OPTIMIZERS[kind.__name__],
            )


def refuse_hook(hook: Any) -> None:
    inner = hook
    while isinstance(inner, functools.partial):
        inner = inner.func
    module, name = getattr(inner, "__module__", ""), getattr(inner, "__qualname__", repr(inner))
    if name in EXACT_HOOKS.get(module, ()) or getattr(hook, VOUCHED, False):
        return
    if name.startswith(("_apply_optim_in_backward_hook", "_hook_then_optimizer", "hook_with_zero")):
        raise UsageError(
            f"DistributedDataParallel updates parameters inside backward ({name})",
            hint=_UPDATE_AFTER,
        )
    raise UsageError(
        f"communication hook {name} may keep state from step to step, which a newcomer would lack",
        hint="use allreduce_hook, fp16_compress_hook or bf16_compress_hook of torch, or set "
        f"hook.{VOUCHED} = True if it keeps nothing",
    )


def _refuse_averagers() -> None:
    module = sys.modules.get(_AVERAGERS)
    if module is None:
        return
    base: Any = module.ModelAverager  # type: ignore[attr-defined]
    # type() and not isinstance: lazy proxies answer isinstance by importing things.
    for thing in gc.get_objects():
        if issubclass(type(thing), base):
            raise _averager(type(thing).__name__)


def _averager(kind: str) -> UsageError:
    return UsageError(
        f"{kind} averages models now and then: between two averages replicas are not equal",
        hint="average gradients in every step (DistributedDataParallel does)",
    )


def _uneven() -> UsageError:
    return UsageError(
        "torch.distributed.algorithms.Join (DistributedDataParallel.join) lets ranks make "
        "different numbers of steps",
        hint="give every rank the same number of batches (DistributedSampler does), or use "
        "join(enable=False)",
    )


def _rpc_is_up() -> bool:
    rpc = sys.modules.get("torch.distributed.rpc.api")
    return rpc is not None and bool(rpc._is_current_rpc_agent_set())  # type: ignore[attr-defined]


def _rpc(what: str) -> UsageError:
    return UsageError(
        f"{what}: what other processes keep for this one is not carried along",
        hint="use collectives of torch.distributed inside @ks.step and @ks.section",
    )


# -------------------------------------------------------------------------------- after attach


def watch() -> None:
    """Refuse the same things where they are first used after attach."""
    global _watching
    if _watching:
        return
    _watching = True
    from torch.distributed import optim
    from torch.distributed.algorithms import join
    from torch.distributed.algorithms.model_averaging import averagers
    from torch.distributed.optim import apply_optimizer_in_backward as in_backward

    ddp: Any = DistributedDataParallel
    register = ddp.register_comm_hook

    def register_unless_refused(module: Any, state: Any, hook: Any) -> Any:
        refuse_hook(hook)
        return register(module, state, hook)

    def join_refused(self: Any, joinables: Any, enable: bool = True, *a: Any, **kw: Any) -> None:
        if enable:
            raise _uneven()
        join_init(self, joinables, enable, *a, **kw)

    def averager_refused(self: Any, *_: Any, **__: Any) -> None:
        raise _averager(type(self).__name__)

    def in_backward_refused(*_: Any, **__: Any) -> None:
        raise UsageError(
            "_apply_optimizer_in_backward makes updates inside backward", hint=_UPDATE_AFTER
        )

    join_class: Any = join.Join
    join_init = join_class.__init__
    ddp.register_comm_hook = register_unless_refused
    join_class.__init__ = join_refused
    averager_class: Any = averagers.ModelAverager
    averager_class.__init__ = averager_refused
    for module in (optim, in_backward):
        setattr(module, "_apply_optimizer_in_backward", in_backward_refused)  # noqa: B010
    if torch.distributed.rpc.is_available():
        rpc: Any = torch.distributed.rpc
        rpc.init_rpc = _init_rpc_refused


def _init_rpc_refused(*_: Any, **__: Any) -> None:
    raise _rpc("torch.distributed.rpc.init_rpc after attach")


def loader_loops(running: Iterable[FrameType], site: str) -> None:
    """A step inside a loop over a DataLoader itself: nobody knows where a replacement has to go on,
    so its own loop would begin anew."""
    for frame in running:
        for iterator, line in stack.loop_iterators(frame):
            kind = next(filter(None, map(_unplaced, _sources(iterator))), "")
            if kind:
                where = f"{frames.place(frame).rpartition(':')[0]}:{line})"
                raise UsageError(
                    f"{site!r} is called in a loop over {kind}, in {where}: a replacement of this "
                    "rank would begin that loop anew",
                    hint="iterate over ks.batches(...) of the loader or sampler; instead of "
                    "itertools.cycle, open ks.batches again when it ends",
                )


def _unplaced(source: Any) -> str:
    """What it is, if nobody can tell or set where it stands."""
    if iterators.of_loader(type(source)):
        return "a DataLoader"
    if isinstance(source, GeneratorType):
        module = str(source.gi_frame.f_globals.get("__name__")) if source.gi_frame else ""
        return f"a generator of {module}" if module.startswith("torch.utils.data") else ""
    if type(source).__module__ == "itertools" and type(source) not in iterators.KINDS:
        return f"itertools.{type(source).__name__}"
    return ""


def _sources(iterator: Any) -> Iterator[Any]:
    """Where its items come from, also through generators (progress bars)."""
    yield from iterators.sources(iterator)
    for generator in iterators.generators(iterator):
        yield generator
        inside = [generator.gi_yieldfrom] if generator.gi_yieldfrom is not None else []
        if generator.gi_frame is not None:
            inside += [inner for inner, _ in stack.loop_iterators(generator.gi_frame)]
        for inner in inside:
            yield from _sources(inner)


def inside_backward(optimizer: Any, site: str) -> None:
    """At the begin of optimizer.step(): refused while a backward runs in this thread."""
    if torch._C._current_graph_task_id() != -1:
        raise UsageError(
            f"{type(optimizer).__name__}.step() is called by a hook inside backward, in {site!r}: "
            "the update would begin before all gradients are complete",
            hint=_UPDATE_AFTER,
        )


def other_thread(name: str) -> None:
    """A collective after attach that does not come from the main thread. Threads of autograd (the
    backward of a GPU) and Keepstep's own are part of the step that runs."""
    thread = threading.current_thread()
    if torch._C._current_graph_task_id() != -1 or thread.name.startswith("keepstep"):
        return
    raise UsageError(
        f"collective {name} in thread {thread.name!r}: only collectives of the main thread have a "
        "place among the steps",
        hint="call it in the main thread, inside a @ks.step or @ks.section function",
    )
