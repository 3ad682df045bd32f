"""Ranks of torch.distributed do this with SLA2's module, for `distributed_ranks.run`."""

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sagebwd.nn import SparseLinearAttention

import distributed_ranks as ranks_of

CHANNELS, HEADS = 8, 2


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(rank):
    """q, k and v of a rank, with more of a trend in later ones."""
    trend = (1 + rank) * torch.linspace(-1, 1, 48, dtype=torch.float64)[:, None]
    return [drawn(1, HEADS, 48, CHANNELS, seed=10 * rank + i) + (i < 2) * trend for i in range(3)]


def everybodys(ranks):
    return [torch.cat(each) for each in zip(*map(tokens, range(ranks)))]


class Model(torch.nn.Module):
    """A layer before the attention, and what it hands to it."""

    def __init__(self, alpha):
        super().__init__()
        self.before = torch.nn.Linear(CHANNELS, CHANNELS)
        self.attention = SparseLinearAttention(
            CHANNELS, HEADS, density=0.4, alpha=alpha, block_size=(16, 16), seq_len=48,
            precision="exact", temperature=1.0)  # fmt: skip
        with torch.no_grad():
            for i, p in enumerate(self.parameters()):
                p += 0.3 * drawn(*p.shape, seed=100 + i)
        self.double()

    def forward(self, q, k, v, method="__call__"):
        return getattr(self.attention, method)(q + self.before(q), k, v)


def whole(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def same(x, y):
    return bool(torch.allclose(whole(x), whole(y), rtol=1e-9, atol=1e-12))


def with_fsdp(rank, alpha, how):
    """The result tells by name what is as without FSDP and with the tensors of all ranks."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    ranks = dist.get_world_size()
    mesh = ranks_of.init_device_mesh("cpu", (ranks,))
    model = Model(alpha)
    alone, given, of_all = copy.deepcopy(model), tokens(rank), everybodys(ranks)
    layer, expected = model.attention, alone.attention
    if how != "one group":
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if how == "registered":
        for name in ("stage_one_loss", "calibrate_alpha", "report"):
            register_fsdp_forward_method(layer, name)
        model(*given).sum().backward()  # PyTorch wants the root's forward first
        model.zero_grad()
    if how == "after a forward":
        with torch.no_grad():
            model(*given)
            if layer.alpha_logit is not None:
                layer(*given)  # whose copies may stay
    found = {}
    found["the report"] = layer.report(*given) == expected.report(*given)
    found["the mask"] = bool(torch.equal(layer.block_mask(*given[:2]),
                                         expected.block_mask(*given[:2])))  # fmt: skip
    for temperature in (None, 0.7):
        layer.stage_one_loss(*given, temperature=temperature).backward()
        expected.stage_one_loss(*of_all, temperature=temperature).backward()
        if how != "one group":
            layer.reshard()
        for (name, p), q in zip(layer.named_parameters(), expected.parameters()):
            found[f"the gradient of {name}"] = same(p.grad, q.grad) and bool(whole(p.grad).any())
    learned = torch.optim.SGD(layer.parameters(), 0.1)
    learned.step()
    torch.optim.SGD(expected.parameters(), 0.1).step()
    layer.calibrate_alpha(*given)
    expected.calibrate_alpha(*of_all)
    if how != "one group":
        layer.reshard()
    for (name, p), q in zip(layer.named_parameters(), expected.named_parameters()):
        found[f"{name} as it was calibrated"] = same(p, q[1])
    layer.freeze_router()
    found["the router is frozen"] = not any(p.requires_grad for p in layer.router.parameters())
    expected.freeze_router()
    for p in (*model.parameters(), *alone.parameters()):
        p.grad = None
    model(*given).square().sum().backward()
    alone(*of_all).square().sum().div(ranks).backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters()):
        if q.grad is not None:
            found[f"{name} in stage 2"] = same(p.grad, q.grad)
    return found


def with_ddp(rank, alpha):
    """alpha after each rank calibrated it on its own, and together; and with all tensors."""
    given, ranks = tokens(rank), dist.get_world_size()
    models = [Model(alpha) for _ in range(3)]
    for model in models[:2]:
        DistributedDataParallel(model)
    apart, together, expected = (model.attention for model in models)
    apart.calibrate_alpha(*given)
    together.calibrate_alpha(*given, group=dist.group.WORLD)
    expected.calibrate_alpha(*everybodys(ranks))
    name = "beta" if alpha == "estimated" else "alpha_logit"
    return [getattr(layer, name).detach() for layer in (apart, together, expected)]


def one_with_nan(rank):
    given, layer = tokens(rank), Model("head").attention
    if rank == 1:
        given[1][0, 0, 3, 2] = torch.nan
    layer.calibrate_alpha(*given, group=dist.group.WORLD)


def copies(rank):
    """The module refuses calls in and after the forward of a group that has its parameters. Such
    calls are right when the copies are gone."""
    from torch.distributed.fsdp import fully_shard

    mesh = ranks_of.init_device_mesh("cpu", (dist.get_world_size(),))
    model, given, errors = Model("head"), tokens(rank), []
    fully_shard(model, mesh=mesh)
    before = whole(model.attention.alpha_logit).clone()

    def refused(call, *arguments):
        try:
            call(*arguments)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")

    with torch.no_grad():
        refused(model, *given, "calibrate_alpha")
        model.reshard()
        model._get_fsdp_state()._state_ctx.iter_forward_root = None  # which the error left
        model(*given)
        refused(model.attention.calibrate_alpha, *given)
        refused(model.attention.freeze_router)
    model.reshard()
    unchanged = torch.equal(whole(model.attention.alpha_logit), before)
    model.attention.calibrate_alpha(*given)
    model.attention.freeze_router()
    changed = not torch.equal(whole(model.attention.alpha_logit), before)
    return errors, unchanged, changed, [p.requires_grad for p in model.attention.parameters()]


def two_types(rank):
    """A layer in FP32 in a model of bf16: its types in stage 2, and what one group says to it."""
    from torch.distributed.fsdp import fully_shard

    mesh = ranks_of.init_device_mesh("cpu", (dist.get_world_size(),))
    given = [t.bfloat16() for t in tokens(rank)]
    types = []
    for own in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Sequential()
        model.before = torch.nn.Linear(CHANNELS, CHANNELS)
        model.attention = SparseLinearAttention(
            CHANNELS, HEADS, density=0.4, alpha="head", block_size=(16, 16),
            precision="exact").freeze_router()  # fmt: skip
        model.bfloat16()
        model.forward = lambda q, k, v, m=model: m.attention(q + m.before(q), k, v)
        if own:
            fully_shard(model.attention, mesh=mesh)
        fully_shard(model, mesh=mesh)
        try:
            model(*given).sum().backward()
            types.append({name: str(p.grad.dtype) for name, p in model.named_parameters()
                          if p.grad is not None})  # fmt: skip
        except AssertionError as error:
            types.append(str(error))
    return types
