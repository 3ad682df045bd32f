"""Wrong use: errors say what was given, what is supported and what to do."""

import numpy as np
import pytest

import sagebwd
from sagebwd import SpecError, _core

torch = pytest.importorskip("torch", reason="needs PyTorch")

ONE = np.ones((1, 1, 64, 64), np.float32)
X = torch.ones(1, 1, 64, 64, dtype=torch.bfloat16)
OURS = "supported are six-of-seven, qk16, dv16, gradients16"


def traced(**given):
    return sagebwd.trace(ONE, ONE, ONE, ONE, **given)


#: Wrong calls, the kind of error, and parts of what it says.
WRONG = {
    "a fourth tensor": (lambda: sagebwd.attention(X, X, X, None), TypeError,
                        ("attention() takes q, k, v by position, and 4 ", "such as causal=")),
    "a fifth": (lambda: sagebwd.attention_forward(X, X, X, 1.0, True), TypeError,
                ("attention_forward() takes q, k, v by position", "5 arguments")),
    "a seventh": (lambda: sagebwd.attention_backward(*[X] * 7), TypeError,
                  ("takes dout, q, k, v, out, lse by position", "7 arguments")),
    "an operation by position": (lambda: sagebwd.warmup(64), TypeError,
                                 ("warmup() takes nothing by position", "such as causal=")),
    "a precision": (lambda: sagebwd.Spec(precision="gradient16"), SpecError,
                    ("'gradient16'", OURS, "did you mean 'gradients16'?")),
    "a precision of trace": (lambda: traced(precision="six-of-sven"), SpecError,
                             ("'six-of-sven'", OURS, "did you mean 'six-of-seven'?", "'s,pv'")),
    "a word that no other is near": (lambda: sagebwd.Spec(precision="int8"), SpecError, (OURS,)),
    "a granularity": (lambda: sagebwd.Spec(granularity="rows"), SpecError,
                      ("'rows'", "did you mean 'row'?")),
    "a word of gradients": (lambda: sagebwd.Spec(gradient_kernels="fuse"), SpecError,
                            ("did you mean 'fused'?",)),
    "inputs": (lambda: sagebwd.named_inputs("sinks"), SpecError,
               ("did you mean 'sink'?", "gaussian")),
    "a GPU": (lambda: _core.arch_for_capability(7, 5), SpecError,
              ("7.5 is not supported", "8.0 (A100)", "use PyTorch's attention")),
    "an architecture": (lambda: sagebwd.build(arch="sm_75"), SpecError,
                        ("'sm_75'", "sm_80", "on other GPUs use PyTorch's attention")),
    "an architecture's other name": (lambda: sagebwd.build(arch="sm_90"), SpecError,
                                     ("did you mean 'sm_90a'?",)),
    "what a call returns": (lambda: sagebwd.warmup(return_max_logits=True), TypeError,
                            ("warmup() takes no return_max_logits", "pass max_logits=True")),
    "the same of a spec": (lambda: sagebwd.Spec(return_max_logits=True), TypeError,
                           ("pass max_logits=True",)),
    "packed sequences": (lambda: sagebwd.build(arch="sm_80", cu_seqlens_q=X), TypeError,
                         ("pass packed=True",)),
    "a scale": (lambda: sagebwd.warmup(softmax_scale=0.1), TypeError,
                ("the kernels are the same", "leave it out")),
    "what an operation has": (lambda: sagebwd.attention(X, X, X, max_logits=True), TypeError,
                              ("did you mean 'return_max_logits'?",)),
    "what tensors say": (lambda: sagebwd.attention(X, X, X, head_dim=64), TypeError,
                         ("the tensors say it",)),
    "packed": (lambda: sagebwd.attention(X, X, X, packed=True), TypeError,
               ("did you mean 'cu_seqlens_q'?",)),
    "smooth_v alone": (lambda: traced(smooth_v=True, precision=("s",)), SpecError,
                       ("smooth_v=True", "('s',)", "no values", "'pv'")),
    "smooth_v emulated": (
        lambda: sagebwd.emulation.emulated_attention(X, X, X, smooth_v=True, precision="none"),
        SpecError, ("smooth_v=True", "'none'", "leave it out")),
    "smooth_q alone": (
        lambda: sagebwd.reference.emulate(ONE, ONE, ONE, ONE, smooth_q=True, precision="pv"),
        SpecError, ("smooth_q=True", "no queries", "'s'")),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_says_what_to_do(what):
    call, kind, parts = WRONG[what]
    with pytest.raises(kind) as refused:
        call()
    assert all(part in str(refused.value) for part in parts), str(refused.value)


def test_smoothing_that_has_something_to_smooth():
    assert traced(smooth_v=True, precision=("pv",))["O"]["rel_l2"] is not None
    assert traced(smooth_v=True)["O"] and traced(smooth_q=True, precision="s")["O"]
