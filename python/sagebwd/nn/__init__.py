"""Modules for SLA2 (arXiv 2602.12675): attention of which some blocks are exact, the rest linear.

attention = sagebwd.nn.SparseLinearAttention(64, heads=12, seq_len=32760, density=0.05).cuda()
attention.calibrate_alpha(q, k, v)            # stage 1, on tensors of the dense model:
attention.stage_one_loss(q, k, v).backward()  # ... a step that trains the router and alpha
attention.freeze_router()                     # stage 2: train the model with
out = attention(q, k, v)
"""

from sagebwd.core.compat import need

need("torch", "sagebwd.nn")

from sagebwd.nn.block_router import BlockRouter  # noqa: E402
from sagebwd.nn.sparse_linear import SparseLinearAttention  # noqa: E402

__all__ = ["BlockRouter", "SparseLinearAttention"]
