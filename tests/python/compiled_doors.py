"""Every door of the package in a compiled function, for tests here and on a GPU.

A door is a function of q, k and v, of (2, 4, TOKENS, 64), and of whether something is hidden; it
gives a tensor. Tensors that hide keys are made outside, as by a data loader.
"""

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
import sagebwd.nn  # noqa: E402

TOKENS = 192
LENGTHS = (TOKENS, 101)


def inputs(device):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, TOKENS, 64, generator=generator).to(device).bfloat16()
            .requires_grad_() for _ in range(3)]  # fmt: skip


class Hidden:
    """These tensors say that keys are hidden, on a device."""

    def __init__(self, device):
        generator = torch.Generator().manual_seed(1)
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32).to(device)
        seen = (torch.arange(TOKENS) < torch.tensor(LENGTHS)[:, None])[:, None, None]
        holes = torch.rand(2, 1, 1, TOKENS, generator=generator) < 0.5
        self.padding, self.holes = seen.to(device), holes.to(device)
        self.pairs = (holes & holes.mT).to(device)
        self.added = torch.zeros(seen.shape).masked_fill(~seen, -10000.0).bfloat16().to(device)
        self.firsts = torch.tensor([0, 70, TOKENS, TOKENS + 9, 2 * TOKENS],
                                   dtype=torch.int32).to(device)  # fmt: skip
        self.whole = torch.tensor([0, 2 * TOKENS], dtype=torch.int32).to(device)
        blocks = torch.rand(1, 4, -(-TOKENS // 128), -(-TOKENS // 64), generator=generator) < 0.5
        blocks[..., 0] = True
        self.blocks = blocks.to(device)
        self.everything = torch.ones_like(self.blocks)
        self.indices = torch.tensor([[[[0, 2], [1, 0]]]], dtype=torch.int32).to(device)
        self.counts = torch.tensor([[[2, 1]]], dtype=torch.int32).to(device)
        self.sinks = torch.linspace(-1, 1, 4).to(device)
        self.sparse, self.full = (
            sagebwd.nn.SparseLinearAttention(64, 4, density=density, alpha="head").to(device)
            for density in (0.3, 1.0))  # fmt: skip


def dense(q, k, v, hidden, told):
    return sagebwd.attention(q, k, v, causal=not hidden, window_left=20 if hidden else None,
                             sink_logits=told.sinks)  # fmt: skip


def padded(q, k, v, hidden, told):
    used = {"seqused_q": told.lengths, "seqused_k": told.lengths} if hidden else {}
    return sagebwd.attention(q, k, v, **used)


def rows(*tensors):
    return [t.transpose(1, 2).flatten(0, 1) for t in tensors]


def packed(q, k, v, hidden, told):
    firsts = told.firsts if hidden else told.whole
    return sagebwd.attention(*rows(q, k, v), causal=True, cu_seqlens_q=firsts, cu_seqlens_k=firsts)


def pytorchs(q, k, v, hidden, told):
    return sagebwd.scaled_dot_product_attention(q, k, v, told.holes if hidden else None)


def pytorchs_padding(q, k, v, hidden, told):
    return sagebwd.scaled_dot_product_attention(q, k, v, told.padding if hidden else None,
                                                is_causal=not hidden)  # fmt: skip


def pytorchs_pairs(q, k, v, hidden, told):
    return sagebwd.scaled_dot_product_attention(q, k, v, told.pairs if hidden else None)


def pytorchs_numbers(q, k, v, hidden, told):
    return sagebwd.scaled_dot_product_attention(q, k, v, told.added if hidden else None)


def in_a_context(q, k, v, hidden, told):
    """PyTorch's own function: `compiled` calls it in sagebwd.sdpa()."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=told.holes if hidden else None, is_causal=not hidden)  # fmt: skip


def of_diffusers(q, k, v, hidden, told):
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return dispatch_attention_fn(q, k, v, attn_mask=told.padding if hidden else None,
                                 backend="sagebwd")  # fmt: skip


def flash(q, k, v, hidden, told):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return sagebwd.flash_attn_func(q, k, v, causal=True, window_size=(20, 0) if hidden else (-1, 0))


def flash_qkvpacked(q, k, v, hidden, told):
    qkv = torch.stack([t.transpose(1, 2) for t in (q, k, v)], 2)
    return sagebwd.flash_attn_qkvpacked_func(qkv, causal=hidden)


def flash_varlen(q, k, v, hidden, told):
    firsts = told.firsts if hidden else told.whole
    return sagebwd.flash_attn_varlen_func(*rows(q, k, v), firsts, firsts, 2 * TOKENS, 2 * TOKENS,
                                          causal=True)  # fmt: skip


def sage(q, k, v, hidden, told):
    return sagebwd.sageattn(q, k, v, is_causal=hidden)


def listed(q, k, v, hidden, told):
    mask = told.blocks if hidden else told.everything
    return sagebwd.block_sparse_attention(q, k, v, block_mask=mask)


def listed_by_numbers(q, k, v, hidden, told):
    return sagebwd.block_sparse_attention(q, k, v, block_indices=told.indices,
                                          block_counts=told.counts if hidden else None)  # fmt: skip


def sparse_linear(q, k, v, hidden, told):
    mask = told.blocks if hidden else told.everything
    return sagebwd.sparse_linear_attention(q, k, v, alpha=0.7, block_mask=mask)


def module(q, k, v, hidden, told):
    return (told.sparse if hidden else told.full)(q, k, v)


#: Those with products in bf16 of PyTorch's own, which compilers put in other words.
WITH_OTHER_PRODUCTS = {sparse_linear, module}
#: Those in which the device checks what hides keys.
CHECKED = {pytorchs, pytorchs_padding, pytorchs_pairs, pytorchs_numbers, in_a_context,
           of_diffusers}  # fmt: skip
#: One for each operator to which none of these leads.
OF_OTHER_OPERATORS = {packed, listed, module}
ALL = [dense, padded, packed, pytorchs, pytorchs_padding, pytorchs_pairs, pytorchs_numbers,
       in_a_context, of_diffusers, flash, flash_qkvpacked, flash_varlen, sage, listed,
       listed_by_numbers, sparse_linear, module]  # fmt: skip
#: Those that run other code if nothing is hidden, each kind once: of the others one has the same
#: tensors with other values, and two are then `pytorchs`.
OTHER_IF_ALL = [door for door in ALL if door not in (
    pytorchs_pairs, pytorchs_numbers, listed, sparse_linear, module)]  # fmt: skip
each = pytest.mark.parametrize("door", ALL, ids=lambda door: door.__name__)


def need(door):
    """Skips a test of a door that leads to a package which is not here."""
    if door is of_diffusers:
        pytest.importorskip("diffusers", reason="needs diffusers")
        import sagebwd.integrations.diffusers  # noqa: F401


def context_of(door):
    return sagebwd.sdpa() if door is in_a_context else contextlib.nullcontext()


def loss_and_gradients(door, given, hidden, told, compiler=None):
    """(loss, dq, dk, dv) of q, k and v. `compiler` takes a function of these."""

    def loss(q, k, v):
        return door(q, k, v, hidden, told).float().square().mean()

    call = loss if compiler is None else compiler(loss)
    with context_of(door):
        found = call(*given)
    return found, *torch.autograd.grad(found, given)


def assert_as_eager(door, device, hidden, backend):
    """A compiled call gives eager's loss and gradients."""
    given, told = inputs(device), Hidden(device)
    expected = loss_and_gradients(door, given, hidden, told)
    torch._dynamo.reset()
    found = loss_and_gradients(door, given, hidden, told, lambda loss: torch.compile(
        loss, fullgraph=True, backend=backend))  # fmt: skip
    for ours, eager in zip(found, expected):
        apart = (ours - eager).double().norm() / eager.double().norm()
        same = backend != "inductor" and door not in WITH_OTHER_PRODUCTS
        assert apart <= (1e-6 if same else 0.01), float(apart)
    # A lost mask gives results that are far away.
    other = loss_and_gradients(door, given, not hidden, told)
    assert max((x - y).double().norm() / y.double().norm()
               for x, y in zip(expected[1:], other[1:])) > 0.05  # fmt: skip
