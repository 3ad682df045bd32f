"""Masks and functions of the score: what is seen, told in numbers per key or as an expression.

    mask = masks.documents(cu_seqlens)                       # intervals of hidden queries per key
    mask = masks.shared_prefix(prompt, [answer, answer])     # ... and trees, spans, windows
    mask = masks.from_bool(dense)                            # ... of any mask that they can say
    masks.trace_mask(lambda b, h, q, k: q - k < 512).text    # an expression: "q - k < 512"
    masks.trace_score(lambda s, b, h, q, k: 20 * masks.tanh(s / 20))
    masks.from_flex(mask_mod)                                # ... of a function for flex_attention
    masks.show(mask)                                         # draws it
    sagebwd.attention(q, k, v, **mask.arguments)             # attends with intervals
    sagebwd.attention(q, k, v, mask=expression)              # ... with the expression of a mask
    masks.block_mask(expression, batch, heads, queries, keys)    # ... whose blocks are found once

`sagebwd.attention` takes `Intervals` and the tensors of an expression on the GPU that q is on: pass
device= or call `to`.
"""

from sagebwd.core.compat import need

need("torch", "sagebwd.masks")

from sagebwd.masks.block_mask import BlockMask, block_mask  # noqa: E402
from sagebwd.masks.evaluation import dense  # noqa: E402
from sagebwd.masks.flex import from_flex  # noqa: E402
from sagebwd.masks.from_dense import from_bool  # noqa: E402
from sagebwd.masks.intervals import Intervals  # noqa: E402
from sagebwd.masks.making import (  # noqa: E402
    documents,
    padding,
    prefix_lm,
    shared_prefix,
    spans,
    window_and_global,
)
from sagebwd.masks.showing import show  # noqa: E402
from sagebwd.masks.symbols import (  # noqa: E402
    absolute,
    exp,
    float_,
    log,
    maximum,
    minimum,
    operand,
    pow,
    sigmoid,
    sqrt,
    tanh,
    where,
)
from sagebwd.masks.tracing import Expression, trace_mask, trace_score  # noqa: E402
from sagebwd.masks.trees import tree  # noqa: E402

__all__ = [
    "BlockMask", "Expression", "Intervals", "absolute", "block_mask", "dense", "documents", "exp",
    "float_", "from_bool", "from_flex", "log", "maximum", "minimum", "operand", "padding", "pow",
    "prefix_lm", "shared_prefix", "show", "sigmoid", "spans", "sqrt", "tanh", "trace_mask",
    "trace_score", "tree", "where", "window_and_global",
]  # fmt: skip
