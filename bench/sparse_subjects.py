"""The attentions that bench/sparse.py compares, for one cell."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import sparse_exact
from needs_torch import torch
from sparse_cases import Cell, Shape, blocks_of, share_of
from torch import Tensor

import sagebwd
from sagebwd.benchmark.attentions import of_pytorch
from sagebwd.benchmark.timing import Call
from sagebwd.numerics import emulation

PRECISIONS = ("six-of-seven", "gradients16")
PEERS = ("cudnn", "fa2")
FLEX = "flex_attention"
FA4 = "FlashAttention-4"  #: where it is installed


@dataclass
class Lists:
    """The lists of one block size."""

    sizes: tuple[int, int]
    mask: Tensor
    bits: Tensor
    share: float

    @classmethod
    def of(cls, mask: Tensor, sizes: tuple[int, int], tokens: int) -> Lists:
        bits = sagebwd.pack_blocks(mask, block_size=sizes)
        return cls(sizes, mask, bits, share_of(mask, tokens, sizes))

    def name(self) -> str:
        return "{}x{}".format(*self.sizes)


@dataclass
class Subject:
    """One attention: a function of q, k, v and `more`, and what is exact."""

    label: str
    kind: str  #: 'sparse', 'all in', 'linear', 'dense' or 'peer'
    attend: Callable[..., Tensor]
    lists: Lists | None = None
    precision: str | None = None
    more: tuple[Tensor, ...] = ()

    def passes(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Call]:
        inputs = q, k, v, *self.more

        def forward() -> Tensor:
            with torch.no_grad():
                return self.attend(*inputs)

        def both() -> tuple[Tensor, ...]:
            out = self.attend(*inputs)
            return out.detach(), *torch.autograd.grad(out, inputs, dout)

        return {"forward": forward, "forward+backward": both}

    def exact(self, inputs: tuple[Tensor, ...], heads: int) -> dict[str, Tensor]:
        """FP64 of the last heads of the last of the batch."""
        parts = [x.detach()[-1, -heads:] for x in inputs]
        if self.lists is None:
            tokens = parts[0].shape[1]
            every = torch.ones(len(parts[0]), blocks_of(tokens, 128), blocks_of(tokens, 128),
                               dtype=torch.bool, device=parts[0].device)  # fmt: skip
            return sparse_exact.sparse(*parts, every, (128, 128))
        listed, sizes = self.lists.mask[-1, -heads:], self.lists.sizes
        if self.kind == "linear":
            return sparse_exact.linear(*parts, listed, sizes)
        if self.kind == "all in":
            alpha = self.more[0].detach()[-heads:].sigmoid()
            return sparse_exact.mixed(*parts, listed, sizes, alpha)
        return sparse_exact.sparse(*parts, listed, sizes)

    def same_exact(self) -> tuple:
        """Subjects for which this is equal have the same exact results."""
        kind = self.kind if self.kind in ("linear", "all in") else ""
        return kind, self.lists and id(self.lists)


def is_peer(name: str) -> bool:
    """Whether a subject of that name is not ours."""
    return name in PEERS or name.startswith((FLEX, FA4))


# ---- ours ----------------------------------------------------------------------------------------


def sparse(lists: Lists, precision: str, cuda: bool) -> Subject:
    attend = sagebwd.block_sparse_attention if cuda else emulation.emulated_block_sparse_attention
    told = dict(block_bits=lists.bits, block_size=lists.sizes, precision=precision)
    return Subject(sparse_label(lists, precision), "sparse", partial(attend, **told), lists,
                   precision)  # fmt: skip


def sparse_label(lists: Lists, precision: str) -> str:
    also = "" if precision == PRECISIONS[0] else f" {precision}"
    return f"sagebwd{also} {lists.name()}"


def all_in(lists: Lists, cell: Cell, q: Tensor, k: Tensor, seed: int, precision: str) -> Subject:
    """SLA2's module: router, both branches, and an alpha of each query block. Its maps, which a
    training changes, are the identity."""
    shape = cell.shape
    module = sagebwd.nn.SparseLinearAttention(
        shape.head_dim, shape.heads, density=cell.density, block_size=lists.sizes,
        seq_len=shape.tokens, precision=precision if q.is_cuda else "exact",
    ).to(q.device)  # fmt: skip
    logit = module.alpha_logit
    generator = torch.Generator(q.device).manual_seed(seed + 2)
    with torch.no_grad():
        logit.copy_(torch.rand(logit.shape, generator=generator, device=q.device).logit(1e-6))
        routed = Lists.of(module.block_mask(q, k), lists.sizes, shape.tokens)
    label = all_in_label(lists, precision)
    attend = lambda q, k, v, logit: module(q, k, v)  # noqa: E731
    return Subject(label, "all in", attend, routed, precision, (logit,))


def all_in_label(lists: Lists, precision: str) -> str:
    return sparse_label(lists, precision).replace("sagebwd", "all in")


def linear(lists: Lists) -> Subject:
    """The linear branch of `all in` alone."""
    attend = partial(sagebwd.block_linear_attention, block_mask=lists.mask,
                     block_size=lists.sizes)  # fmt: skip
    return Subject(f"linear branch {lists.name()}", "linear", attend, lists)


def dense(label: str, cuda: bool) -> Subject:
    """Attention to every key, ours or a peer's, by its name in DENSE."""
    if label in PEERS:
        device = "cuda" if cuda else "cpu"
        return Subject(label, "peer", of_pytorch(label, device, causal=False))
    attend = sagebwd.attention if cuda else emulation.emulated_attention
    told = dense_options(label)
    return Subject(label, "dense", partial(attend, **told), precision=told["precision"])


def dense_options(label: str) -> dict:
    """The options of one of ours in DENSE."""
    word = label.removeprefix("sagebwd").strip()
    precision = word if word in PRECISIONS else PRECISIONS[0]
    return dict(precision=precision) | ({"group_kv": 64} if "group_kv" in word else {})


# ---- flex_attention ------------------------------------------------------------------------------


@cache
def compiled_flex(cuda: bool) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    if not cuda:
        return flex_attention
    torch._dynamo.config.recompile_limit = 64  # shapes and passes, of one function
    return torch.compile(flex_attention, dynamic=False)


def flex(lists: Lists, shape: Shape, cuda: bool) -> Subject:
    """flex_attention with the same lists, whose blocks are all full."""
    from torch.nn.attention.flex_attention import BlockMask

    counts = lists.mask.sum(-1, dtype=torch.int32)
    order = lists.mask.int().argsort(dim=-1, descending=True, stable=True).int().contiguous()
    block_mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), torch.zeros_like(order), counts, order, BLOCK_SIZE=lists.sizes,
        seq_lengths=(shape.tokens, shape.tokens))  # fmt: skip
    attend = partial(compiled_flex(cuda), block_mask=block_mask)
    return Subject(f"{FLEX} {lists.name()}", "peer", attend, lists)


def has_fa4() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


def fa4(lists: Lists) -> Subject:
    """FlashAttention-4 with the same lists, whose blocks are all full: those of keys for the
    forward, and for the backward those of queries."""
    from flash_attn.cute import flash_attn_func
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    def told(mask: Tensor) -> BlockSparseTensorsTorch:
        counts = mask.sum(-1, dtype=torch.int32)
        order = mask.int().argsort(dim=-1, descending=True, stable=True).int().contiguous()
        none = torch.zeros_like(counts), torch.zeros_like(order)
        return BlockSparseTensorsTorch(*none, counts, order, block_size=lists.sizes)

    both = dict(block_sparse_tensors=told(lists.mask), block_sparse_tensors_bwd=told(lists.mask.mT))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), **both)
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return Subject(f"{FA4} {lists.name()}", "peer", attend, lists)


# ---- all of a cell -------------------------------------------------------------------------------


def makers_of(cell: Cell, lists: list[Lists], inputs: tuple[Tensor, ...], precisions,
              seed: int, with_flex: bool) -> dict[str, Callable[[], Subject]]:  # fmt: skip
    """A function makes each subject of a cell, and has a name for the case that it fails."""
    q, k = inputs[:2]
    cuda, every = q.is_cuda, cell.lists == "all"
    makers = {label: partial(dense, label, cuda) for label in cell.dense}
    for one in lists if cell.with_lists() else ():
        if with_flex and cell.is_timed and one.sizes == (128, 128):
            makers[f"{FLEX} {one.name()}"] = partial(flex, one, cell.shape, cuda)
            if cuda and has_fa4():
                makers[f"{FA4} {one.name()}"] = partial(fa4, one)
        for precision in precisions:
            makers[sparse_label(one, precision)] = partial(sparse, one, precision, cuda)
        if every:
            continue
        makers[f"linear branch {one.name()}"] = partial(linear, one)
        if cell.lists != "popular":  # no router gives such lists for these inputs
            for precision in precisions:
                makers[all_in_label(one, precision)] = partial(all_in, one, cell, q, k, seed,
                                                               precision)  # fmt: skip
    return makers


def specs_of(cells: list[Cell], sizes, precisions, dtype: str) -> list[dict]:
    """Lists what sagebwd.warmup is to compile before these cells, for calls with one head."""
    found = []
    for cell in cells:
        tokens = cell.shape.tokens
        told = {"head_dim": cell.shape.head_dim, "dtype": dtype, "sizes": (1, 1, 1, tokens, tokens)}
        found += [told | dense_options(label) for label in cell.dense if label not in PEERS]
        found += [told | {"precision": precision, "sparse_q": rows, "sparse_kv": columns}
                  for rows, columns in (sizes if cell.with_lists() else ())
                  for precision in precisions]  # fmt: skip
    return [spec for i, spec in enumerate(found) if spec not in found[:i]]
