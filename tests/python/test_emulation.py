"""The PyTorch emulation against the C++ reference and against FP64."""

import inspect

import numpy as np
import pytest

import sagebwd
from sagebwd import reference

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sagebwd.core import options  # noqa: E402
from sagebwd.numerics import emulation, numerics  # noqa: E402
from sagebwd.numerics.exact import exact_attention  # noqa: E402

NAMES = ("out", "lse", "dq", "dk", "dv")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def relative(x, expected):
    x, expected = (np.asarray(t, dtype=np.float64) for t in (x, expected))
    seen = np.isfinite(expected)
    assert np.array_equal(seen, np.isfinite(x))
    return np.linalg.norm(x[seen] - expected[seen]) / np.linalg.norm(expected[seen])


def both(m, n, *, d=64, heads=4, heads_kv=2, dtype="bf16", sigma=1.0, with_dlse=False, seed=0,
         causal="none", precision="six-of-seven", octaves=0, magnitudes=(1, 1, 1),
         **options):  # fmt: skip
    """Unrounded results of the C++ reference and of the emulation, from the same inputs.

    Rows of dO differ by factors of up to 2^octaves either way; q, k and v are `magnitudes` larger.
    """
    arrays = reference.random_inputs(m, head_dim=d, heads=heads, heads_kv=heads_kv, batch=2,
                                     seq_len_kv=n, dtype=dtype, sigma=sigma, seed=seed)  # fmt: skip
    arrays[1][..., 3] += 4  # a key offset, which smoothing removes
    arrays[3][...] *= np.exp2(np.random.default_rng(seed).integers(-octaves, octaves + 1,
                                                                   (2, heads, m, 1)))  # fmt: skip
    for x, factor in zip(arrays, magnitudes):
        x *= factor
    arrays = [reference.round_to(x, dtype) for x in arrays]
    dlse = np.random.default_rng(seed).standard_normal((2, heads, m)).astype(np.float32)
    dlse = dlse if with_dlse else None
    expected = reference.emulate(*arrays, dlse=dlse, dtype=dtype, causal=causal,
                                 precision=precision, **options)  # fmt: skip
    q, k, v, dout = (torch.from_numpy(x).to(DTYPES[dtype]) for x in arrays)
    rules = emulation.emulation_rules(q, k, v, causal=False if causal == "none" else causal,
                                      plan=precision, **options)  # fmt: skip
    q, k, v, dout, dlse = emulation.grouped(
        heads_kv, q, k, v, dout, None if dlse is None else torch.from_numpy(dlse)
    )
    out, lse, _ = numerics.forward_chunk(q, k, v, rules)
    gradients = numerics.backward_chunk(q, k, v, out, lse, dout, dlse, rules)
    got = {
        name: t.unflatten(0, (2, heads_kv)).flatten(1, 2)
        for name, t in zip(NAMES, (out, lse, *gradients))
    }
    return got, expected


def assert_same(got, expected):
    """Equal but for FP32 summation order.

    That order can move a number across a rounding tie of a quantiser, which changes one row of one
    result by one level of one element: nearly all rows must agree to FP32, all results to 1e-3.
    """
    for name in NAMES:
        assert got[name].shape == expected[name].shape, name
        assert relative(got[name], expected[name]) <= (1e-6 if name == "lse" else 1e-3), name
        if name != "lse":
            difference = np.linalg.norm(got[name].double().numpy() - expected[name], axis=-1)
            rows = np.linalg.norm(expected[name].astype(np.float64), axis=-1)
            typical = np.sqrt(np.mean(rows**2))
            # A tie of P, rounded to 16 or 8 bits, is broken by the last bit of an exponential, and
            # changes a row: one in fifty on average, and three standard deviations more.
            expected_ties = 0.02 * difference.size
            others = np.sum(difference > 1e-5 * typical)
            assert others <= expected_ties + 3 * expected_ties**0.5, (name, others)


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize(("m", "n"), [(150, 150), (200, 70), (70, 200)])
def test_equals_the_reference(granularity, causal, m, n):
    assert_same(*both(m, n, granularity=granularity, causal=causal))


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("precision", options.PRECISIONS)
def test_equals_the_reference_under_options(granularity, smooth_k, rotate, precision):
    assert_same(*both(90, 130, granularity=granularity, smooth_k=smooth_k, rotate=rotate,
                      precision=precision, with_dlse=True))  # fmt: skip


@pytest.mark.parametrize("causal", ["none", "bottom-right"])
@pytest.mark.parametrize("precision", options.PRECISIONS)
def test_equals_the_reference_without_a_key_apart(causal, precision):
    assert_same(*both(100, 150, precision=precision, causal=causal, sink_keys=0, with_dlse=True))


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("precision", ["six-of-seven", "dv16", ("dv", "dp")])
def test_equals_the_reference_where_rows_of_gradients_differ(granularity, precision):
    assert_same(*both(120, 150, granularity=granularity, precision=precision, octaves=4))


def test_equals_the_reference_across_units_of_channels():
    assert_same(*both(530, 1100, heads=2, heads_kv=1, causal="top-left"))


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("product", [*sagebwd.PRODUCTS, None])
def test_equals_the_reference_with_one_product_in_int8(granularity, product):
    plan = () if product is None else (product,)
    assert_same(*both(100, 100, granularity=granularity, precision=plan, with_dlse=True))


@pytest.mark.parametrize(
    "options",
    [dict(d=128), dict(dtype="fp16"), dict(group_kv=64), dict(sigma=10.0), dict(heads_kv=4),
     dict(heads_kv=1, seed=3)],
)  # fmt: skip
def test_equals_the_reference_on_other_shapes(options):
    assert_same(*both(130, 190, **options))


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 65), (65, 1)])
def test_shortest_lengths(m, n):
    got, expected = both(m, n)
    for name in NAMES:
        # With one key dq and dk are differences of equal numbers: nothing but rounding.
        scale = np.abs(expected["dv"]).max()
        np.testing.assert_allclose(got[name], expected[name], atol=1e-5 * scale, err_msg=name)


def test_float64_math_has_the_same_quantisers():
    q, k, v, dout = (torch.from_numpy(x).bfloat16() for x in
                     reference.random_inputs(200, head_dim=64))  # fmt: skip
    results = []
    for math_dtype in (torch.float32, torch.float64):
        out, lse = emulation.emulated_forward(q, k, v, math_dtype=math_dtype)
        results.append([out, *emulation.emulated_backward(dout, q, k, v, out, lse,
                                                          math_dtype=math_dtype)])  # fmt: skip
    for a, b in zip(*results):
        assert relative(a.double(), b.double()) < 1e-3  # both rounded to bf16


def tensors(m=90, n=90, h=4, hk=2, d=64, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, h, m, d), (2, hk, n, d), (2, hk, n, d))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("causal, left, right", [
    ("none", 40, 30), ("top-left", 70, None), ("bottom-right", 3, None), ("none", None, 5),
])  # fmt: skip
@pytest.mark.parametrize("granularity", ["row", "block"])
def test_equals_the_reference_in_a_window(granularity, causal, left, right):
    assert_same(*both(140, 300, granularity=granularity, causal=causal, window_left=left,
                      window_right=right))  # fmt: skip


@pytest.mark.parametrize("causal", [False, "top-left", "bottom-right"])
def test_gradients_against_fp64(causal):
    q, k, v = tensors(90, 60)
    out, lse = emulation.emulated_attention(q, k, v, causal=causal, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    # No gradient flows into rows that see nothing.
    dlse = dlse * (lse > -torch.inf)
    torch.autograd.backward([out, lse], [dout, dlse])
    expected = exact_attention(*(t.detach() for t in (q, k, v)), dout, dlse=dlse, causal=causal)
    assert relative(out.detach().double(), expected.out) < 0.015
    assert torch.equal(lse == -torch.inf, expected.lse == -torch.inf)
    assert relative(lse.detach().double(), expected.lse) < 0.01
    for t, gradient in ((q, expected.dq), (k, expected.dk), (v, expected.dv)):
        assert relative(t.grad.double(), gradient) < 0.03


@pytest.mark.parametrize("group_kv", [64, 128])
def test_the_first_key_may_take_most_of_the_mass(group_kv):
    """As in trained models, and with a value near zero."""
    n, d = 2048, 128
    q, k, v, dout = (torch.from_numpy(x) for x in reference.random_inputs(n, head_dim=d))
    q[..., :4], k[..., :4] = 2 + 0.3 * q[..., :4], 0.3 * k[..., :4]
    k[..., 0, :4], v[..., 0, :] = (np.log(n) + 0.5) * d**0.5 / 8, 0.05 * v[..., 0, :]
    q, k, v = (t.bfloat16().requires_grad_() for t in (q, k, v))
    exact = exact_attention(*(t.detach() for t in (q, k, v)), dout.bfloat16(), causal=True)

    def errors(sink_keys):
        out = emulation.emulated_attention(q, k, v, causal=True, sink_keys=sink_keys,
                                           group_kv=group_kv)  # fmt: skip
        dq, dk, _ = torch.autograd.grad(out, (q, k, v), dout.bfloat16())
        pairs = ((out.detach(), exact.out), (dq, exact.dq), (dk, exact.dk))
        return [relative(x.double(), expected) for x, expected in pairs]

    apart, together = errors(None), errors(0)
    assert all(e <= limit for e, limit in zip(apart, (0.010, 0.020, 0.023))), apart
    assert all(e >= 3 * least for e, least in zip(together, apart)), (apart, together)


def test_int8_dp_is_worse():
    q, k, v = tensors(256, 256)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(0)).to(q.dtype)
    exact = reference.exact(*(t.detach().float().numpy() for t in (q, k, v, dout)))
    errors = []
    for plan in ("six-of-seven", sagebwd.PRODUCTS):
        out = emulation.emulated_attention(q, k, v, plan=plan, granularity="block")
        (dq,) = torch.autograd.grad(out, q, dout)
        errors.append(relative(dq.double(), exact["dq"]))
    assert errors[1] > 1.02 * errors[0]


def test_layouts_agree():
    q, k, v = tensors(70, 50)
    expected = emulation.emulated_attention(q, k, v)
    swapped = (t.transpose(1, 2) for t in (q, k, v))
    got = emulation.emulated_attention(*swapped, layout="bshd")
    assert torch.equal(got.transpose(1, 2), expected)


def test_chunks_change_nothing(monkeypatch):
    q, k, v = tensors()
    whole = emulation.emulated_attention(q, k, v, causal=True)
    gradients = torch.autograd.grad(whole.sum(), (q, k, v))
    monkeypatch.setattr(emulation, "CHUNK_ELEMENTS", 1)
    parts = emulation.emulated_attention(q, k, v, causal=True)
    assert torch.equal(whole, parts)
    for a, b in zip(gradients, torch.autograd.grad(parts.sum(), (q, k, v))):
        assert torch.equal(a, b)


def test_precision_settings_of_the_caller_do_not_matter():
    q, k, v = tensors()
    expected = emulation.emulated_attention(q, k, v)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            got = emulation.emulated_attention(q, k, v)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(got, expected)


def test_autocast_casts_inputs():
    q, k, v = (t.detach().float() for t in tensors())
    with pytest.raises(sagebwd.SpecError, match=r"torch.float32.*bfloat16"):
        emulation.emulated_attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert emulation.emulated_attention(q, k, v).dtype == torch.bfloat16


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_one_bad_element_stays_visible(which, value):
    named = dict(zip("qkv", (t.detach() for t in tensors(70, 70))))
    named[which][0, 1, 5, 7] = value
    out = emulation.emulated_attention(**named)
    assert not out[0].isfinite().all()
    assert out[1].isfinite().all()  # nor does it leave its batch


def test_empty_inputs():
    q, k, v = tensors(8, 0)
    out, lse = emulation.emulated_attention(q, k, v, return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())
    out.sum().backward()
    assert bool((q.grad == 0).all()) and k.grad.shape == k.shape


def test_outputs_may_be_changed_in_place():
    """As long as no gradient is asked for: the backward needs out."""
    out, lse = emulation.emulated_attention(*tensors(), return_lse=True)
    expected = 2 * out.detach()
    assert torch.equal(out.mul_(2), expected) and bool((lse.zero_() == 0).all())


def test_what_is_no_tensor_with_values_is_refused():
    q = torch.zeros(1, 1, 8, 32)
    with pytest.raises(TypeError, match="k is a list; pass a torch tensor"):
        emulation.emulated_attention(q, [1], q)
    with pytest.raises(sagebwd.SpecError, match="q is on meta, where nothing is computed"):
        emulation.emulated_attention(*(q.to("meta") for _ in range(3)))


def test_double_backward_is_refused():
    q, k, v = tensors()
    out = emulation.emulated_attention(q, k, v)
    (gradient,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        (out.sum() + gradient.square().sum()).backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(plan=("s", "qk")), "unknown products qk"),
        (dict(group_q=0), "group_q=0"),
        (dict(group_kv=1.5), "group_kv=1.5"),
        (dict(math_dtype=torch.bfloat16), "math_dtype"),
        (dict(granularity="tensor"), "tensor"),
        (dict(sink_keys=2), "sink_keys = 2"),
        (dict(sink_keys=1, granularity="block"), "sink_keys = 1"),
        (dict(causal="up"), "causal='up'"),
    ],
)
def test_what_the_emulation_refuses(options, message):
    with pytest.raises(sagebwd.SpecError, match=message):
        emulation.emulated_attention(*tensors(), **options)


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("magnitudes", [(1, 1, 2.0**-90), (2.0**70, 2.0**-70, 1),
                                        (2.0**-62, 2.0**62, 1)])  # fmt: skip
def test_equals_the_reference_far_from_one(granularity, magnitudes):
    given = dict(granularity=granularity, magnitudes=magnitudes)
    got, expected = both(300, 530, heads=2, heads_kv=1, **given)
    assert_same(got, expected)
    # A head of another magnitude costs what one of 1 does: nothing counts as zeros.
    plain = both(300, 530, heads=2, heads_kv=1, granularity=granularity)[0]
    for name, factor in zip(NAMES, (magnitudes[2], None, magnitudes[1] * magnitudes[2],
                                    magnitudes[0] * magnitudes[2], 1)):  # fmt: skip
        if factor is not None:
            assert relative(got[name].double() / factor, plain[name]) <= 1e-3, name


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("precision", ["six-of-seven", "qk16"])
def test_softmax_scales_of_any_sign(granularity, precision):
    given = dict(causal="top-left", granularity=granularity, precision=precision)
    got, expected = both(150, 150, softmax_scale=-0.125, **given)
    assert_same(got, expected)
    assert_same(*both(150, 150, softmax_scale=-0.125, sigma=3.0, **given))
    # All keys weigh the same: of the scores nothing is left.
    got, expected = both(150, 150, softmax_scale=0, **given)
    assert relative(got["out"], expected["out"]) <= 1e-3
    assert relative(got["lse"], expected["lse"]) <= 1e-6
    assert not any(x[name].any() for x in (got, expected) for name in ("dq", "dk"))


def test_a_negative_scale_is_a_negated_query():
    q, k, v, dout = (torch.from_numpy(x).bfloat16()
                     for x in reference.random_inputs(70, head_dim=64, heads=2))  # fmt: skip
    exact = exact_attention(-q, k, v, dout, softmax_scale=0.2)
    turned = exact_attention(q, k, v, dout, softmax_scale=-0.2)
    assert torch.equal(turned.out, exact.out) and torch.equal(turned.dq, -exact.dq)
    out, lse = emulation.emulated_forward(q, k, v, softmax_scale=-0.2)
    of_negated = emulation.emulated_forward(-q, k, v, softmax_scale=0.2)
    assert torch.equal(out, of_negated[0]) and torch.equal(lse, of_negated[1])


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("plan", ["six-of-seven", "gradients16"])
def test_smoothed_queries_lose_their_mean_and_nothing_else(granularity, plan):
    generator = torch.Generator().manual_seed(4)
    q, k, v, dout = (torch.randn(1, 2, 300, 64, generator=generator) for _ in range(4))
    q = q + 20 * torch.randn(1, 2, 1, 64, generator=generator)  # what smoothing takes away
    q, k, v, dout = (t.bfloat16() for t in (q, k / 20, v, dout))
    exact = exact_attention(q, k, v, dout, causal="top-left")

    def errors(smooth_q):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = emulation.emulated_attention(*leaves, causal=True, granularity=granularity, plan=plan,
                                           rotate=False, smooth_q=smooth_q)  # fmt: skip
        found = (out.detach(), *torch.autograd.grad(out, leaves, dout))
        return [float((x.double() - y).norm() / y.norm())
                for x, y in zip(found, exact.named().values())]  # fmt: skip

    plain, smoothed = errors(False), errors(True)
    assert all(x < y for x, y in zip(smoothed, plain))
    assert smoothed[2] < 0.85 * plain[2]  # dK sums over the queries' mean


def test_compiled_models_leave_it_out_of_their_graphs():
    from torch._dynamo.testing import CompileCounter

    x = torch.randn(1, 24, 2, 64).bfloat16()
    layer = torch.nn.Linear(64, 64).bfloat16()

    def model(x):
        q = layer(x)
        out = sagebwd.emulation.emulated_attention(q, q, q, precision=("s",), layout="bshd")
        return out.float().relu().sum()

    results = []
    counter = CompileCounter()
    torch._dynamo.reset()
    for function in (model, torch.compile(model, backend=counter)):
        loss = function(x)
        (gradient,) = torch.autograd.grad(loss, [layer.weight])
        results.append((loss, gradient))
    assert all(torch.equal(*pair) for pair in zip(*results))
    assert counter.frame_count == 2  # before it, and behind it
    if "reason" in inspect.signature(torch.compiler.disable).parameters:
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"):
            torch.compile(model, fullgraph=True, backend="eager")(x)


def test_options_of_kernels_alone_are_the_same_everywhere():
    """Lists of names are written out where the type stubs read them; a new option joins all."""
    from experiments import attentions

    from sagebwd.core import keywords

    chosen_among_kernels = ("precision", *keywords.NOT_EMULATED)
    assert emulation._NOT_HERE == attentions._KERNELS == chosen_among_kernels
    assert set(keywords.NOT_EMULATED) < set(keywords.NOT_WITH_LISTS) | {"deterministic"}
