"""The tensors of a drawn case: values, strides, and where sequences lie among them."""

from __future__ import annotations

from dataclasses import dataclass, field

import oracle
from draw import SMALL, TENSORS, Case
from draw_intervals import numbers_of
from draw_lists import lists_of
from frame import torch
from torch import Tensor

from sagebwd.benchmark.measuring import dtype_of


@dataclass(frozen=True)
class Given:
    """The arguments of one call. Tensors are indexed (batch, heads, tokens, channels) and may have
    any strides. Packed tensors are a batch of one."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dlse: Tensor | None  #: (batch, heads, queries)
    k_mean: Tensor | None  #: (sequences, heads_kv, channels)
    sink: Tensor | None  #: (heads,)
    packing: dict[str, Tensor]  #: cu_seqlens_q and the like, for the call
    spans: list[tuple[tuple, tuple]]  #: (batch, begin, end) of each sequence's queries and keys
    mask: Tensor | None = None  #: which blocks are listed, (batch, heads, of queries, of keys)
    #: block_mask and the like, or startend_row_indices, for the call
    lists: dict[str, Tensor] = field(default_factory=dict)

    def alone(self, i: int) -> Given:
        """Sequence i by itself, contiguous."""

        def part(x: Tensor | None, span: tuple) -> Tensor | None:
            return None if x is None else x[span[0], :, span[1] : span[2]][None].contiguous()

        queries, keys = self.spans[i]
        q, dout, dlse = (part(x, queries) for x in (self.q, self.dout, self.dlse))
        k, v = (part(x, keys) for x in (self.k, self.v))
        mean = None if self.k_mean is None else self.k_mean[i : i + 1]
        whole = (0, 0, q.shape[2]), (0, 0, k.shape[2])
        return Given(q, k, v, dout, dlse, mean, self.sink, {}, [whole])


def inputs_of(case: Case, device: str) -> Given:
    generator = torch.Generator(device).manual_seed(case.seed)
    dtype, heads = dtype_of(case.spec["dtype"]), case.heads_kv * case.group
    batch, seq_q, seq_kv = _rooms(case)
    packing = _packing(case, device)
    spans = list(zip(*(
        oracle.spans(n, batch, packing.get(f"cu_seqlens_{of}"), packing.get(f"seqused_{of}"))
        for of, n in (("q", seq_q), ("k", seq_kv)))))  # fmt: skip
    shapes = {"q": (batch, heads, seq_q, case.head_dim),
              "k": (batch, case.heads_kv, seq_kv, case.head_dim),
              "v": (batch, case.heads_kv, seq_kv, case.value_dim),
              "dout": (batch, heads, seq_q, case.value_dim)}  # fmt: skip
    given = {}
    for name in TENSORS:
        kind, scale = case.values[name]
        x = drawn(kind, shapes[name], generator, device) * scale
        if name == "k":
            x += case.key_offset * torch.randn(case.head_dim, generator=generator, device=device)
        if case.zeros and case.zeros[0] == name:
            first, end = (round(share * x.shape[2]) for share in case.zeros[1:])
            x[:, :, first:end] = 0
        if name == "dout" and case.dlse == "alone":
            x.zero_()
        else:
            _fill_unused(x, case, name, [span[name in "kv"] for span in spans])
        given[name] = laid_out(x.to(dtype), case.strides[name])
    dlse = sink = None
    if case.dlse != "none":
        scale = case.values["v"][1] * (case.values["dout"][1] if case.dlse != "alone" else 1)
        dlse = scale * torch.randn(shapes["q"][:3], generator=generator, device=device)
        if case.strides["dlse"] != "one number for all":
            _fill_unused(dlse, case, "dlse", [span[0] for span in spans])
        dlse = laid_out(dlse.unsqueeze(-1), case.strides["dlse"]).squeeze(-1)
    if case.sinks:
        sink = 2 * torch.randn(heads, generator=generator, device=device)
        if case.sinks == "some off":
            sink[torch.rand(heads, generator=generator, device=device) < 0.5] = -torch.inf
    mean = _mean(case, given["k"], [span[1] for span in spans], generator)
    mask, lists = None, {}
    if case.lists:
        sizes = case.spec["sparse_q"], case.spec["sparse_kv"]
        mask, lists = lists_of(case.lists, (batch, heads, case.heads_kv, seq_q, seq_kv), sizes,
                               case.seed, device)  # fmt: skip
    if case.intervals:
        lists["startend_row_indices"] = numbers_of(
            case.intervals, (batch, case.heads_kv, seq_q, seq_kv), case.spec["intervals"],
            case.spec["causal"] != "none", case.seed, device)
    return Given(**given, dlse=dlse, k_mean=mean, sink=sink, packing=packing, spans=spans,
                 mask=mask, lists=lists)  # fmt: skip


def drawn(kind: str, shape: tuple, generator: torch.Generator, device: str) -> Tensor:
    """A float32 tensor (batch, heads, tokens, channels) of a distribution of draw.VALUES."""
    tokens, channels = shape[2:]

    def whole_numbers(most: int, *size: int) -> Tensor:
        return torch.randint(most, size, generator=generator, device=device)

    x = torch.randn(shape, generator=generator, device=device)
    if kind == "one-hot":  # as long as a Gaussian token
        at = whole_numbers(channels, *shape[:3], 1)
        signs = x[..., :1].sign()
        return torch.zeros_like(x).scatter_(-1, at, signs * channels**0.5)
    if kind == "duplicates":
        return x[:, :, whole_numbers(min(4, tokens), tokens)] if tokens else x
    if kind == "alternating":
        signs = 1 - 2 * (torch.arange(tokens, device=device) % 2)
        return signs[:, None] * torch.ones_like(x)
    if kind == "one huge token" and tokens:
        x[:, :, whole_numbers(tokens, 1)] *= 100
    if kind == "few tokens":
        x *= torch.rand((*shape[:3], 1), generator=generator, device=device) < 0.05
    if kind == "few numbers":
        x *= torch.rand(shape, generator=generator, device=device) < 0.02
    return x + 4 if kind == "common offset" else x


def laid_out(x: Tensor, strides: str) -> Tensor:
    """Gives (B, H, S, D) values other strides. Numbers between them are NaN.

    With strides of zero, the first head, sequence or number stands for all.
    """
    b, h, s, d = x.shape
    if strides == "heads first" or not x.numel():
        return x.contiguous()
    if strides == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if strides == "one head for all":
        return x[:, :1].contiguous().expand_as(x)
    if strides == "one batch for all":
        return x[:1].contiguous().expand_as(x)
    if strides == "one number for all":
        return x[:1, :1, :1, :1].contiguous().expand_as(x)
    # Token strides of D + 16 elements, or heads of q, k and v side by side: multiples of 16 bytes.
    shape = {"room between tokens": (b, h, s + 3, d + 16), "slice of qkv": (b, s, 3, h, d),
             "channels apart": (b, h, s, d, 2)}[strides]  # fmt: skip
    whole = torch.full(shape, torch.nan, dtype=x.dtype, device=x.device)
    view = {"room between tokens": lambda: whole[:, :, 2:-1, 8:-8],
            "slice of qkv": lambda: whole[:, :, 1].transpose(1, 2),
            "channels apart": lambda: whole[..., 0]}[strides]()  # fmt: skip
    view.copy_(x)
    return view


def _rooms(case: Case) -> tuple[int, int, int]:
    """The batch, queries and keys of the tensors."""
    if not case.is_packed:
        return case.batch, case.seq_q, case.seq_kv
    where = case.sequences
    return 1, *(where.before[i] + sum(room[i] for room in where.rooms) + where.behind[i]
                for i in (0, 1))  # fmt: skip


def _packing(case: Case, device: str) -> dict[str, Tensor]:
    where, packing = case.sequences, {}
    if where is None:
        return packing

    def on_device(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    for i, of in enumerate("qk"):
        if where.said_by != "seqused":
            firsts = [where.before[i]]
            for room in where.rooms:
                firsts.append(firsts[-1] + room[i])
            firsts[-1] += where.beyond
            packing[f"cu_seqlens_{of}"] = on_device(firsts)
        if where.said_by != "cu_seqlens" and of != where.without:
            packing[f"seqused_{of}"] = on_device([used[i] for used in where.used])
    return packing


def _fill_unused(x: Tensor, case: Case, name: str, spans: list[tuple]) -> None:
    """Puts what `case.unused` says into tokens that no sequence contains."""
    counts = torch.zeros(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device)
    for batch, begin, end in spans:
        counts[batch, begin:end] = True
    shared = case.strides[name]
    if shared == "one batch for all":
        counts = counts.any(0, keepdim=True).expand_as(counts)
    fill = {"nan": torch.nan, "inf": torch.inf}.get(case.unused)
    if case.sinks and name in ("dout", "dlse"):  # a sink reads all rows
        fill = 0.0
    if fill is not None and shared != "one number for all":
        x.masked_fill_(~counts.view(x.shape[0], 1, -1, *[1] * (x.dim() - 3)), fill)


def _mean(
    case: Case, k: Tensor, spans: list[tuple], generator: torch.Generator
) -> Tensor | None:
    """smooth_k is told to subtract this from the keys of each sequence."""
    if case.k_mean is None:
        return None
    none = torch.zeros(k.shape[1], k.shape[3], device=k.device)
    mean = torch.stack([k[batch, :, begin:end].float().mean(1) if end > begin else none
                        for batch, begin, end in spans])  # fmt: skip
    noise = torch.randn(mean.shape, generator=generator, device=k.device)
    by = {"own": (1, 0), "near": (1, 0.1), "far": (1, 4), "zero": (0, 0)}[case.k_mean]
    # If all keys are zeros, kernels take a mean as small as 1e-30 for zero, too.
    size = case.values["k"][1] if case.values["k"][1] > SMALL else 0
    return by[0] * mean + by[1] * size * noise
