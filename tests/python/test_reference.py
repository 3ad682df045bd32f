"""The CPU reference through NumPy."""

import numpy as np
import pytest
from signals import interrupted

import sagebwd
from sagebwd import reference


def attention_in_numpy(q, k, v, dout, dlse, scale, offset):
    """One (M, D), (N, D) head in float64; `offset` of the causal diagonal, or None."""
    s = scale * q @ k.T
    visible = np.ones(s.shape, bool)
    if offset is not None:
        visible = np.arange(s.shape[1])[None] <= np.arange(s.shape[0])[:, None] + offset
    s = np.where(visible, s, -np.inf)
    top = np.where(visible.any(1, keepdims=True), s.max(1, keepdims=True), 0)
    weights = np.exp(s - top)
    total = weights.sum(1, keepdims=True)
    p = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    out = p @ v
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[:, 0]
    ds = p * (dout @ v.T - (dout * out).sum(1, keepdims=True) + dlse[:, None])
    return out, lse, scale * ds @ k, scale * ds.T @ q, p.T @ dout


@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_exact_is_attention(causal):
    b, h, hk, m, n, d = 2, 4, 2, 37, 23, 64
    rng = np.random.default_rng(1)
    q, dout = (rng.standard_normal((b, h, m, d), dtype=np.float32) for _ in range(2))
    k, v = (rng.standard_normal((b, hk, n, d), dtype=np.float32) for _ in range(2))
    dlse = rng.standard_normal((b, h, m), dtype=np.float32)
    got = reference.exact(q, k, v, dout, dlse=dlse, causal=causal, softmax_scale=0.2)
    offset = {"none": None, "top-left": 0, "bottom-right": n - m}[causal]
    dk, dv = np.zeros((b, hk, n, d)), np.zeros((b, hk, n, d))
    for i in range(b):
        for j in range(h):
            one = [x.astype(np.float64) for x in
                   (q[i, j], k[i, j // 2], v[i, j // 2], dout[i, j], dlse[i, j])]  # fmt: skip
            out, lse, dq, dk_one, dv_one = attention_in_numpy(*one, 0.2, offset)
            np.testing.assert_allclose(got["out"][i, j], out, atol=1e-6)
            np.testing.assert_allclose(got["lse"][i, j], lse, atol=1e-6)
            np.testing.assert_allclose(got["dq"][i, j], dq, atol=1e-6)
            dk[i, j // 2] += dk_one
            dv[i, j // 2] += dv_one
    np.testing.assert_allclose(got["dk"], dk, atol=1e-5)
    np.testing.assert_allclose(got["dv"], dv, atol=1e-5)
    assert got["p"] is None


def test_matrices_are_returned_where_asked_for():
    q, k, v, dout = reference.random_inputs(40, head_dim=64, seq_len_kv=24)
    got = reference.exact(q, k, v, dout, matrices=True)
    assert got["p"].shape == got["dp"].shape == got["ds"].shape == (1, 1, 40, 24)
    np.testing.assert_allclose(got["p"].sum(-1), 1, atol=1e-12)
    forward_only = reference.exact(q, k, v)
    assert forward_only["dq"] is None
    assert np.array_equal(forward_only["out"], got["out"])


def test_emulation_without_int8_products_is_close_to_exact():
    q, k, v, dout = reference.random_inputs(100, head_dim=64, heads=2)
    exact = reference.exact(q, k, v, dout)
    plain = reference.emulate(q, k, v, dout, precision=())
    int8 = reference.emulate(q, k, v, dout)
    for name in ("out", "dq", "dk", "dv"):
        norm = np.linalg.norm(exact[name])
        assert np.linalg.norm(plain[name] - exact[name]) < 0.006 * norm, name
        assert 0.006 * norm < np.linalg.norm(int8[name] - exact[name]) < 0.03 * norm, name


def test_backward_from_a_given_forward():
    q, k, v, dout = reference.random_inputs(64, head_dim=64)
    forward = reference.emulate(q, k, v, round_outputs=True)
    whole = reference.emulate(q, k, v, dout, round_outputs=True)
    parts = reference.emulate(q, k, v, dout, round_outputs=True, out=forward["out"],
                              lse=forward["lse"])  # fmt: skip
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(parts[name], whole[name]), name


def test_random_inputs_repeat_and_are_rounded():
    first = reference.random_inputs(50, head_dim=64, heads=4, heads_kv=2, sigma=3, seed=5)
    again = reference.random_inputs(50, head_dim=64, heads=4, heads_kv=2, sigma=3, seed=5)
    other = reference.random_inputs(50, head_dim=64, heads=4, heads_kv=2, sigma=3, seed=6)
    assert [x.shape for x in first] == [(1, 4, 50, 64), (1, 2, 50, 64), (1, 2, 50, 64),
                                        (1, 4, 50, 64)]  # fmt: skip
    for a, b, c in zip(first, again, other):
        assert np.array_equal(a, b) and not np.array_equal(a, c)
        assert np.array_equal(a, reference.round_to(a, "bf16"))
    assert abs(first[0].std() - 3) < 0.1 and abs(first[2].std() - 1) < 0.05


@pytest.mark.parametrize(
    "given",
    [dict(seq_len=0), dict(seq_len=-1), dict(batch=0), dict(heads=-2), dict(heads_kv=0),
     dict(seq_len_kv=0), dict(head_dim=-64), dict(seq_len=2.5), dict(heads=True), dict(sigma=-1.0),
     dict(sigma=float("nan")), dict(sigma="1"), dict(seed=-1), dict(seed=1 << 64),
     dict(seq_len=1 << 40)],
)  # fmt: skip
def test_random_inputs_refuse(given):
    (name,) = given
    name = {"seq_len_kv": "seq_kv"}.get(name, name)  # errors say the new name
    with pytest.raises(sagebwd.SpecError, match="2..36" if given == {"seq_len": 1 << 40} else name):
        reference.random_inputs(**{"seq_len": 8} | given)


def test_a_given_forward_is_whole():
    q, k, v, dout = reference.random_inputs(8, head_dim=64)
    forward = reference.emulate(q, k, v)
    for given in (dict(out=forward["out"]), dict(lse=forward["lse"])):
        with pytest.raises(sagebwd.SpecError, match="out and lse go together"):
            reference.emulate(q, k, v, dout, **given)
    with pytest.raises(sagebwd.SpecError, match="lse"):
        reference.emulate(q, k, v, dout, out=forward["out"], lse=forward["lse"][..., :4])


def test_round_to():
    x = np.array([1.0, 1 + 2**-9, 1 + 3 * 2**-9, 65504, 3e38, np.nan], np.float32)
    bf16 = reference.round_to(x, "bf16")
    assert bf16[:3].tolist() == [1.0, 1.0, 1 + 2**-7]
    assert np.isnan(bf16[5])
    assert reference.round_to(x, "fp16")[:4].tolist() == [1.0, 1 + 2**-9, 1 + 3 * 2**-9, 65504]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.update(k=a["k"][:, :, :, :32]), "k has shape"),
        (lambda a: a.update(v=a["v"][:, :, :9]), "v has shape"),
        (lambda a: a.update(q=a["q"][0]), "rank 4"),
        (lambda a: a.update(dout=a["dout"][:, :1]), "dout has shape"),
        (lambda a: a.update(causal="yes"), "yes"),
        (lambda a: a.update(softmax_scale=-1e-21), "softmax_scale=-1e-21"),
        (lambda a: a.update(k=a["k"][:, :2].repeat(2, 1)[:, :3], v=a["v"][:, :3]), "3"),
    ],
)
def test_what_the_reference_refuses(change, message):
    q, k, v, dout = reference.random_inputs(16, head_dim=64, heads=4)
    arguments = dict(q=q, k=k, v=v, dout=dout)
    change(arguments)
    with pytest.raises(sagebwd.SpecError, match=message):
        reference.exact(**arguments)


@pytest.mark.parametrize(
    "call",
    ["reference.exact(*x)", "reference.emulate(*x)", "sagebwd.trace(*x)",
     "reference.random_inputs(1 << 22, head_dim=64, seq_len_kv=1)"],
)  # fmt: skip
def test_a_signal_ends_it(call):
    code = (
        "import os, sagebwd; from sagebwd import reference\n"
        "x = reference.random_inputs(1 << 15, head_dim=64)\n"
        "start = os.times().user; print('at work', flush=True)\n"
        f"try: {call}\n"
        "except KeyboardInterrupt: print(os.times().user - start)\n"
    )
    _, out, err = interrupted(code)
    # The seconds are of all threads and of their own code, so that neither a busy machine counts
    # nor the time in which it finds a GiB of pages; uninterrupted they are ten and more.
    assert float(out) < 4, err


@pytest.mark.parametrize("precision", ["six-of-seven", "gradients16"])
def test_v_may_have_fewer_channels(precision):
    q, k, v, dout = reference.random_inputs(48, head_dim=96)
    v, dout = v[..., :64], dout[..., :64]
    exact = reference.exact(q, k, v, dout)
    emulated = reference.emulate(q, k, v, dout, precision=precision)
    for name in ("out", "dv", "dq", "dk"):
        channels = 64 if name in ("out", "dv") else 96
        assert exact[name].shape[3] == emulated[name].shape[3] == channels
        error = np.linalg.norm(emulated[name] - exact[name]) / np.linalg.norm(exact[name])
        assert 0 < error < 0.05, name
    padded = (np.pad(x, [(0, 0)] * 3 + [(0, 32)]) for x in (v, dout))
    assert np.array_equal(reference.exact(q, k, *padded)["dq"], exact["dq"])
    table = sagebwd.trace(q, k, v, dout, precision=precision)
    assert all(0 < figures["rel_l2"] < 0.05 for name, figures in table.items() if name != "dP")
    with pytest.raises(sagebwd.SpecError, match="v has 64 channels and dout or out 72"):
        reference.exact(q, k, v, reference.random_inputs(48, head_dim=72)[3])
