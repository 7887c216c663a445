"""What every script of the zoo shares: arguments, the process group, tiny data, the result file.

Nothing here knows of Keepstep: the scripts use it as the quickstart tells, and this module only
spares each of them the same twenty lines.
"""

import argparse
import hashlib
import json
import os
import random
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--fsdp", action="store_true", help="fully_shard instead of DDP")


def start():
    """(arguments, rank, world size), with the process group ready."""
    args = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    seed_everything(0)
    return args, rank, world


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def spread(net, args, **ddp):
    """DDP, or FSDP2 with --fsdp: then each rank has a shard that no other rank has."""
    if not args.fsdp:
        return DistributedDataParallel(net, **ddp)
    for layer in net.children():
        if any(p.requires_grad for p in layer.parameters()):
            fully_shard(layer)
    return fully_shard(net)


def mlp(width=16, hidden=32, out=4, dropout=0.1):
    return nn.Sequential(
        nn.Linear(width, hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, out)
    )


def vectors(count=128, width=16, classes=4):
    """Points with labels."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, width, generator=generator)
    labels = (x[:, :classes] + 0.1 * torch.randn(count, classes, generator=generator)).argmax(1)
    return TensorDataset(x, labels)


def images(count=128, size=8, classes=4):
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(count, 3, size, size, generator=generator)
    labels = x[:, :, : size // 2, : size // 2].mean((2, 3)).abs().argmax(1) % classes
    return TensorDataset(x, labels)


def text(count=2000, words=32):
    """A stream of words in which each depends on the one before."""
    dice = np.random.default_rng(9)
    return np.cumsum(dice.integers(0, 3, count)).astype(np.int64) % words


def sharded_loader(data, batch_size=8, **more):
    """(loader, sampler) for this rank: 128 samples are 8 batches for each of two ranks."""
    sampler = DistributedSampler(data, shuffle=True, seed=3)
    return DataLoader(data, batch_size, sampler=sampler, **more), sampler


def _digest(data):
    return hashlib.sha256(data).hexdigest()[:24]


def flat(thing):
    """Digests of tensors and arrays, everything else as text."""
    if isinstance(thing, DTensor):
        thing = thing.to_local()
    if isinstance(thing, torch.Tensor):
        value = thing.detach().to_dense() if thing.is_sparse else thing.detach()
        return _digest(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(thing, np.ndarray):
        return _digest(thing.tobytes())
    if isinstance(thing, nn.Module):
        state = dict(thing.state_dict())  # with extra state
        state.update(thing.named_buffers())  # and buffers that are not saved
        frozen = [name for name, p in thing.named_parameters() if not p.requires_grad]
        return {"frozen": frozen, **{str(k): flat(v) for k, v in state.items()}}
    if hasattr(thing, "state_dict"):
        return flat(thing.state_dict())
    if isinstance(thing, dict):
        return {str(k): flat(v) for k, v in thing.items()}
    if isinstance(thing, list | tuple):
        return [flat(v) for v in thing]
    if isinstance(thing, float):
        return thing.hex()
    # Functions and other objects have an address in their text, which differs from run to run.
    return repr(thing) if isinstance(thing, int | str | bool | None) else type(thing).__name__


def finish(args, losses, **parts):
    """Writes rank-R.json: digests of all `parts`, the losses, learning rates, random states."""
    optimizers = [x for x in parts.values() if isinstance(x, torch.optim.Optimizer)]
    state = {name: flat(part) for name, part in parts.items()}
    state["lr"] = [float(g["lr"]).hex() for one in optimizers for g in one.param_groups]
    state["rng"] = {
        "torch": flat(torch.get_rng_state()),
        "numpy": _digest(repr(np.random.get_state()[1:]).encode()),
        "random": _digest(repr(random.getstate()).encode()),
    }
    state["losses"] = [float(x).hex() for x in losses]
    target = Path(args.out) / f"rank-{dist.get_rank()}.json"
    target.with_suffix(".tmp").write_text(json.dumps(state, sort_keys=True, indent=1))
    target.with_suffix(".tmp").rename(target)
    dist.destroy_process_group()
