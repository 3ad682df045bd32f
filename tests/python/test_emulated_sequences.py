"""The PyTorch emulation of packed sequences and padded batches."""

from itertools import pairwise

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from packed_inputs import LENGTHS_Q, packed  # noqa: E402

from sagebwd.numerics import emulation  # noqa: E402


@pytest.mark.parametrize("causal", [False, True, "bottom-right"])
def test_packed_sequences_are_each_computed_alone(causal):
    (q, k, v), dout, where = packed()
    if causal is True:  # as many queries as keys
        (q, k, v), dout, where = packed(lengths_k=LENGTHS_Q)
        where["cu_seqlens_k"] = where["cu_seqlens_q"]
    out, lse = emulation.emulated_attention(q, k, v, causal=causal, return_lse=True, **where)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    spans = [t.tolist() for t in where.values()]
    for (m, m_end), (n, n_end) in zip(*map(pairwise, spans)):
        if m == m_end or n == n_end:
            assert not out[m:m_end].any() and (lse[:, m:m_end] == -torch.inf).all()
            continue
        one = [t[None, a:b].detach().requires_grad_()
               for t, a, b in ((q, m, m_end), (k, n, n_end), (v, n, n_end))]  # fmt: skip
        alone, its_lse = emulation.emulated_attention(*one, causal=causal, layout="bshd",
                                                      return_lse=True)  # fmt: skip
        assert torch.equal(out[m:m_end], alone[0]) and torch.equal(lse[:, m:m_end], its_lse[0])
        expected = torch.autograd.grad(alone, one, dout[None, m:m_end])
        for got, own, a, b in zip(gradients, expected, (m, n, n), (m_end, n_end, n_end)):
            assert torch.equal(got[a:b], own[0])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_padded_batches_use_so_many_tokens(layout):
    q, k, v = (torch.randn(2, heads, 40, 64).bfloat16() for heads in (4, 2, 2))
    used = torch.tensor([40, 17], dtype=torch.int32)
    given = [t.transpose(1, 2) for t in (q, k, v)] if layout == "bshd" else (q, k, v)
    out, lse = emulation.emulated_attention(*given, layout=layout, causal="bottom-right",
                                            seqused_k=used, return_lse=True)  # fmt: skip
    out = out.transpose(1, 2) if layout == "bshd" else out
    for i, n in enumerate(used.tolist()):
        alone = emulation.emulated_attention(q[i:i + 1], k[i:i + 1, :, :n], v[i:i + 1, :, :n],
                                             causal="bottom-right", return_lse=True)  # fmt: skip
        assert torch.equal(out[i], alone[0][0]) and torch.equal(lse[i], alone[1][0])


def test_packing_that_says_it_wrongly():
    (q, k, v), _, where = packed()
    for change, message in (
        ({"cu_seqlens_k": None}, "pass cu_seqlens_q and cu_seqlens_k, or neither"),
        ({"causal": True}, "causal=True is ambiguous"),
        ({"cu_seqlens_q": where["cu_seqlens_q"].long()}, "must be contiguous torch.int32"),
    ):
        with pytest.raises(sagebwd.SpecError, match=message):
            emulation.emulated_attention(q, k, v, **{**where, **change})
