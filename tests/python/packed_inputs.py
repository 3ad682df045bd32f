"""Packed sequences of lengths around the edges, and each of them alone."""

import torch

import sagebwd

LENGTHS_Q, LENGTHS_K = (20, 0, 7, 16, 1), (24, 5, 0, 16, 9)


def firsts(lengths, device="cpu"):
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def packed(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K, seed=0, device="cpu", head_dim=64):
    """(q, k, v), which take gradients, dout, and where sequences begin, as keywords."""
    generator = torch.Generator(device).manual_seed(seed)

    def randn(heads, tokens):
        x = torch.randn(tokens, heads, head_dim, generator=generator, device=device)
        return x.bfloat16().requires_grad_()

    inputs = randn(4, sum(lengths_q)), randn(2, sum(lengths_k)), randn(2, sum(lengths_k))
    where = {"cu_seqlens_q": firsts(lengths_q, device),
             "cu_seqlens_k": firsts(lengths_k, device)}  # fmt: skip
    return inputs, randn(4, sum(lengths_q)).detach(), where


def alone(inputs, dout, spans, **chosen):
    """out, lse and gradients of each sequence by itself, put back where it lies."""
    results = [torch.zeros_like(inputs[0]), inputs[0].new_full((4, len(inputs[0])), -torch.inf,
               dtype=torch.float32), *map(torch.zeros_like, inputs)]  # fmt: skip
    for (first_q, m), (first_k, n) in spans:
        if m == 0 or n == 0:
            continue
        queries, keys = slice(first_q, first_q + m), slice(first_k, first_k + n)
        q, k, v = (t[span].transpose(0, 1)[None].detach().requires_grad_()
                   for t, span in zip(inputs, (queries, keys, keys)))  # fmt: skip
        out, lse = sagebwd.attention(q, k, v, return_lse=True, **chosen)
        gradients = torch.autograd.grad(out, (q, k, v), dout[queries].transpose(0, 1)[None])
        results[1][:, queries] = lse[0].detach()
        for to, part, span in zip(
            (results[0], *results[2:]), (out, *gradients), (queries, queries, keys, keys)
        ):
            to[span] = part[0].detach().transpose(0, 1)
    return [t.detach() for t in results]


def spans_of(lengths_q=LENGTHS_Q, lengths_k=LENGTHS_K):
    return list(zip(zip(firsts(lengths_q).tolist(), lengths_q),
                    zip(firsts(lengths_k).tolist(), lengths_k)))  # fmt: skip


def assert_equal(got, expected):
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, expected):
        assert torch.equal(a, b), name
