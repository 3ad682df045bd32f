"""SLA2 on one attention layer: stage 1 trains which blocks are exact, stage 2 uses them.

    python examples/sparse_linear.py

Queries and keys are made so that the mean of a block of keys, which the pooled router compares,
says little of the few keys in it that matter. The program trains the learned router for a few
seconds and prints, for both on tokens that were not trained on, how much of full attention's weight
lies on the listed blocks, and how far the output is from full attention's. Then it computes
attention and its gradients. With a GPU that is with INT8 kernels, without one by PyTorch. Needs
PyTorch.
"""

import argparse

import torch

from sagebwd.nn import SparseLinearAttention

HEADS, HEAD_DIM, BLOCK = 2, 64, 64


def tokens(seed, blocks, device, dtype):
    """(q, k, v): in half of the channels a few keys of a block answer to a topic, and weigh much.
    In the others all keys of a block are alike, and weigh little."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(HEADS, *shape, generator=generator)

    def topics():
        order = torch.stack([torch.randperm(blocks, generator=generator) for _ in range(HEADS)])
        return torch.nn.functional.one_hot(order % 16, HEAD_DIM // 2)[:, :, None].float()

    def alike():
        return 1.4 * randn(blocks, 1, HEAD_DIM // 2).expand(-1, -1, BLOCK, -1)

    few = torch.zeros(BLOCK, 1)
    few[::8] = 1
    q = torch.cat([8 * topics().expand(-1, -1, BLOCK, -1), alike()], -1)
    k = torch.cat([8 * few * topics(), alike()], -1)
    return [x.flatten(1, 2)[None].to(device, dtype)
            for x in (q, k, randn(blocks, BLOCK, HEAD_DIM))]  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=32, help=f"of {BLOCK} tokens")
    parser.add_argument("--density", type=float, default=0.13)
    parser.add_argument("--steps", type=int, default=100, help="of stage 1")
    options = parser.parse_args()
    if options.blocks < 1 or options.steps < 1 or not 0 < options.density <= 1:
        parser.error("pass at least one of --blocks and --steps, and a --density above 0, at most 1")
    gpu = torch.cuda.is_available()
    where = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)

    def layer(router):
        made = SparseLinearAttention(
            HEAD_DIM, HEADS, density=options.density, block_size=(BLOCK, BLOCK), alpha="head",
            router=router, precision="six-of-seven" if gpu else "exact",
        )  # fmt: skip
        made.to(where[0]).calibrate_alpha(*tokens(0, options.blocks, *where))
        return made

    pooled, learned = layer("pooled"), layer("learned")
    optimizer = torch.optim.AdamW(learned.parameters(), lr=0.01, weight_decay=0)
    slower = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, options.steps)
    for step in range(options.steps):
        loss = learned.stage_one_loss(*tokens(step, options.blocks, *where))
        loss.backward()
        optimizer.step()
        slower.step()
        optimizer.zero_grad()
    learned.freeze_router()
    for name, made in (("pooled", pooled), ("learned", learned)):
        found = made.report(*tokens(99, options.blocks, *where))
        print(f"{name:8} weight of the listed blocks {found['mass']:.2f} (at best "
              f"{found['best_mass']:.2f}), error {found['error']:.3f}")  # fmt: skip
    q, k, v = (t.requires_grad_() for t in tokens(99, options.blocks, *where))
    learned(q, k, v).square().mean().backward()
    print(f"norms of dQ, dK and dV: {q.grad.norm():.2e} {k.grad.norm():.2e} {v.grad.norm():.2e}")


if __name__ == "__main__":
    main()
