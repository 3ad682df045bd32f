"""The operation without a GPU: signature, refusals, and shapes on meta tensors."""

import inspect

import numpy as np
import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")


def make(*shape, dtype=torch.bfloat16, grad=False, device="meta"):
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=grad)


def inputs(m=100, n=100, h=4, hk=2, d=64, **kwargs):
    return (make(2, h, m, d, **kwargs), make(2, hk, n, d, **kwargs), make(2, hk, n, d, **kwargs))


def test_signature():
    expected = (
        "(q, k, v, *, causal=False, window_left=None, window_right=None, granularity='row', "
        "group_q=None, group_kv=None, sink_keys=None, smooth_k=True, smooth_q=False, "
        "smooth_v=False, rotate=True, precision='six-of-seven', deterministic=True, dq_sums='fp32', dp_sums='fp32', "
        "gradient_kernels='any', softmax_scale=None, layout='bhsd', return_lse=False, "
        "return_max_logits=False, sink_logits=None, k_mean=None, cu_seqlens_q=None, "
        "cu_seqlens_k=None, seqused_q=None, seqused_k=None, startend_row_indices=None, "
        "mask=None, score=None, q_norm=None, k_norm=None, "
        "norm_eps=1e-06, q_inv_rms=None, k_inv_rms=None, rope=None, rope_k=None, "
        "rope_style='halves', rope_begin=0, gate=None, recompute_qk=False)"
    )
    assert str(inspect.signature(sagebwd.attention)) == expected


def test_the_three_functions_share_their_options():
    def keywords(function):
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    options = keywords(sagebwd.attention_forward)
    layer = {**keywords(sagebwd.qk_norm_rope), "gate": None, "recompute_qk": False}
    assert keywords(sagebwd.attention) == {
        **layer, **options, "return_lse": False, "return_max_logits": False, "sink_logits": None}
    assert keywords(sagebwd.attention_backward) == {**options, "dlse": None, "part": None}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_shapes_and_strides(layout):
    q, k, v = inputs(100, 80, grad=True)
    if layout == "bshd":  # views of other memory orders give contiguous results too
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out, lse = sagebwd.attention(q, k, v, layout=layout, return_lse=True)
    assert out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    assert lse.shape == (2, 4, 100) and lse.dtype == torch.float32 and lse.is_contiguous()
    gradients = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    for gradient, t in zip(gradients, (q, k, v)):
        assert gradient.shape == t.shape and gradient.dtype == t.dtype


@pytest.mark.parametrize("wanted", range(1, 8))
def test_any_subset_of_gradients(wanted):
    tensors = inputs()
    for i, t in enumerate(tensors):
        t.requires_grad_(bool(wanted >> i & 1))
    sagebwd.attention(*tensors).sum().backward()
    for i, t in enumerate(tensors):
        assert (t.grad is not None) == bool(wanted >> i & 1)


def test_no_gradients_no_graph():
    assert not sagebwd.attention(*inputs()).requires_grad
    with torch.no_grad():
        assert not sagebwd.attention(*inputs(grad=True)).requires_grad


def test_explicit_halves():
    q, k, v = inputs(100, 60)
    out, lse = sagebwd.attention_forward(q, k, v, causal="bottom-right")
    dlse = torch.empty_like(lse)
    gradients = sagebwd.attention_backward(out, q, k, v, out, lse, dlse=dlse, causal="bottom-right")
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


def test_double_backward_is_refused():
    q, k, v = inputs(grad=True)
    out = sagebwd.attention(q, k, v)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        (out.sum() + gradient.square().sum()).backward()


def test_fakes_match_on_fake_cuda_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = inputs(100, 80, device="cuda")
        out, lse = sagebwd.attention(q, k, v, return_lse=True)
        assert out.device.type == "cuda" and out.stride() == (4 * 100 * 64, 100 * 64, 64, 1)
        assert lse.stride() == (400, 100, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_float32_inputs(dtype, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    # torch.autocast("cuda") switches itself off without a GPU: set what it would set.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: dtype)
    with FakeTensorMode():
        q, k, v = inputs(device="cuda", dtype=torch.float32)
        assert sagebwd.attention(q, k, v).dtype == dtype
        assert sagebwd.attention(q.bfloat16(), k, v.half()).dtype == dtype
        with pytest.raises(sagebwd.SpecError, match="float64"):
            sagebwd.attention(q.double(), k, v)


def test_compiles_into_one_graph_with_symbolic_lengths():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    @torch.compile(fullgraph=True, backend=backend, dynamic=True)
    def layer(q, k, v):
        return sagebwd.attention(q * 2, k, v, causal=True, layout="bshd") + 1

    for m in (100, 129, 257):
        q, k, v = (make(2, m, h, 64, grad=True) for h in (4, 2, 2))
        assert layer(q, k, v).shape == q.shape
    assert len(graphs) == 1
    targets = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert any(getattr(t, "__name__", "") == "forward" or t == torch.ops.sagebwd.forward
               for t in targets)  # fmt: skip


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("causal", "more_keys"), [(False, 28), (True, 0), ("top-left", 28), ("bottom-right", 28)]
)
def test_one_compilation_serves_all_lengths(backend, layout, causal, more_keys):
    from torch._dynamo.testing import CompileCounterWithBackend

    # Each with each of the others, though not with each pair of them.
    marked = (backend == "eager") ^ (layout == "bhsd") ^ (causal in (True, "top-left"))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    token = 2 if layout == "bhsd" else 1

    @torch.compile(fullgraph=True, backend=counter, dynamic=None if marked else True)
    def layer(q, k, v):
        out, lse = sagebwd.attention(q * 2, k, v, causal=causal, layout=layout, return_lse=True)
        return out * 2, lse

    for m in (100, 129, 257, 64, 511):
        lengths = (m, m + more_keys, m + more_keys)
        tensors = [make(2, h, n, 64) if token == 2 else make(2, n, h, 64)
                   for h, n in zip((4, 2, 2), lengths)]  # fmt: skip
        for t in tensors:
            t.requires_grad_()
            if marked:  # an error where a length is taken for a constant
                torch._dynamo.mark_dynamic(t, token)
        out, lse = layer(*tensors)
        assert out.shape == tensors[0].shape and lse.shape == (2, 4, m)
        out.sum().backward()
    assert counter.frame_count == 1


@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 32), (128, 64), (256, 128), (192, 24),
                                                     (96, 36), (96, 64), (192, 128)])  # fmt: skip
def test_meta_tensors_take_the_widths_of_v_that_kernels_take(head_dim, value_dim):
    """A launch asks the same function of the C++ library."""
    tensors = [make(1, 2, 64, d) for d in (head_dim, head_dim, value_dim, value_dim, value_dim)]
    q, k, v, dout, out = tensors
    lse = make(1, 2, 64, dtype=torch.float32)
    calls = (lambda: sagebwd.attention(q, k, v),
             lambda: sagebwd.attention_backward(dout, q, k, v, out, lse))  # fmt: skip
    if (head_dim, value_dim) in ((96, 64), (192, 128)):
        assert calls[0]().shape == out.shape and calls[1]()[2].shape == v.shape
        return
    for call in calls:
        with pytest.raises(sagebwd.SpecError) as refused:
            call()
        assert str(refused.value).startswith(
            f"value_dim = {value_dim} with head_dim = {head_dim} is not supported: ")


def test_true_means_top_left_where_lengths_agree():
    q, k, v = inputs(100, 100)
    sagebwd.attention(q, k, v, causal=True)
    with pytest.raises(sagebwd.SpecError) as error:
        sagebwd.attention(q, *inputs(100, 80)[1:], causal=True)
    for part in ("100 queries and 80 keys", "top-left", "bottom-right"):
        assert part in str(error.value)
    # Under 'bshd' the token axis is another one: 4 queries and 2 keys here.
    with pytest.raises(sagebwd.SpecError, match="4 queries and 2 keys"):
        sagebwd.attention(q, k, v, causal=True, layout="bshd")


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("is_causal", "'causal'"),
        ("sm_scale", "'softmax_scale'"),
        ("sofmax_scale", "'softmax_scale'"),
        ("smoothk", "'smooth_k'"),
        ("dropout_p", "dropout is not supported"),
        ("attn_mask", "masks are not supported"),
        ("block_mask", "sagebwd.block_sparse_attention has it"),
        ("xyzzy", "known keywords: causal"),
    ],
)
def test_unknown_keywords_of_attention(keyword, hint):
    with pytest.raises(TypeError, match=f"'{keyword}'.*{hint}"):
        sagebwd.attention(*inputs(), **{keyword: None})


def cpu(*shape, **kwargs):
    return make(*shape, device="cpu", **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update({n: a[n].float() for n in "qkv"}), "torch.float32.*autocast"),
        (lambda a: a.update(k=a["k"].half()), "one dtype"),
        (lambda a: a.update(v=a["v"].half()), "one dtype"),
        (lambda a: a.update({n: make(2, 2, 9, 84) for n in "qkv"}),
         "84 is not built.*multiples of 8 from 32 to 512"),
        (lambda a: a.update(v=make(2, 2, 100, 128)), "64, 64 and 128"),
        (lambda a: a.update(q=a["q"][0]), "q has rank 3.*rank 4"),
        (lambda a: a.update(k=a["k"][None]), "k has rank 5"),
        (lambda a: a.update(k=make(2, 3, 100, 64), v=make(2, 3, 100, 64)), "4 heads.*3"),
        (lambda a: a.update(k=make(1, 2, 100, 64), v=make(1, 2, 100, 64)), "batch 2 and k 1"),
        (lambda a: a.update(v=make(2, 2, 99, 64)), "k has shape.*v"),
        (lambda a: a.update({n: cpu(2, 2, 9, 64) for n in "qkv"}), "on cpu.*trace.*reference"),
        (lambda a: a.update(k=cpu(2, 2, 100, 64)), "k is on cpu"),
        (lambda a: a.update(layout="sbhd"), "sbhd.*bhsd.*bshd"),
        (lambda a: a.update(granularity="tensor"), "tensor.*row, block"),
        (lambda a: a.update(precision="fp8"), "fp8.*six-of-seven, qk16, dv16, gradients16"),
        (lambda a: a.update(group_q=32), "group_q = 32"),
        (lambda a: a.update(causal="left"), "causal='left'.*top-left"),
        (lambda a: a.update(causal=1), "causal=1"),
        (lambda a: a.update(return_lse="yes"), "return_lse='yes': pass True or False"),
        (lambda a: a.update(softmax_scale=-1e-21), "softmax_scale=-1e-21"),
        (lambda a: a.update(softmax_scale=1e-44), "softmax_scale=1e-44: .*at least 1e-20"),
        (lambda a: a.update(softmax_scale=9.9e-21), "below 3.4e38.*at least 1e-20"),
        (lambda a: a.update(softmax_scale=float("nan")), "softmax_scale=nan"),
        (lambda a: a.update(softmax_scale=float("inf")), "softmax_scale=inf"),
        (lambda a: a.update(softmax_scale=-1.0, precision="qk16"),
         "softmax_scale = -1 is not supported under 'qk16', where Q is not copied: negate Q"),
        (lambda a: a.update(seqused_k=make(2, dtype=torch.int32), granularity="block"),
         "packed sequences are not supported under 'block'"),
        (lambda a: a.update(seqused_q=make(2, dtype=torch.int32), smooth_q=True),
         "smooth_q is not supported for packed sequences"),
        (lambda a: a.update({n: a[n][0] for n in "qkv"}, granularity="block", **dict.fromkeys(
            ("cu_seqlens_q", "cu_seqlens_k"), make(3, dtype=torch.int32))),
         "packed sequences are not supported under 'block'"),
    ],
)
def test_calls_that_are_refused(change, message):
    q, k, v = inputs()
    arguments = dict(q=q, k=k, v=v)
    change(arguments)
    with pytest.raises(sagebwd.SpecError, match=message):
        sagebwd.attention(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(dout=a["dout"][:, :1]), "dout is"),
        (lambda a: a.update(dout=a["dout"].float()), "dout is.*float32"),
        (lambda a: a.update(out=a["out"][:, :, :9]), "out is"),
        (lambda a: a.update(lse=a["lse"].bfloat16()), "lse is.*float32"),
        (lambda a: a.update(lse=a["lse"][..., None]), "lse is"),
        (lambda a: a.update(dlse=a["lse"][:1]), "dlse is"),
        (lambda a: a.update(softmax_scale=-0.5, precision="qk16"), "softmax_scale = -0.5 is not"),
        (lambda a: a.update(seqused_k=make(2, dtype=torch.int32), granularity="block"),
         "packed sequences are not supported under 'block'"),
    ],
)
def test_backward_refused(change, message):
    q, k, v = inputs()
    out, lse = sagebwd.attention_forward(q, k, v)
    arguments = dict(dout=out, q=q, k=k, v=v, out=out, lse=lse)
    change(arguments)
    with pytest.raises(sagebwd.SpecError, match=message):
        sagebwd.attention_backward(**arguments)


def test_the_least_softmax_scale():
    from sagebwd.core import options

    assert options.check_softmax_scale(1e-20, 64) == 1e-20
    sagebwd.attention(*inputs(), softmax_scale=1e-20)
    with pytest.raises(sagebwd.SpecError, match="at least 1e-20"):
        q, k, v = inputs()
        out, lse = sagebwd.attention_forward(q, k, v)
        sagebwd.attention_backward(out, q, k, v, out, lse, softmax_scale=1e-21)


def test_sparse_tensors_are_refused_with_the_way_out(monkeypatch):
    from sagebwd.core import ops

    monkeypatch.setattr(ops, "DEVICES", ("cpu",))
    q = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    given = dict(dout=q, q=q, k=q, v=q, out=q, lse=q[..., 0].float())
    for name in ("q", "dout"):
        with pytest.raises(sagebwd.SpecError, match=f"{name} is torch.sparse_coo.*to_dense"):
            sagebwd.attention_backward(**given | {name: q.to_sparse()})
    for grad in (False, True):
        with pytest.raises(sagebwd.SpecError, match=r"q is torch.sparse_coo.*to_dense"):
            sagebwd.attention(q.to_sparse().requires_grad_(grad), q, q)
    for function in (sagebwd.emulation.emulated_attention, sagebwd.reference.exact):
        with pytest.raises(sagebwd.SpecError, match=r"is torch.sparse_coo.*to_dense"):
            function(*[q.to_sparse()] * 3)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused_with_the_way_out(layout):
    nested = torch.nested.nested_tensor([torch.zeros(n, 4, 64) for n in (5, 7)], layout=layout,
                                        dtype=torch.bfloat16)  # fmt: skip
    calls = (sagebwd.attention, sagebwd.attention_forward, sagebwd.flash_attn_func,
             sagebwd.scaled_dot_product_attention,
             lambda *qkv: sagebwd.attention_backward(qkv[0], *qkv, *qkv[:2]))  # fmt: skip
    for call in calls:
        with pytest.raises(sagebwd.SpecError, match=r"nested tensor: .* as cu_seqlens_q"):
            call(nested, nested, nested)


def test_numpy_arrays_are_refused_with_the_way_out():
    arrays = [np.zeros((1, 1, 8, 64), np.float32)] * 3
    with pytest.raises(TypeError, match=r"q is an ndarray.*sagebwd.reference"):
        sagebwd.attention(*arrays)
    with pytest.raises(TypeError, match="dout is an ndarray"):
        sagebwd.attention_backward(arrays[0], *inputs(), arrays[0], arrays[0])


def test_strides_that_kernels_cannot_read():
    from sagebwd.core.arguments.shapes import operand_of, required_operand

    t = torch.empty(2, 4, 6, 64, dtype=torch.bfloat16)
    address = t.data_ptr()
    assert operand_of(t, "bhsd") == (address, 4 * 6 * 64, 6 * 64, 64)
    assert operand_of(t, "bshd") == (address, 4 * 6 * 64, 64, 6 * 64)
    assert operand_of(t.transpose(1, 2), "bshd") == (address, 4 * 6 * 64, 6 * 64, 64)
    assert operand_of(t[:, :1].expand(2, 4, 6, 64), "bhsd") == (address, 4 * 6 * 64, 0, 64)
    # Strides of dimensions of size one do not matter.
    odd = torch.empty(6, 67, dtype=torch.bfloat16)[:, :64].as_strided((1, 6, 1, 64), (3, 0, 5, 1))
    assert operand_of(odd, "bhsd")[1:] == (0, 0, 0)
    for bad in (t.mT, t[..., ::2], t.flatten()[4:-60].view(2, 4, -1, 2),
                torch.empty(2, 4, 6, 68, dtype=torch.bfloat16)[..., :64]):  # fmt: skip
        assert operand_of(bad, "bhsd") is None
        with pytest.raises(sagebwd.SpecError, match=r"k has strides \(.*pass k\.contiguous\(\)"):
            required_operand("k", bad if not bad.is_contiguous() else bad.mT, "bhsd")
    shifted = torch.empty(2 * 64 + 4, dtype=torch.bfloat16)[4:].view(1, 1, 2, 64)
    with pytest.raises(sagebwd.SpecError, match=r"address .*pass v\.clone\(\)"):
        required_operand("v", shifted, "bhsd")


def test_operators_can_be_saved_by_selective_checkpointing():
    assert isinstance(torch.ops.sagebwd.forward.default, torch._ops.OpOverload)
    assert isinstance(torch.ops.sagebwd.backward.default, torch._ops.OpOverload)


def test_warmup_refuses_what_no_kernel_takes():
    with pytest.raises(sagebwd.SpecError, match=r"torch.float32"):
        sagebwd.warmup(dtype=torch.float32)
    for name, hint in {"sliding_window": r"pass window_left=sliding_window - 1",
                       "lse": r"did you mean 'return_lse'\?"}.items():  # fmt: skip
        with pytest.raises(TypeError, match=hint):
            sagebwd.attention(None, None, None, **{name: True})
    packed = torch.zeros(24, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(sagebwd.SpecError, match=r"q has rank 3 .*Packed sequences, \(tokens, heads, "
                       r"head_dim\), need cu_seqlens_q= and cu_seqlens_k="):  # fmt: skip
        sagebwd.attention(packed, packed, packed)
    with pytest.raises(TypeError, match="did you mean"):
        sagebwd.warmup(headdim=64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_driver_the_error_says_so():
    from sagebwd.core.forms import operation

    with pytest.raises(
        (sagebwd.LibraryError, sagebwd.DriverError), match=r"(?i)libcuda|driver|GPU"
    ):
        operation(0, "", head_dim=64, dtype=torch.bfloat16)
