"""distributed_c10d as the user's script meets it: the names that Keepstep has replaced.

While a process is solo (a newcomer from its start), init_process_group, new_group and DeviceMesh
get solo backends and ask nobody. Otherwise the backends are real, and known to gloo.py or nccl.py,
so that they can be aborted from any thread.

No communicator is ever split from another one: an abort of the parent would reach into the child,
and a solo parent has nothing to split. A device_id is therefore not passed on; NCCL connects at
`attach` at the latest (groups.build_first_fence).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch._C._distributed_c10d as _C
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from keepstep.errors import UsageError
from keepstep.worker.device import extension
from keepstep.worker.groups import gloo, nccl

solo = False
refusal = ""  # why no more groups can be created
ext: Any = None
on_ddp_built: Callable[[], None] | None = None


def install(alone: bool) -> None:
    """Before the user's script runs. A newcomer starts solo."""
    global ext, solo
    solo = alone
    if ext is not None:
        return
    if gloo.RealGloo is None:
        raise UsageError("this torch has no gloo backend", hint="install a build with USE_GLOO=1")
    ext = extension.load()
    # torch.compile gives all groups more time while it compiles; who is alone needs none.
    ext.SoloBackend._add_ephemeral_timeout = lambda *_: None
    if not ext.note_waits():
        print(
            "keepstep: this build of torch hides gloo's symbols: if a rank is lost, another one "
            "that is in the middle of a message may wait until the timeout of its group",
            file=sys.stderr,
        )
    # Lazy connections would appear after we have looked, and unknown to us could not be aborted.
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    c10d_any: Any = c10d
    dist_any: Any = dist
    c10d_any.ProcessGroupGloo = dist_any.ProcessGroupGloo = _Gloo
    if nccl.RealNccl is not None:
        c10d_any.ProcessGroupNCCL = dist_any.ProcessGroupNCCL = _Nccl
    _patch_rendezvous(c10d_any)
    _patch_split(c10d_any, dist_any)
    _patch_logger()


# -------------------------------------------------------------------------------------- backends


class _GlooMeta(type):
    def __call__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
        chosen = (*args, *kwargs.values())[0] if args or kwargs else timedelta(minutes=30)
        timeout = chosen if isinstance(chosen, timedelta) else chosen._timeout
        if solo:
            return solo_backend("gloo", rank, size, timeout)
        mesh = gloo.Mesh()
        backend = gloo.connect(store, rank, size, timeout, mesh)
        gloo.install([mesh])
        return backend

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (gloo.RealGloo, ext.SoloBackend))

    def __getattr__(cls, name: str) -> Any:
        return getattr(gloo.RealGloo, name)


class _Gloo(metaclass=_GlooMeta):
    """Stands in for distributed_c10d.ProcessGroupGloo: callable, testable, never instantiated."""


class _NcclMeta(type):
    def __call__(cls, store: Any, rank: int, size: int, *args: Any, **kwargs: Any) -> Any:
        chosen = (*args, *kwargs.values())[0] if args or kwargs else nccl.RealNccl.Options()
        options = chosen if not isinstance(chosen, timedelta) else nccl.options(chosen)
        if solo:
            return ext.SoloBackend(rank, size, "nccl", options)
        return nccl.build(store, rank, size, options)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, (nccl.RealNccl, ext.SoloBackend))

    def __getattr__(cls, name: str) -> Any:
        return getattr(nccl.RealNccl, name)


class _Nccl(metaclass=_NcclMeta):
    """Stands in for distributed_c10d.ProcessGroupNCCL likewise."""


def solo_backend(name: str, rank: int, size: int, timeout: timedelta) -> Any:
    backend = ext.SoloBackend(rank, size, name, None)
    backend.options._timeout = timeout  # the real backend that follows takes it over
    return backend


# --------------------------------------------------------------------------------------- patches


def _patch_rendezvous(module: Any) -> None:
    rendezvous, barrier = module.rendezvous, module._store_based_barrier
    helper, debug_level = module._new_process_group_helper, module.get_debug_level

    def rendezvous_or_alone(url: str, rank: int = -1, world_size: int = -1, **kw: Any) -> Any:
        if not solo:
            yield from rendezvous(url, rank, world_size, **kw)
            return
        rank = int(os.environ["RANK"]) if rank < 0 else rank
        world_size = int(os.environ["WORLD_SIZE"]) if world_size < 0 else world_size
        yield _C.HashStore(), rank, world_size

    def barrier_unless_alone(*args: Any, **kw: Any) -> Any:
        return None if solo else barrier(*args, **kw)

    def helper_unless_refused(*args: Any, **kw: Any) -> Any:
        if refusal:
            raise UsageError(refusal, hint="create process groups before the first step")
        if "device_id" in kw:
            kw["device_id"] = None
        return helper(*args, **kw)

    def debug_level_without_wrapper() -> Any:
        # DETAIL wraps backends in a class that accepts nothing but a genuine gloo backend.
        level = debug_level()
        return _C.DebugLevel.INFO if solo and level == _C.DebugLevel.DETAIL else level

    module.rendezvous = rendezvous_or_alone
    module._store_based_barrier = barrier_unless_alone
    module._new_process_group_helper = helper_unless_refused
    module.get_debug_level = debug_level_without_wrapper


def _patch_split(*modules: Any) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise UsageError(
            "torch.distributed.split_group under Keepstep: a communicator that was split from "
            "another one cannot be replaced by itself",
            hint="use torch.distributed.new_group",
        )

    for module in modules:
        if hasattr(module, "split_group"):
            module.split_group = refused


def _patch_logger() -> None:
    # DDP's constructor logs: c10d::Logger static_casts the backend of a group whose default type
    # is GLOO to ProcessGroupGloo, which is a crash for any other class.
    logger: Any = _C.Logger
    original = logger.set_construction_data_and_log
    kinds = dist.ProcessGroup.BackendType

    def without_cast(*args: Any, **kw: Any) -> Any:
        if on_ddp_built is not None:
            on_ddp_built()
        if not solo:
            return original(*args, **kw)
        groups = [pg for pg, (backend, _) in c10d._world.pg_map.items() if backend == "gloo"]
        for pg in groups:
            pg._set_default_backend(kinds.UNDEFINED)
        try:
            return original(*args, **kw)
        finally:
            for pg in groups:
                pg._set_default_backend(kinds.GLOO)

    logger.set_construction_data_and_log = without_cast
