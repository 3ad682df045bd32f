"""Compares what the kernels compute with FP64 and with the emulation of the same numerics."""

import pytest
from inputs import EMULATION_LIMIT, NAMES, emulated, kernels, make, relative, torch

import sagebwd
from sagebwd.core import forms
from sagebwd.numerics.exact import exact_attention

# Over the paper's figures for sigma = 1 by what short sequences add; the emulation binds closer.
LIMITS = {
    "row": dict(out=0.02, lse=0.002, dq=0.03, dk=0.03, dv=0.02),
    "block": dict(out=0.03, lse=0.002, dq=0.08, dk=0.08, dv=0.05),
}


def run(*tensors, **options):
    return vars(kernels(*tensors, **options))


def exact(*tensors, **options):
    return vars(exact_attention(*tensors, **options))


def check(tensors, *, limits=None, **options):
    found = kernels(*tensors, **options)
    places = ("dlse", "causal", "layout", "softmax_scale")
    reference = exact(*tensors, **{n: options[n] for n in places if n in options})
    expected = vars(emulated(*tensors, given=found, **options))
    limits = limits or LIMITS[options.get("granularity", "row")]
    for name, got in vars(found).items():
        assert got.shape == reference[name].shape
        assert got.is_contiguous()
        assert relative(got, reference[name]) <= limits[name], f"{name} against FP64"
        assert relative(got, expected[name]) <= EMULATION_LIMIT, f"{name} against emulation"


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("causal", [False, "top-left"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [64, 128])
def test_specs(d, dtype, causal, granularity):
    # Long: the few values that an approximate exponential rounds the other way average.
    check(make(1024, h=8, d=d, dtype=dtype), causal=causal, granularity=granularity)


@pytest.mark.parametrize("precision", ["six-of-seven", "gradients16"])
@pytest.mark.parametrize("d", [32, 40, 72, 80, 96, 112, 160, 192, 200])
def test_head_dims(d, precision):
    tensors = make(700, 600, h=4, hk=2, d=d)
    check(tensors, causal="bottom-right", precision=precision)
    # As if the caller had filled the channels up, but for the order of sums over them: bit for bit.
    width = next(w for w in (64, 128, 256) if w >= d)
    zeros = [torch.nn.functional.pad(x, (0, width - d)) for x in tensors]
    options = dict(softmax_scale=d**-0.5, precision=precision)
    own, filled = run(*tensors, **options), run(*zeros, **options)
    for name in NAMES:
        padding = filled[name][..., d:] if name != "lse" else filled[name][..., :0]
        assert not padding.any(), name
        shared = filled[name] if name == "lse" else filled[name][..., :d]
        assert torch.equal(own[name], shared), name


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("smooth_k", [True, False])
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("precision", ["six-of-seven", "qk16"])
def test_options(granularity, smooth_k, rotate, precision):
    check(make(300, 200), granularity=granularity, smooth_k=smooth_k, rotate=rotate,
          precision=precision)  # fmt: skip


@pytest.mark.parametrize("causal", [False, "top-left", "bottom-right"])
@pytest.mark.parametrize("m, n", [(129, 129), (63, 300), (300, 63), (257, 31), (64, 1), (2, 500)])
def test_errors_of_any_lengths(m, n, causal):
    limits = {name: 2 * limit for name, limit in LIMITS["row"].items()}  # few numbers, more noise
    limits["lse"] = 0.02  # of one key it is a single score, which nothing averages
    if min(m, n) == 1 or causal:
        # A row that sees one key has dP = delta: its dS is a rounding error of either side.
        tensors = make(m, n)
        got = run(*tensors, causal=causal)
        reference = exact(*tensors, causal=causal)
        for name in ("out", "lse", "dv"):
            assert relative(got[name], reference[name]) <= limits[name], name
        scale = float(reference["dv"].abs().max())
        for name in ("dq", "dk"):
            assert float((got[name] - reference[name]).abs().max()) <= 0.05 * scale, name
    else:
        check(make(m, n), causal=causal, limits=limits)


def test_one_query_one_key():
    q, k, v, dout = make(1, 1, h=2, hk=2)
    got = run(q, k, v, dout)
    assert relative(got["out"], v) < 0.01 and relative(got["dv"], dout) < 0.01
    assert float(got["dq"].abs().max()) < 0.05 and float(got["dk"].abs().max()) < 0.05


@pytest.mark.parametrize("hk", [1, 2, 4, 8])
def test_grouped_queries(hk):
    check(make(200, 300, h=8, hk=hk))


def test_groups_equal_repeated_heads():
    q, k, v, dout = make(200, h=6, hk=2)
    grouped = run(q, k, v, dout)
    repeated = run(q, *(t.repeat_interleave(3, 1) for t in (k, v)), dout)
    for name in ("out", "lse", "dq"):
        assert torch.equal(grouped[name], repeated[name]), name
    for name in ("dk", "dv"):
        summed = repeated[name].float().unflatten(1, (2, 3)).sum(2)
        assert relative(grouped[name], summed) < 6e-3, name


@pytest.mark.parametrize("sigma", [0.1, 3.0, 10.0])
def test_magnitudes(sigma):
    # At large sigma P and dS are nearly one-hot: quantised steps near a tie weigh more.
    limits = dict(out=0.13, lse=0.02, dq=0.7, dk=0.7, dv=0.13)
    check(make(512, sigma=sigma), limits=limits)


def test_softmax_scale():
    check(make(200), softmax_scale=0.05)
    check(make(200), softmax_scale=0.3, limits=dict(out=0.06, lse=0.01, dq=0.15, dk=0.15, dv=0.06))


@pytest.mark.parametrize("causal", [False, "bottom-right"])
@pytest.mark.parametrize("precision", ["six-of-seven", "qk16"])
def test_gradient_through_lse(causal, precision):
    tensors = list(make(150, 250))
    tensors[1] = (tensors[1] + 3).bfloat16()  # keys with a mean
    dlse = torch.randn(2, 4, 150, device="cuda")
    check(tensors, dlse=dlse, causal=causal, precision=precision)


def test_channel_outliers_need_smoothing_and_rotation():
    tensors = list(make(512, d=128))
    tensors[0][..., 7] *= 12
    tensors[1][..., 7] = tensors[1][..., 7] * 3 + 20
    reference = exact(*tensors)
    errors = [relative(run(*tensors, smooth_k=s, rotate=r)["dq"], reference["dq"])
              for s, r in ((True, True), (True, False), (False, False))]  # fmt: skip
    assert errors[0] < errors[1] < errors[2]


def test_deterministic():
    tensors = make(777, d=128, h=8)
    first, second = run(*tensors, causal=True), run(*tensors, causal=True)
    for name in NAMES:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [1, 1e4, 1e-6])
def test_sums_of_dq_in_fp16(d, causal, scale):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs sm_90a")
    tensors = list(make(1024, d=d))
    tensors[3] = tensors[3] * scale
    options = dict(causal=causal, precision="gradients16", deterministic=False)
    fp16, fp32 = run(*tensors, **options, dq_sums="fp16"), run(*tensors, **options)
    assert torch.equal(fp16["out"], fp32["out"])
    assert torch.equal(fp16["lse"], fp32["lse"])
    # At 64 channels FP32's are of two kernels: other sums of dK and dV, and all of them bf16's.
    same = 0 if d == 128 else 2e-3
    for name, bound in (("dk", same), ("dv", same), ("dq", 3e-3)):
        assert relative(fp16[name], fp32[name]) <= bound, name  # .0005 is FP16's rounding


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shift", [0, 10])
def test_sums_of_dp_in_fp16(d, causal, shift):
    tensors = list(make(1024, d=d))
    tensors[2] = tensors[2] + shift
    with forms.kernels_of("mma"):  # whose own family has none on sm_90a
        fp16, fp32 = run(*tensors, causal=causal, dp_sums="fp16"), run(*tensors, causal=causal)
    for name in ("out", "lse", "dv"):
        assert torch.equal(fp16[name], fp32[name]), name
    for name in ("dq", "dk"):
        assert not torch.equal(fp16[name], fp32[name]), name
        # Here and there a value is rounded to the next integer.
        assert relative(fp16[name], fp32[name]) <= 6e-3, name


def test_rows_that_see_no_key():
    tensors = make(200, 70)
    got = run(*tensors, causal="bottom-right")
    blind = 200 - 70
    for name in ("out", "dq"):
        assert bool((got[name][:, :, :blind] == 0).all()), name
    assert bool((got["lse"][:, :, :blind] == -torch.inf).all())


@pytest.mark.parametrize("b, m, n", [(0, 64, 64), (2, 0, 64), (2, 64, 0), (0, 0, 0)])
def test_empty(b, m, n):
    tensors = make(m, n, b=b)
    got = run(*tensors)
    expected = dict(zip(NAMES, (tensors[0], None, *tensors[:3])))
    for name in ("out", "dq", "dk", "dv"):
        assert got[name].shape == expected[name].shape and bool((got[name] == 0).all())
    assert bool((got["lse"] == -torch.inf).all())


@pytest.mark.parametrize("granularity", ["row", "block"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "dout"])
def test_non_finite_values_stay_visible(which, value, granularity):
    tensors = list(make(150, 170))
    clean = run(*tensors, granularity=granularity)
    tensors[which] = tensors[which].clone()
    tensors[which][0, 1, 70, 33] = value
    got = run(*tensors, granularity=granularity)
    reference = exact(*tensors)
    for name in ("out", "dq", "dk", "dv"):
        if not reference[name].isfinite().all():
            assert not got[name].isfinite().all(), f"{name} hides it"
        assert torch.equal(got[name][1], clean[name][1]), f"{name}: it left its batch"
    # It may spread to the queries and keys that share a key head, no further. Query head 1 reads
    # key head 0, key head 1 serves query heads 2 and 3.
    spared_q, spared_k = ((2, 3), (1,)) if which in (0, 3) else ((0, 1), (0,))
    for name, spared in (("out", spared_q), ("dq", spared_q), ("dk", spared_k), ("dv", spared_k)):
        for head in spared:
            assert torch.equal(got[name][0, head], clean[name][0, head]), (
                f"{name}: it left its head"
            )


@pytest.mark.parametrize("causal", [False, "top-left"])
def test_trace_on_the_gpu(causal):
    q, k, v, dout = make(512, d=64)
    table = sagebwd.trace(q, k, v, dout, causal=causal)
    on_cpu = sagebwd.trace(q, k, v, dout, causal=causal, device="cpu")
    for name, figures in on_cpu.items():
        assert table[name]["rel_l2"] == pytest.approx(figures["rel_l2"], rel=0.01, abs=1e-5), name
    for name in ("O", "dQ", "dK", "dV"):
        # Rounded to bf16, which adds at most 2^-9 to each element.
        assert table["kernels"][name]["rel_l2"] == pytest.approx(
            table[name]["rel_l2"], rel=0.05, abs=2e-3
        ), name
    assert "kernels" not in sagebwd.trace(q, k, v, dout, precision=sagebwd.PRODUCTS)
