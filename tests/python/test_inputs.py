"""sagebwd.named_inputs: shapes, types, and what defines a few of them; trace(inputs=)."""

import numpy as np
import pytest

import sagebwd
from sagebwd import reference

SMALL = dict(heads=2, seq_q=128, head_dim=64)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", sagebwd.INPUTS)
def test_shapes_and_rounding(name, dtype):
    given = dict(batch=2, heads=4, heads_kv=2, seq_q=40, seq_kv=70, head_dim=64, dtype=dtype)
    first, again = (sagebwd.named_inputs(name, seed=3, **given) for _ in range(2))
    other = sagebwd.named_inputs(name, seed=4, **given)
    query, key = (2, 4, 40, 64), (2, 2, 70, 64)
    assert [x.shape for x in first] == [query, key, key, query]
    for a, b, c in zip(first, again, other):
        assert a.dtype == np.float32 and np.isfinite(a).all()
        assert np.array_equal(a, b) and not np.array_equal(a, c)
        assert np.array_equal(a, reference.round_to(a, dtype))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_torch_tensors_hold_the_same_numbers(dtype):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    arrays = sagebwd.named_inputs("outlier-channels", dtype=dtype, **SMALL)
    tensors = sagebwd.named_inputs("outlier-channels", dtype=dtype, device="cpu", **SMALL)
    for array, tensor in zip(arrays, tensors):
        assert tensor.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        assert np.array_equal(array, tensor.float().numpy())
    with pytest.raises(sagebwd.SpecError, match="device='banana'"):
        sagebwd.named_inputs("sink", device="banana", **SMALL)


def test_every_name_says_what_it_imitates():
    assert {"gaussian", "outlier-channels", "heavy-channels", "sink", "sink-last", "local",
            "large-first-key", "qk-norm", "qk-norm-unit", "massive-tokens", "padded",
            "alternating-keys", "common-offset", "tiny-values"} == set(sagebwd.INPUTS)
    assert all(len(text) > 20 for text in sagebwd.INPUTS.values())


def test_gaussian_is_what_random_inputs_gives():
    named = sagebwd.named_inputs("gaussian", sigma=3, seed=5, **SMALL)
    plain = reference.random_inputs(128, head_dim=64, heads=2, sigma=3, seed=5)
    for a, b in zip(named, plain):
        assert np.array_equal(a, b)
    offset = sagebwd.named_inputs("gaussian", key_offset=20, **SMALL)[1]
    assert offset[..., ::2].mean() == pytest.approx(20, abs=0.1)
    assert offset[..., 1::2].mean() == pytest.approx(-20, abs=0.1)


@pytest.mark.parametrize("name, key, causal", [("sink", 0, True), ("sink-last", -1, False)])
def test_a_sink_takes_half_of_the_mass(name, key, causal):
    q, k, v, dout = sagebwd.named_inputs(name, heads=2, seq_q=512, head_dim=64)
    p = reference.exact(q, k, v, causal=causal, matrices=True)["p"]
    assert 0.35 < p[:, :, -128:, key].mean() < 0.65
    norm = np.linalg.norm(v, axis=-1)
    share = norm[..., key].mean() / norm.mean()
    assert share == pytest.approx(0.05, rel=0.2) if name == "sink" else share > 0.9
    rows = np.log(np.linalg.norm(dout, axis=-1))
    assert rows.std() == pytest.approx(1, rel=0.1) if name == "sink" else rows.std() < 0.15


def test_rotation_is_what_heavy_channels_need():
    arrays = sagebwd.named_inputs("heavy-channels", heads=1, seq_q=256)
    rotated, plain = (sagebwd.trace(*arrays, causal=True, rotate=r) for r in (True, False))
    assert plain["dQ"]["rel_l2"] > 1.3 * rotated["dQ"]["rel_l2"]


@pytest.mark.parametrize("name", ["alternating-keys", "common-offset"])
def test_rotation_costs_nothing_where_channels_have_something_in_common(name):
    arrays = sagebwd.named_inputs(name, heads=4, seq_q=256)
    rotated, plain = (sagebwd.trace(*arrays, rotate=r) for r in (True, False))
    for tensor in ("O", "dQ", "dK", "dV"):
        assert rotated[tensor]["rel_l2"] < 1.6 * plain[tensor]["rel_l2"], tensor


def test_tiny_values_cost_what_others_do():
    tiny = sagebwd.named_inputs("tiny-values", heads=1, seq_q=512, head_dim=64)
    assert 0.9e-30 < tiny[2].std(dtype=np.float64) < 1.1e-30
    found = sagebwd.trace(*tiny)
    for tensor in ("O", "dQ", "dK", "dV"):
        assert found[tensor]["rel_l2"] < 0.025, tensor


def test_trace_takes_a_name():
    given = dict(name="qk-norm-unit", seed=2, **SMALL)
    expected = sagebwd.trace(*sagebwd.named_inputs(**given), causal=True)
    assert sagebwd.trace(inputs=given, causal=True) == expected
    half = sagebwd.trace(*sagebwd.named_inputs(**given, dtype="fp16"), dtype="fp16")
    assert sagebwd.trace(inputs=given, dtype="fp16") == half


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: sagebwd.named_inputs("banana"), "inputs='banana': pass one of gaussian, "),
        (lambda: sagebwd.named_inputs(3), "inputs=3"),
        (lambda: sagebwd.named_inputs("sink", sigma=2.0), "'sink' has none"),
        (lambda: sagebwd.named_inputs("sink", key_offset=2.0), "'sink' has none"),
        (lambda: sagebwd.named_inputs("local", head_dim=16), "at least 32; it is 16"),
        (lambda: sagebwd.named_inputs("sink", seq_kv=0), "seq_kv=0"),
        (lambda: sagebwd.named_inputs("sink", heads=3, heads_kv=2), "heads=3 .* heads_kv=2"),
        (lambda: sagebwd.named_inputs("gaussian", key_offset=float("nan")), "key_offset=nan"),
        (lambda: sagebwd.named_inputs("gaussian", dtype="fp8"), "fp8"),
        (lambda: sagebwd.trace(inputs="banana"), "inputs='banana'"),
        (lambda: sagebwd.trace(inputs={}), r"inputs=\{\} has no name: pass dict\(name='sink', "),
        (lambda: sagebwd.trace(inputs=dict(seq_q=64)), "has no name: .* gaussian, "),
        (lambda: sagebwd.trace(inputs=dict(name="sink", dtype="fp16")), "pass dtype= beside"),
        (lambda: sagebwd.trace(*[np.zeros((1, 1, 2, 64))] * 4, inputs="sink"), "leave those out"),
    ],
)  # fmt: skip
def test_inputs_that_are_refused(call, message):
    with pytest.raises(sagebwd.SpecError, match=message):
        call()


def test_more_than_memory_holds_is_refused_at_once():
    with pytest.raises(sagebwd.SpecError, match="GiB of memory and .* shorten the sequences"):
        sagebwd.named_inputs("gaussian", heads=1 << 10, seq_q=1 << 19)


def test_unknown_keywords_name_those_that_are_near():
    with pytest.raises(TypeError, match="named_inputs.. takes no seq_len: pass seq_q, and seq_kv"):
        sagebwd.named_inputs("sink", seq_len=64)
    with pytest.raises(TypeError, match=r"named_inputs\(\) needs a name: one of gaussian, .*sink"):
        sagebwd.named_inputs(seq_q=64)
    with pytest.raises(TypeError, match="'head_dims'; did you mean 'head_dim'"):
        sagebwd.trace(inputs=dict(name="sink", head_dims=64))
    with pytest.raises(TypeError, match=r"random_inputs\(\) got.*'head_dm'; did you mean 'head_d"):
        reference.random_inputs(64, head_dm=64)
