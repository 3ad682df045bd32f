"""Attention over lists of blocks: what the front end checks, packs and emulates, without a GPU."""

import inspect

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sagebwd.core import options  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402

M, N = 300, 500


def tensors(device="cpu", heads=4, heads_kv=2, m=M, n=N, **more):
    torch.manual_seed(0)
    return [torch.randn(2, h, s, 64, dtype=torch.bfloat16, device=device, **more)
            for h, s in ((heads, m), (heads_kv, n), (heads_kv, n))]  # fmt: skip


def mask_of(*shape, density=0.4):
    torch.manual_seed(1)
    return torch.rand(shape) < density


def indices_of(mask):
    """Numbers of the listed blocks in another order, some twice, and how many count."""
    width = 2 * mask.shape[-1] + 3
    indices = torch.full((*mask.shape[:-1], width), -5, dtype=torch.int32)
    counts = torch.zeros(mask.shape[:-1], dtype=torch.int32)
    for place in torch.cartesian_prod(*map(torch.arange, mask.shape[:-1])).tolist():
        listed = mask[tuple(place)].nonzero().flatten().flip(0)
        listed = torch.cat([listed, listed[::2]]).int()
        indices[tuple(place)][: len(listed)], counts[tuple(place)] = listed, len(listed)
    return indices, counts


def words_by_hand(mask):
    words = torch.zeros((*mask.shape[:-1], mask.shape[-1] // 32 + 1), dtype=torch.int64)
    for place in mask.nonzero().tolist():
        words[(*place[:-1], place[-1] // 32)] += 1 << place[-1] % 32
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@pytest.mark.parametrize("blocks", [1, 31, 32, 70])
def test_masks_and_indices_become_the_same_bits(blocks):
    mask = mask_of(2, 3, 4, blocks)
    bits = sagebwd.pack_blocks(mask)
    assert bits.dtype == torch.int32
    assert torch.equal(bits, words_by_hand(mask))
    assert torch.equal(sagebwd.pack_blocks(mask.byte() * 7), bits)
    indices, counts = indices_of(mask)
    given = dict(block_indices=indices, block_counts=counts, keys=blocks * 64)
    assert torch.equal(sagebwd.pack_blocks(**given), bits)
    sagebwd.check_block_indices(indices, counts, keys=blocks * 64)
    every = torch.arange(blocks, dtype=torch.int32).expand(1, 1, 2, blocks)
    full = sagebwd.pack_blocks(torch.ones(1, 1, 2, blocks, dtype=torch.bool))
    assert torch.equal(sagebwd.pack_blocks(block_indices=every, keys=blocks * 64), full)


def test_bits_of_another_block_size_are_refused():
    mask = mask_of(1, 1, 2, 2)
    q = torch.randn(1, 1, 256, 64).bfloat16()
    bits = sagebwd.pack_blocks(mask, block_size=(128, 128))
    call = sagebwd.emulation.emulated_block_sparse_attention
    for attend in (call, sagebwd.sparse_linear_attention):
        with pytest.raises(sagebwd.SpecError, match=r"\(128, 128\), and block_size is \(128, 64\)"):
            attend(q, q, q, block_bits=bits, **({} if attend is call else dict(alpha=0.5)))
    call(q, q, q, block_bits=bits, block_size=(128, 128))
    with pytest.raises(sagebwd.SpecError, match="packed for 2 key blocks, and 320 keys have 3"):
        k = torch.randn(1, 1, 320, 64).bfloat16()
        call(q, k, k, block_bits=bits, block_size=(128, 128))
    with pytest.raises(sagebwd.SpecError, match="block_mask has 2 key blocks, and keys=4000 have"):
        sagebwd.pack_blocks(mask, keys=4000)
    assert torch.equal(sagebwd.pack_blocks(mask, keys=256, block_size=(128, 128)), bits)


def test_wrong_indices_mark_their_list_and_are_found():
    indices, counts = indices_of(mask_of(1, 1, 5, 8))
    sound = sagebwd.pack_blocks(block_indices=indices, block_counts=counts, keys=N)
    indices[0, 0, 1, 0], counts[0, 0, 1] = 8, max(1, int(counts[0, 0, 1]))
    counts[0, 0, 3] = 99
    marked = sagebwd.pack_blocks(block_indices=indices, block_counts=counts, keys=N)
    assert (marked[0, 0, :, -1] < 0).tolist() == [False, True, False, True, False]
    assert torch.equal(marked[:, :, ::2], sound[:, :, ::2])
    with pytest.raises(sagebwd.SpecError, match=r"block_counts\[0, 0, 3\] is 99.*0 to 19"):
        sagebwd.check_block_indices(indices, counts, keys=N)
    counts[0, 0, 3] = 0
    with pytest.raises(sagebwd.SpecError, match=r"block_indices\[0, 0, 1, 0\] is 8.*8 blocks"):
        sagebwd.check_block_indices(indices, counts, keys=N)


@pytest.mark.parametrize("causal", ["none", "bottom-right"])
def test_the_emulation_is_near_attention_with_a_mask_of_tokens(causal):
    q, k, v = tensors(requires_grad=True)
    mask = mask_of(2, 4, 3, 8)
    mask[0, 0, 1] = False
    out, lse = emulation.emulated_block_sparse_attention(
        q, k, v, block_mask=mask, causal=causal, return_lse=True
    )
    seen = mask.repeat_interleave(128, 2)[:, :, :M].repeat_interleave(64, 3)[..., :N]
    if causal != "none":
        seen = seen & (torch.arange(N) <= torch.arange(M)[:, None] + N - M)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    repeated = [exact[0], *(t.repeat_interleave(2, 1) for t in exact[1:])]
    scores = (repeated[0] @ repeated[1].mT / 8).masked_fill(~seen, -torch.inf)
    expected = torch.softmax(scores, -1).nan_to_num(0) @ repeated[2]
    weights = torch.randn_like(expected)
    found = torch.autograd.grad(out, (q, k, v), weights.to(out.dtype))
    gradients = torch.autograd.grad(expected, exact, weights)
    for x, y, limit in zip((out, *found), (expected, *gradients), (0.02, 0.03, 0.03, 0.02)):
        assert (x.double() - y).norm() <= limit * y.norm()
    blind = ~seen.any(-1)
    assert blind.any()
    assert torch.equal(lse == -torch.inf, blind)
    assert not out[blind].any()


@pytest.mark.parametrize("causal", ["none", "bottom-right"])
def test_lists_and_all_other_blocks_merge_to_dense_attention(causal):
    """By lse, whose gradients pass through both. Keys have a mean, which each part takes off."""
    q, k, v = tensors()
    k = k + 2
    mask = mask_of(2, 4, 3, 8)
    mask[0, 0, 0], mask[0, 0, 1] = False, True  # one part of these has everything
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).bfloat16()

    def passes(attend):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = attend(*leaves)
        return out, *torch.autograd.grad(out, leaves, dout)

    def merged(*leaves):
        told = dict(causal=causal, return_lse=True)
        parts = [emulation.emulated_block_sparse_attention(*leaves, block_mask=m, **told)
                 for m in (mask, ~mask)]  # fmt: skip
        return sagebwd.merge(parts)[0]

    def dense(*leaves):
        return emulation.emulated_attention(*leaves, causal=causal, group_kv=64, sink_keys=0)

    exact = sagebwd.reference.exact(*(t.float() for t in (q, k, v, dout)), causal=causal)
    for name, x, y in zip(("out", "dq", "dk", "dv"), passes(merged), passes(dense)):
        expected = torch.from_numpy(exact[name])
        errors = [float((t.detach() - expected).norm() / expected.norm()) for t in (x, y)]
        assert errors[0] < 1.08 * errors[1], (name, errors)


def test_with_every_block_the_emulation_is_that_of_dense_attention():
    q, k, v = tensors()
    every = torch.ones(1, 1, 3, 8, dtype=torch.uint8)
    sparse = emulation.emulated_block_sparse_attention(q, k, v, block_mask=every, return_lse=True)
    dense = emulation.emulated_attention(q, k, v, group_kv=64, sink_keys=0, return_lse=True)
    assert all(map(torch.equal, sparse, dense))


def test_the_emulation_has_nan_for_wrong_lists_alone():
    q, k, v = tensors()
    indices = torch.zeros(1, 1, 3, 1, dtype=torch.int32)
    indices[0, 0, 1] = -1
    out, lse = emulation.emulated_block_sparse_attention(
        q, k, v, block_indices=indices, return_lse=True
    )
    wrong = torch.arange(M) // 128 == 1
    assert torch.equal(lse.isnan(), wrong.expand_as(lse))
    assert torch.equal(out.isnan(), wrong[:, None].expand_as(out))


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_without_data_shapes_are_those_of_attention(heads, layout):
    q, k, v = (t.detach().requires_grad_() for t in tensors("meta"))
    if layout == "bshd":
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    mask = torch.ones(1, heads, 3, 8, dtype=torch.bool, device="meta")
    out, lse = sagebwd.block_sparse_attention(
        q, k, v, block_mask=mask, layout=layout, return_lse=True
    )
    assert (out.shape, lse.shape) == (q.shape, (2, 4, M))
    gradients = torch.autograd.grad(out, (q, k, v), out)
    assert [g.shape for g in gradients] == [t.shape for t in (q, k, v)]
    told = dict(block_mask=mask, layout=layout)
    out, lse = sagebwd.block_sparse_attention_forward(q, k, v, **told)
    gradients = sagebwd.block_sparse_attention_backward(out, q, k, v, out, lse, **told)
    assert [g.shape for g in gradients] == [t.shape for t in (q, k, v)]


def test_it_compiles_in_one_graph_and_is_not_differentiated_twice():
    q, k, v = (t.detach().requires_grad_() for t in tensors("meta"))
    mask = torch.ones(1, 1, 3, 8, dtype=torch.bool, device="meta")

    def call(q, k, v):
        return sagebwd.block_sparse_attention(q, k, v, block_mask=mask, causal="top-left")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    assert compiled(q, k, v).shape == q.shape
    (grad,) = torch.autograd.grad(call(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="twice"):
        grad.sum().backward()


GOOD = dict(block_mask=torch.ones(1, 1, 3, 8, dtype=torch.bool))
INDICES = torch.zeros(1, 1, 3, 2, dtype=torch.int32)


@pytest.mark.parametrize("given, error, match", [
    ({}, sagebwd.SpecError, "no lists of blocks given: pass one of block_mask"),
    (GOOD | dict(block_indices=INDICES), sagebwd.SpecError, "block_mask and block_indices given"),
    (GOOD | dict(block_counts=INDICES[..., 0]), sagebwd.SpecError, "belongs to block_indices"),
    (GOOD | dict(block_size=(64, 32)), sagebwd.SpecError, r"\(64, 32\).*64 and 128"),
    (GOOD | dict(block_size=128), TypeError, r"two numbers"),
    (GOOD | dict(block_size=(64, 64), granularity="block"), sagebwd.SpecError, "need.*5, 8"),
    (dict(block_mask=torch.ones(1, 1, 5, 8, dtype=torch.bool), block_size=(64, 64),
          granularity="block"), sagebwd.SpecError, "under 'block'.*128 queries"),
    (dict(block_mask=torch.ones(1, 1, 3, 7, dtype=torch.bool)), sagebwd.SpecError,
     r"\(1, 1, 3, 7\); 300 queries and 500 keys in blocks of \(128, 64\) need .*3, 8"),
    (dict(block_mask=torch.ones(1, 3, 3, 8, dtype=torch.bool)), sagebwd.SpecError, "4 or 2 or 1"),
    (dict(block_mask=torch.ones(3, 8, dtype=torch.bool)), sagebwd.SpecError, "has shape"),
    (dict(block_mask=torch.ones(1, 1, 3, 8)), sagebwd.SpecError, "float32; pass torch.bool"),
    (dict(block_mask=[[1]]), TypeError, "a list; pass a torch tensor"),
    (dict(block_bits=torch.zeros(1, 1, 3, 2, dtype=torch.int32)), sagebwd.SpecError, "3, 1"),
    (dict(block_indices=INDICES.short()), sagebwd.SpecError, "int16; pass torch.int32 or torch.i"),
    (dict(block_indices=INDICES, block_counts=INDICES), sagebwd.SpecError, r"must be \(1, 1, 3\)"),
    (dict(block_indices=INDICES, block_counts=5), TypeError, "an int; pass"),
    (GOOD | dict(group_kv=128), sagebwd.SpecError, "group_kv = 128.*blocks of 64"),
    (GOOD | dict(topk=3), TypeError, "topk: list the blocks"),
    (GOOD | dict(BLKQ=128), TypeError, r"block_size=\(queries, keys\)"),
    (GOOD | dict(window_left=128), TypeError, "list the blocks in the window"),
    (GOOD | dict(cu_seqlens_q=None), TypeError, "a call for each"),
    (GOOD | dict(smooth_q=True), TypeError, "smooth_q"),
    (GOOD | dict(causal=True), sagebwd.SpecError, "ambiguous"),
])  # fmt: skip
def test_wrong_calls_say_what_is_right(given, error, match):
    given = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    with pytest.raises(error, match=f"(?s){match}"):
        sagebwd.block_sparse_attention(*tensors("meta"), **given)


def test_tensors_of_the_cpu_are_referred_to_the_emulation():
    with pytest.raises(sagebwd.SpecError, match="q is on cpu.*emulation"):
        sagebwd.block_sparse_attention(*tensors(), **GOOD)
    with pytest.raises(sagebwd.SpecError, match="block_mask is on cpu and q on meta"):
        sagebwd.block_sparse_attention(*tensors("meta"), **GOOD)


def test_packing_says_what_it_lacks():
    with pytest.raises(sagebwd.SpecError, match="pass keys="):
        sagebwd.pack_blocks(block_indices=INDICES)
    with pytest.raises(sagebwd.SpecError, match="4 dimensions"):
        sagebwd.pack_blocks(torch.ones(3, 8, dtype=torch.bool))
    assert sagebwd.pack_blocks(block_indices=INDICES[..., :0], keys=N).shape == (1, 1, 3, 1)


def test_its_options_are_those_that_lists_have():
    names = inspect.signature(sagebwd.block_sparse_attention).parameters
    assert {"causal", "granularity", "group_kv", "precision", "dp_sums"} <= set(names)
    assert options.spec_of_text("sparse_q=128 sparse_kv=64").group_kv == 64
