"""SLA2 and lists of blocks at their edges: types of parameters, empty tensors, odd arguments."""

import numpy as np
import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sla_inputs import BLOCKS, EXACT, drawn  # noqa: E402

from sagebwd.nn import BlockRouter, SparseLinearAttention  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402
from sagebwd.sla.exact import listed_attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def qkv(queries=21, keys=18, batch=1):
    return tuple(drawn(batch, 2, n, 4, seed=s) for s, n in enumerate((queries, keys, keys)))


def made(**given):
    return SparseLinearAttention(4, 2, **{"alpha": "head", "density": 0.45, **EXACT, **given})


# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", ["block", "head", "estimated"])
def test_a_default_dtype_does_not_change_parameters(alpha):
    torch.set_default_dtype(torch.bfloat16)
    try:
        modules = made(alpha=alpha, seq_len=21), BlockRouter(4, heads=2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for module in modules for p in module.parameters()} == {torch.float32}


@pytest.mark.parametrize("alpha", ["block", "head", "estimated"])
def test_parameters_of_empty_memory_are_reset(alpha):
    with torch.device("meta"):
        module = made(alpha=alpha, seq_len=21, router=BlockRouter(4, heads=2, block_size=BLOCKS))
    module = module.to_empty(device="cpu")
    for p in module.parameters():
        p.data.fill_(torch.nan)
    for part in module.modules():  # as FSDP does
        part.reset_parameters()
    expected = made(alpha=alpha, seq_len=21, router=BlockRouter(4, heads=2, block_size=BLOCKS))
    found = module.state_dict()
    assert found.keys() == expected.state_dict().keys()
    assert all(torch.equal(found[name], x) for name, x in expected.state_dict().items())
    assert torch.equal(module.router.key_map, torch.eye(4).expand(2, 4, 4))


@pytest.mark.parametrize("kept", [None, ["sparse"]])
def test_what_diffusers_casts(kept, tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

    class Model(diffusers.ModelMixin, diffusers.ConfigMixin):
        config_name, _keep_in_fp32_modules = "config.json", kept

        @diffusers.configuration_utils.register_to_config
        def __init__(self):
            super().__init__()
            self.first, self.sparse = torch.nn.Linear(4, 4), made()

    Model().save_pretrained(tmp_path)
    model = Model.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    assert model.first.weight.dtype == torch.bfloat16
    wanted = torch.float32 if kept else torch.bfloat16  # as the docstring says
    assert {p.dtype for p in model.sparse.parameters()} == {wanted}


def test_transformers_casts_nothing(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers")

    class Config(transformers.PretrainedConfig):
        model_type = "sparse"

    class Model(transformers.PreTrainedModel):
        config_class = Config

        def __init__(self, config):
            super().__init__(config)
            self.first, self.sparse = torch.nn.Linear(4, 4), made()
            self.post_init()

        def _init_weights(self, module):
            pass

    Model(Config()).save_pretrained(tmp_path)
    model = Model.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.first.weight.dtype == torch.bfloat16
    assert {p.dtype for p in model.sparse.parameters()} == {torch.float32}


class Silence(torch.nn.Module):
    """In place of the attention to listed blocks."""

    def forward(self, q, k, v, lists, *rest):
        return torch.zeros_like(q), q.new_zeros(q.shape[:3])


@pytest.mark.parametrize("where", ["a function", "a module", "the class"])
def test_another_sparse_attention_is_used_wherever_it_is_set(monkeypatch, where):
    """Not in a subclass alone; a module as an attribute does not hide a method of the class."""
    module, (q, k, v) = made(alpha="head").double(), qkv()
    usual, calibrated = module(q, k, v), made(alpha="head").double()
    calibrated.calibrate_alpha(q, k, v)
    if where == "the class":
        monkeypatch.setattr(SparseLinearAttention, "attend_blocks",
                            lambda self, *given: Silence()(*given))  # fmt: skip
    else:
        module.attend_blocks = Silence() if where == "a module" else Silence().forward
    linear = sagebwd.block_linear_attention(q, k, v, block_mask=module.block_mask(q, k),
                                            block_size=BLOCKS)  # fmt: skip
    out = module(q, k, v)
    torch.testing.assert_close(out, 0.5 * linear)
    assert not torch.allclose(out, usual) and module.report(q, k, v)["error_sparse"] == 1
    module.calibrate_alpha(q, k, v)
    assert not torch.allclose(module.alpha_logit, calibrated.alpha_logit)


# ---- the report ----------------------------------------------------------------------------------


def test_the_best_mass_is_of_as_many_blocks_in_each_row():
    class Masked(torch.nn.Module):
        def forward(self, q, k):
            scores = sagebwd.pooled_block_scores(q, k, block_size=BLOCKS).clone()
            scores[:, :, 0], scores[:, 1, 1, 1:] = -torch.inf, -torch.inf
            return scores

    module, (q, k, v) = made(router=Masked()).double(), qkv()
    mask, best = module.block_mask(q, k), []
    assert set(mask.sum(-1).flatten().tolist()) == {0, 1, 2}
    weights = (q @ k.mT / 2).softmax(-1)
    for head in range(2):
        for i in range(3):
            rows = weights[0, head, 8 * i : 8 * i + 8]
            masses = sorted((float(rows[:, 4 * j : 4 * j + 4].sum(-1).mean()) for j in range(5)),
                            reverse=True)  # fmt: skip
            best.append(len(rows) * sum(masses[: int(mask[0, head, i].sum())]))
    found = module.report(q, k, v)
    np.testing.assert_allclose(found["best_mass"], sum(best) / weights[..., 0].numel(), rtol=1e-9)
    assert found["mass"] <= found["best_mass"]


@pytest.mark.parametrize("sizes", [dict(queries=0), dict(keys=0), dict(batch=0)])
@pytest.mark.parametrize("alpha", ["head", "estimated"])
def test_nothing_has_no_report_and_no_loss(sizes, alpha):
    module, given = made(alpha=alpha).double(), qkv(**sizes)
    before = [p.clone() for p in module.parameters()]
    for call in (module.report, module.stage_one_loss, module.calibrate_alpha):
        with pytest.raises(sagebwd.SpecError, match="pass some queries and keys"):
            call(*given)
    assert all(map(torch.equal, before, module.parameters()))
    assert module(*given).shape == given[0].shape


# ---- lists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("counted", [True, False])
def test_counts_of_lists_without_room_are_wrong(counted):
    indices = torch.zeros(1, 1, 2, 0, dtype=torch.int32)
    counts = torch.tensor([[[1, -1]]], dtype=torch.int32) if counted else None
    bits = sagebwd.pack_blocks(block_indices=indices, block_counts=counts, keys=64 * 40)
    assert bits.shape == (1, 1, 2, 2) and not bits[..., 0].any()
    assert bits[..., 1].flatten().tolist() == ([-(1 << 31)] * 2 if counted else [0, 0])
    none = sagebwd.pack_blocks(block_indices=indices, keys=64,
                               block_counts=torch.zeros(1, 1, 2, dtype=torch.int32))  # fmt: skip
    assert none.shape == (1, 1, 2, 1) and not none.any()
    q, k, v = (torch.randn(1, 2, 256, 64, dtype=torch.bfloat16) for _ in range(3))
    given = dict(block_indices=indices, block_counts=counts)
    for out in (emulation.emulated_block_sparse_attention(q, k, v, **given),
                sagebwd.sparse_linear_attention(q, k, v, alpha=1, precision="exact", **given)):
        assert out.isnan().all() if counted else not out.isnan().any()


@pytest.mark.parametrize("shape", [(), (3,), (1, 2, 3)])
def test_what_is_checked_has_four_dimensions(shape):
    indices = torch.zeros(shape, dtype=torch.int32)
    for call in (lambda: sagebwd.check_block_indices(indices, keys=128),
                 lambda: sagebwd.pack_blocks(block_indices=indices, keys=128)):  # fmt: skip
        with pytest.raises(sagebwd.SpecError, match="block_indices has shape .*4 dimensions"):
            call()


# ---- arguments -----------------------------------------------------------------------------------


def lists(**given):
    x = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    return emulation.emulated_block_sparse_attention(x, x, x, block_mask=mask, **given)


def both(**given):
    mask = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    return sagebwd.sparse_linear_attention(*qkv(), **{"alpha": 0.5, **EXACT, "block_mask": mask,
                                                      **given})  # fmt: skip


@pytest.mark.parametrize("call, name, match", [
    (lists, "attn_mask", "pass block_mask=, which says"),
    (both, "attn_mask", "pass block_mask=, which says"),
    (lists, "sink_logits", "calls with lists of blocks have no such option"),
    (both, "sink_logits", "calls with lists of blocks have no such option"),
    (both, "dropout_p", "dropout is not supported"),
    (made, "dropout", "dropout is not supported: leave it out"),
    (made, "dtype", "parameters are in FP32"),
    (lambda **x: made().double()(*qkv(), **x), "is_causal", "it has no causal form"),
    (lambda **x: made().double()(*qkv(), **x), "attn_mask", "its router says which blocks"),
    (lambda **x: sagebwd.pack_blocks(torch.ones(1, 1, 1, 2).bool(), **x), "block_szie",
     "did you mean 'block_size'"),
    (lambda **x: sagebwd.pooled_block_scores(*qkv()[:2], **x), "query_mpa",
     "did you mean 'query_map'"),
    (made, "zzz", "known keywords: (?!.*self)"),
])  # fmt: skip
def test_keywords_of_others_get_a_hint(call, name, match):
    with pytest.raises(TypeError, match=f"{name}.*{match}"):
        call(**{name: True})


def test_keywords_that_ask_for_nothing_are_taken():
    expected = both()
    assert torch.equal(both(dropout_p=0.0, is_causal=False, causal=False), expected)
    assert torch.equal(lists(dropout_p=0.0), lists())
    module = made().double()
    assert torch.equal(module(*qkv(), is_causal=False), module(*qkv()))
    for asked in (dict(dropout_p=0.1), dict(causal="top-left"), dict(is_causal=True)):
        with pytest.raises(TypeError):
            both(**asked)


def test_numbers_of_numpy_are_alphas():
    assert torch.equal(both(alpha=np.float32(0.25)), both(alpha=0.25))
    for wrong in (True, np.bool_(True), "x"):
        with pytest.raises((TypeError, sagebwd.SpecError), match="alpha"):
            both(alpha=wrong)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_beta_has_floating_numbers(dtype):
    with pytest.raises(sagebwd.SpecError, match=f"beta is {dtype} of .2,. on cpu: pass floating"):
        both(alpha="estimated", beta=torch.ones(2, dtype=dtype))
    both(alpha="estimated", beta=torch.ones(2))


def test_a_router_gives_a_tensor():
    class Listing(torch.nn.Module):
        def forward(self, q, k):
            return [1.0]

    with pytest.raises(TypeError, match="the router gives a list; it must give a torch tensor"):
        made(router=Listing()).double()(*qkv())


def test_soft_lists_of_what_is_not_finite():
    """As the docstring says."""
    bad = torch.tensor([[1.0, torch.nan, 2.0, 3.0], [1.0, 2.0, -torch.inf, 3.0]])
    soft = sagebwd.soft_top_blocks(bad, 0.5)
    assert soft[0].isnan().all() and not soft[1].isnan().any() and soft[1, 2] == 0
    assert torch.equal(sagebwd.soft_top_blocks(bad[:1], 1.0), torch.ones(1, 4))


def test_parameters_stay_in_fp32():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), SparseLinearAttention(32, 2, alpha="head"))
    with torch.no_grad():
        model[1].alpha_logit.fill_(1 / 3)
    for cast in (lambda: model.bfloat16(), lambda: model.half(), lambda: model.to(torch.bfloat16)):
        cast()
        assert model[0].weight.dtype in (torch.bfloat16, torch.float16)
        assert {p.dtype for p in model[1].parameters()} == {torch.float32}
        assert (model[1].alpha_logit == torch.tensor(1 / 3)).all()
    assert model.to("meta")[1].alpha_logit.is_meta


def test_sixteen_bit_tensors_take_any_length_with_an_estimate():
    module = SparseLinearAttention(32, 2, alpha="estimated", density=0.3, precision="exact")
    for tokens in (128, 300):
        q, k, v = (drawn(1, 2, tokens, 32, seed=s).bfloat16().requires_grad_() for s in range(3))
        out = module(q, k, v)
        out.sum().backward()
        assert out.dtype == q.grad.dtype == torch.bfloat16 and module.beta.grad.any()
        loss = module.stage_one_loss(q, k, v)
        assert loss.dtype == torch.float32 and 0 < loss.item() < 1
