"""`sagebwd.qk_clip_`: attention logits stay below a bound, by the weights that form them."""

import itertools
import numbers

import torch

from sagebwd.core import options

_TAKES = "a torch.nn.Linear, or a weight of (rows, features)"


@torch.no_grad()
def qk_clip_(
    q_proj, k_proj, max_logits, tau, *, alpha=0.5, q_bias=None, k_bias=None, check=False
):  # fmt: skip
    """Scales the projections of queries and keys in place, so that no logit is above tau,
    except by the roundings of max_logits and of the weights, about 1 %.

    This is QK-clip (MuonClip, Kimi K2, arXiv 2507.20534, section 2.1). gamma = min(1, tau /
    max_logits) of each query head. With a key head of its own, a head's rows of the query
    projection are multiplied by gamma^alpha and those of the key projection by gamma^(1 - alpha),
    so that on the same inputs its largest logit is tau. Heads at or below tau stay as they are.

    Query heads that share a key head (GQA): the keys take gamma^(1 - alpha) of the smallest gamma
    of the group, which is that of its largest logit. The queries of each head take the rest, gamma
    divided by that factor. So every head's largest logit becomes min(max_logits, tau). For a head
    that needs no clipping this is more than 1: its logits do not change.

    Args:
        q_proj, k_proj: torch.nn.Linear modules, whose biases are scaled too, or weights of (rows,
            features), such as slices of a fused projection, of any floating type. The rows of
            query head h are h head_dim to (h + 1) head_dim - 1, those of its keys begin at
            head_dim (h // (heads // heads_kv)).
        max_logits: floats of (heads,), as `attention(..., return_max_logits=True)` gives them, of
            these weights: call this behind the optimizer's step. For several calls pass
            torch.maximum of theirs, and for data-parallel ranks the maximum over these.
        tau: the bound, a positive number; Kimi K2 has 100.
        alpha: the queries' part of the clipping, from 0 to 1.
        q_bias, k_bias: with weights, the biases of (rows,), or None.
        check: also raise for max_logits that are NaN or +inf. That waits for the device. Without it
            the host does not wait, and such heads are not clipped.

    Returns:
        gamma, float32 of (heads,): 1 where nothing was clipped.

    Logits have to be linear in the projections. Models with QK-norm, whose norm takes the factors
    out again, cannot be clipped so, nor can logits behind a score function: `attention` must have
    given max_logits without score.

    Raises SpecError for sizes that do not fit together, a tau or alpha that is none and tensors on
    other devices, and TypeError for what is no projection.
    """
    _check_numbers(tau, alpha)
    if not isinstance(max_logits, torch.Tensor):
        raise TypeError(f"max_logits is {options.a_kind(max_logits)}; pass the float tensor of "
                        "(heads,) that attention(..., return_max_logits=True) gives")  # fmt: skip
    if max_logits.dim() != 1 or not max_logits.numel() or not max_logits.is_floating_point():
        raise options.SpecError(f"max_logits is {max_logits.dtype} of {tuple(max_logits.shape)}: "
                                "pass floats of (heads,)")  # fmt: skip
    of_q = _tensors_of("q", q_proj, q_bias, max_logits.device)
    of_k = _tensors_of("k", k_proj, k_bias, max_logits.device)
    heads, heads_kv = _heads_of(max_logits.shape[0], of_q[0].shape[0], of_k[0].shape[0])
    _check_apart(of_q, of_k)
    largest = max_logits.detach().float()
    if check and not bool((largest < torch.inf).all()):
        place = int((~(largest < torch.inf)).nonzero()[0])
        raise options.SpecError(
            f"max_logits[{place}] is {largest[place].item()}: a score of that head is not finite; "
            "look for NaN and infinities in q and k. No weight was changed"
        )
    clips = (largest > tau) & (largest < torch.inf)
    gamma = torch.where(clips, tau / torch.where(clips, largest, 1.0), 1.0)
    of_keys = gamma.view(heads_kv, -1).amin(1).pow(1 - alpha)
    of_queries = gamma / of_keys.repeat_interleave(heads // heads_kv)
    for tensors, factors in ((of_q, of_queries), (of_k, of_keys)):
        for t in tensors:
            each = factors.view(-1, *[1] * t.dim())
            parts = t.unflatten(0, (factors.shape[0], -1))
            t.copy_((parts * each).view(t.shape))
    return gamma


def _check_numbers(tau, alpha):
    real = isinstance(tau, numbers.Real) and not isinstance(tau, bool)
    if not real or not 2.0**-126 <= tau <= 2.0**127:  # FP32 has it and its reciprocal
        raise options.SpecError(f"tau={tau!r}: pass a positive number, such as 100")
    real = isinstance(alpha, numbers.Real) and not isinstance(alpha, bool)
    if not real or not 0 <= alpha <= 1:
        raise options.SpecError(f"alpha={alpha!r}: pass a number from 0 to 1; 0.5 clips queries "
                                "and keys alike")  # fmt: skip


def _tensors_of(side, projection, bias, device):
    """The weight of a projection, and its bias if it has one."""
    if isinstance(projection, torch.nn.Linear):
        if bias is not None:
            raise options.SpecError(f"{side}_bias is given with a module, whose own bias is "
                                    "scaled: leave it out, or pass the weight")  # fmt: skip
        weight, bias = projection.weight, projection.bias
        if not isinstance(weight, torch.nn.Parameter):
            raise options.SpecError(
                f"the weight of {side}_proj is no parameter: it is made of others, as by "
                "weight_norm, spectral_norm or another parametrization, which undoes a clip. Pass "
                "a tensor that the optimizer holds and logits are linear in"
            )
    elif isinstance(projection, torch.Tensor):
        weight = projection
    else:
        raise TypeError(f"{side}_proj is {options.a_kind(projection)}; pass {_TAKES}")
    found = [weight] if bias is None else [weight, bias]
    for name, t, dims in zip((f"{side}_proj", f"{side}_bias"), found, (2, 1)):
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name} is {options.a_kind(t)}; pass a torch tensor, or None")
        if type(t).__module__.startswith("torch.distributed."):
            raise options.SpecError(
                f"{name} is a DTensor: a rank has a part of it, and the rows of heads are those of "
                "all. Pass to_local() of projections whose ranks have whole heads, with their part "
                "of max_logits"
            )
        if t.dim() != dims or not t.is_floating_point():
            raise options.SpecError(f"{name} is {t.dtype} of {tuple(t.shape)}: pass {_TAKES}, and "
                                    "biases of (rows,), of a floating type")  # fmt: skip
        if t.element_size() == 1 or any(size > 1 and not stride
                                        for size, stride in zip(t.shape, t.stride())):
            raise options.SpecError(f"{name} is {t.dtype} with strides {t.stride()}: pass elements "
                                    "of 16 bits or more, each with memory of its own")  # fmt: skip
        if t.shape[0] != weight.shape[0]:
            raise options.SpecError(f"{name} has {t.shape[0]} rows and the weight "
                                    f"{weight.shape[0]}: pass the bias of that weight")  # fmt: skip
        if t.device != device:
            raise options.SpecError(f"{name} is on {t.device} and max_logits on {device}: move "
                                    "max_logits")  # fmt: skip
    return found


def _check_apart(of_q, of_k):
    """SpecError where a tensor would be scaled twice."""
    def ends(t):
        last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride()))
        return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()

    for (first, end), (first_k, end_k) in itertools.product(map(ends, of_q), map(ends, of_k)):
        if first < end_k and first_k < end and first:  # meta tensors have no memory
            raise options.SpecError(
                "q_proj and k_proj share memory: pass the rows of each, such as qkv.weight[:n] and "
                "qkv.weight[n : n + n_kv]"
            )


def _heads_of(heads, rows_q, rows_k):
    """How many heads of queries and of keys projections of so many rows have."""
    head_dim = rows_q // heads
    if not head_dim or rows_q % heads:
        raise options.SpecError(f"max_logits has {heads} heads, and q_proj {rows_q} rows: pass one "
                                "number for each head of queries")  # fmt: skip
    heads_kv = rows_k // head_dim
    if not heads_kv or rows_k % head_dim or heads % heads_kv:
        raise options.SpecError(
            f"k_proj has {rows_k} rows, and {heads} heads of {head_dim} rows share key heads of as "
            f"many: pass a projection of {head_dim} rows for each of 1 to {heads} key heads, a "
            "divisor of the heads"
        )
    return heads, heads_kv
