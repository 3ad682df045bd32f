"""How long a ring of `sagebwd.distributed` over NCCL waits for its messages."""

import time

from inputs import torch
from on_gpus import drawn_here, needs_gpus, ranks_of, run

from sagebwd import distributed

pytestmark = needs_gpus


def exposed(rank, tokens):
    """Seconds of forward and backward of a ring, with its messages and without them."""
    from sagebwd.distributed import ring

    mesh = ranks_of.mesh_of("ring", 2)
    leaves, dout = drawn_here(tokens // 2)

    def step():
        out = distributed.attention(*leaves, mesh=mesh, causal=True)
        torch.autograd.grad(out, leaves, dout)

    messages = ring.dist.batch_isend_irecv

    def seconds(send):
        ring.dist.batch_isend_irecv = messages if send else lambda ops: []
        torch.distributed.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    samples = [(seconds(True), seconds(False)) for _ in range(8)][2:]
    ring.dist.batch_isend_irecv = messages
    return [sorted(of)[len(of) // 2] for of in zip(*samples)]


def test_a_ring_computes_while_messages_travel(tmp_path):
    for rank, (whole, without) in enumerate(run(tmp_path, 2, exposed, 1 << 16)):
        print(f"rank {rank}: {whole * 1e3:.2f} ms, without messages {without * 1e3:.2f} ms")
        assert whole < 1.15 * without
