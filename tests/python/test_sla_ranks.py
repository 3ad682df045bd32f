"""SLA2's module with FSDP and DDP, over gloo: what is right for one rank with all tensors."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

import distributed_ranks as ranks_of  # noqa: E402
import sla_ranks  # noqa: E402

WAYS = "own group", "one group", "registered", "after a forward"


@pytest.mark.parametrize("ranks, alpha, how", [
    *((2, "head", how) for how in WAYS), (2, "block", "own group"),
    (3, "estimated", "registered"),
])  # fmt: skip
def test_methods_gather_parameters_that_fsdp_shares(ranks, alpha, how, tmp_path):
    for found in ranks_of.run(tmp_path, ranks, sla_ranks.with_fsdp, alpha, how):
        assert isinstance(found, dict), found
        assert len(found) >= 10 and all(found.values()), found


@pytest.mark.parametrize("alpha", ["block", "head", "estimated"])
def test_ranks_of_ddp_calibrate_together(alpha, tmp_path):
    found = ranks_of.run(tmp_path, 2, sla_ranks.with_ddp, alpha)
    (apart, together, expected), (apart_there, together_there, _) = found
    assert torch.equal(together, together_there)
    torch.testing.assert_close(together, expected, rtol=1e-6, atol=1e-6)
    assert not torch.allclose(apart, apart_there)  # as the docstring says


def test_one_rank_that_cannot_calibrate_stops_all(tmp_path):
    for found in ranks_of.run(tmp_path, 2, sla_ranks.one_with_nan):
        assert str(found).startswith("SpecError: k has NaN or infinite values"), found


def test_copies_that_fsdp_throws_away_are_not_changed(tmp_path):
    (found,) = ranks_of.run(tmp_path, 1, sla_ranks.copies)
    errors, unchanged, changed, trained = found
    assert len(errors) == 3 and unchanged and changed
    assert [error.split()[1] for error in errors] == [
        "calibrate_alpha", "calibrate_alpha", "freeze_router"]  # fmt: skip
    assert all("would change copies" in error and "model.reshard()" in error for error in errors)
    assert trained == [True, False, False]


def test_a_layer_in_fp32_has_a_group_of_its_own_in_a_model_of_bf16(tmp_path):
    (found,) = ranks_of.run(tmp_path, 1, sla_ranks.two_types)
    own, one_group = found
    assert own == {"before.weight": "torch.bfloat16", "before.bias": "torch.bfloat16",
                   "attention.alpha_logit": "torch.float32"}  # fmt: skip
    assert "uniform original parameter dtype" in one_group
