"""SLA2 (arXiv 2602.12675) in FP64 on NumPy arrays, with every gradient.

Blocks are expanded to tokens here, and each branch forms its matrix of (queries, keys): the linear
branch weighs key m for query n by phi(q_n) phi(k_m). So this shares no formula with the sums over
blocks in linear.py, and takes memory for several such matrices.
"""

from sagebwd.core import options
from sagebwd.lists import blocks


def sparse_linear(
    q, k, v, dout=None, *, alpha, beta=None, block_mask=None, query_map=None, key_map=None,
    density=None, temperature=None, score="logits", block_size=(128, 64), linear="complement",
    smooth_k=True, softmax_scale=None,
):  # fmt: skip
    """SLA2's attention in FP64, and all its gradients if `dout` is given (arXiv 2602.12675, Eq. 11
    to 17 and Algorithms 2 and 3, without quantisation).

    out = alpha out_sparse + (1 - alpha) out_linear. out_sparse is softmax attention to the keys of
    listed blocks, out_linear is linear attention, with phi = softmax over channels, to the others.
    Which blocks are listed comes from `block_mask`, or from the router: pass `density`.

    Args:
        q, dout: (batch, heads, queries, head_dim).
        k, v: (batch, heads_kv, keys, head_dim), where heads is a multiple of heads_kv.
        alpha: a number; or an array of (heads,), of (heads, query blocks), or of (batch or 1, heads
            or 1, queries); or 'estimated', which is sigmoid(lse - rest - beta) for each query. rest
            is the logarithm of what the keys of unlisted blocks would weigh if all keys of a block
            were their mean.
        beta: (heads,), with alpha='estimated' only; None means 0.
        block_mask: (batch or 1, heads or heads_kv or 1, query blocks, key blocks), with values from
            0 to 1. A value m between counts m times in the softmax, and 1 - m times in the linear
            branch.
        query_map, key_map: (head_dim, head_dim) or (heads, head_dim, head_dim), of the router; None
            means the identity.
        density: the share of the key blocks that the router lists for a block of queries.
        temperature: None lists the best blocks. A number lists sigmoid(score / temperature +
            lambda), where lambda makes a row sum to as many blocks.
        score: 'logits', or 'softmax' of these (Algorithm 2, line 8).
        block_size: queries and keys of a block.
        linear: which keys the linear branch sees: the 'complement' of the listed, or 'all'.
        smooth_k: subtract the mean of the keys first.
        softmax_scale: None means 1/sqrt(head_dim).

    Returns a dict of float64 arrays: out, out_sparse, out_linear, lse and lse_full (of listed and
    of all keys, without smoothing), alpha and exact_alpha of (batch, heads, queries), where
    exact_alpha is the weight of the listed keys in full attention; block_mask and scores (or None);
    and dq, dk, dv, dalpha (like alpha), dbeta, dblock_mask, dquery_map, dkey_map, or None for what
    was not asked for. If no block is listed, out is out_linear, and if all are, it is out_sparse;
    alpha has no gradient there. Through a router without temperature nothing flows.

    Raises SpecError and TypeError.
    """
    import numpy as np  # here, so that importing the package does not import it

    from sagebwd.sla.reference_passes import Problem

    sizes = blocks.check_block_size(block_size, any_size=True)
    blocks.one_of("linear", linear, blocks.LINEAR)
    blocks.one_of("score", score, blocks.SCORES)
    if (block_mask is None) == (density is None):
        raise options.SpecError(
            "pass block_mask, or density, from which the router lists blocks: one of the two"
        )
    if density is None and any(x is not None for x in (query_map, key_map, temperature)):
        raise options.SpecError("query_map, key_map and temperature belong to the router, and "
                                "block_mask takes its place: pass density instead")  # fmt: skip
    if temperature is not None:
        blocks.check_temperature(temperature)
    if beta is not None and not isinstance(alpha, str):
        raise options.SpecError("beta is given and alpha is not 'estimated': leave it out")
    blocks.check_alpha_number(alpha)
    given = Problem(*(np.asarray(x, np.float64) for x in (q, k, v)), sizes, softmax_scale, smooth_k)
    blocks.refuse_flex_mask("block_mask", block_mask)
    if density is None:
        given.take_mask(block_mask)
    else:
        given.route(query_map, key_map, density, temperature, score)
    given.attend(linear == "all")
    given.mix(alpha, beta)
    if dout is not None:
        given.backward(np.asarray(dout, np.float64))
    return given.results()
