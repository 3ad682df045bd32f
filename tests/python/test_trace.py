"""sagebwd.trace: which errors it reports, and that they are errors."""

import math

import numpy as np
import pytest

import sagebwd
from sagebwd import reference
from sagebwd.numerics import tracing

TENSORS = ["delta", "P", "dP", "dS", "O", "dQ", "dK", "dV"]


@pytest.fixture(scope="module")
def inputs():
    return reference.random_inputs(256, head_dim=64, heads=2)


@pytest.mark.parametrize("granularity", ["row", "block"])
def test_figures_are_those_of_the_reference(inputs, granularity):
    table = sagebwd.trace(*inputs, granularity=granularity)
    assert list(table) == TENSORS
    exact = reference.exact(*inputs, matrices=True)
    emulated = reference.emulate(*inputs, granularity=granularity, matrices=True)
    for name, key in (("O", "out"), ("dQ", "dq"), ("dK", "dk"), ("dV", "dv"), ("P", "p")):
        x, expected = emulated[key].ravel().astype(np.float64), exact[key].ravel()
        rel_l2 = np.linalg.norm(x - expected) / np.linalg.norm(expected)
        cosine = x @ expected / np.linalg.norm(x) / np.linalg.norm(expected)
        assert table[name]["rel_l2"] == pytest.approx(rel_l2, rel=0.02, abs=1e-6), name
        assert table[name]["cosine"] == pytest.approx(cosine, abs=1e-5), name
        bias = (x - expected).mean() / np.abs(expected).mean()
        assert table[name]["bias"] == pytest.approx(bias, rel=0.02, abs=2e-6), name


@pytest.mark.parametrize("granularity", ["row", "block"])
def test_errors_of_no_tensor_have_a_sign(granularity):
    """Over inputs of several seeds biases average out, as those of rounding to nearest do."""
    biases = {name: [] for name in TENSORS}
    for seed in range(12):
        given = reference.random_inputs(256, head_dim=64, heads=1, seed=seed)
        for name, figures in sagebwd.trace(*given, granularity=granularity).items():
            biases[name].append(figures["bias"])
    for name, found in biases.items():
        error_of_mean = np.std(found, ddof=1) / math.sqrt(len(found))
        assert abs(np.mean(found)) < 3.5 * error_of_mean + 1e-7, (name, found)
        assert max(map(abs, found)) < 0.01, (name, found)


def test_a_bias_is_seen():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    exact = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    figures = tracing._figures(*tracing._sums(exact.abs() * 0.99, exact.abs()))
    assert figures["bias"] == pytest.approx(-0.01) and figures["rel_l2"] == pytest.approx(0.01)
    truncated = torch.trunc(exact * 64) / 64  # toward zero: of both signs, without a bias
    assert abs(tracing._figures(*tracing._sums(truncated, exact))["bias"]) < 1e-3
    floored = torch.floor(exact * 64) / 64
    assert tracing._figures(*tracing._sums(floored, exact))["bias"] < -5e-3


def test_exact_products_have_no_error(inputs):
    table = sagebwd.trace(*inputs)
    assert table["dP"]["rel_l2"] < 1e-6  # the one product that stays in 16 bits
    assert 0.005 < table["dQ"]["rel_l2"] < 0.03


def test_each_product_costs_what_depends_on_it(inputs):
    depends = {
        "s": {"P", "dS", "O", "delta", "dQ", "dK", "dV"},
        "pv": {"O", "delta"},
        "dv": {"dV"},
        "dp": {"dP", "dS", "dQ", "dK"},
        "dq": {"dQ"},
        "dk": {"dK"},
    }
    plain = sagebwd.trace(*inputs, precision=())
    for product, affected in depends.items():
        table = sagebwd.trace(*inputs, precision=(product,))
        for name in affected:
            assert table[name]["rel_l2"] > plain[name]["rel_l2"] + 5e-4, (product, name)
        for name in set(TENSORS) - affected - {"dS", "dQ", "dK"}:
            assert table[name]["rel_l2"] < plain[name]["rel_l2"] + 1e-4, (product, name)


def test_precision_in_words_of_the_command_line(inputs):
    for word, products in (("none", ()), ("s,pv", ("s", "pv")), ("dp", ("dp",)),
                           ("s,pv,dv,dq,dk", "six-of-seven")):  # fmt: skip
        assert sagebwd.trace(*inputs, precision=word) == sagebwd.trace(*inputs, precision=products)


def test_an_unknown_row_names_those_there_are(inputs):
    table = sagebwd.trace(*inputs)
    for name, hint in (("dq", "did you mean 'dQ'"), ("DP", "did you mean 'dP'"), ("x", "no row; ")):
        with pytest.raises(KeyError, match=rf"'{name}' is .*{hint}.*There are delta, P, .*dK, dV"):
            table[name]
    assert table.get("dq") is None and "dq" not in table


@pytest.mark.parametrize("name", ["seq_len", "seq_q", "heads", "head_dim", "seed"])
def test_sizes_are_said_elsewhere(name):
    there = "seq_q" if name == "seq_len" else name
    with pytest.raises(TypeError, match=rf"trace\(\) takes no {name}: the tensors say it; for "
                       rf"inputs= pass inputs=dict\(name=..., {there}=...\)"):  # fmt: skip
        sagebwd.trace(inputs="gaussian", **{name: 64})


def test_16_bits_cost_nothing_in_their_products(inputs):
    most, dv16, gradients16 = (
        sagebwd.trace(*inputs, precision=p) for p in ("six-of-seven", "dv16", "gradients16")
    )
    assert dv16["dV"]["rel_l2"] < 0.9 * most["dV"]["rel_l2"]
    for name in ("dQ", "dK", "dV"):
        assert gradients16[name]["rel_l2"] < 0.9 * most[name]["rel_l2"], name
    assert gradients16["O"] == dv16["O"] == most["O"]


def test_row_beats_block(inputs):
    row, block = (sagebwd.trace(*inputs, granularity=g) for g in ("row", "block"))
    for name in ("dQ", "dK", "dV"):
        assert row[name]["rel_l2"] < block[name]["rel_l2"]


def test_torch_tensors_give_the_same_table(inputs):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    expected = sagebwd.trace(*inputs, causal=True)
    tensors = [torch.from_numpy(x).bfloat16() for x in inputs]
    assert sagebwd.trace(*tensors, causal=True) == expected
    half = sagebwd.trace(*(t.half() for t in tensors), causal=True)
    assert half == sagebwd.trace(*inputs, causal=True, dtype="fp16")


def test_the_emulation_in_pytorch_gives_the_same_table(inputs):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from sagebwd.numerics.tracing import _trace_torch

    expected = sagebwd.trace(*inputs, causal="top-left")
    options = dict(causal="top-left", granularity="row", group_q=None, group_kv=None,
                   sink_keys=None, smooth_k=True, rotate=True,
                   precision="six-of-seven")  # fmt: skip
    table = _trace_torch([torch.from_numpy(x) for x in inputs], "cpu", "bf16", None, options, {})
    assert list(table) == TENSORS
    for name in TENSORS:
        for figure in tracing.FIGURES:
            assert table[name][figure] == pytest.approx(expected[name][figure], rel=2e-3, abs=1e-5)


def test_non_finite_inputs_are_seen(inputs):
    q, k, v, dout = (x.copy() for x in inputs)
    v[0, 0, 3, 5] = np.nan
    with pytest.warns(UserWarning, match="^v holds 1 values that are NaN or infinite .* to bf16"):
        assert math.isnan(sagebwd.trace(q, k, v, dout)["O"]["rel_l2"])
    q[0, 0, :2, 0] = 1e5  # beyond fp16
    with pytest.warns(UserWarning) as warned:
        sagebwd.trace(q, k, inputs[2], dout, dtype="fp16")
    assert [str(one.message).split(" values")[0] for one in warned] == ["q holds 2"]


def test_inputs_that_go_together_are_asked_for(inputs):
    q, k, v, dout = inputs
    alone = None, None, None, dout
    for given, missing in ((alone, "q, k, v"), ((q, k, v), "dout"), ((), "q, k")):
        with pytest.raises(TypeError, match=rf"trace\(\) needs {missing}.* or inputs= in their pl"):
            sagebwd.trace(*given)


def test_mixed_types_are_not_guessed(inputs):
    q, k, v, dout = inputs
    half = q.astype(np.float16)
    with pytest.raises(sagebwd.SpecError, match=r"q is float16, k is float32, .*: pass dtype="):
        sagebwd.trace(half, k, v, dout)
    assert sagebwd.trace(half, k, v, dout, dtype="fp16")["O"]["rel_l2"] > 0
    assert sagebwd.trace(q.astype(np.float64), k, v, dout) == sagebwd.trace(*inputs)
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    mixed = [torch.from_numpy(x).bfloat16() for x in inputs]
    mixed[2] = mixed[2].half()
    with pytest.raises(sagebwd.SpecError, match=r"q is torch\.bfloat16, .* v is torch\.float16"):
        sagebwd.trace(*mixed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(precision="int4"), "int4"),
        (dict(precision=("s", "o")), "unknown products o"),
        (dict(precision="int8"), "any INT8 products among .*, such as .s,pv"),
        (dict(precision="s,o"), "unknown products o"),
        (dict(precision={"s": False}), r"precision=\{'s': False\}: pass one of .* or a tuple"),
        (dict(dtype="fp8"), "fp8"),
        (dict(granularity="tensor"), "tensor"),
        (dict(causal="up"), "causal='up'"),
        (dict(softmax_scale=-1e-21), "softmax_scale=-1e-21"),
    ],
)
def test_traces_that_are_refused(inputs, change, message):
    with pytest.raises(sagebwd.SpecError, match=message):
        sagebwd.trace(*inputs, **change)
    with pytest.raises(TypeError, match="did you mean 'granularity'"):
        sagebwd.trace(*inputs, granularty="row")
    for name, message in {
        "sink_logits": "'sink_logits'; it is an argument of sagebwd.attention, which takes PyTorch",
        "s_aux": "'s_aux'; sink_logits is an argument of sagebwd.attention, which takes PyTorch's",
        "seqused_k": "no packed sequences or lengths: it is an argument of sagebwd.attention,",
    }.items():
        with pytest.raises(TypeError, match=message):
            sagebwd.trace(*inputs, **{name: None})
    with pytest.raises(sagebwd.SpecError, match="k has rank 3"):
        sagebwd.trace(inputs[0], inputs[1][0], *inputs[2:])


def test_a_table_prints_and_becomes_others(inputs):
    table = sagebwd.trace(*inputs)
    assert isinstance(table, dict) and table.to_dict() == dict(table)
    assert type(table.to_dict()) is dict
    header, *lines = str(table).splitlines()
    assert header.split() == ["tensor", "cosine", "rel.", "L2", "bias"]
    for line, tensor in zip(lines, TENSORS):
        figures = table[tensor]
        assert line.split() == [tensor, f"{figures['cosine']:.6f}", f"{figures['rel_l2']:.5f}",
                                f"{figures['bias']:.6f}"]  # fmt: skip
    assert len(lines) == len(TENSORS) and len({*map(len, lines), len(header)}) == 1
    of_gpu = tracing.TraceTable(table, kernels={"O": {"cosine": 0.5, "rel_l2": 0.25, "bias": -0.125}})
    assert str(of_gpu).splitlines()[-1].split() == ["kernels", "O", "0.500000", "0.25000",
                                                    "-0.125000"]  # fmt: skip
    assert of_gpu.rows()[-1] == ("kernels", "O", 0.5, 0.25, -0.125)
    assert len(of_gpu.rows()) == len(TENSORS) + 1


def test_a_table_becomes_a_data_frame(inputs):
    pytest.importorskip("pandas", reason="needs pandas")
    table = sagebwd.trace(*inputs)
    frame = table.to_pandas()
    assert list(frame["tensor"]) == TENSORS
    assert list(frame["rel_l2"]) == [table[tensor]["rel_l2"] for tensor in TENSORS]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [(dict(name="sink", seq_q=1_000_000), "takes up to 1e.13 .minutes.: shorten"),
     (dict(name="sink", seq_q=8, seq_kv=8_000_000, heads=8), "GiB of memory .* shorten")],
)  # fmt: skip
def test_sizes_are_looked_at_before_anything_is_drawn(inputs, message, monkeypatch):
    def draw(*given):
        raise AssertionError("drawn")

    monkeypatch.setattr(sagebwd._core, "named_inputs", draw)
    for device in ({}, {"device": "cpu"}):
        with pytest.raises(sagebwd.SpecError, match=message):
            sagebwd.trace(inputs=inputs, **device)
    with pytest.raises(AssertionError, match="drawn"):
        sagebwd.trace(inputs=dict(name="sink", seq_q=64))


def test_layouts_are_not_guessed(inputs):
    with pytest.raises(TypeError, match="'layout'; tensors are .batch, heads, tokens, head_dim"):
        sagebwd.trace(*inputs, layout="bshd")


def lists_of(blocks):
    """Lists of 3 blocks of queries: random ones, none and all."""
    mask = np.random.default_rng(2).random((1, 2, 3, blocks)) < 0.5
    mask[:, :, 1], mask[:, :, 2] = False, True
    return mask


def tokens_of(mask, sizes, queries, keys):
    return mask.repeat(sizes[0], 2)[:, :, :queries].repeat(sizes[1], 3)[..., :keys]


@pytest.mark.parametrize("sizes", [(128, 64), (64, 128)])
def test_lists_of_blocks_are_a_mask_of_tokens(sizes):
    queries, keys = 2 * sizes[0] + 20, 3 * sizes[1] + 9
    q, k, v, dout = reference.random_inputs(queries, seq_kv=keys, head_dim=64, heads=2)
    mask = lists_of(4)
    found = reference.exact(q, k, v, dout, block_mask=mask, block_size=sizes, matrices=True)
    seen = tokens_of(mask, sizes, queries, keys)
    s = q.astype(np.float64) @ k.astype(np.float64).swapaxes(2, 3) / 8
    p = np.where(seen, np.exp(s), 0)
    total = p.sum(-1, keepdims=True)
    p /= np.where(total, total, 1)
    np.testing.assert_allclose(found["p"], p, rtol=1e-12)
    np.testing.assert_allclose(found["out"], p @ v.astype(np.float64), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found["dv"], p.swapaxes(2, 3) @ dout.astype(np.float64), rtol=1e-9,
                               atol=1e-12)  # fmt: skip
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(found["lse"], np.log(total[..., 0]), rtol=1e-12)
    emulated = reference.emulate(q, k, v, dout, block_mask=mask, block_size=sizes)
    table = sagebwd.trace(q, k, v, dout, block_mask=mask, block_size=sizes)
    for name, key in (("O", "out"), ("dQ", "dq"), ("dK", "dk"), ("dV", "dv")):
        error = np.linalg.norm(emulated[key] - found[key]) / np.linalg.norm(found[key])
        assert 0.001 < error < 0.03
        assert table[name]["rel_l2"] == pytest.approx(error, rel=0.05), name


def test_lists_of_blocks_in_all_forms_and_places(inputs):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from sagebwd.numerics.tracing import _trace_torch

    mask = lists_of(4)[:, :1, :2]
    expected = sagebwd.trace(*inputs, block_mask=mask, causal=True)
    assert expected != sagebwd.trace(*inputs, causal=True)
    per_head = np.broadcast_to(mask, (1, 2, 2, 4)).astype(np.uint8) * 3
    for same in (per_head, torch.from_numpy(mask.copy())):
        assert sagebwd.trace(*inputs, block_mask=same, causal=True) == expected
    options = dict(causal="top-left", granularity="row", group_q=None, group_kv=None,
                   sink_keys=None, smooth_k=True, rotate=True,
                   precision="six-of-seven")  # fmt: skip
    lists = dict(block_mask=per_head != 0, block_size=(128, 64))
    table = _trace_torch([torch.from_numpy(x) for x in inputs], "cpu", "bf16", None, options, lists)
    for name in TENSORS:
        for figure in tracing.FIGURES:
            assert table[name][figure] == pytest.approx(expected[name][figure], rel=2e-3, abs=1e-5)


@pytest.mark.parametrize("given, error, match", [
    (dict(block_mask=np.ones((1, 2, 3, 4), bool)), sagebwd.SpecError,
     r"\(1, 2, 3, 4\); 256 queries and 256 keys in blocks of \(128, 64\) need .*2 or 1, 2, 4"),
    (dict(block_mask=np.ones((1, 2, 2, 4))), sagebwd.SpecError, "float64; pass bool or uint8"),
    (dict(block_mask=[1]), TypeError, "block_mask is a list; pass a NumPy array"),
    (dict(block_mask=np.ones((1, 2, 2, 4), bool), block_size=(32, 64)), sagebwd.SpecError,
     r"\(32, 64\): kernels have 64 and 128"),
    (dict(block_size=(64, 64)), sagebwd.SpecError, "no lists: pass block_mask="),
    (dict(block_mask=np.ones((1, 2, 2, 4), bool), window_left=5), sagebwd.SpecError, "a window"),
])  # fmt: skip
@pytest.mark.parametrize("function", [sagebwd.trace, reference.exact, reference.emulate])
def test_wrong_lists_are_refused(inputs, function, given, error, match):
    with pytest.raises(error, match=match):
        function(*inputs, **given)
