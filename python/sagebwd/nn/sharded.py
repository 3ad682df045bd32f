"""Methods of modules whose parameters FSDP shares among ranks, and sums over ranks.

PyTorch gathers parameters for a module's forward alone, and what is written to the gathered copies
is lost. Here other methods gather for themselves, and write to each rank's share.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from sagebwd.core.options import SpecError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Method = TypeVar("Method", bound=Callable[..., Any])


def _loaded(name: str) -> Any:
    """A module of torch.distributed, None where nobody has imported it and nothing can be its."""
    return sys.modules.get(f"torch.distributed.{name}")


def is_shared(t: Tensor) -> bool:
    tensor = _loaded("tensor")
    return tensor is not None and isinstance(t, tensor.DTensor)


def _is_group(module: nn.Module) -> bool:
    """Whether `fully_shard` was called for this module itself."""
    fsdp = getattr(_loaded("fsdp"), "FSDPModule", None)
    return fsdp is not None and isinstance(module, fsdp)


def as_shared(weight: Tensor, values: Tensor) -> Tensor:
    """The values as what the weight is: a share of them for each rank if it is a DTensor."""
    if not is_shared(weight):
        return values
    cut: Tensor = _loaded("tensor").distribute_tensor(
        values.contiguous(), weight.device_mesh, weight.placements)  # type: ignore[attr-defined]
    return cut


class _Mean(torch.autograd.Function):
    """A parameter as a whole, whose gradient is the mean over ranks, as FSDP's is."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.ranks, None


def whole(parameter: Tensor) -> Tensor:
    """The parameter, gathered from all ranks if they share it."""
    if not is_shared(parameter):
        return parameter
    partial = _loaded("tensor").Partial
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    found = parameter.full_tensor(  # type: ignore[attr-defined]
        grad_placements=[partial()] * mesh.ndim)  # fmt: skip
    return _Mean.apply(found, mesh.size())  # type: ignore[no-any-return]


def _shared_parameters(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """By name; those of parts that gather for their own forward are left out."""
    found = {prefix + name: p for name, p in module.named_parameters(recurse=False)
             if is_shared(p)}  # fmt: skip
    for name, child in module.named_children():
        if not _is_group(child):
            found |= _shared_parameters(child, f"{prefix}{name}.")
    return found


class _Call(nn.Module):
    """A method as what torch.func.functional_call calls: its module is not called, so that hooks
    of the forward do not run."""

    def __init__(self, module: nn.Module, method: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.method(self.module, *given, **named)


def gathers(method: Method) -> Method:
    """Makes a method of a module see its parameters as wholes. All ranks call it together."""

    @functools.wraps(method)
    def wrapper(self: nn.Module, *given: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() or _loaded("tensor") is None:
            return method(self, *given, **named)
        if torch.is_grad_enabled():
            put_back(self)  # gradients of copies would be lost
        shared = _shared_parameters(self, "module.")
        if not shared:
            return method(self, *given, **named)
        wholes = {name: whole(p) for name, p in shared.items()}
        return torch.func.functional_call(_Call(self, method), wholes, given, named)

    return wrapper  # type: ignore[return-value]


def put_back(module: nn.Module) -> None:
    """Gives up the copies of a module's parameters that FSDP may have left after a forward."""
    if _is_group(module):
        module.reshard()  # type: ignore[operator]


def refuse_copies(modules: Iterable[nn.Module], what: str) -> None:
    """SpecError where a change of these modules' own parameters would be one of copies."""
    for module in modules:
        put_back(module)
        managed = getattr(module, "_is_fsdp_managed_module", False)
        if managed and not all(map(is_shared, module.parameters(recurse=False))):
            raise SpecError(
                f"{what} would change copies of parameters that FSDP has gathered, and throws "
                "away: call it outside the model's forward and after model.reshard(), or before "
                "fully_shard or FullyShardedDataParallel"
            )


class Together:
    """Sums and maxima over the ranks that calibrate together; without any, of this one."""

    def __init__(self, parameter: Tensor, group: ProcessGroup | None) -> None:
        self.groups = [] if group is None else [group]
        if group is None and is_shared(parameter):
            mesh = parameter.device_mesh  # type: ignore[attr-defined]
            self.groups = [mesh.get_group(i) for i in range(mesh.ndim)]

    def sum(self, t: Tensor) -> Tensor:
        return self._reduced(t, "SUM")

    def most(self, t: Tensor) -> Tensor:
        return self._reduced(t, "MAX")

    def _reduced(self, t: Tensor, how: str) -> Tensor:
        for group in self.groups:
            t = t.contiguous()
            torch.distributed.all_reduce(t, getattr(torch.distributed.ReduceOp, how), group=group)
        return t
