"""QK-norm, RoPE and the output's gate as arguments of attention functions.

Norm and RoPE are those of `qk_norm_rope`. Attention gets what it gives, so that means of keys,
lists of blocks and lse are those of normed and rotated queries and keys.
"""

import torch

from sagebwd.core import direct, front, ops, options
from sagebwd.core.front_arguments import with_front_end
from sagebwd.core.gate import gated
from sagebwd.core.not_kept import not_kept


def behind_front(q, k, v, given, layout="bhsd", cu_seqlens_q=None, cu_seqlens_k=None, **_):
    """(q, k, v), q and k behind norm and RoPE, all as autocast wants them."""
    if all(isinstance(t, torch.Tensor) for t in (q, k, v)):
        q, k, v = ops.as_autocast_wants(q.device.type, q, k, v)
    if (cu_seqlens_q is None) != (cu_seqlens_k is None):
        raise options.SpecError("pass cu_seqlens_q and cu_seqlens_k, or neither")
    # Packed sequences are one sequence to norm and RoPE.
    are_packed = cu_seqlens_q is not None
    if not are_packed or not all(isinstance(t, torch.Tensor) and t.dim() == 3 for t in (q, k)):
        return *front.qk_norm_rope(q, k, layout=layout, **given), v
    options.check_layout(layout)
    for name, t in (("q_inv_rms", q), ("k_inv_rms", k)):
        given[name] = _of_one_sequence(name, given.get(name), t)
    found = front.qk_norm_rope(q.unsqueeze(0), k.unsqueeze(0), layout="bshd", **given)
    return *(t.squeeze(0) for t in found), v


def _of_one_sequence(name, inv_rms, t):
    """1/rms of packed tokens, as `qk_norm_rope` takes it of a batch of one."""
    if not isinstance(inv_rms, torch.Tensor):
        return inv_rms
    tokens, heads = t.shape[:2]
    if tuple(inv_rms.shape) not in ((tokens,), (heads, tokens)):
        raise options.SpecError(
            f"{name} has shape {tuple(inv_rms.shape)}: for packed sequences pass ({tokens},), or "
            f"({heads}, {tokens}) for one of each head"
        )
    return inv_rms.unsqueeze(0)


#: Gives a function of (q, k, v, ...) on torch tensors the keywords of a front end.
has_front_end = with_front_end(behind_front, gated, not_kept=not_kept)
#: The same for `attention`, which is called past the dispatcher where that serves.
has_direct_front_end = with_front_end(behind_front, gated, direct.attention, not_kept)
