"""Random nets of convolutions on a TPU v5e 2x4: memory predicted beside compiled.

Nets that people have names for were looked at while the model of convolutions was made; these were not. Each has 6 to
12 layers of 32 to 160 channels, kernels of 1, 3 and 5, strides, batch or group norms, images of 32 to 96 squared in
batches of 64 to 512, and is trained with SGD. A row that is in the file is not made again unless `--again`.

    python benchmarks/random_nets.py --seeds 100:118
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from compiled import measured
from results import RESULTS, add, kept, key, read
from torch import nn

from autoshard import api
from autoshard.graph.ops import Graph
from autoshard.stablehlo.reader import build_graph

TARGET, PLANS = "tpu-v5e:2x4", ("dp", "fsdp")
NAME = "random net"


class Net(nn.Module):
    """Convolutions with norms and activations between them, a mean over space, and a linear layer."""

    def __init__(self, of: random.Random) -> None:
        """With sizes drawn from `of`."""
        super().__init__()
        channels = of.choice((16, 24, 32, 48, 64))
        self.first = nn.Conv2d(of.choice((3, 4, 8)), channels, 3, padding=1)
        layers: list[nn.Module] = []
        for _ in range(of.randint(6, 12)):
            made, taps, stride = (
                of.choice((32, 48, 64, 96, 128, 160)),
                of.choice((1, 3, 3, 3, 5)),
                of.choice((1, 1, 1, 2)),
            )
            layers.append(nn.Conv2d(channels, made, taps, padding=taps // 2, stride=stride))
            channels, drawn = made, of.random()
            if drawn < 0.6:
                layers.append(nn.BatchNorm2d(channels) if drawn < 0.4 else nn.GroupNorm(8, channels))
            layers.append(of.choice((nn.ReLU, nn.SiLU, nn.GELU))())
        self.layers, self.out = nn.Sequential(*layers), nn.Linear(channels, of.choice((10, 128)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of (batch, channels, height, width)."""
        made: torch.Tensor = self.out(self.layers(self.first(x)).mean((2, 3)))
        return made


def graph_of(seed: int) -> Graph:
    """The training step of the net that a seed gives."""
    of = random.Random(seed)
    net = Net(of)
    size, batch = of.choice((32, 48, 64, 96)), 8 * of.choice((8, 16, 32, 64))
    sample = torch.empty(batch, net.first.in_channels, size, size)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return build_graph(api.capture(net, sample, loss_fn=lambda made: (made**2).mean(), optimizer=optimizer))


def main() -> None:
    """Make the rows that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="100:118", help="first:last, without the last")
    parser.add_argument("--out", type=Path, default=RESULTS / "random_nets.csv")
    parser.add_argument("--again", action="store_true", help="make rows again that other sources made")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    known = {key(row): row for row in read(options.out)} if options.out.exists() else {}
    for seed in range(first, last):
        graph = None
        for plan in PLANS:
            name = {"model": f"{NAME} {seed}", "target": TARGET, "mesh": "2x4", "plan": plan}
            if kept(known.get(key(name)), options.again):
                continue
            graph = graph or graph_of(seed)
            row = name | measured(graph, "2x4", TARGET, plan)
            add(options.out, row)
            print(seed, plan, f"{row['predicted_memory'] / row['compiled_memory'] - 1:+.3f}", flush=True)


if __name__ == "__main__":
    main()
