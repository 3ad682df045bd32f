"""FlopCounterMode counts our operators as PyTorch counts its own attention."""


import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import warm  # noqa: E402
from stand_in import kernels_on_the_cpu, listed_kernels_on_the_cpu  # noqa: E402, F401
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

import sagebwd  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "listed_kernels_on_the_cpu",
                                     "tiny_tensors")  # fmt: skip


def randn(*shape):
    return torch.randn(*shape).bfloat16().requires_grad_()


def counted(call, *inputs):
    """Operations of the forward, and of forward and backward."""
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        call(*inputs)
    with FlopCounterMode(display=False) as both:
        call(*inputs).float().sum().backward()
    return forward.get_total_flops(), both.get_total_flops()


def of_sdpa(q, k, v):
    forward = sdpa_flop_count(q, (*q[:2], *k[2:]), (*q[:2], *v[2:]))
    return forward, forward + sdpa_backward_flop_count((*q[:3], v[3]), q, (*q[:2], *k[2:]),
                                                       (*q[:2], *v[2:]))  # fmt: skip


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("value_dim", [96, 64])
def test_dense_calls(layout, value_dim):
    shapes = (2, 4, 20, 96), (2, 2, 30, 96), (2, 2, 30, value_dim)
    inputs = [randn(*shape) for shape in shapes]
    if layout == "bshd":
        inputs = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in inputs]

    def call(q, k, v):
        return sagebwd.attention(q, k, v, layout=layout, causal="top-left")

    for _ in range(2):  # known forms, too
        assert counted(call, *inputs) == of_sdpa(*shapes)


def test_it_is_counted_as_pytorchs_own():
    inputs = [randn(2, 4, 20, 64) for _ in range(3)]
    ours = counted(sagebwd.attention, *inputs)
    exact = [t.detach().float().requires_grad_() for t in inputs]
    forward, both = counted(torch.nn.functional.scaled_dot_product_attention, *exact)
    assert ours[0] == forward and ours[1] >= both  # whose own backward may keep the scores


def test_packed_sequences_count_by_their_lengths():
    q, k, v = randn(27, 4, 64), randn(30, 2, 64), randn(30, 2, 64)
    of_q, of_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 27], [0, 10, 30]))

    def call(q, k, v):
        return sagebwd.attention(q, k, v, cu_seqlens_q=of_q, cu_seqlens_k=of_k)

    pairs = 20 * 10 + 7 * 20
    assert counted(call, q, k, v) == (4 * 4 * 64 * pairs, (4 + 10) * 4 * 64 * pairs)


def test_listed_blocks_count():
    q, k, v = randn(2, 4, 300, 64), randn(2, 2, 200, 64), randn(2, 2, 200, 64)
    mask = torch.zeros(1, 4, 3, 4, dtype=torch.bool)
    mask[:, 0, 0, 0] = mask[:, 1, 2, 3] = True  # 128 x 64, and at the ends 44 x 8

    def call(q, k, v):
        return sagebwd.block_sparse_attention(q, k, v, block_mask=mask)

    pairs = 2 * (128 * 64 + 44 * 8)
    assert counted(call, q, k, v) == (4 * 64 * pairs, (4 + 10) * 64 * pairs)


def test_operators_of_sla2():
    """By tensors without data: they are for GPUs alone."""
    b, h, hk, m, n, d = 2, 4, 2, 256, 192, 64
    pairs = h * 2 * 3
    with FakeTensorMode(), torch.no_grad():
        q, k = (torch.empty(b, heads, tokens, d, dtype=torch.bfloat16, device="cuda")
                for heads, tokens in ((h, m), (hk, n)))  # fmt: skip
        mask = torch.empty(b, h, 2, 3, dtype=torch.bool, device="cuda")
        for name, given, products in (
            ("linear_branch_forward", (q, k, k), hk * n + pairs + h * m),
            ("linear_branch_backward", (q, q, k, k), 3 * hk * n + 2 * pairs + 2 * h * m),
        ):
            with FlopCounterMode(display=False) as counter:
                getattr(torch.ops.sagebwd, name)(*given, mask, (128, 64), True)
            assert counter.get_total_flops() == 2 * b * products * d * d
        with FlopCounterMode(display=False) as counter:
            rest, centred, of_k, mean = torch.ops.sagebwd.estimated_rest_forward(
                q, k, mask, (128, 64), 0.1)  # fmt: skip
        assert counter.get_total_flops() == 2 * b * h * m * 3 * d
        with FlopCounterMode(display=False) as counter:
            torch.ops.sagebwd.estimated_rest_backward(rest, q, mask, centred, of_k, mean,
                                                      (128, 64), 0.1, n)  # fmt: skip
        assert counter.get_total_flops() == 3 * 2 * b * h * m * 3 * d


@pytest.mark.parametrize("keeps", [False, True])
def test_sla2_as_one_operator(keeps):
    """Lists without data count all pairs. A backward that has no sums forms them again."""
    b, h, hk, m, n, d = 2, 4, 2, 256, 192, 64
    blocks, pairs = h * 2 * 3, b * h * m * n
    given = 128, False, keeps, 0.1, "bhsd", "sparse_q=128 sparse_kv=64 linear=complement"
    with torch.no_grad():
        q, k = (torch.empty(b, heads, tokens, d, dtype=torch.bfloat16, device="meta")
                for heads, tokens in ((h, m), (hk, n)))  # fmt: skip
        bits = torch.empty(b, h, 2, 1, dtype=torch.int32, device="meta")
        alpha = torch.empty(1, h, 2, device="meta")
        with FlopCounterMode(display=False) as counter:
            out, *kept = torch.ops.sagebwd.sparse_linear_forward(q, k, k, bits, alpha, *given)
        products = hk * n + blocks + h * m
        assert counter.get_total_flops() == 4 * d * pairs + 2 * b * products * d * d
        with FlopCounterMode(display=False) as counter:
            torch.ops.sagebwd.sparse_linear_backward(out, q, k, k, *kept, bits, alpha, *given)
        products += hk * n + h * m + (0 if keeps else hk * n + blocks)
        assert counter.get_total_flops() == 10 * d * pairs + 2 * b * products * d * d


def test_keys_with_intervals():
    """Without data all pairs count, else those of blocks that somebody sees."""
    m, n, d, spec = 300, 200, 64, "causal=none intervals=2"
    q, k = (torch.empty(2, heads, tokens, d, dtype=torch.bfloat16, device="meta")
            for heads, tokens in ((4, m), (2, n)))  # fmt: skip
    at = torch.empty(1, 1, n, 2, dtype=torch.int32, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        bits = torch.ops.sagebwd.interval_bits(at, 4, m, spec)
        assert bits.shape == (1, 1, 3, 2)
        out, lse = torch.ops.sagebwd.interval_forward(q, k, k, at, bits, None, "bhsd", spec)
    assert counter.get_total_flops() == 4 * d * 2 * 4 * m * n
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        torch.ops.sagebwd.interval_backward(out, q, k, k, out, lse, None, at, bits, None, "bhsd",
                                            spec)  # fmt: skip
    assert counter.get_total_flops() == 10 * d * 2 * 4 * m * n
    seen = torch.tensor([[[[1, 3], [0, 0], [2, 2]]]], dtype=torch.int32)  # 128 x 128 and 44 x 72
    formula = flop_registry[torch.ops.sagebwd.interval_forward]
    pairs = 2 * 4 * (128 * 128 + 44 * 72)
    assert formula(q, k, k, at, seen, None, "bhsd", spec) == 4 * d * pairs


def test_every_operator_with_products_has_a_formula():
    # Norm and RoPE, which are there once something has called them, have no products.
    names = {name for name in dir(torch.ops.sagebwd) if name.endswith(("forward", "backward"))
             and not name.startswith("front_")}  # fmt: skip
    counted = {str(target).rpartition(".")[2] for target in FlopCounterMode().flop_registry
               if str(target).startswith("sagebwd.")}  # fmt: skip
    names.add("table_gradients")
    assert names == counted and len(names) == 15


@pytest.mark.parametrize("order", ["import sagebwd, torch.utils.flop_counter",
                                   "import torch.utils.flop_counter, sagebwd"])
def test_whichever_is_imported_first(order):
    code = (f"{order}\nimport torch\nfrom torch.utils import flop_counter\n"
            "assert torch.ops.sagebwd.forward in flop_counter.flop_registry")  # fmt: skip
    warm.run(["-c", code], loaded="torch").check_returncode()
