"""The door of transformers refuses these, and a mask stands in for an unwritten one."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from transformers.masking_utils import (  # noqa: E402
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers_cases import (  # noqa: E402
    flash_keywords,
    llama,
    model_of,
    packing,
    padding_of,
    tokens,
)

import sagebwd.integrations.transformers as door  # noqa: E402
from sagebwd import SpecError  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")


def attend(n=16, keys=None, mask=None, module=None, **given):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, count, 64, generator=generator).bfloat16()
               for count in (n, keys or n, keys or n))  # fmt: skip
    return door.attend(module or torch.nn.Linear(1, 1), q, k, v, mask, **given)[0]


SMALL = dict(vocab_size=100, hidden_size=64, num_hidden_layers=1, num_attention_heads=2)


@pytest.mark.parametrize(("name", "given"), [
    ("Bloom", dict(vocab_size=100, hidden_size=64, n_head=2, n_layer=1)), ("Falcon", SMALL),
    ("GPTNeo", dict(vocab_size=100, hidden_size=64, num_heads=2, num_layers=1,
                    attention_types=[[["global"], 1]]))])  # fmt: skip
def test_models_that_ask_for_no_function(name, given):
    """transformers itself says nothing, or KeyError: 'sagebwd'."""
    config = getattr(transformers, f"{name}Config")(**given)
    build = getattr(transformers, f"{name}ForCausalLM")._from_config
    with pytest.raises(SpecError, match=f"attention of {name}ForCausalLM itself.*sagebwd.sdpa"):
        build(config, attn_implementation="sagebwd")
    build(config, attn_implementation="eager")


def test_models_within_models_may_ask_for_a_function():
    text = transformers.Qwen2Config(**SMALL, num_key_value_heads=1, intermediate_size=64)
    image = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=32,
                 patch_size=8)  # fmt: skip
    config = transformers.GotOcr2Config(
        vision_config=dict(image, mlp_dim=64, output_channels=16, window_size=2,
                           global_attn_indexes=[0]), text_config=text)  # fmt: skip
    with pytest.warns(UserWarning, match="GotOcr2ForConditionalGeneration itself.* within it may"):
        model = transformers.GotOcr2ForConditionalGeneration._from_config(
            config, attn_implementation="sagebwd").bfloat16()  # fmt: skip
    model(torch.randint(50, (1, 8)))  # which hands logits_to_keep on
    clip = transformers.CLIPVisionConfig(**image, intermediate_size=64)
    config = transformers.LlavaConfig(vision_config=clip, text_config=text)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        transformers.LlavaForConditionalGeneration._from_config(
            config, attn_implementation="sagebwd")  # fmt: skip


@pytest.mark.parametrize("name", ["block_indices", "indices", "sinks", "something_new"])
def test_keywords_that_are_not_known(name):
    for value in (torch.zeros(1), 1, True, "x"):
        with pytest.raises(SpecError, match=f"^{name}: Linear hands it .*'sdpa'"):
            attend(**{name: value})
    for value in (None, False):
        assert torch.equal(attend(**{name: value}), attend())


def test_what_is_harmless_changes_nothing():
    for name in door.HARMLESS:
        assert torch.equal(attend(**{name: torch.arange(16)[None]}), attend())
    assert torch.equal(attend(deterministic=True), attend())


def test_sinks_that_are_not_handed_over():
    module = torch.nn.Linear(1, 1)
    module.sinks = torch.zeros(2)
    with pytest.raises(SpecError, match="Linear has sinks"):
        attend(module=module)
    assert not torch.equal(attend(module=module, s_aux=module.sinks), attend())


def test_fewer_queries_than_keys():
    with pytest.raises(SpecError, match="4 queries and 16 keys, causal and without a mask"):
        attend(4, 16)
    assert attend(4, 16, is_causal=False).shape == attend(4, 16, mask=masked(4, 16, 12)).shape
    assert torch.equal(attend(1, 16), attend(1, 16, is_causal=False))  # what generation asks for


def test_half_of_what_packing_needs():
    firsts = torch.tensor([0, 6, 16]).int()
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        with pytest.raises(SpecError, match="pass cu_seq_lens_q and cu_seq_lens_k, or neither"):
            attend(**{name: firsts})


def test_a_mask_beside_packed_sequences():
    firsts, positions = packing((6, 10), "cpu")
    given = {"position_ids": positions, "use_cache": False, **flash_keywords(firsts, (6, 10))}
    model = model_of(llama, "sagebwd", "cpu")
    expected = model(tokens(1, 16, device="cpu"), **given).logits
    found = model(tokens(1, 16, device="cpu"), attention_mask=padding_of([16], 16, "cpu"), **given)
    assert torch.equal(found.logits, expected)
    with pytest.raises(SpecError, match="within the packed sequences this mask is not"):
        model(tokens(1, 16, device="cpu"), attention_mask=padding_of([13], 16, "cpu"), **given)


def masked(queries, keys, offset=0, function=causal_mask_function, padding=None):
    return door.mask(1, queries, keys, q_offset=offset, mask_function=function,
                     attention_mask=padding, allow_is_causal_skip=False)  # fmt: skip


def test_who_looks_into_the_stand_in_sees_the_mask():
    mask = masked(16, 16, function=sliding_window_causal_mask_function(5))
    behind = torch.arange(16) - torch.arange(16)[:, None]
    right = ((behind <= 0) & (behind > -5))[None, None]
    assert mask.shape == right.shape and mask.dtype == torch.bool and mask.dim() == 4
    assert mask.to("cpu") is mask and mask.contiguous() is mask  # nobody has looked
    assert mask.mask is None
    assert torch.equal(mask, right) and torch.equal(~mask, ~right)
    assert torch.equal(mask[:, :, -4:], right[:, :, -4:]) and int(mask.sum()) == int(right.sum())
    scores = torch.zeros(1, 2, 16, 16).masked_fill(~mask, -1)
    assert torch.equal(scores == 0, right.expand(1, 2, 16, 16))
    expected = attend(mask=mask, sliding_window=5)
    assert torch.equal(attend(mask=right, sliding_window=5), expected)  # written out it is the same
    last = attend(4, 16, mask=masked(16, 16)[:, :, -4:])
    assert torch.equal(last, attend(4, 16, mask=masked(4, 16, 12)))


def test_who_writes_into_the_stand_in_is_heard():
    mask = masked(16, 16)
    mask[..., 3] = False
    with pytest.raises(SpecError, match="is not that of causal"):
        attend(mask=mask)


def test_masks_of_numbers():
    """As transformers before 4.53 writes them: what is added to scores, of a key too many."""
    visible = torch.ones(1, 1, 16, 17, dtype=torch.bool).tril()
    for dtype in (torch.bfloat16, torch.float32):
        least = torch.finfo(dtype).min
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, least)
        assert torch.equal(attend(mask=mask), attend())
        mask[..., 3] = least
        with pytest.raises(SpecError, match="is not that of causal"):
            attend(mask=mask)
        mask[..., 3] = -1  # a bias
        with pytest.raises(SpecError, match="attention_mask has shape .*sdpa"):
            attend(mask=mask)


def test_packed_sequences_by_a_written_mask():
    """As transformers 4.53 to 4.57 hands it over."""
    _, positions = packing((6, 10), "cpu")
    of = (positions[0] == 0).cumsum(0)
    mask = (of[:, None] == of).tril()[None, None]
    expected = torch.cat([attend_part(0, 6), attend_part(6, 16)], 1)
    assert torch.equal(attend(mask=mask, position_ids=positions), expected)
    with pytest.raises(SpecError, match="is not that of causal"):
        attend(mask=mask)


def attend_part(first, end):
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randn(1, 2, 16, 64, generator=generator).bfloat16()[:, :, first:end]
             for _ in range(3))  # fmt: skip
    return door.attend(torch.nn.Linear(1, 1), *parts, None)[0]


def test_masks_of_other_sizes_or_kinds():
    with pytest.raises(SpecError, match=r"has shape \(1, 1, 16, 16\) for 4 queries and 16 keys"):
        attend(4, 16, mask=masked(16, 16))
    bias = torch.full((1, 1, 16, 16), 0.5)
    for other in (bias, torch.ones(1, 2, 16, 16).bool(), torch.ones(1, 16)):
        with pytest.raises(SpecError, match="attention_mask has shape .*sdpa"):
            attend(mask=other)


def test_errors_speak_of_what_models_are_given():
    firsts = torch.tensor([0, 6, 16])
    for given, said in [
        ({"scaling": "x"}, "^scaling='x': pass a number"),
        ({"sliding_window": 0}, "^sliding_window=0: pass a whole number of at least 1"),
        ({"s_aux": torch.zeros(5)}, "^s_aux "),
    ]:
        with pytest.raises(SpecError, match=said):
            attend(**given)
    q = torch.zeros(1, 2, 16, 64, dtype=torch.float64)
    with pytest.raises(SpecError, match=r"^query is torch.float64"):
        door.attend(torch.nn.Linear(1, 1), q, q, q, None)
    door.use(smooth_q=True)
    try:
        with pytest.raises(SpecError, match="smooth_q is not supported for packed"):
            attend(cu_seq_lens_q=firsts, cu_seq_lens_k=firsts)
    finally:
        door.use()


def test_use_takes_options_by_name():
    for given, meant in (("dv16", "dv16"), ({"precision": "dv16"}, "gradients16")):
        with pytest.raises(TypeError, match=rf"pass them as in use\(precision='{meant}'\)"):
            door.use(given)


@pytest.mark.parametrize("padding", [None, [16, 9], [16, 16]])
def test_meta_tensors(padding):
    """They have shapes and no values: a mask of padding is taken for one."""
    model = model_of(llama, "sagebwd", "cpu").to("meta")
    mask = None if padding is None else padding_of(padding, 16, "meta")
    found = model(tokens(2, 16, device="cpu").to("meta"), attention_mask=mask).logits
    assert found.is_meta and found.shape == (2, 16, 100)
