"""Packed calls of PyTorch's own where sagebwd is activated for the process."""

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")
varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this PyTorch has no varlen_attn")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from torch.nn.functional import scaled_dot_product_attention as exact_sdpa  # noqa: E402

from sagebwd.integrations import _operators  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")


@pytest.fixture
def activated():
    """As on a GPU, on the CPU."""
    active = _operators.Active("CPU")
    yield
    active.remove()


def inputs(lengths):
    generator = torch.Generator().manual_seed(0)
    shape = (sum(lengths), 4, 64)
    qkv = [torch.randn(shape, generator=generator).bfloat16().requires_grad_() for _ in range(3)]
    return qkv, torch.tensor([0, *lengths]).cumsum(0).int()


def exact(qkv, lengths, left, right):
    """Each sequence by PyTorch, in FP64, with windows of so many keys, -1 for all."""
    results = []
    for part in zip(*(t.split(lengths) for t in qkv)):
        n = len(part[0])
        behind = torch.arange(n) - torch.arange(n)[:, None]
        mask = (behind >= (-left if left >= 0 else -n)) & (behind <= (right if right >= 0 else n))
        out = exact_sdpa(*(t.double().transpose(0, 1)[None] for t in part), attn_mask=mask)
        results.append(out[0].transpose(0, 1))
    return torch.cat(results)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 0), (7, 3)])
def test_varlen_attn_is_sagebwds(activated, kernels_on_the_cpu, window):  # noqa: F811
    lengths = (24, 9)
    qkv, firsts = inputs(lengths)
    found = varlen.varlen_attn(*qkv, firsts, firsts, 24, 24, window_size=window)
    dout = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    gradients = torch.autograd.grad(found, qkv, dout)
    # PyTorch's would have launched none of these. The backward starts from the forward's results.
    assert sum(kernels.launches for kernels in kernels_on_the_cpu.values()) == 2
    expected = exact(qkv, lengths, *window)
    wanted = torch.autograd.grad(expected, qkv, dout.double())
    for x, y in zip((found, *gradients), (expected, *wanted)):
        assert float((x.double() - y).detach().norm() / y.detach().norm()) < 0.03


def test_what_packed_calls_cannot_do_is_refused(activated):
    (q, k, v), firsts = inputs((24, 9))
    operator = torch.ops.aten._flash_attention_forward
    for given, name in (({"alibi_slopes": torch.ones(4)}, "alibi_slopes"),
                        ({"seqused_k": firsts[1:]}, "seqused_k")):  # fmt: skip
        with pytest.raises(sagebwd.SpecError, match=f"{name}.*restore_flash"):
            operator(q, k, v, firsts, firsts, 24, 24, 0.0, False, False, **given)
    with pytest.raises(sagebwd.SpecError, match="dropout_p=0.1"):
        operator(q, k, v, firsts, firsts, 24, 24, 0.1, False, False)
