"""Cases of tests/drawn/draw.py with little drawn, for tests of cases.py and judge.py there."""

from dataclasses import replace

import cases
import doors
import draw

from sagebwd.numerics import emulation

SPEC = dict(head_dim=64, dtype="bf16", causal="none", smooth_k=True, rotate=True, group_kv=64,
            family="", precision="six-of-seven", deterministic=True, dq_sums="fp32",
            dp_sums="fp32", gradient_kernels="any", granularity="row", window="", packed=False,
            sink_keys=0, smooth_q=False, smooth_v=False)  # fmt: skip
PLAIN = {name: ("gaussian", 1.0) for name in draw.TENSORS}


def case_of(spec=None, **what):
    """A plain case with what is said."""
    drawn = draw.draw_case(0, [SPEC | (spec or {})], 0)
    strides = dict.fromkeys((*draw.TENSORS, "dlse"), "heads first")
    plain = dict(seq_q=70, seq_kv=70, heads_kv=2, group=2, batch=1, value_dim=64,
                 window=(None, None), sequences=None, layout="bhsd", strides=strides,
                 values=PLAIN, key_offset=0.0, zeros=None, unused="nan", softmax_scale=None,
                 door="halves", ends_of_parts=(), told="", dlse="none", k_mean=None, sinks=None,
                 says_group_q=False, again=False)  # fmt: skip
    return replace(drawn, **plain | what)


def is_usual(case):
    """Whether magnitudes are those that models have, and no sink is off."""
    return case.sinks != "some off" and min(scale for _, scale in case.values.values()) > 1e-7


def packed(said_by="both", **what):
    where = draw.Sequences(said_by, used=((20, 30), (33, 17)), rooms=((25, 31), (40, 20)),
                           before=(3, 4), behind=(5, 6), beyond=0, without="")  # fmt: skip
    return dict(batch=2, sequences=where) | what


def wrong_of(case):
    """This names what is called wrong of a case that is not refused."""
    result = cases.outcome_of(case, "cpu")
    assert result["outcome"] in ("right", "wrong")
    return result["wrong"]


def break_pass(monkeypatch, method, change):
    """Lets a pass of the emulation take options that `change` has changed."""
    right = getattr(doors.Emulated, method)

    def changed(*tensors, **options):
        change(options)
        return right(*tensors, **options)

    broken = type("Broken", (doors.Emulated,), {method: staticmethod(changed)})
    monkeypatch.setattr(cases, "doors_of", lambda device: broken)


def add_to_first_dq(monkeypatch):
    """Lets the emulation add something to the gradient of the first query of each head."""
    right = emulation.backward

    def added(*arguments):
        dq, dk, dv = right(*arguments)
        dq[:, :, :1] += 1e-3
        return dq, dk, dv

    monkeypatch.setattr(emulation, "backward", added)
