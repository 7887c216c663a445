"""A training loop that is an installed package, as teams install theirs into an image.

Nothing in the script's own files counts or averages: all of it is in attributes and globals of the
package, below `site-packages`.
"""

import sys
from pathlib import Path

import torch
import zoolib
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parent / "site-packages"))


def main():
    from company_training import trainer

    args, rank, _ = zoolib.start()
    zoolib.seed_everything(120)
    model = DistributedDataParallel(zoolib.mlp())
    torch.manual_seed(1200 + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader, sampler = zoolib.sharded_loader(zoolib.vectors())
    mine = trainer.Trainer(model, optimizer)
    losses = mine.fit(loader, sampler, epochs=2)
    counted = [mine.noise.value, mine.loss_average, trainer.calls]
    zoolib.finish(args, losses, model=model, optimizer=optimizer, counted=counted)


if __name__ == "__main__":
    main()
