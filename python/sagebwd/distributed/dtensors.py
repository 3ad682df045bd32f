"""Attention of DTensors, as PyTorch's context_parallel and tensor parallel models hand them on."""

import math
import sys

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from sagebwd.core.arguments.checks import SpecError, a_kind
from sagebwd.core.arguments.shapes import check_rank, problem_of_shapes
from sagebwd.core.fastest import of_q
from sagebwd.core.functional import attention as on_one_rank
from sagebwd.core.options import takes
from sagebwd.distributed.functional import over_ranks

_ELSEWHERE = (
    "sagebwd.distributed.attention, outside context_parallel, for tensors that "
    "sagebwd.distributed.shard gives"
)
_PACKED = "ranks share whole sequences: pad all to one length, and ignore the padding in the loss"
_OTHERWISE = {
    "sink_logits": f"pass it to {_ELSEWHERE}",
    "k_mean": "a ring computes the mean of all keys: leave it out",
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), _PACKED),
    "return_lse": f"pass it to {_ELSEWHERE}",
}
#: Dimensions of (batch, heads, tokens, head_dim).
_HEADS, _TOKENS = 1, 2


@takes(otherwise=_OTHERWISE, fastest=of_q())
def attention_of_dtensors(q, k, v, *, softmax_scale=None, layout="bhsd", chosen):
    """`sagebwd.attention` of DTensors, whose result is one with q's placements.

    Along a dimension of the mesh that shares tokens the ranks form a ring; of two such dimensions
    the second shares heads in each place of the ring. If ranks share the batch or heads, or have
    copies, each computes its own. Raises what the two `attention` raise, and SpecError for other
    placements.
    """
    mesh, sharing = _placed(q, k, v, layout)
    _check_heads(q, k, v)
    local = [x.to_local() for x in (q, k, v)]
    if sharing is None:
        out = on_one_rank(*local, softmax_scale=softmax_scale, **chosen)
    else:
        causal = chosen["causal"] not in (False, "none")
        if causal:
            _check_order()
        method = "ring" if sharing.ndim == 1 else "both"
        out = over_ranks(
            *local, sharing, method, softmax_scale, layout, False, None, chosen, causal,
            f"pass method='ulysses' to {_ELSEWHERE}")  # fmt: skip
    shape = (*q.shape[:3], v.shape[3])
    stride = (shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1)
    return DTensor.from_local(out, mesh, q.placements, run_check=False, shape=shape, stride=stride)


def _placed(q, k, v, layout):
    """The mesh, and the part of it along which ranks share tokens, or None."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, DTensor):
            raise TypeError(f"{name} is {a_kind(x)}, and others are DTensors: pass all as such")
        if x.device_mesh != q.device_mesh:
            raise SpecError(f"{name} has mesh {x.device_mesh}, and q {q.device_mesh}")
        if x.placements != q.placements:
            raise SpecError(
                f"{name} is placed as {x.placements}, and q as {q.placements}: call "
                "redistribute() first, so that all are placed alike"
            )
    if layout != "bhsd":
        raise SpecError(f"layout={layout!r}: DTensors are (batch, heads, tokens, head_dim)")
    shared = []
    for at, placement in enumerate(q.placements):
        if placement == Shard(_TOKENS):
            shared.append(at)
        elif isinstance(placement, Partial) or placement not in (Replicate(), Shard(0), Shard(1)):
            raise SpecError(
                f"q, k and v are placed as {q.placements}: ranks may share the batch, heads or "
                "tokens, or have copies; call redistribute() first"
            )
    if not shared:
        return q.device_mesh, None
    if len(shared) > 2:
        raise SpecError(
            f"{q.placements}: {len(shared)} dimensions of the mesh share tokens; pass one or two"
        )
    mesh = q.device_mesh
    if mesh.ndim == len(shared):
        return mesh, mesh
    if not mesh.mesh_dim_names:
        raise SpecError(f"{mesh} has no names of dimensions: pass mesh_dim_names= where it is made")
    return mesh, mesh[tuple(mesh.mesh_dim_names[at] for at in shared)]


def _check_heads(q, k, v):
    """SpecError, the same on all ranks, where a rank would not have the key heads that its query
    heads read. If R ranks share n heads, each has ceil(n / R), and the last ones the rest."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_rank(name, tuple(x.shape))
    _, heads, heads_kv, *_ = problem_of_shapes(*(tuple(x.shape) for x in (q, k, v)), "bhsd")
    sharing = [q.device_mesh.size(at) for at, p in enumerate(q.placements) if p == Shard(_HEADS)]
    ranks = math.prod(sharing)
    of_q, of_k = -(-heads // ranks), -(-heads_kv // ranks)
    alike = of_q * heads_kv == of_k * heads and (ranks - 1) * of_k < heads_kv
    if heads_kv % ranks and not (alike and len(sharing) == 1):
        raise SpecError(
            f"q has {heads} heads and k and v have {heads_kv}, which {ranks} ranks share: some "
            "would not have the key heads that their query heads read. Repeat heads of k and v to "
            f"a multiple of {ranks} before they are distributed, by repeat_interleave(n, 1), or "
            "call redistribute() to share the batch instead"
        )


def _check_order():
    """SpecError where ranks may have neighbouring tokens and not an early and a late chunk."""
    from torch.distributed.tensor import experimental

    dispatcher = getattr(DTensor, "_op_dispatcher", None)
    handlers = getattr(dispatcher, "_custom_op_handlers", {})
    if torch.ops.aten._scaled_dot_product_flash_attention.default not in handlers:
        raise SpecError(
            "is_causal=True, and q, k and v share tokens outside PyTorch's context_parallel: call "
            "it in `with context_parallel(...)`, which gives each rank an early and a late chunk, "
            "or call sagebwd.distributed.attention with what sagebwd.distributed.shard gives"
        )
    name = experimental.__name__
    for module in (f"{name}._context_parallel._attention", f"{name}._attention"):
        found = getattr(sys.modules.get(module), "_cp_options", None)
        if found is not None and not found.enable_load_balance:
            raise SpecError(
                "is_causal=True, and each rank has neighbouring tokens: pad sequences to a "
                "multiple of twice the ranks and leave PyTorch's load balance of context_parallel "
                "on, so that each has an early and a late chunk"
            )
