"""Several processes, which torchrun starts: each computes its part of every batch."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace

from .command import Failure, torch
from .config import TrainConfig


@dataclass(frozen=True)
class Group:
    """This process among the others, of which teams share each sequence."""

    rank: int = 0
    world: int = 1
    sharing: int = 1  #: processes of a team, which are neighbours

    @property
    def teams(self) -> int:
        return self.world // self.sharing

    @property
    def team(self) -> int:
        return self.rank // self.sharing

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduced(x, "SUM") / self.world

    def maximum(self, x: torch.Tensor) -> torch.Tensor:
        return self._reduced(x, "MAX")

    def _reduced(self, x: torch.Tensor, how: str) -> torch.Tensor:
        if self.world > 1:
            torch.distributed.all_reduce(x, getattr(torch.distributed.ReduceOp, how))
        return x


ALONE = Group()


def rank() -> int:
    """That of this process in `joined`, before it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


@contextlib.contextmanager
def joined(config: TrainConfig):
    """Gives the group that torchrun describes, or one process, and the configuration with a GPU of
    its own. A group that is there already stays."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ALONE, config
        return
    cuda = torch.device(config.device).type == "cuda"
    if cuda:
        local = int(os.environ["LOCAL_RANK"])
        if local >= (count := torch.cuda.device_count()):
            raise Failure(f"process {local} of this machine has no GPU: there are {count}; start "
                          f"torchrun with --nproc-per-node {count}, or pass --device cpu")
        config = replace(config, device=f"cuda:{local}")
        torch.cuda.set_device(local)
    new = not torch.distributed.is_initialized()
    if new:
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Group(torch.distributed.get_rank(), world, config.context_parallel), config
    finally:
        if new:
            torch.distributed.destroy_process_group()


def shared(model: torch.nn.Module, config: TrainConfig, group: Group) -> torch.nn.Module:
    """A training step calls this module. With FSDP `model` itself changes: it keeps shards."""
    if config.parallel == "fsdp":
        if not torch.distributed.is_initialized():
            raise Failure("--parallel fsdp needs several processes: start it with torchrun")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        kind = torch.device(config.device).type
        mesh = init_device_mesh(kind, (group.world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    if group.world == 1:
        return model
    return torch.nn.parallel.DistributedDataParallel(model)


@contextlib.contextmanager
def gradients_added(model: torch.nn.Module, last: bool):
    """Gradients of processes are added with the last part of a step only."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    quiet = model.no_sync() if not last and hasattr(model, "no_sync") else contextlib.nullcontext()
    with quiet:
        yield


def whole(x: torch.Tensor) -> torch.Tensor:
    """A parameter or a norm of which FSDP may keep a shard here."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x
