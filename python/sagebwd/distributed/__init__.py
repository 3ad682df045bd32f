"""Attention over sequences that several GPUs share, on torch.distributed (context parallelism).

    mesh = init_device_mesh("cuda", (ranks,))
    q, k, v = (distributed.shard(x, mesh, dim=2) for x in (q, k, v))     # this rank's tokens
    out = distributed.attention(q, k, v, mesh=mesh, causal=True)         # their output

All else in a model works on this rank's tokens; positions come from `shard(torch.arange(n), ...)`.
"""

from sagebwd.core.compat import need

if not need("torch", "sagebwd.distributed").distributed.is_available():
    raise ImportError("sagebwd.distributed needs a PyTorch that was built with torch.distributed")

from sagebwd.distributed.functional import attention
from sagebwd.distributed.sharding import shard, unshard

__all__ = ["attention", "shard", "unshard"]
