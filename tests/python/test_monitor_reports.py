"""sagebwd.Monitor's warnings and remedies, and which calls it samples."""

import math
import warnings

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from test_monitor import Model, make, nobody_watches_afterwards, run  # noqa: E402, F401

from sagebwd.monitoring import advice  # noqa: E402
from sagebwd.numerics.inputs import named_inputs  # noqa: E402

pytestmark = [pytest.mark.usefixtures("tiny_tensors", "kernels_on_the_cpu"),
              pytest.mark.filterwarnings("error::sagebwd.MonitorWarning")]  # fmt: skip


def watched(inputs, dout, thresholds=None, **options):
    """The record, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sagebwd.Monitor(thresholds=thresholds, every=1) as monitor:
            run(inputs, dout, **options)
            run(inputs, dout, **options)
    assert all(w.category is sagebwd.MonitorWarning for w in caught)
    return monitor.latest, [str(w.message) for w in caught]


# ---- warnings ------------------------------------------------------------------------------------


def test_usual_inputs_do_not_warn():
    for options in (dict(), dict(causal=True), dict(granularity="block"),
                    dict(precision="gradients16")):  # fmt: skip
        record, told = watched(*make(m=128), **options)
        assert not told and record["warnings"] == []


def test_huge_logits_warn_and_the_remedy_helps():
    inputs, dout = make(m=128, sigma=9.0)
    record, told = watched(inputs, dout)
    assert len(told) == 1  # one for all figures, and none in the second step
    assert {"O", "dS", "dQ", "dK", "logit_range"} <= set(record["warnings"])
    assert "precision='qk16'" in told[0] and "QK-norm" in told[0]
    assert "smooth_q" not in told[0] and "gradients16" not in told[0]
    better, _ = watched(inputs, dout, precision="qk16")
    assert all(better[name] < record[name] / 2 for name in ("O", "dS", "dQ", "dK", "dV"))
    # QK-norm: queries and keys of length sqrt(D)
    normed = [t.detach().float() for t in inputs[:2]]
    normed = [(t / t.square().mean(-1, keepdim=True).sqrt()).bfloat16() for t in normed]
    normed = [t.requires_grad_() for t in (*normed, inputs[2].detach())]
    record, told = watched(normed, dout)
    assert not told


def test_huge_logits_under_qk16_are_a_matter_of_the_model():
    _, told = watched(*make(m=128, sigma=12.0), precision="qk16")
    assert "QK-norm" in told[0] and "precision=" not in told[0]


def test_queries_with_a_common_offset_are_told_of_smooth_q():
    inputs, dout = make(m=300, offset=4.0)
    limits = {"O": 0.015}
    record, told = watched(inputs, dout, limits)
    assert record["q_offset"] == pytest.approx(16 / 17, abs=0.01)
    assert "94% of the squares of q" in told[0] and "smooth_q=True" in told[0]
    better, told = watched(inputs, dout, limits, smooth_q=True)
    assert better["O"] < record["O"] / 1.5 and not told


def test_values_with_a_mean_are_told_to_take_it_off():
    (q, k, v), dout = make(m=300, sigma=1.5)
    with_mean = [q, k, (v.detach() + 2).requires_grad_()]
    dout = dout + 0.5
    limits = {"O": 0.03, "dQ": None, "dK": None, "dV": None, "dS": 0.05}
    record, told = watched(with_mean, dout, limits)
    assert record["v_offset"] == pytest.approx(0.8, abs=0.03) and record["O_bias"] < -0.001
    assert "of the squares of v are a mean of all tokens" in told[0]
    assert told[0].index("smooth_v=True") < told[0].index("qk16")
    better, told = watched(with_mean, dout, limits, smooth_v=True)
    assert better["dS"] < record["dS"] / 2 and not told
    assert abs(better["O_bias"]) < abs(record["O_bias"]) / 2


def test_gradients_alone_are_told_of_gradients16():
    limits = dict.fromkeys(("dQ", "dK", "dV"), 0.0115)
    inputs, dout = make(m=128)
    record, told = watched(inputs, dout, limits)
    assert "gradients16" in told[0] and "QK-norm" not in told[0] and "qk16" not in told[0]
    better, _ = watched(inputs, dout, limits, precision="gradients16")
    assert all(better[name] < record[name] for name in limits)


@pytest.mark.parametrize(("name", "wrong", "remedy"), [
    ("local", {"granularity": "block"}, {"granularity": "row"}),
    ("outlier-channels", {"smooth_k": False}, {"smooth_k": True})])  # fmt: skip
def test_gradients_are_told_of_the_option_that_spoils_them(name, wrong, remedy):
    *inputs, dout = named_inputs(name, seq_q=512, heads=1, head_dim=64, device="cpu")
    inputs = [t.requires_grad_() for t in inputs]
    record, told = watched(inputs, dout, causal=True, **wrong)
    [(option, value)] = remedy.items()
    assert record["warnings"] == ["dQ"] and f"{option}={value!r}" in told[0]
    assert "gradients16" not in told[0] and "qk16" not in told[0]
    better, told = watched(inputs, dout, causal=True, **remedy)
    assert better["dQ"] < record["dQ"] / 2 and not told


PLAN = {"s", "pv", "dv", "dq", "dk"}


@pytest.mark.parametrize(("errors", "call", "told", "not_told"), [
    # Most of the error comes with dS, although dS is below its own limit: as large logits do.
    ({"dQ": 0.073, "dK": 0.07, "dS": 0.071, "logit_range": 47}, {}, ["qk16", "QK-norm"],
     ["gradients16"]),
    ({"dQ": 0.073, "dS": 0.071}, {}, ["qk16"], ["QK-norm", "gradients16"]),
    ({"dQ": 0.073, "dS": 0.071}, {"int8": PLAN - {"s"}}, ["QK-norm"], ["qk16"]),
    ({"dQ": 0.2, "dS": 0.18}, {"int8": PLAN | {"dp"}}, ["'dp'"], ["gradients16"]),
    # An option that spoils the scores comes before their 16 bits; those do not make logits smaller.
    ({"O": 0.15, "dS": 0.14, "dQ": 0.3}, {"smooth_k": False}, ["smooth_k=True"], ["qk16"]),
    ({"dS": 0.12}, {"granularity": "block"}, ["granularity='row'"], ["qk16"]),
    ({"logit_range": 120}, {}, ["QK-norm"], ["qk16"]),
    # K, which smooth_k makes smaller, is no operand of dK and dV.
    ({"dK": 0.08}, {"smooth_k": False}, ["gradients16"], ["smooth_k"]),
    ({"dK": 0.08, "dQ": 0.07}, {"smooth_k": False}, ["smooth_k=True"], ["gradients16"]),
    ({"dV": 0.08}, {"int8": PLAN - {"dv"}}, ["no option"], ["gradients16"]),
    # A mean of v is in O and delta, and not in dV.
    ({"dQ": 0.1, "dS": 0.09, "v_offset": 0.8}, {}, ["smooth_v=True", "qk16"], ["gradients16"]),
    ({"dV": 0.08, "dS": 0.09, "v_offset": 0.8}, {}, ["qk16"], ["smooth_v"]),
    ({"dQ": 0.1, "dS": 0.09, "v_offset": 0.8}, {"granularity": "block"}, ["smooth_v=True"],
     ["'row'"]),
    ({"dQ": 0.1, "dS": 0.09, "v_offset": 0.8}, {"int8": PLAN - {"s"}}, ["smooth_v=True"],
     ["QK-norm"]),
    # Rounding to fp16 has an error of 2^-24 / sqrt(12), or 1.7e-8: most of 0.02 of 1e-6.
    ({"dQ": 0.12}, {"dtype": "fp16"}, ["gradients16"], ["scale the loss"]),
])  # fmt: skip
def test_remedies_of_gradients(errors, call, told, not_told):
    figures = dict.fromkeys(("O", "dS", "dQ", "dK", "dV", "q_offset", "v_offset", "zero_scales",
                             "saturated_scales", "max_logit", "logit_range"), 0.0)  # fmt: skip
    figures |= errors
    call = dict(int8=PLAN, granularity="row", smooth_k=True, smooth_q=False, smooth_v=False,
                packed=False, dtype="bf16") | call  # fmt: skip
    names = advice.exceeded(figures, advice.limits(None))
    said = advice.remedy(names, figures, call, dict.fromkeys(("dQ", "dK", "dV"), 1e-6))
    assert all(word in said for word in told) and not any(word in said for word in not_told)


def test_values_that_are_not_finite():
    inputs, dout = make()
    dout[:, :, 3] = torch.inf
    record, told = watched(inputs, dout)
    assert math.isnan(record["dQ"]) and record["saturated_scales"] > 0 and record["O"] < 0.03
    assert "saturated_scales" in told[0] and "NaN or infinite" in told[0]


def test_values_too_small_for_their_scales():
    inputs, dout = make(m=64)
    dout = dout * 2.0**-125
    record, told = watched(inputs, dout, {"dS": None, "dQ": None, "dK": None, "dV": None})
    assert record["zero_scales"] > 0.1
    assert "zero_scales" in told[0] and "scale the loss" in told[0]
    record, told = watched(inputs, torch.zeros_like(dout))  # nothing is lost
    assert record["zero_scales"] == 0 and record["dQ"] == 0 and not told


def test_gradients_too_small_for_fp16():
    inputs, dout = make(m=128, dtype=torch.float16)
    small = (dout.float() * 1e-6).half()
    record, told = watched(inputs, small)
    assert {"dQ", "dK"} <= set(record["warnings"]) and record["zero_scales"] == 0
    assert "too small for fp16: scale the loss" in told[0] and "gradients16" not in told[0]
    worse, _ = watched(inputs, small, precision="gradients16")
    assert worse["dQ"] > 0.06
    better, told = watched(inputs, dout)
    assert better["dQ"] < record["dQ"] / 2 and not told


def test_each_figure_warns_once():
    limits = {"O": 0.0, "dV": math.inf}
    with sagebwd.Monitor(every=1, thresholds=limits) as monitor:
        with pytest.warns(sagebwd.MonitorWarning, match=r"O 0\.01\d* \(limit 0\)"):
            run(*make())
            monitor.latest  # noqa: B018
        run(*make())
    assert monitor.latest["warnings"] == ["O"]


# ---- what is not measured ------------------------------------------------------------------------


def test_parts_of_the_keys():
    inputs, dout = make()
    q, k, v = (t.detach() for t in inputs)
    out, lse = sagebwd.attention_forward(q, k, v)
    mean = k.float().mean(2)

    def part(keys, **given):
        return sagebwd.attention_backward(dout, q, k[:, :, keys], v[:, :, keys], out, lse, **given)

    for given in (dict(k_mean=mean), dict(smooth_k=False)):
        with pytest.warns(sagebwd.MonitorWarning, match="parts of the keys") as caught:
            with sagebwd.Monitor(every=1) as monitor:
                part(slice(0, 16), **given)
                part(slice(16, 40), **given)
        assert len(caught) == 1 and monitor.latest is None
        with sagebwd.Monitor(every=1) as monitor:  # all of the keys
            part(slice(None), **given)
        assert monitor.latest["dQ"] < 0.05


@pytest.mark.parametrize("options", [dict(granularity="block"), dict(rotate=False)])
def test_large_errors_without_smoothing_are_no_parts(options):
    """The error of lse is large there, too."""
    inputs, dout = make(m=128, sigma=15.0)
    record, told = watched(inputs, dout, causal=True, smooth_k=False, **options)
    assert record["O"] > 0.05 and record["dQ"] > 0.1
    assert "O 0." in told[0] and "parts of the keys" not in " ".join(told)


def test_parts_that_are_merged_are_measured():
    inputs, dout = make()
    q, k, v = inputs
    with sagebwd.Monitor(every=1) as monitor:
        parts = [sagebwd.attention(q, k[:, :, at], v[:, :, at], return_lse=True)
                 for at in (slice(0, 16), slice(16, 40))]  # fmt: skip
        sagebwd.merge(parts)[0].backward(dout)
    assert monitor.latest["calls"] == 2 and monitor.latest["dQ"] < 0.05


def test_lists_of_blocks_are_named():
    from sagebwd.numerics import emulation

    inputs, dout = make(m=128)
    mask = torch.ones(2, 4, 1, 2, dtype=torch.bool)
    with pytest.warns(sagebwd.MonitorWarning, match="lists of blocks") as caught:
        with sagebwd.Monitor(every=1) as monitor:
            for _ in range(2):
                run(inputs, dout, emulation.emulated_block_sparse_attention, block_mask=mask)
    assert len(caught) == 1 and monitor.latest is None


def test_a_forward_without_a_backward():
    inputs, _ = make()
    with pytest.warns(sagebwd.MonitorWarning, match="without a backward"):
        with sagebwd.Monitor(), torch.no_grad():
            sagebwd.attention(*inputs)


def test_a_model_or_a_function_whose_calls_were_not_seen():
    inputs, dout = make()

    def said(of, work=lambda: run(inputs, dout)):
        with pytest.warns(sagebwd.MonitorWarning) as caught:
            with sagebwd.Monitor(of, every=1) as monitor:
                for _ in range(3):
                    work()
        assert len(caught) == 1 and not monitor.records
        return str(caught[0].message)

    def of_model_without_backward():
        with torch.no_grad():
            model(torch.randn(2, 24, 64))
        run(inputs, dout)

    model = Model(layers=1)
    assert "nothing was measured. It saw 3 calls that were not the model's" in said(model)
    assert "saw no attention of sagebwd:" in said(model, lambda: None)
    none = "it saw 3 calls with a backward, and none was "
    assert none + "the model's" in said(model, of_model_without_backward)
    assert none + "wanted by the function" in said(lambda call: False)


def test_a_part_of_a_training_without_a_sample():
    inputs, dout = make()
    with sagebwd.Monitor(every=4) as first:
        for _ in range(5):
            run(inputs, dout)
    assert [r["step"] for r in first.records] == [1, 5]
    second = sagebwd.Monitor(every=4)
    second.load_state_dict(first.state_dict())
    said = "it saw 3 calls with a backward, and the next sample would have been in step 9"
    with pytest.warns(sagebwd.MonitorWarning, match=said):
        with second:
            for _ in range(3):
                run(inputs, dout)
    with second:
        run(inputs, dout)
    assert [r["step"] for r in second.records] == [1, 5, 9]


def test_the_first_step_has_a_sample_whatever_its_number():
    inputs, dout = make()
    with sagebwd.Monitor(every=4) as monitor:
        monitor.step(102)
        for step in range(103, 110):
            run(inputs, dout)
            monitor.step(step)
    assert [r["step"] for r in monitor.records] == [103, 105, 109]


def test_warnings_name_the_line_that_began_and_are_each_monitors():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            with sagebwd.Monitor():
                pass
    lines = open(__file__).read().splitlines()
    assert len(caught) == 2  # of one text
    for one in caught:
        assert one.filename == __file__
        assert lines[one.lineno - 1].strip() == "with sagebwd.Monitor():"


def test_an_error_in_the_training_is_not_followed_by_a_warning():
    with pytest.raises(KeyError), sagebwd.Monitor():
        raise KeyError("the user's")


def test_steps_that_nobody_watches():
    monitor = sagebwd.Monitor()
    monitor.step(100)  # may be said before it starts
    with pytest.warns(sagebwd.MonitorWarning, match=r"nothing is watched: write `with monitor:`"):
        monitor.step()
    monitor.step()


def test_a_function_that_fails_ends_no_training():
    inputs, dout = make()
    expected = run(inputs, dout)
    with pytest.warns(sagebwd.MonitorWarning) as caught:
        with sagebwd.Monitor(lambda call: call["heds"] == 4) as monitor:
            assert all(map(torch.equal, run(inputs, dout), expected))
    assert "the function that chooses calls failed" in str(caught[0].message)
    assert "KeyError: 'heds'" in str(caught[0].message) and monitor.latest is None


# ---- which calls ---------------------------------------------------------------------------------


def test_models_and_functions_choose_calls():
    inputs, dout = make()
    one, two = Model(layers=1), Model(layers=2, width=96)
    x = [torch.randn(2, 24, width, requires_grad=True) for width in (64, 96)]

    def step():
        for model, given in zip((one, two), x):
            model(given).sum().backward()
        run(inputs, dout)

    def calls(*of, **given):
        with sagebwd.Monitor(*of, every=1, **given) as monitor:
            step()
            step()
        return [(r["calls"], r["heads"], r["queries"]) for r in monitor.records]

    assert calls(two) == [(2, 1, 24)] * 2
    assert calls([one, two]) == [(1, 1, 24), (2, 1, 24)] * 2
    assert calls(lambda call: call["queries"] == 40 and call["precision"] == "six-of-seven") == [
        (1, 2, 40)] * 2  # fmt: skip
    assert set(calls()) == {(1, 1, 24), (2, 1, 24), (1, 2, 40)}


def test_two_monitors():
    inputs, dout = make()
    with sagebwd.Monitor(every=1) as often, sagebwd.Monitor(every=2, seed=1) as seldom:
        for _ in range(3):
            run(inputs, dout)
    assert [len(m.records) for m in (often, seldom)] == [3, 2]


def test_a_model_compiled_in_place():
    inputs, dout = make()
    model = Model(layers=1)
    torch._dynamo.reset()
    model.compile(backend="aot_eager", fullgraph=True)
    before = model._compiled_call_impl
    with sagebwd.Monitor(model, every=1) as monitor:
        for _ in range(2):
            model(torch.randn(2, 24, 64, requires_grad=True)).sum().backward()
            run(inputs, dout)
    assert [r["queries"] for r in monitor.records] == [24, 24]
    assert model._compiled_call_impl is before
    first, second = (sagebwd.Monitor(model, every=1).start() for _ in range(2))
    for monitor in (first, second):  # in another order than that of their hooks
        model(torch.randn(2, 24, 64, requires_grad=True)).sum().backward()
        monitor.stop()
    model(torch.randn(2, 24, 64, requires_grad=True)).sum().backward()
    assert [len(m.records) for m in (first, second)] == [1, 2]


def test_a_model_compiled_after_the_monitor_began():
    model = Model(layers=1)
    torch._dynamo.reset()
    with pytest.warns(sagebwd.MonitorWarning, match="what torch.compile returned"):
        with sagebwd.Monitor(model) as monitor:
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            for _ in range(10):
                compiled(torch.randn(2, 24, 64, requires_grad=True)).sum().backward()
    assert monitor.latest["queries"] == 24 and len(monitor.records) == 1
