"""dP with sums in FP16 (`dp_sums='fp16'`), emulated: against exact arithmetic and FP64."""

from fractions import Fraction

import numpy as np
import pytest

import sagebwd
from sagebwd import reference

torch = pytest.importorskip("torch", reason="needs PyTorch")

from alike import relative  # noqa: E402

from sagebwd.numerics import emulation, half_sums, numerics  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def rounded(x):
    """A fraction, rounded to FP16 by nearest even."""
    if x == 0:
        return Fraction(0)
    exponent = max(x.numerator.bit_length() - x.denominator.bit_length() - 12, -24)
    while abs(x) >= Fraction(2) ** (exponent + 11):
        exponent += 1
    step = Fraction(2) ** exponent
    return round(x / step) * step  # Python rounds fractions to even


def test_each_instruction_rounds_an_exact_sum_once():
    rng = np.random.default_rng(0)
    # The numbers have few bits, so that sums often lie in the middle between two numbers of FP16.
    a = (rng.integers(-64, 64, (20, 40)) * 2.0 ** rng.integers(-14, 0, (20, 40))).astype("f4")
    b = (rng.integers(-64, 64, (30, 40)) * 2.0 ** rng.integers(-8, 5, (30, 40))).astype("f4")
    got = half_sums._half_products(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    for i in range(len(a)):
        for j in range(len(b)):
            total = Fraction(0)
            for first in range(0, 40, 16):
                terms = zip(a[i, first : first + 16], b[j, first : first + 16])
                total = rounded(total + sum(Fraction(float(x)) * Fraction(float(y))
                                            for x, y in terms))  # fmt: skip
            assert Fraction(float(got[i, j])) == total


@pytest.mark.parametrize("x", [65519.0, 65520.0, -70000.0, 2.0**-25, 1.5 * 2**-24, 2.0**-26, 0.0,
                               1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-40, float("nan"), float("inf")])
def test_rounding_is_numpys(x):
    with np.errstate(over="ignore"):
        assert np.array_equal(half_sums._rounded(torch.tensor([x], dtype=torch.float64)).numpy(),
                              np.array([x]).astype(np.float16).astype("f8"), equal_nan=True)


def drawn(n, d, dtype, shift):
    q, k, v, dout = reference.random_inputs(150, seq_kv=n, heads=2, heads_kv=1, head_dim=d,
                                            dtype=dtype, seed=5)  # fmt: skip
    v = reference.round_to(v + shift, dtype)
    rows = np.exp2(np.arange(150) % 17 - 8).astype("f4")[None, None, :, None]
    return q, k, v, reference.round_to(dout * rows, dtype)


@pytest.mark.parametrize("n", [1, 100, 700])
@pytest.mark.parametrize(
    "d, dtype, shift, options",
    [(64, "bf16", 0, {}), (128, "fp16", 10, dict(causal="top-left")),
     (72, "bf16", 3, dict(precision="gradients16")), (256, "bf16", -2, dict(granularity="block")),
     (40, "fp16", 1, dict(precision="dv16", window_left=9))],
)  # fmt: skip
def test_dp_is_the_references_bit_for_bit(n, d, dtype, shift, options):
    check_dp(n, d, dtype, shift, options)


def test_so_is_that_of_values_that_are_summed_in_long_chunks():
    check_dp(5000, 64, "bf16", 3, {})


def check_dp(n, d, dtype, shift, options):
    arrays = drawn(n, d, dtype, shift)
    expected = reference.emulate(*arrays, dtype=dtype, dp_sums="fp16", matrices=True,
                                 round_outputs=True, **options)  # fmt: skip
    tensors = [torch.from_numpy(x).to(DTYPES[dtype]) for x in arrays]
    rules = emulation.emulation_rules(*tensors[:3], dp_sums="fp16", **options)
    out = torch.from_numpy(expected["out"]).to(DTYPES[dtype])
    lse = torch.from_numpy(expected["lse"])
    q, k, v, dout, out, lse = emulation.grouped(1, *tensors, out, lse)
    _, _, _, _, _, dp, ds = numerics.backward_chunk(q, k, v, out, lse, dout, None, rules)
    assert np.array_equal(dp.numpy().reshape(expected["dp"].shape), expected["dp"])
    close = np.isclose(ds.numpy().reshape(expected["ds"].shape), expected["ds"], rtol=1e-4,
                       atol=1e-6 * np.abs(expected["ds"]).max())  # fmt: skip
    assert close.mean() > 0.999  # exponentials differ in their last bits


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["gaussian", "heavy-channels", "qk-norm", "a mean of V"])
def test_errors_are_those_of_fp32_sums(name, dtype, d):
    shift = 10 if name == "a mean of V" else 0
    kind = "gaussian" if shift else name
    tensors = sagebwd.named_inputs(kind, seq_q=512, heads=2, head_dim=d, dtype=dtype, seed=3,
                                   device="cpu")  # fmt: skip
    q, k, v, dout = (t.float().numpy() for t in tensors)
    v = reference.round_to(v + shift, dtype)
    exact = reference.exact(q, k, v, dout)
    fp32, fp16 = (reference.emulate(q, k, v, dout, dtype=dtype, dp_sums=sums)
                  for sums in ("fp32", "fp16"))  # fmt: skip
    for gradient in ("dq", "dk"):
        error = relative(fp16[gradient], exact[gradient])
        assert error <= 1.05 * relative(fp32[gradient], exact[gradient]), gradient
    assert np.array_equal(fp16["dv"], fp32["dv"])
    assert np.array_equal(fp16["out"], fp32["out"])


def test_dp_is_not_what_fp32_sums_give():
    """The option is at work, and costs what FP16's 11 bits cost."""
    arrays = drawn(300, 128, "bf16", 0)
    fp32, fp16 = (reference.emulate(*arrays, dp_sums=sums, matrices=True)["dp"]
                  for sums in ("fp32", "fp16"))  # fmt: skip
    assert 1e-4 < relative(fp16, fp32) < 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("which", [2, 3])
def test_what_is_not_finite_stays_visible(which, value):
    arrays = [torch.from_numpy(x).bfloat16().requires_grad_() for x in drawn(100, 64, "bf16", 0)]
    with torch.no_grad():
        arrays[which][0, 0, 50, 7] = value
    out = emulation.emulated_attention(*arrays[:3], dp_sums="fp16")
    out.backward(arrays[3].detach())
    exact = reference.exact(*(x.detach().float().numpy() for x in arrays))
    for x, name in zip(arrays, ("dq", "dk", "dv")):
        assert not x.grad.isfinite().numpy()[~np.isfinite(exact[name])].any(), name


def test_a_mean_beyond_fp32_is_not_taken_off():
    q, k, v, dout = drawn(64, 64, "bf16", 0)
    lse = reference.exact(q, k, v)["lse"].astype("f4")
    v, out = np.full_like(v, 2.0**122), np.full_like(q, 2.0**122)  # the sum of v is infinite
    found = reference.emulate(q, k, v, dout * np.float32(2.0**-20), out=out, lse=lse,
                              dp_sums="fp16")  # fmt: skip
    assert np.isfinite(found["dq"]).all() and np.isfinite(found["dk"]).all()


def test_an_int8_product_has_no_such_sums():
    with pytest.raises(sagebwd.SpecError, match="dp_sums='fp16' .* 'dp' among the INT8 products"):
        reference.emulate(*drawn(64, 64, "bf16", 0), dp_sums="fp16", precision=("dp",))
