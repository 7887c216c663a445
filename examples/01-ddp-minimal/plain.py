"""An ordinary DDP training script: torchrun --standalone --nproc-per-node 2 plain.py"""

import hashlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 3

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")

torch.manual_seed(0)
inputs = torch.randn(512, 32)
data = TensorDataset(inputs, inputs.roll(1, dims=1).sin())
sampler = DistributedSampler(data, world, rank, shuffle=True)
loader = DataLoader(data, batch_size=16, sampler=sampler)

net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 32))
torch.manual_seed(rank)  # each rank draws its own dropout masks
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))


def train_step(x, y):
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def evaluate():
    model.eval()
    with torch.no_grad():
        loss = nn.functional.mse_loss(net(inputs[rank::world]), data.tensors[1][rank::world])
    dist.all_reduce(loss)
    model.train()
    return loss.item() / world


for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        train_step(x, y)
    score = evaluate()
    if rank == 0:
        print(f"epoch {epoch}: loss {score:.4f}", flush=True)

weights = b"".join(p.detach().numpy().tobytes() for p in net.parameters())
print(f"rank {rank} sha256 {hashlib.sha256(weights).hexdigest()}", flush=True)
dist.destroy_process_group()
