"""The operators' plumbing on the CPU: the emulation stands in for the kernels.

Everything around the kernels is the real thing: schema, fakes, autograd, compile, checkpoints.
"""

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import assert_alike, compiled, forwards_of_selective_checkpoints  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401

from sagebwd.core import options  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("kernels_on_the_cpu"),
    pytest.mark.filterwarnings("ignore:Warning only once for all operators"),
]


def make(m=40, n=40, h=4, hk=2, layout="bhsd", grad=True):
    generator = torch.Generator().manual_seed(0)

    def randn(heads, length):
        shape = (2, heads, length, 64) if layout == "bhsd" else (2, length, heads, 64)
        return torch.randn(shape, generator=generator).bfloat16().requires_grad_(grad)

    return (randn(h, m), randn(hk, n), randn(hk, n)), randn(h, m).detach()


def equal(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second))


OPTIONS = options.text_of({"causal": "bottom-right"})
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor",
          "test_aot_dispatch_dynamic")  # fmt: skip


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_opcheck_forward(layout, scale):
    inputs, _ = make(40, 30, layout=layout)
    arguments = (*inputs, scale, layout, OPTIONS)
    torch.library.opcheck(torch.ops.sagebwd.forward.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_backward(with_dlse):
    (q, k, v), dout = make(40, 30, grad=False)
    out, lse = sagebwd.attention_forward(q, k, v)
    dlse = torch.randn_like(lse) if with_dlse else None
    arguments = (dout, q, k, v, out, lse, dlse, None, "bhsd", OPTIONS)
    torch.library.opcheck(torch.ops.sagebwd.backward.default, arguments, test_utils=CHECKS)


@pytest.mark.parametrize("return_lse", [False, True])
def test_autograd_equals_the_explicit_backward(return_lse):
    inputs, dout = make(40, 30)
    result = sagebwd.attention(*inputs, causal="top-left", return_lse=return_lse)
    out, lse = sagebwd.attention_forward(*(t.detach() for t in inputs), causal="top-left")
    dlse = torch.randn_like(lse) if return_lse else None
    got = torch.autograd.grad(result, inputs, (dout, dlse) if return_lse else dout)
    want = sagebwd.attention_backward(dout, *(t.detach() for t in inputs), out, lse, dlse=dlse,
                                      causal="top-left")  # fmt: skip
    assert equal(got, want)


def test_gradient_of_lse_alone():
    inputs, _ = make()
    _, lse = sagebwd.attention(*inputs, return_lse=True)
    dq, _, dv = torch.autograd.grad(lse.sum(), inputs)
    assert float(dq.abs().max()) > 0 and bool((dv == 0).all())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_gives_the_same_bits(dynamic):
    def layer(q, k, v):
        return sagebwd.attention(q * 2, k, v, causal=True) * 0.5

    fast = compiled(layer, dynamic=dynamic)
    for m in (40, 72):
        assert_alike(layer, fast, *make(m, m))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    inputs, dout = make()
    expected = torch.autograd.grad(sagebwd.attention(*inputs), inputs, dout)
    checkpoint(sagebwd.attention, *inputs, use_reentrant=reentrant).backward(dout)
    assert equal([t.grad for t in inputs], expected)


@pytest.mark.parametrize("save", [True, False])
def test_selective_checkpointing(save):
    inputs, dout = make()
    expected = torch.autograd.grad(sagebwd.attention(*inputs), inputs, dout)
    assert forwards_of_selective_checkpoints(inputs, dout, save) == (1 if save else 2)
    assert equal([t.grad for t in inputs], expected)


def test_expanded_gradient():
    inputs, dout = make()
    summed = torch.autograd.grad(sagebwd.attention(*inputs).sum(), inputs)
    ones = torch.autograd.grad(sagebwd.attention(*inputs), inputs, torch.ones_like(dout))
    assert equal(summed, ones)


def test_saved_tensors_are_guarded_against_change_in_place():
    inputs, dout = make()
    out = sagebwd.attention(*inputs)
    with torch.no_grad():
        inputs[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(dout)


@pytest.mark.parametrize("smooth_k", [True, False])
def test_backward_over_chunks_of_the_keys(smooth_k):
    """Ring attention: gradients of chunks, each from the whole out and lse, add up."""
    (q, k, v), dout = make(64, 256, grad=False)
    out, lse = sagebwd.attention_forward(q, k, v, smooth_k=smooth_k)
    whole = sagebwd.attention_backward(dout, q, k, v, out, lse, smooth_k=smooth_k)
    parts = [
        sagebwd.attention_backward(dout, q, k[:, :, a:b], v[:, :, a:b], out, lse, smooth_k=smooth_k)
        for a, b in ((0, 128), (128, 256))
    ]

    def error(x, expected):
        return float((x.float() - expected.float()).norm() / expected.float().norm())

    assert error(torch.cat([p[1] for p in parts], 2), whole[1]) < 0.03
    assert error(torch.cat([p[2] for p in parts], 2), whole[2]) < 0.03
    # The docstring's warning: a smoothed chunk's dq lacks its row sums times the chunk's mean.
    assert (error(parts[0][0] + parts[1][0], whole[0]) > 0.03) == smooth_k


def test_v_with_fewer_channels():
    generator = torch.Generator().manual_seed(2)

    def randn(heads, tokens, channels, grad=True):
        shape = (2, heads, tokens, channels)
        return torch.randn(shape, generator=generator).bfloat16().requires_grad_(grad)

    inputs = randn(4, 20, 96), randn(2, 24, 96), randn(2, 24, 32)
    dout = randn(4, 20, 32, grad=False)
    out, lse = sagebwd.attention(*inputs, return_lse=True)
    assert out.shape == dout.shape
    gradients = torch.autograd.grad(out, inputs, dout)
    # As if the others were zeros.
    whole = [*inputs[:2], torch.nn.functional.pad(inputs[2], (0, 64)).detach().requires_grad_()]
    expected, expected_lse = sagebwd.attention(*whole, return_lse=True)
    assert torch.equal(out, expected[..., :32]) and torch.equal(lse, expected_lse)
    dq, dk, dv = torch.autograd.grad(expected, whole, torch.nn.functional.pad(dout, (0, 64)))
    assert equal(gradients, (dq, dk, dv[..., :32]))

    compiled = torch.compile(sagebwd.attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*inputs), out)
    refused = {"v's may be smaller": randn(2, 24, 104), "except for the channels": randn(2, 20, 32)}
    for match, v in refused.items():
        with pytest.raises(sagebwd.SpecError, match=match):
            sagebwd.attention(*inputs[:2], v)


@pytest.fixture
def mesh():
    """The mesh has this process alone."""
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_distributed_tensors_are_refused_and_local_map_serves(mesh):
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map

    inputs, dout = make(grad=False)
    leaves = [t.requires_grad_() for t in inputs]
    expected = torch.autograd.grad(sagebwd.attention(*leaves), leaves, dout)
    heads = [distribute_tensor(t.detach(), mesh, [Shard(1)]).requires_grad_() for t in inputs]
    for _ in range(3):
        for call in (sagebwd.attention, sagebwd.attention_forward):
            with pytest.raises(sagebwd.SpecError, match=r"is a DTensor.*local_map.*to_local\(\)"):
                call(*heads)
        attend = local_map(sagebwd.attention, out_placements=[Shard(1)],
                           in_placements=([Shard(1)],) * 3, device_mesh=mesh)  # fmt: skip
        of_out = distribute_tensor(dout, mesh, [Shard(1)])
        found = torch.autograd.grad(attend(*heads), heads, of_out)
        assert equal([g.to_local() for g in found], expected)
