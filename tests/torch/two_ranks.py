"""One of two ranks: trains a network with and without a plan under each engine, and compares weights."""

import copy
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from onnxgc.torch import checkpoint, plans_of

STEPS = 4


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
    return nn.Sequential(*layers, nn.Linear(32, 8))


def data(rank: int, step: int) -> Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def under(engine: str, module: nn.Module) -> nn.Module:
    if engine == "ddp":
        return DistributedDataParallel(module)
    fully_shard(module)
    return module


def trained(engine: str, module: nn.Module, rank: int) -> list[Tensor]:
    engaged = under(engine, module)
    optimizer = torch.optim.AdamW(engaged.parameters(), lr=1e-2)
    for step in range(STEPS):
        # Two micro-batches per step accumulate gradients.
        for part in data(rank, step).chunk(2):
            engaged(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [one.full_tensor() if isinstance(one, DTensor) else one.detach() for one in engaged.parameters()]


def check(engine: str, rank: int) -> None:
    plain = network()
    planned = checkpoint(
        copy.deepcopy(plain), data(0, 0)[:32], budget="80%", device="a100", time_limit=None, step_limit=2
    )
    assert plans_of(planned)[0].repeated > 0
    weights = [trained(engine, module, rank) for module in (plain, planned)]
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)
    print(f"rank {rank} under {engine}: {len(weights[0])} parameters are equal", flush=True)


def main() -> None:
    dist.init_process_group("gloo")
    for engine in ("ddp", "fsdp2"):
        check(engine, int(os.environ["RANK"]))
    # A rank that exits during communication may abort the other.
    dist.barrier()
    dist.destroy_process_group()
    # PyTorch's threads would abort the interpreter at exit.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
