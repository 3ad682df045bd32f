"""Sizes beyond 16 and 31 bits, and many calls: an H200's memory holds the largest."""

import random
import resource
import time

import pytest
from inputs import equal, leaves, relative, torch
from packed_inputs import packed

import sagebwd
from sagebwd.numerics.exact import exact_attention

ERROR_LIMIT = 0.03  # of INT8 itself, on unit normal inputs


def normal(*shape):
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def needs(gigabytes):
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] >> 30
    if free < gigabytes:
        pytest.skip(f"needs {gigabytes} GiB of GPU memory, {free} are free")


def all_of(inputs, dout, dlse=None, **options):
    out, lse = sagebwd.attention_forward(*inputs, **options)
    gradients = sagebwd.attention_backward(dout, *inputs, out, lse, dlse=dlse, **options)
    return out, lse, *gradients


def test_more_sequences_than_a_grid_has():
    batch = 140_000  # three launches
    inputs = normal(batch, 4, 5, 64), normal(batch, 2, 7, 64), normal(batch, 2, 7, 64)
    dout, dlse = normal(batch, 4, 5, 64), torch.randn(batch, 4, 5, device="cuda")
    found = all_of(inputs, dout, dlse)
    for first in (0, 65_530, 131_065, batch - 8):
        part = slice(first, first + 8)
        alone = all_of([t[part] for t in inputs], dout[part], dlse[part])
        assert equal([t[part] for t in found], alone)


def test_more_sequences_with_lists_than_a_grid_has():
    """The lists of each launch are put in order alone."""
    needs(100)
    batch = 140_000  # three launches
    q, k, v, dout = (normal(batch, heads, 70, 64) for heads in (2, 1, 1, 2))
    lists = torch.rand(batch, 2, 2, 2, device="cuda") < 0.1
    lists[3::7] = True  # which come first

    def both(part):
        given = dict(block_mask=lists[part], block_size=(64, 64))
        inputs = q[part], k[part], v[part]
        out, lse = sagebwd.block_sparse_attention_forward(*inputs, **given)
        return out, lse, *sagebwd.block_sparse_attention_backward(dout[part], *inputs, out, lse,
                                                                  **given)  # fmt: skip

    found = both(slice(None))
    for first in (0, 65_530, 131_065, batch - 8):
        part = slice(first, first + 8)
        assert equal([t[part] for t in found], both(part))


def test_more_packed_sequences_than_a_grid_has():
    """Their places are numbered in the grid's x, which has room for 2^31."""
    needs(24)
    lengths = [i * 7919 % 6 for i in range(70_000)]  # 0 to 5 tokens
    inputs, dout, where = packed(lengths, lengths, device="cuda")
    firsts = where["cu_seqlens_q"].tolist()
    given = dict.fromkeys(where, where["cu_seqlens_q"])
    found = [*sagebwd.attention(*inputs, causal=True, return_lse=True, **given)]
    found += torch.autograd.grad(found[0], inputs, dout)
    assert all(t.isfinite().all() for t in found)
    sample = [*range(12), *range(65_530, 65_542), *range(69_988, 70_000)]
    for i in (i for i in sample if lengths[i]):
        part = slice(firsts[i], firsts[i + 1])
        one = [t[part].transpose(0, 1)[None] for t in (*inputs, dout)]
        alone = all_of(one[:3], one[3], causal="top-left")
        exact = exact_attention(*one, causal="top-left")
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), found, alone):
            mine = x[:, part] if name == "lse" else x[part].transpose(0, 1)
            assert torch.equal(mine[None], y), (i, name)
            reference = getattr(exact, name).detach().double()
            # A query that sees one key has no gradient: nothing to be relative to.
            size = max(float(reference.norm()), 0.1 * reference.numel() ** 0.5)
            assert float((y.detach().double() - reference).norm()) < 0.1 * size, (i, name)


def test_more_elements_than_31_bits_over_heads():
    needs(60)
    q, k, v, dout = (normal(2100, heads, 500, 64) for heads in (33, 3, 3, 33))
    assert q.numel() > 1 << 31
    found = all_of((q, k, v), dout, causal="top-left")
    for first in (0, 1024, 2096):
        part = slice(first, first + 4)
        alone = all_of((q[part], k[part], v[part]), dout[part], causal="top-left")
        assert equal([t[part] for t in found], alone)


def test_more_elements_than_31_bits_in_a_sequence():
    needs(100)
    tokens, tail, compared = (1 << 25) + 1000, 4000, 1500
    q, k, v, dout = (normal(1, 1, tokens, 64) for _ in range(4))
    mask = {"causal": "top-left", "window_left": 100}
    found = all_of((q, k, v), dout, **mask)
    end = [t[:, :, -tail:] for t in (q, k, v, dout)]
    expected = exact_attention(*end, **mask)
    for name, x in zip(("out", "lse", "dq", "dk", "dv"), found):
        last = getattr(expected, name)[:, :, -compared:]
        assert relative(x[:, :, -compared:], last) < ERROR_LIMIT, name


def settled():
    """Bytes of GPU memory in use, once they do not fall any more: PyTorch's thread lets go of the
    last backward's tensors some time after the caller has their gradients."""
    torch.cuda.synchronize()
    bytes_ = torch.cuda.memory_allocated()
    for _ in range(20):
        time.sleep(0.01)
        bytes_ = min(bytes_, torch.cuda.memory_allocated())
    return bytes_


def test_twenty_thousand_mixed_calls_leave_nothing_behind():
    rng = random.Random(0)
    specs = [{}, {"causal": "top-left"}, {"causal": "top-left", "window_left": 50},
             {"precision": "gradients16"}, {"granularity": "block"}]  # fmt: skip
    kept = [(leaves(m, n, d=d), spec) for m in (1, 100, 257) for n in (33, 128)
            for d in (64, 96) for spec in specs]  # fmt: skip
    first = {}
    held = []
    for call in range(20_000):
        index = rng.randrange(len(kept))
        (inputs, dout), spec = kept[index]
        out, lse = sagebwd.attention(*inputs, return_lse=True, **spec)
        results = [out, lse, *torch.autograd.grad(out, inputs, dout)]
        if index not in first:
            first[index] = [t.detach().clone() for t in results]
        elif call % 50 == 0:
            assert equal(results, first[index])
        if call % 2000 == 1999:
            del out, lse, results
            held.append((settled(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
    assert len(first) == len(kept)
    assert held[-1][0] <= held[1][0] and held[-1][1] - held[1][1] < 32 << 10  # KiB
