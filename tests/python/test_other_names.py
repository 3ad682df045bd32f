"""Functions and arguments that were renamed: the old names are still accepted."""

import numpy as np
import pytest

import sagebwd
from sagebwd import reference


def test_comparing_precisions_has_two_names():
    assert sagebwd.compare_plans is sagebwd.compare_precisions
    assert sagebwd.PlanFigures is sagebwd.PrecisionFigures
    assert not {"compare_plans", "PlanFigures"} & set(sagebwd.__all__)


def test_random_inputs_take_lengths_by_other_names():
    given = reference.random_inputs(16, head_dim=64, seq_kv=24)
    for other in (reference.random_inputs(16, head_dim=64, seq_len_kv=24),
                  reference.random_inputs(seq_q=16, head_dim=64, seq_kv=24)):  # fmt: skip
        assert all(np.array_equal(a, b) for a, b in zip(given, other))
    assert given[1].shape == (1, 1, 24, 64)


@pytest.mark.parametrize("function", ["tune", "compare_precisions"])
def test_lengths_of_tuning_have_two_names(function, monkeypatch):
    """A length is checked after there is a GPU, or before, but by either name alike."""
    monkeypatch.setattr(sagebwd.core.tuning, "local_arch", lambda *given: "sm_90a")
    for name in ("seq_q", "seq_len"):
        with pytest.raises(sagebwd.SpecError, match="seq_len=0"):
            getattr(sagebwd, function)(**{name: 0})


def test_both_names_at_once_are_refused():
    with pytest.raises(TypeError, match="'seq_len' and 'seq_q', which are two names"):
        sagebwd.tune(seq_len=64, seq_q=64)


def test_the_emulation_takes_a_plan():
    torch = pytest.importorskip("torch")
    from sagebwd.numerics.emulation import emulated_attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 64, 64).bfloat16() for _ in range(3))
    plain = emulated_attention(q, k, v)
    by_name = emulated_attention(q, k, v, precision=("pv",))
    assert torch.equal(emulated_attention(q, k, v, plan=("pv",)), by_name)
    assert not torch.equal(by_name, plain)


def test_experiments_take_products_by_either_name():
    pytest.importorskip("torch")
    from experiments.attentions import AttentionChoice

    for products in ("none", "s+pv+dv+dp+dq+dk"):
        choice = AttentionChoice.parse(f"emulated:no-rotate,precision={products}")
        assert choice == AttentionChoice.parse(f"emulated:no-rotate,plan={products}")
        assert len(choice.plan) == (0 if products == "none" else 6)
