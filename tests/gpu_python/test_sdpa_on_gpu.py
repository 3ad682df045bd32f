"""PyTorch's own function, served by sagebwd through its registry and in a block of code."""

import pytest
from inputs import torch

import sagebwd

scaled_dot_product_attention = torch.nn.functional.scaled_dot_product_attention


def inputs(heads_kv=4, layout="bhsd"):
    torch.manual_seed(0)
    shapes = [(2, 300, heads, 64) for heads in (4, heads_kv, heads_kv)]
    tensors = [torch.randn(shape, device="cuda").bfloat16().transpose(1, 2) for shape in shapes]
    return [(t if layout == "bshd" else t.contiguous()).requires_grad_() for t in tensors]


def compare(call, q, k, v, causal):
    expected = sagebwd.attention(q, k, v, causal=causal)
    found = call(q, k, v)
    assert torch.equal(found, expected)
    dout = torch.randn_like(found)
    for got, own in zip(torch.autograd.grad(found, (q, k, v), dout),
                        torch.autograd.grad(expected, (q, k, v), dout)):  # fmt: skip
        assert torch.equal(got, own)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("compiled", [None, "aot_eager", "inductor"])
def test_pytorchs_registry(layout, causal, heads_kv, compiled):
    attention = torch.nn.attention
    if not hasattr(attention, "activate_flash_attention_impl"):
        pytest.skip("this PyTorch has no registry")
    q, k, v = inputs(heads_kv, layout)
    grouped = heads_kv != 4  # no number: compiled again with another one, it would be a symbol

    def call(q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    if compiled:
        torch.compiler.reset()  # the cases share a code object, which takes 8 graphs
        call = torch.compile(call, fullgraph=True, backend=compiled)
    attention.activate_flash_attention_impl("sagebwd")
    try:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            compare(call, q, k, v, causal)
    finally:
        attention.restore_flash_attention_impl()
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        assert not torch.equal(call(q, k, v), sagebwd.attention(q, k, v, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_around_a_block_of_code(causal):
    q, k, v = inputs()
    with sagebwd.sdpa():
        compare(lambda *qkv: scaled_dot_product_attention(*qkv, is_causal=causal), q, k, v, causal)
    warned = pytest.warns(UserWarning, match="PyTorch computed 1 of 1 calls")
    with warned, sagebwd.sdpa(fallback="torch"):
        scaled_dot_product_attention(q, k, v, dropout_p=0.1)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_checkpoints_compute_the_same_attention_again(reentrant, where):
    from torch.utils.checkpoint import checkpoint

    def layer(x):
        q, k, v = x.unbind()
        return scaled_dot_product_attention(q.sin(), k, v, is_causal=True)

    def gradient(call):
        x = torch.stack([t.detach() for t in inputs()]).requires_grad_()
        with sagebwd.sdpa() as mode:
            loss = call(x).float().square().mean()
            if where == "inside":
                loss.backward()
        if where == "outside":
            loss.backward()
        return x.grad, mode.calls

    expected, calls = gradient(layer)
    found, computed = gradient(lambda x: checkpoint(layer, x, use_reentrant=reentrant))
    assert (calls, computed) == (1, 2) and torch.equal(found, expected)


def masked(seed, dtype=torch.bool):
    """(2, 1, 1, 300): about half of the keys are hidden, in every tensor others; or, of "pairs",
    (2, 1, 300, 300): half of the queries, too."""
    generator = torch.Generator("cuda").manual_seed(seed)
    seen = torch.rand(2, 1, 1, 300, device="cuda", generator=generator) < 0.5
    if dtype == torch.bool:
        return seen
    if dtype == "pairs":
        return seen & seen.mT
    return torch.zeros(seen.shape, dtype=dtype, device="cuda").masked_fill(~seen, -10000.0)


def assert_masked(found, q, k, v, mask, dout):
    """Out and gradients are those of FP64."""
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    mask = mask.double() if mask.is_floating_point() else mask
    out = scaled_dot_product_attention(*exact, attn_mask=mask)
    for ours, theirs in zip(found, (out, *torch.autograd.grad(out, exact, dout.double()))):
        assert (ours - theirs).norm() < 0.04 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, "pairs"])
@pytest.mark.parametrize("compiled", [None, "aot_eager", "inductor"])
def test_masks_of_keys(dtype, compiled):
    q, k, v = inputs()
    call = sagebwd.scaled_dot_product_attention
    if compiled:
        torch.compiler.reset()  # the cases share a code object, which takes 8 graphs
        call = torch.compile(call, fullgraph=True, backend=compiled)
    for seed in range(2):
        mask, dout = masked(seed, dtype), torch.randn_like(q)
        out = call(q, k, v, attn_mask=mask)
        assert_masked((out, *torch.autograd.grad(out, (q, k, v), dout)), q, k, v, mask, dout)


@pytest.mark.parametrize("kind", ["nested", "disjoint"])
def test_masks_that_differ_among_queries(kind):
    """The text refiner of HunyuanVideo has the first kind, and documents are the second."""
    q, k, v = inputs()
    dout = torch.randn_like(q)
    if kind == "nested":
        tokens = torch.arange(300, device="cuda") < torch.tensor([[120], [270]], device="cuda")
        mask = tokens[:, None, :, None] & tokens[:, None, None]
        mask[..., 0] = True
        dout = dout * tokens[:, None, :, None]  # no loss is of padding
    else:
        documents = torch.arange(300, device="cuda") * 7 // 500
        mask = documents[:, None] == documents
    for _ in range(2):  # found, and kept
        out = sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert_masked((out, *torch.autograd.grad(out, (q, k, v), dout)), q, k, v, mask, dout)


def test_a_captured_graph_reads_other_masks():
    q, k, v = inputs()
    mask, dout = masked(0), torch.randn_like(q)

    def step():
        out = sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for seed in (1, 2):
        mask.copy_(masked(seed))
        for t in found:
            t.detach().fill_(float("nan"))
        graph.replay()
        assert_masked(found, q, k, v, mask, dout)
