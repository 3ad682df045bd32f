"""The operators in PyTorch: dispatch, autograd, compile, checkpoints, streams, graphs."""

import pytest
from alike import assert_alike, compiled, forwards_of_selective_checkpoints
from inputs import NAMES, equal, gradients, leaves, make, relative, torch

import sagebwd
from sagebwd.core import options

OPTIONS = (None, "bhsd", options.text_of({"causal": "top-left"}))
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor",
          "test_aot_dispatch_dynamic")  # fmt: skip


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_opcheck_forward(layout):
    inputs, _ = leaves(100, 80, layout=layout)
    arguments = (*inputs, None, layout, *OPTIONS[2:])
    torch.library.opcheck(torch.ops.sagebwd.forward.default, arguments, test_utils=CHECKS,
                          atol=2e-2, rtol=2e-2)  # fmt: skip


@pytest.mark.parametrize("with_dlse", [False, True])
def test_opcheck_backward(with_dlse):
    q, k, v, dout = make(100, 80)
    out, lse = sagebwd.attention_forward(q, k, v, causal="top-left")
    arguments = (dout, q, k, v, out, lse, torch.randn_like(lse) if with_dlse else None, *OPTIONS)
    torch.library.opcheck(torch.ops.sagebwd.backward.default, arguments, test_utils=CHECKS,
                          atol=2e-2, rtol=2e-2)  # fmt: skip


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(backend, dynamic):
    if backend == "inductor":
        pytest.importorskip("triton", reason="needs Triton for Inductor")

    def layer(q, k, v):
        return sagebwd.attention(q * 2, k, v, causal=True) * 0.5

    fast = compiled(layer, backend=backend, dynamic=dynamic)
    for m in (128, 200):
        assert_alike(layer, fast, *leaves(m))


def test_compile_keeps_transposed_views():
    def layer(x):
        q, k, v = x.view(2, 128, 3, 4, 64).unbind(2)
        return sagebwd.attention(q, k, v, layout="bshd", causal=True).flatten(2)

    x = torch.randn(2, 128, 3 * 4 * 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, got = layer(x), compiled(x)
    assert torch.equal(got, expected)
    assert equal(torch.autograd.grad(got.sum(), x), torch.autograd.grad(expected.sum(), x))


def test_autocast_with_float32_inputs():
    q, k, v, dout = make(128)
    low = [t.detach().requires_grad_() for t in (q, k, v)]
    full = [t.detach().float().requires_grad_() for t in (q, k, v)]
    with torch.autocast("cuda", torch.bfloat16):
        out = sagebwd.attention(*full)
    assert out.dtype == torch.bfloat16
    expected = gradients(low, dout)
    for got, want in zip(torch.autograd.grad(out, full, dout), expected):
        assert got.dtype == torch.float32 and torch.equal(got, want.float())


def test_grad_scaler_sees_an_overflow():
    inputs, dout = leaves(128, dtype=torch.float16)
    dout = dout * torch.finfo(torch.float16).max  # overflows to infinity
    assert not all(bool(g.isfinite().all()) for g in gradients(inputs, dout))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    inputs, dout = leaves(128)
    expected = gradients(inputs, dout)
    out = checkpoint(sagebwd.attention, *inputs, use_reentrant=reentrant)
    out.backward(dout)
    assert equal([t.grad for t in inputs], expected)


def test_selective_checkpointing_does_not_run_the_forward_again():
    inputs, dout = leaves(128)
    expected = gradients(inputs, dout)
    assert forwards_of_selective_checkpoints(inputs, dout, save=True) == 1
    assert equal([t.grad for t in inputs], expected)


def test_gradients_of_any_strides():
    inputs, dout = leaves(128)
    ones = torch.ones_like(dout)
    sum_gradients = torch.autograd.grad(sagebwd.attention(*inputs).sum(), inputs)
    assert equal(sum_gradients, gradients(inputs, ones))
    expected = gradients(inputs, dout)
    padded = torch.zeros(2, 4, 128, 67, device="cuda", dtype=dout.dtype)
    padded[..., :64] = dout
    for view in (dout.transpose(1, 2).contiguous().transpose(1, 2), dout.mT.contiguous().mT,
                 padded[..., :64]):  # fmt: skip
        assert torch.equal(view, dout) and not view.is_contiguous()
        assert equal(gradients(inputs, view), expected)


@pytest.mark.parametrize("wanted", range(1, 8))
def test_any_subset_of_gradients(wanted):
    inputs, dout = leaves(128)
    expected = gradients(inputs, dout)
    chosen = [t.detach().requires_grad_(bool(wanted >> i & 1)) for i, t in enumerate(inputs)]
    sagebwd.attention(*chosen).backward(dout)
    for t, gradient in zip(chosen, expected):
        assert (t.grad is None) if not t.requires_grad else torch.equal(t.grad, gradient)


def test_lse_is_differentiable():
    inputs, dout = leaves(128)
    out, lse = sagebwd.attention(*inputs, return_lse=True)
    dlse = torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), inputs, (dout, dlse))
    q, k, v = (t.detach() for t in inputs)
    want = sagebwd.attention_backward(dout, q, k, v, out.detach(), lse.detach(), dlse=dlse)
    assert equal(got, want)
    out, lse = sagebwd.attention(*inputs, return_lse=True)
    only_lse = torch.autograd.grad(lse, inputs, dlse)
    assert float(only_lse[0].abs().max()) > 0 and bool((only_lse[2] == 0).all())


def test_double_backward_is_refused():
    inputs, _ = leaves(64)
    out = sagebwd.attention(*inputs)
    (gradient,) = torch.autograd.grad(out.sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        (out.sum() + gradient.square().sum()).backward()


def test_layouts_and_packed_views_agree():
    (q, k, v), dout = leaves(200, h=4, hk=4)
    expected = (sagebwd.attention(q, k, v, causal=True), *gradients((q, k, v), dout, causal=True))
    packed = torch.stack([t.detach().transpose(1, 2) for t in (q, k, v)], 2)  # (B, S, 3, H, D)
    views = [t.requires_grad_() for t in packed.unbind(2)]
    assert not any(t.is_contiguous() for t in views)
    out = sagebwd.attention(*views, causal=True, layout="bshd")
    assert out.is_contiguous()
    got = (out, *torch.autograd.grad(out, views, dout.transpose(1, 2)))
    assert equal([t.transpose(1, 2) for t in got], expected)


def test_strides_that_kernels_cannot_read_are_refused():
    (q, k, v), _ = leaves(128)
    wide = torch.zeros(2, 2, 128, 68, device="cuda", dtype=k.dtype)[..., :64]
    for bad in (wide, k.detach().mT.contiguous().mT):
        with pytest.raises(sagebwd.SpecError, match=r"k has strides.*k\.contiguous\(\)"):
            sagebwd.attention(q, bad, v)
    shifted = torch.zeros(k.numel() + 4, device="cuda", dtype=k.dtype)[4:].view(k.shape)
    with pytest.raises(sagebwd.SpecError, match=r"address.*v\.clone\(\)"):
        sagebwd.attention(q, k, shifted)
    with pytest.raises(sagebwd.SpecError, match="k is on cpu"):
        sagebwd.attention(q, k.cpu(), v)


def test_runs_on_the_current_stream():
    sources = make(512)
    buffers = [torch.zeros_like(t) for t in sources]
    out, lse = sagebwd.attention_forward(*sources[:3])
    expected = (out, lse, *sagebwd.attention_backward(sources[3], *sources[:3], out, lse))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # the inputs arrive long after the launches below
        for to, source in zip(buffers, sources):
            to.copy_(source)
        out, lse = sagebwd.attention_forward(*buffers[:3])
        got = (out, lse, *sagebwd.attention_backward(buffers[3], *buffers[:3], out, lse))
    assert not side.query(), "a call waited for the device"
    side.synchronize()
    assert equal(got, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_one_compilation_serves_all_lengths(backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    if backend == "inductor":
        pytest.importorskip("triton", reason="needs Triton for Inductor")

    def layer(q, k, v):
        return sagebwd.attention(q * 2, k, v, causal="bottom-right") * 0.5

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for m in (128, 200, 77, 300):
        inputs, dout = leaves(m, m + 30)
        for t in inputs:
            torch._dynamo.mark_dynamic(t, 2)
        expected, got = layer(*inputs), compiled(*inputs)
        assert torch.equal(got, expected)
        assert equal(torch.autograd.grad(got, inputs, dout),
                     torch.autograd.grad(expected, inputs, dout))  # fmt: skip
    assert counter.frame_count == 1


@pytest.mark.parametrize("known", [False, True])
def test_cuda_graph_replays_with_changed_inputs(known):
    sagebwd.warmup(head_dim=64, causal=True)
    inputs, dout = leaves(256 if known else 250)
    if known:  # captured is then a call straight to the kernels
        gradients(inputs, dout, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = sagebwd.attention(*inputs, causal=True, return_lse=True)
        captured = (out, lse, *torch.autograd.grad(out, inputs, dout))
    for seed in (1, 2, 3):
        fresh, fresh_dout = leaves(inputs[0].shape[2], seed=seed)
        with torch.no_grad():
            for to, source in zip((*inputs, dout), (*fresh, fresh_dout)):
                to.copy_(source)
        graph.replay()
        out, lse = sagebwd.attention(*fresh, causal=True, return_lse=True)
        assert equal(captured, (out, lse, *torch.autograd.grad(out, fresh, fresh_dout)))


def test_capture_without_warmup_says_so():
    q, k, v, _ = make(64, dtype=torch.float16)
    rare = dict(granularity="block", smooth_k=False, rotate=False, causal="bottom-right")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(sagebwd.DriverError, match="warmup"), torch.cuda.graph(graph):
        sagebwd.attention(q, k, v, **rare)
    assert bool(sagebwd.attention(q, k, v, **rare).isfinite().all())  # and nothing is broken


def test_forward_and_backward_from_threads():
    from concurrent.futures import ThreadPoolExecutor

    inputs, dout = leaves(300)
    expected = gradients(inputs, dout)

    def work(_):
        return equal(gradients([t.detach().requires_grad_() for t in inputs], dout), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(16)))


def test_another_device_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = make(200)
    there = [t.to("cuda:1") for t in tensors]
    assert torch.cuda.current_device() == 0
    out, lse = sagebwd.attention_forward(*there[:3])
    got = (out, lse, *sagebwd.attention_backward(there[3], *there[:3], out, lse))
    out, lse = sagebwd.attention_forward(*tensors[:3])
    want = (out, lse, *sagebwd.attention_backward(tensors[3], *tensors[:3], out, lse))
    assert all(g.device.index == 1 for g in got)
    assert equal([g.cpu() for g in got], [w.cpu() for w in want])
    with pytest.raises(sagebwd.SpecError, match="one device"):
        sagebwd.attention(there[0], *tensors[1:3])
    for _ in range(2):  # the second time without the operators
        assert equal([sagebwd.attention(*there[:3]).cpu()], [want[0].cpu()])
        assert equal([sagebwd.attention(*tensors[:3]).cpu()], [want[0].cpu()])


def test_trains_like_sdpa():
    """A few steps of a tiny regression: the loss falls as it does with exact attention."""
    from torch.nn import functional as F

    def losses(attend):
        torch.manual_seed(0)
        project = torch.nn.Linear(64, 3 * 4 * 64, device="cuda")
        head = torch.nn.Linear(4 * 64, 64, device="cuda")
        optimizer = torch.optim.Adam([*project.parameters(), *head.parameters()], 3e-3)
        x = torch.randn(4, 128, 64, device="cuda")
        target = x.cumsum(1) / torch.arange(1, 129, device="cuda")[:, None]
        history = []
        for _ in range(60):
            with torch.autocast("cuda", torch.bfloat16):
                q, k, v = project(x).view(4, 128, 3, 4, 64).permute(2, 0, 3, 1, 4)
                loss = F.mse_loss(head(attend(q, k, v).transpose(1, 2).flatten(2)).float(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(float(loss.detach()))
        return history

    ours = losses(lambda q, k, v: sagebwd.attention(q, k, v, causal=True))
    exact = losses(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert ours[-1] < 0.5 * ours[0]
    assert abs(ours[-1] - exact[-1]) < 0.1 * exact[-1] + 1e-3


def test_results_do_not_depend_on_stale_memory():
    """Workspace and outputs come uninitialised: filling the allocator's memory changes nothing."""
    q, k, v, dout = make(130, 190)
    results = []
    for fill in (0, 255):
        blocks = [torch.full((1 << 20,), fill, dtype=torch.uint8, device="cuda") for _ in range(64)]
        del blocks
        out, lse = sagebwd.attention_forward(q, k, v)
        results.append((out, lse, *sagebwd.attention_backward(dout, q, k, v, out, lse)))
    for name, a, b in zip(NAMES, *results):
        assert torch.equal(a, b), name
    assert relative(results[0][0], results[1][0]) == 0
