"""Tiny models of transformers with masks that are expressions, on a simulated GPU."""

import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", minversion="5.5",
                                   reason="needs transformers 5.5")  # fmt: skip

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from transformers import masking_utils  # noqa: E402

import sagebwd.integrations.transformers as door  # noqa: E402
from sagebwd import SpecError  # noqa: E402

import simulator_needed  # noqa: E402, F401

from alike import relative  # noqa: E402
from test_block_mask import Operators  # noqa: E402
from test_linear_branch import kernels_for_lists  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("on_the_simulator")

N = 40
SIZES = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
         "max_position_embeddings": 256, "pad_token_id": 0}  # fmt: skip
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
          "num_attention_heads": 1, "image_size": 16, "patch_size": 8}  # fmt: skip
LAYERS = ["sliding_attention", "full_attention"]


def gemma3():
    text = dict(SIZES, layer_types=LAYERS, sliding_window=9)
    return transformers.Gemma3ForConditionalGeneration, transformers.Gemma3Config(
        text_config=text, vision_config=VISION, mm_tokens_per_image=4)  # fmt: skip


def llama4():
    kinds = ["chunked_attention", "full_attention"]
    return transformers.Llama4ForCausalLM, transformers.Llama4TextConfig(
        **SIZES, attention_chunk_size=16, layer_types=kinds, num_local_experts=1,
        intermediate_size_mlp=64, no_rope_layers=[1, 1], attn_temperature_tuning=False,
        moe_layers=[])  # fmt: skip


def llama():
    return transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES)


def model_of(case, implementation):
    kind, config = case()
    for part in (config, getattr(config, "text_config", config)):
        part._attn_implementation = implementation
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation, dtype=torch.bfloat16)
    for parameter in (p for n, p in model.named_parameters() if "q_proj.weight" in n):
        parameter.data *= 6  # attention that attends to something
    return model


def tokens(*shape):
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(1))


def result(case, implementation, weights, **given):
    model = model_of(case, implementation).train()
    logits = model(**given, use_cache=False).logits * weights[..., None].bfloat16()
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits.float() * direction).sum().backward()
    named = [p.grad.flatten() for n, p in model.named_parameters()
             if p.grad is not None and "vision" not in n]  # fmt: skip
    return logits, torch.cat(named)


def assert_as_eager(case, given, without):
    """That logits and gradients are eager attention's, and not those `without` the mask."""
    weights = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    with Operators() as operators:
        found = result(case, "sagebwd", weights, **given)
    expected = result(case, "eager", weights, **given)
    other = result(case, "eager", weights, **without)
    assert relative(found[0], expected[0]) < 0.05 < 0.2 < relative(other[0], expected[0])
    assert relative(found[1], expected[1]) < 0.12
    return operators.found


def image_spans():
    spans = torch.zeros(2, N, dtype=torch.int64)
    spans[0, 5:22], spans[0, 25:31], spans[1, 12:30] = 1, 1, 1
    return spans


@pytest.mark.parametrize("padded", [False, True])
def test_image_spans_of_gemma3(padded):
    """Two kinds of layers have a mask each. A forward finds its blocks once."""
    given = {"input_ids": tokens(2, N)}
    if padded:
        given["attention_mask"] = torch.ones(2, N, dtype=torch.int64)
        given["attention_mask"][1, :7] = 0
    nothing = torch.zeros(2, N, dtype=torch.int64)
    found = assert_as_eager(gemma3, {**given, "token_type_ids": image_spans()},
                            {**given, "token_type_ids": nothing})  # fmt: skip
    assert found == 2


def test_chunks_of_llama4():
    given = {"input_ids": tokens(2, N)}
    everything = torch.ones(2, 1, N, N, dtype=torch.bool)
    assert assert_as_eager(llama4, given, given | {"attention_mask": everything}) == 1


def test_padding_on_the_left():
    given = {"input_ids": tokens(2, N), "attention_mask": torch.ones(2, N, dtype=torch.int64)}
    given["attention_mask"][0, :13] = 0
    everything = torch.ones(2, 1, N, N, dtype=torch.bool).tril()
    assert assert_as_eager(llama, given, given | {"attention_mask": everything}) == 1


def test_checkpoints_find_no_blocks_again():
    given = {"input_ids": tokens(2, N), "attention_mask": torch.ones(2, N, dtype=torch.int64)}
    given["attention_mask"][0, :13] = 0
    gradients = []
    for checkpoints in (None, {"use_reentrant": True}, {"use_reentrant": False}):
        model = model_of(llama, "sagebwd").train()
        if checkpoints:
            model.gradient_checkpointing_enable(checkpoints)
        with Operators() as operators:
            model(**given, use_cache=False).logits.float().square().sum().backward()
        assert operators.found == 1
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert all(relative(other, gradients[0]) < 1e-3 for other in gradients[1:])


def test_generation_compiles_once():
    """Kernels read where queries lie, and the text does not say it."""
    ids, padding = tokens(2, 12), torch.ones(2, 12, dtype=torch.int64)
    padding[0, :5] = 0
    scores, texts = {}, set()
    for kind in ("sagebwd", "eager"):
        out = model_of(llama, kind).generate(
            ids, attention_mask=padding, max_new_tokens=4, do_sample=False,
            return_dict_in_generate=True, output_scores=True, disable_compile=True)  # fmt: skip
        scores[kind] = torch.stack(out.scores)
    assert relative(scores["sagebwd"][:1], scores["eager"][:1]) < 0.06
    for offset in (12, 13):
        padding = torch.ones(1, offset + 1, dtype=torch.bool)
        seen = mask_of(masking_utils.causal_mask_function, 1, offset + 1, offset, padding)
        texts.add(seen.pattern._expression().text)
    assert len(texts) == 1 and "q_offset[0]" in texts.pop()


# ---- functions of masks --------------------------------------------------------------------------


def mask_of(function, queries=N, keys=N, offset=0, padding=None):
    return door.mask(1, queries, keys, q_offset=offset, mask_function=function, use_vmap=True,
                     attention_mask=padding, allow_is_causal_skip=False)  # fmt: skip


def attend(mask, queries=N, keys=N):
    q, k, v = (torch.randn(1, 2, n, 32, generator=torch.Generator().manual_seed(n + i)).bfloat16()
               for i, n in enumerate((queries, keys, keys)))  # fmt: skip
    out, _ = door.attend(torch.nn.Linear(1, 1), q, k, v, mask)
    right = torch.nn.functional.scaled_dot_product_attention(
        *(t.double() for t in (q, k, v)), attn_mask=mask.pattern.written())  # fmt: skip
    assert relative(out, right.transpose(1, 2)) < 0.03


GROUPS = torch.tensor([[-1] * 10 + [0] * 15 + [-1] * 5 + [1] * 10])
TABLE = torch.rand(N, generator=torch.Generator().manual_seed(3)) > 0.5


def test_functions_joined_by_transformers():
    causal = masking_utils.causal_mask_function
    groups = masking_utils.blockwise_overlay(GROUPS)
    attend(mask_of(masking_utils.or_masks(causal, groups)))
    attend(mask_of(masking_utils.and_masks(causal, lambda b, h, q, k: (k < 3) | (q - k < 7))))
    attend(mask_of(lambda b, h, q, k: TABLE[k] | (q == k)))
    attend(mask_of(masking_utils.or_masks(causal, groups), queries=9, offset=31), queries=9)
    packed = torch.tensor([[0] * 15 + [1] * 25])
    positions = torch.cat([torch.arange(15), torch.arange(25)])[None]
    within = masking_utils.remap_positions_for_packed_sequence(causal, positions)
    apart = masking_utils.packed_sequence_mask_function(packed)
    attend(mask_of(masking_utils.and_masks(masking_utils.or_masks(within, groups), apart)))


@pytest.mark.parametrize("function, message", [
    (lambda b, h, q, k: torch.sin(q * k) > 0, "and it is no expression: .*sin has no place in an"),
    (lambda b, h, q, k: (q < k) | TABLE[k - 1],  # PyTorch takes -1 for the last, and kernels for 0
     "as an expression, .*, it says something else"),
    (lambda b, h, q, k: (k + h) % 3 != 0, "depends on the head"),
])  # fmt: skip
def test_other_functions_are_refused(function, message):
    assert TABLE[-1] != TABLE[0]
    with pytest.raises(SpecError, match=f"^this mask is not that of causal attention .*{message}"):
        attend(mask_of(function))
