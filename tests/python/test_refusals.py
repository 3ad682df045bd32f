"""Functions that refuse something say what helps there: on a CPU, under torch.func, by keywords."""

import copy

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.autograd import forward_ad  # noqa: E402

from sagebwd.nn import SparseLinearAttention  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

MASK = torch.tensor([True, False]).reshape(1, 1, 1, 2)
SLA = SparseLinearAttention(64, 2, alpha="head", precision="exact")
META = copy.deepcopy(SLA).to("meta")


def qkv(dtype=torch.bfloat16, device="cpu"):
    return [torch.ones(1, 2, 128, 64, dtype=dtype, device=device) for _ in range(3)]


def sparse(*tensors, **more):
    return sagebwd.block_sparse_attention(*tensors, block_mask=MASK.to(tensors[0].device), **more)


def sla(*tensors, **more):
    mask = MASK.to(tensors[0].device)
    return sagebwd.sparse_linear_attention(*tensors, alpha=0.5, block_mask=mask, **more)


def exact(*tensors, **more):
    return sla(*tensors, precision="exact", **more)


def linear(*tensors):
    mask = MASK.to(tensors[0].device)
    return sagebwd.block_linear_attention(*tensors, block_mask=mask)


def emulated_sparse(*tensors):
    mask = MASK.to(tensors[0].device)
    return emulation.emulated_block_sparse_attention(*tensors, block_mask=mask)


# ---- on a CPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("function, helps", [
    (sagebwd.attention, r"sagebwd.emulation.emulated_attention\b"),
    (sagebwd.scaled_dot_product_attention, r"sagebwd.emulation.emulated_attention\b"),
    (sparse, "sagebwd.emulation.emulated_block_sparse_attention"),
    (sla, "precision='exact'.*emulated_block_sparse_attention.*reference.sparse_linear"),
    (SparseLinearAttention(64, 2, alpha="head"), "precision='exact'"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cpu_is_told_what_computes_there(function, helps, dtype):
    with pytest.raises(sagebwd.SpecError, match=f"on cpu.* CUDA GPU.*{helps}") as refused:
        function(*qkv(dtype))
    assert "autocast" not in str(refused.value)
    if dtype == torch.float32:
        assert "torch.float32" in str(refused.value)


@pytest.mark.parametrize("function", [emulation.emulated_attention, emulated_sparse])
def test_the_emulation_in_float32_is_told_of_autocast_on_the_cpu(function):
    with pytest.raises(sagebwd.SpecError, match=r"the emulation takes .*autocast\('cpu'\)$"):
        function(*qkv(torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        assert function(*qkv(torch.float32)).dtype == torch.bfloat16


# ---- keywords ------------------------------------------------------------------------------------


@pytest.mark.parametrize("function, keyword, message", [
    (sagebwd.distributed.attention, "cu_seqlens",
     "no packed sequences or lengths: cu_seqlens_q is an argument of sagebwd.attention, which"),
    (sagebwd.distributed.attention, "k_mean", "it is an argument of sagebwd.attention, which"),
    (sparse, "cu_seqlens", "lists are of whole sequences: make a call for each"),
    (sparse, "smooth_q", "have no such option: leave it out"),
    (sparse, "window_size", "list the blocks in the window"),
    (sla, "cu_seqlens_q", "lists are of whole sequences: make a call for each"),
    (sla, "window_left", "list the blocks in the window"),
    (sla, "sink_keys", "have no such option: leave it out"),
    (sla, "return_lse", "return_branches=True"),
    (emulation.emulated_attention, "deterministic", "the emulation has not: leave it out"),
    (emulation.emulated_block_sparse_attention, "deterministic", "the emulation has not"),
    (emulation.emulated_block_sparse_attention, "window_left", "list the blocks in the window"),
    (emulation.emulated_block_sparse_attention, "topk", "sagebwd.top_blocks"),
    (sagebwd.trace, "gradient_kernels", "the emulation has not: leave it out"),
    (sagebwd.reference.emulate, "dq_sums", "the emulation has not: leave it out"),
])  # fmt: skip
def test_a_keyword_that_is_not_there_says_what_helps(function, keyword, message):
    with pytest.raises(TypeError, match=message) as refused:
        function(*qkv(), **{keyword: 1})
    assert "need PyTorch" not in str(refused.value)


def test_known_keywords_beside_unknown_ones_are_not_refused():
    with pytest.raises(TypeError, match="'dens'.*did you mean 'density'"):
        SparseLinearAttention(64, 2, density=0.5, dens=1)
    with pytest.raises(TypeError, match="'group'.*did you mean"):
        emulation.emulated_block_sparse_attention(*qkv(), group_q=64, group=1)


def test_a_k_mean_that_is_no_tensor():
    with pytest.raises(TypeError, match="k_mean is an int; pass a float32 torch tensor, or None"):
        emulation.emulated_attention(*qkv(), k_mean=1)


# ---- torch.func ----------------------------------------------------------------------------------

WITHOUT_RULES = {
    "SLA2": exact, "estimated": lambda *t: sagebwd.sparse_linear_attention(
        *t, alpha="estimated", block_mask=MASK, precision="exact"),
    "branches": lambda *t: exact(*t, return_branches=True)[0], "linear": linear, "module": SLA,
    "soft lists": lambda q, *_: sagebwd.soft_top_blocks(q, 0.5),
    "emulation": emulation.emulated_attention, "emulated lists": emulated_sparse,
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_RULES)
def test_transforms_are_refused(name):
    q, k, v = qkv()

    def function(q):
        return WITHOUT_RULES[name](q, k, v)

    for transformed, given in ((torch.func.grad(lambda q: function(q).sum()), q),
                               (torch.func.vmap(function), q[None])):  # fmt: skip
        with pytest.raises(sagebwd.SpecError, match="no rules for torch.func's transforms"):
            transformed(given)
    with pytest.raises(sagebwd.SpecError, match="carries a tangent"):
        torch.func.jvp(function, (q,), (q,))


@pytest.mark.parametrize("name", [name for name in WITHOUT_RULES if name != "soft lists"])
def test_batches_of_gradients_are_refused(name):
    q, k, v = (t.requires_grad_() for t in qkv())
    out = WITHOUT_RULES[name](q, k, v)
    batch = torch.stack([torch.ones_like(out)] * 2)
    with pytest.raises(sagebwd.SpecError, match="is_grads_batched=True.*for each of them"):
        torch.autograd.grad(out, q, batch, is_grads_batched=True, retain_graph=True)
    with pytest.raises(sagebwd.SpecError, match=r"torch\.func\.vmap\), for which"):
        torch.func.vmap(lambda one: torch.autograd.grad(out, q, one))(batch)


@pytest.mark.parametrize("name", ["alpha", "beta"])
@pytest.mark.parametrize("return_branches", [False, True])
def test_tangents_of_alpha_and_beta_are_refused(name, return_branches):
    q, k, v = qkv()
    given = dict(block_mask=MASK, precision="exact", return_branches=return_branches,
                 alpha="estimated")  # fmt: skip
    with forward_ad.dual_level():
        given[name] = forward_ad.make_dual(torch.full((q.shape[1],), 0.5), torch.ones(q.shape[1]))
        with pytest.raises(sagebwd.SpecError, match=r"shape \(\d,\) carries a tangent"):
            sagebwd.sparse_linear_attention(q, k, v, **given)


def test_lists_are_made_under_vmap():
    scores = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(0))
    lists = torch.func.vmap(lambda x: sagebwd.top_blocks(x, 0.5))(scores)
    assert torch.equal(lists, sagebwd.top_blocks(scores, 0.5)) and (lists.sum(-1) == 2).all()


# ---- meta tensors --------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [
    sla, exact, linear, META, lambda *t: META(*t, routing="soft"),
    lambda *t: exact(*t, return_branches=True)[0],
    lambda *t: sagebwd.sparse_linear_attention(*t, alpha="estimated", precision="exact",
                                               block_mask=MASK.to("meta")),
])  # fmt: skip
def test_meta_tensors_have_shapes(function):
    tensors = [t.requires_grad_() for t in qkv(device="meta")]
    out = function(*tensors)
    assert out.is_meta and out.shape == tensors[0].shape and out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out, tensors, torch.empty_like(out))
    assert all(g.is_meta and g.shape == t.shape for g, t in zip(gradients, tensors))


def test_what_reads_numbers_refuses_meta_tensors():
    with pytest.raises(sagebwd.SpecError, match="q is on meta, where there are no numbers"):
        META.report(*qkv(device="meta"))
    indices = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device="meta")
    with pytest.raises(sagebwd.SpecError, match="block_indices is on meta"):
        sagebwd.check_block_indices(indices, keys=128)
    with pytest.raises(sagebwd.SpecError, match="sagebwd.block_sparse_attention, which takes meta"):
        emulated_sparse(*qkv(device="meta"))
