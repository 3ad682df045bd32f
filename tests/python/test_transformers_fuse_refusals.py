"""`fuse` names what it cannot fuse, and calls what was changed afterwards."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from fused_models import FAMILIES, SIZES, assert_near, config_of, model_of, results, tokens  # noqa: E402
from transformers.models.qwen3 import modeling_qwen3  # noqa: E402
from transformers.models.qwen3.modeling_qwen3 import (  # noqa: E402
    ALL_ATTENTION_FUNCTIONS,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

import sagebwd.integrations.transformers as door  # noqa: E402
from sagebwd import SpecError  # noqa: E402
from sagebwd.integrations import _fused_forward  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def layer(model, number=0):
    return model.model.layers[number].self_attn


def assert_left(model, match):
    """That the first of two layers is left for this reason, and the second is fused."""
    classes = [type(module) for module in model.modules()]
    report = door.fuse(model)
    assert list(report.fused) == ["model.layers.1.self_attn"]
    assert list(report.left) == ["model.layers.0.self_attn"]
    (reason,) = report.left.values()
    assert match in reason, reason
    assert reason in str(report)
    changed = [a is not b for a, b in zip(classes, map(type, model.modules()))]
    assert sum(changed) == 1


def assert_nothing_fits(model, *matches):
    classes = [type(module) for module in model.modules()]
    with pytest.raises(SpecError) as error:
        door.fuse(model)
    assert all(match in str(error.value) for match in matches), error.value
    assert classes == [type(module) for module in model.modules()]


def other_signs(q, k, cos, sin, unsqueeze_dim=1):
    """It turns the other way round."""
    cos, sin = (t.unsqueeze(unsqueeze_dim) for t in (cos, -sin))
    return [x * cos + modeling_qwen3.rotate_half(x) * sin for x in (q, k)]


def only_of_queries(q, k, cos, sin, unsqueeze_dim=1):
    return other_signs(q, k, cos, -sin)[0], k


def complex_tables(q, k, freqs_cis):
    return q * freqs_cis, k * freqs_cis


@pytest.mark.parametrize("rotate", [other_signs, only_of_queries, complex_tables])
def test_an_unknown_function_that_rotates_is_refused_by_name(monkeypatch, rotate):
    model = model_of("qwen3")
    monkeypatch.setattr(modeling_qwen3, "apply_rotary_pos_emb", rotate)
    said = "takes 3 positional" if rotate is complex_tables else "in none of the known ways"
    assert_nothing_fits(model, "apply_rotary_pos_emb", said, "model.layers.0.self_attn")


class WithoutMean(modeling_qwen3.Qwen3RMSNorm):
    """It divides by the largest number of a head."""

    def forward(self, x):
        return self.weight * x / (x.abs().amax(-1, keepdim=True) + self.variance_epsilon)


class OtherGradient(modeling_qwen3.Qwen3RMSNorm):
    """This gives the right results and other gradients."""

    def forward(self, x):
        y = super().forward(x)
        factor = (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt().detach()
        return (self.weight * x * factor) + (y - self.weight * x * factor).detach()


class OtherEps(modeling_qwen3.Qwen3RMSNorm):
    """This adds another eps than its attribute has."""

    def forward(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


@pytest.mark.parametrize(
    "norm, match",
    [
        (lambda: torch.nn.LayerNorm(32, eps=1e-6), "q_norm (LayerNorm) is not RMSNorm"),
        (lambda: WithoutMean(32), "q_norm (WithoutMean) is not RMSNorm"),
        (lambda: OtherEps(32), "q_norm (OtherEps) is not RMSNorm"),
        (lambda: OtherGradient(32), "the gradient of q_proj would be off by"),
        (lambda: modeling_qwen3.Qwen3RMSNorm(32, eps=1e-5), "eps of its q_norm is not that of"),
        (lambda: torch.nn.RMSNorm(32, eps=None), "has no eps that is a number"),
        (lambda: torch.nn.RMSNorm(16, eps=1e-6), "a weight of 16 numbers"),
        (lambda: torch.nn.Dropout(0.0), "has no eps that is a number"),
    ],
)
def test_norms_that_somebody_put_there(norm, match):
    model = model_of("qwen3")
    layer(model).q_norm = norm()
    assert_left(model, match)


def test_a_norm_of_the_same_formula_is_fused():
    model, ids = model_of("qwen3"), tokens(2, 12)
    layer(model).q_norm = torch.nn.RMSNorm(32, eps=1e-6, elementwise_affine=False)
    layer(model, 1).k_norm = torch.nn.RMSNorm(32, eps=1e-6)
    expected = results(model, ids)
    assert len(door.fuse(model).fused) == 2
    assert_near(results(model, ids), expected, 1e-5)


HOOKS = {
    "register_forward_hook": lambda module, given, out: 2 * out,
    "register_forward_pre_hook": lambda module, given: (given[0] + 1,),
    "register_full_backward_hook": lambda module, of_given, of_out: (2 * of_given[0],),
    "register_full_backward_pre_hook": lambda module, of_out: (2 * of_out[0],),
}


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("family", ["qwen3", "olmo2"])
def test_hooks_of_norms_are_refused_before_and_called_afterwards(family, name):
    model, ids = model_of(family), tokens(2, 12)
    plain = results(model, ids)
    handle = getattr(layer(model).q_norm, name)(HOOKS[name])
    expected = results(model, ids)
    assert_left(model, "q_norm (")
    handle.remove()
    assert len(door.fuse(model).fused) == 2
    getattr(layer(model).q_norm, name)(HOOKS[name])
    found = results(model, ids)
    assert_near(found, expected, 1e-5)
    with pytest.raises(AssertionError):
        assert_near(found, plain, 0.01)


def test_another_eps_afterwards_is_that_of_both_or_refused():
    model, ids = model_of("qwen3"), tokens(2, 12)
    door.fuse(model)
    layer(model).q_norm.variance_epsilon = 0.5
    with pytest.raises(SpecError, match=r"q_norm has eps=0.5 and k_norm 1e-06.*unfuse"):
        model(ids)
    layer(model).k_norm.variance_epsilon = 0.5
    found = results(model, ids)
    door.unfuse(model)
    assert_near(found, results(model, ids), 1e-5)


def test_norms_that_are_replaced_afterwards_are_called():
    for norm in (WithoutMean(32), torch.nn.RMSNorm(32, eps=0.5)):
        model, ids = model_of("qwen3"), tokens(2, 12)
        door.fuse(model)
        layer(model).k_norm = norm
        found = results(model, ids)
        door.unfuse(model)
        assert_near(found, results(model, ids), 1e-5)


def test_forwards_that_somebody_put_there():
    model = model_of("qwen3")
    for part, match in ((layer(model), "its forward was replaced"),
                        (layer(model).k_norm, "a forward of its own")):  # fmt: skip
        part.forward = functools.partial(part.forward)
        assert_left(model, match)
        del part.forward
        door.unfuse(model)


def test_a_forward_that_recording_left_behind():
    """Transformers 4.57 does so after output_attentions=True."""
    model, ids = model_of("qwen3"), tokens(2, 12)
    expected = results(model, ids)
    layer(model).forward = layer(model).forward
    assert len(door.fuse(model).fused) == 2
    assert layer(model).forward.__func__ is _fused_forward.Fused.forward
    assert_near(results(model, ids), expected, 1e-5)
    layer(model).forward = layer(model).forward
    door.unfuse(model)
    assert layer(model).forward.__func__ is modeling_qwen3.Qwen3Attention.forward
    after = results(model, ids)
    assert all(torch.equal(after[name], expected[name]) for name in expected)


class Scaled(modeling_qwen3.Qwen3Attention):
    """It changes queries behind its norm, by a parameter that the fused forward does not know."""

    def __init__(self, *given):
        super().__init__(*given)
        self.scale = torch.nn.Linear(32, 32)

    def forward(self, hidden_states, position_embeddings, attention_mask, cache=None, **more):
        handle = self.q_norm.register_forward_hook(lambda module, given, out: self.scale(out))
        try:
            return super().forward(hidden_states, position_embeddings, attention_mask, cache=cache,
                                   **more)  # fmt: skip
        finally:
            handle.remove()


class Written(modeling_qwen3.Qwen3Attention):
    """Somebody wrote this forward, which fits unless it has a twist."""

    twist = None

    def forward(self, hidden_states, position_embeddings, attention_mask=None,
                past_key_values=None, **more):  # fmt: skip
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = (project(hidden_states).view(shape)
                   for project in (self.q_proj, self.k_proj, self.v_proj))  # fmt: skip
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        if past_key_values is not None:
            words = {"cos": q} if self.twist == "other words" else {}
            k, v = past_key_values.update(k, v, self.layer_idx, *([words] if words else []))
        elif self.twist == "without a cache":
            q = 2 * q
        if self.twist == "keys by groups":
            k = k.repeat_interleave(2, 1)
        name = self.config._attn_implementation
        attend = eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        dropout = self.attention_dropout if self.training else 0.0
        if self.twist == "another mask":
            attention_mask = 2 * attention_mask
        more = {} if self.twist == "drops keywords" else more
        out, weights = attend(self, q, k, v, attention_mask, scaling=self.scaling, dropout=dropout,
                              **more)  # fmt: skip
        out, weights = self.o_proj(out.flatten(-2)), None if self.twist == "alone" else weights
        return (out, weights, k) if self.twist == "three results" else (out, weights)


@pytest.mark.parametrize(
    "twist, match",
    [
        ("without a cache", "the output would be off by"),
        ("keys by groups", "heads that do not belong together"),
        ("three results", "does not call attention once and give two results"),
        ("alone", "its second result would be another one"),
        ("other words", "its cache would be handed something else"),
        ("another mask", "attention would be handed another mask"),
        ("drops keywords", "attention would be handed another position_ids"),
    ],
)
def test_a_forward_that_somebody_wrote(twist, match):
    model, ids = model_of("qwen3"), tokens(2, 12)
    for block in model.model.layers:
        block.self_attn.__class__ = Written
    expected = results(model, ids)
    assert len(door.fuse(model).fused) == 2
    assert_near(results(model, ids), expected, 1e-5)
    door.unfuse(model)
    layer(model).twist = twist
    assert_left(model, match)


class OfFlashAttention(Written):
    """It does something else for an attn_implementation that is not tried."""

    def forward(self, hidden_states, position_embeddings, attention_mask=None,
                past_key_values=None, **more):  # fmt: skip
        if self.config._attn_implementation == "flash_attention_2" and ALL_ATTENTION_FUNCTIONS:
            hidden_states = hidden_states[:, :1]
        return super().forward(hidden_states, position_embeddings, attention_mask,
                               past_key_values, **more)  # fmt: skip


class Named(modeling_qwen3.Qwen3Attention):
    def forward(self, hidden_states, attention_mask=None, cache=None):
        raise NotImplementedError  # its parameters are looked at, and it is not called


def test_attention_of_other_kinds():
    model = model_of("qwen3")
    own = layer(model)
    for kind, match in ((Scaled, "Scaled.forward calls another class's"), (Named, "asks tran"),
                        (OfFlashAttention, "something else for flash-attention")):  # fmt: skip
        model.model.layers[0].self_attn = kind(model.config, 0)
        assert_left(model, match)
        door.unfuse(model)
    model.model.layers[0].self_attn = own
    own.q_proj, q_proj = None, own.q_proj
    assert_left(model, "it has no q_proj")
    door.unfuse(model)
    own.q_proj = torch.nn.Sequential(q_proj)
    assert_left(model, "its q_proj (Sequential) has no out_features")


def test_what_attention_is_handed_has_to_be_known(monkeypatch):
    """A model's forward that hands attention another keyword, or a number from elsewhere."""
    model, code = model_of("qwen3"), modeling_qwen3.Qwen3Attention.forward

    class Told(dict):
        """It stands for transformers' functions, and tells them more than the module does."""

        def __getitem__(self, name):
            attend = super().__getitem__(name)
            return lambda *tensors, **more: attend(*tensors, **{**more, **self.extra})

        def get_interface(self, name, default):
            return self[name]

    monkeypatch.setattr(modeling_qwen3, "ALL_ATTENTION_FUNCTIONS", told := Told())
    for extra, match in (
        ({"scaling": 0.5}, "scaling=0.5, whose source is not known"),
        ({"scaling": 32**-0.5}, "scaling=0.1767766952966369, whose source is not known"),
        ({"bias": 7}, "bias=7, whose source is not known"),
    ):
        told.extra = extra
        assert_nothing_fits(model, match)
    told.extra = {"sliding_window": None}
    assert len(door.fuse(model).fused) == 2
    assert code is modeling_qwen3.Qwen3Attention.forward


def test_layers_without_positions_and_of_other_kinds_are_named():
    config = transformers.SmolLM3Config(**WHOLE_HEADS, no_rope_layers=[1, 0])
    model = transformers.AutoModelForCausalLM.from_config(config)
    report = door.fuse(model)
    assert list(report.fused) == ["model.layers.0.self_attn"]
    assert "does not call its function that rotates" in report.left["model.layers.1.self_attn"]
    report = door.fuse(model_of("qwen3_next"))
    assert report.left == {"model.layers.0.linear_attn": "it has no q_proj, k_proj, v_proj, o_proj"}
    lines = str(report).split("\n")
    assert lines[0] == f"fused: model.layers.1.self_attn: {FAMILIES['qwen3_next'][2]}"
    assert lines[1].startswith("left as it was: model.layers.0.linear_attn: it has no q_proj")


WHOLE_HEADS = {name: size for name, size in SIZES.items() if name != "head_dim"}
#: By name of a configuration: what it is given, and why its attention is not fused.
OTHERS = {
    "HunYuanDenseV1": (SIZES, "would be off by", "It also has key_layernorm, query_layernorm"),
    "Afmoe": (SIZES | {"num_experts": 2, "num_dense_layers": 2}, "It also has gate_proj"),
    "Olmo": (WHOLE_HEADS | {"clip_qkv": 1000.0}, "the output would be off by"),
    "Ministral3": (SIZES, "the output would be off by"),  # it scales queries of later positions
    "SeedOss": (SIZES | {"residual_dropout": 0.1}, "the output would be off by"),
    "NanoChat": (WHOLE_HEADS, "rotates in none of the known ways"),  # the other way round
    "Llama4Text": (SIZES | {"num_local_experts": 2, "intermediate_size_mlp": 64},
                   "Llama4TextRotaryEmbedding gives no (cos, sin)"),
    "Phi3": (WHOLE_HEADS, "it has no q_proj, k_proj, v_proj"),
    "Cohere": (WHOLE_HEADS | {"use_qk_norm": True}, "its q_norm (CohereLayerNorm) has a weight of "
               "(4, 16): RMSNorm of each head has (16,), and over all heads (64,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_attention_that_does_something_else_as_well(name):
    given, *matches = OTHERS[name]
    kind = getattr(transformers, f"{name}Config", None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    model = transformers.AutoModelForCausalLM.from_config(kind(**given))
    state = torch.get_rng_state()
    assert_nothing_fits(model, *matches)
    assert torch.equal(torch.get_rng_state(), state)  # dropout draws numbers
    if name == "Olmo":
        model = transformers.AutoModelForCausalLM.from_config(kind(**WHOLE_HEADS))
        assert len(door.fuse(model).fused) == 2


def test_models_of_which_nothing_can_be_fused():
    config = transformers.GPT2Config(n_embd=64, n_head=2, n_layer=2, vocab_size=100)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert_nothing_fits(model, "nothing in GPT2LMHeadModel", "transformer.h.0.attn and 1 more")
    assert_nothing_fits(torch.nn.Linear(2, 2), "It has no modules of attention")
    assert_nothing_fits(modeling_qwen3.Qwen3Attention(config_of("qwen3"), 0), "no module above")
    for function in (door.fuse, door.unfuse):
        with pytest.raises(TypeError, match=r"model is a str.*pass a model of transformers"):
            function("qwen3")
    assert door.unfuse(torch.nn.Linear(2, 2)) == []


def test_positions_have_to_come():
    model = model_of("qwen3")
    door.fuse(model)
    with pytest.raises(TypeError, match=r"position_embeddings is a NoneType.*pass \(cos, sin\)"):
        layer(model)(torch.zeros(1, 4, 64))
