"""The kernels on inputs as trained models have them, under every precision plan."""

import pytest
from inputs import EMULATION_LIMIT, emulated, kernels, relative

import sagebwd
from sagebwd.numerics.exact import exact_attention

#: Beyond the emulation's own error against FP64.
SLACK = 4e-3
#: These imitate language models; the others are seen whole.
CAUSAL = ("outlier-channels", "heavy-channels", "sink", "large-first-key", "local", "qk-norm",
          "qk-norm-unit")


@pytest.mark.parametrize("precision", ["six-of-seven", "qk16", "dv16", "gradients16"])
@pytest.mark.parametrize("name", sagebwd.INPUTS)
def test_near_the_emulation(name, precision):
    causal = "top-left" if name in CAUSAL else "none"
    tensors = sagebwd.named_inputs(name, heads=4, heads_kv=2, seq_q=1024, seed=5, device="cuda")
    options = dict(causal=causal, precision=precision)
    found = kernels(*tensors, **options)
    expected = vars(emulated(*tensors, given=found, **options))
    exact = vars(exact_attention(*tensors, causal=causal))
    for tensor, got in vars(found).items():
        assert relative(got, expected[tensor]) <= EMULATION_LIMIT, f"{tensor} against emulation"
        bound = relative(expected[tensor], exact[tensor]) + SLACK
        assert relative(got, exact[tensor]) <= bound, f"{tensor} against FP64"


@pytest.mark.parametrize("precision", ["six-of-seven", "dv16"])
def test_a_sink_costs_no_more_than_other_inputs(precision):
    tensors = sagebwd.named_inputs("sink", heads=2, seq_q=2048, device="cuda")
    found = vars(kernels(*tensors, causal=True, precision=precision))
    exact = vars(exact_attention(*tensors, causal=True))
    for tensor, limit in dict(out=0.010, dq=0.020, dk=0.023, dv=0.0155).items():
        assert relative(found[tensor], exact[tensor]) <= limit, tensor


def test_trace_takes_a_name_on_the_gpu():
    table = sagebwd.trace(inputs=dict(name="sink", seq_q=512, heads=2), device="cuda", causal=True)
    assert table["kernels"]["dQ"]["rel_l2"] == pytest.approx(table["dQ"]["rel_l2"], abs=2e-3)
