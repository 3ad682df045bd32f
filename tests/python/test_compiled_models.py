"""Models of transformers in compiled and exported code, and what the device checks there."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
pytest.importorskip("transformers", reason="needs transformers")

import compiled_models as models  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from test_device_checks import MOST, Reader, assert_short, texts_in  # noqa: E402

from sagebwd.integrations import _masks  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")
#: In which a mask comes to attention. Compiled code has the same texts whether it hides something.
WITH_MASKS = ("whole", "padded", "packed beside")


@models.each
def test_compiled_as_eager(kind):
    reader = Reader(inductor=kind in WITH_MASKS[1:])
    models.assert_as_eager(kind, "cpu", reader, True)
    reader.assert_short(some=kind in WITH_MASKS)


def test_texts_of_an_exported_model():
    model = models.model_of(models.llama_of_one_layer, "sagebwd", "cpu")
    given = models.inputs("padded", "cpu")
    exported = torch.export.export(model, (), {**given, "use_cache": False}, strict=False)
    texts = list(texts_in(exported.graph))
    assert texts
    assert_short(texts)


@pytest.mark.parametrize("messages", [_masks._UNKNOWN, _masks._UNKNOWN_BESIDE_PACKING])
def test_texts_of_the_longest_windows(messages):
    """The long text says more, and only the host says it."""
    on_host, on_device = messages
    said = on_device.format("bidirectional", f" in windows of {1 << 62}")
    assert len(said) <= MOST and "attn_implementation='sdpa'" in said
    assert "(batch, queries, keys)" in on_host and "(batch" not in on_device


def padded(n):
    return dict(input_ids=models.tokens(2, n, device="cpu"),
                attention_mask=models.padding_of([n, n - 9], n, "cpu"))  # fmt: skip


def packed_beside(n):
    firsts, positions = models.packing((n // 3, n - n // 3), "cpu")
    ids = models.tokens(1, n, device="cpu")
    return dict(input_ids=ids, position_ids=positions, attention_mask=torch.ones_like(ids),
                cu_seq_lens_q=firsts, cu_seq_lens_k=firsts)  # fmt: skip


@pytest.mark.parametrize("given_of", [padded, packed_beside])
def test_a_graph_serves_all_lengths(given_of):
    """Neither texts nor loops depend on them."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model = models.model_of(models.llama_of_one_layer, "sagebwd", "cpu")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for n in (48, 40, 56, 33):
        given = dict(given_of(n), use_cache=False)
        with torch.no_grad():
            found, expected = compiled(**given).logits, model(**given).logits
        weights = given["attention_mask"][..., None]
        assert ((found - expected) * weights).norm() < 0.01 * (expected * weights).norm()
    assert counter.frame_count == 1


def test_a_wrong_mask_is_told_in_compiled_code():
    model = models.model_of(models.llama_of_one_layer, "sagebwd", "cpu")
    ids = models.tokens(2, 48, device="cpu")
    mask = models.padding_of([48, 30], 48, "cpu").flip(1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="attention_mask is not that of causal"):
        compiled(input_ids=ids, attention_mask=mask, use_cache=False)
