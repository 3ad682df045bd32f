"""attn_mask of scaled_dot_product_attention that hides keys, such as padding, from all queries."""

import gc

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention as pytorchs  # noqa: E402
from torch.utils import checkpoint  # noqa: E402

from sagebwd.integrations import _key_masks  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")

BATCH, HEADS, QUERIES, KEYS = 2, 4, 20, 40


def inputs():
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(BATCH, HEADS, n, 64, generator=generator).bfloat16()
                     for n in (QUERIES, KEYS, KEYS, QUERIES))  # fmt: skip
    k[:, :, 25] += 3  # of a key that is mostly hidden
    return *(t.requires_grad_() for t in (q, k, v)), dout


def padding(*used):
    return (torch.arange(KEYS) < torch.tensor(used)[:, None])[:, None, None]


def holes():
    mask = torch.rand(BATCH, 1, 1, KEYS, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[..., 25] = False
    return mask


def added(mask, hidden, dtype=torch.bfloat16):
    """The mask as what PyTorch adds to scores."""
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, hidden)


def pairs(queries, keys):
    """A pair is seen where neither the query nor the key is hidden."""
    return queries[:, None, :, None] & keys


SEEING = torch.rand(BATCH, QUERIES, generator=torch.Generator().manual_seed(2)) < 0.7
SEEING[:, 0] = True

MASKS = {
    "padding": padding(17, 33),
    "padding of one": padding(40, 21),
    "holes": holes(),
    "the same of both": padding(17)[0],
    "of keys alone": holes()[1, 0],
    "written for each head": holes().repeat(1, HEADS, 1, 1),
    "written for each query": padding(17, 33).repeat(1, 1, QUERIES, 1),
    "expanded": holes().expand(BATCH, HEADS, QUERIES, KEYS),
    "queries and keys": pairs(SEEING, holes()),
    "queries and keys of each head": pairs(SEEING, padding(17, 33)).repeat(1, HEADS, 1, 1),
    "queries alone": pairs(SEEING, padding(40, 40)),
    "-10000": added(holes(), -10000.0),
    "-10000 in fp32": added(padding(3, 8), -10000.0, torch.float32),
    "-inf": added(holes(), -torch.inf, torch.float16),
    "nothing": padding(40, 40),
    "nothing, added": torch.zeros(QUERIES, KEYS),
    "a whole sequence": padding(40, 0),
    "a whole sequence by -inf": added(padding(12, 0), -torch.inf),
}


def results(attend, q, k, v, dout, mask, **more):
    out = attend(q, k, v, attn_mask=mask, **more)
    return out, *torch.autograd.grad(out, (q, k, v), dout)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", MASKS)
def test_results_are_those_of_pytorch(name, layout):
    q, k, v, dout = inputs()
    mask = MASKS[name]
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted = results(pytorchs, *exact, dout.double(),
                     mask.double() if mask.is_floating_point() else mask)  # fmt: skip
    given = [t.transpose(1, 2) if layout == "bshd" else t for t in (q, k, v)]
    out = sagebwd.scaled_dot_product_attention(*given, attn_mask=mask, layout=layout)
    out = out.transpose(1, 2) if layout == "bshd" else out
    found = out, *torch.autograd.grad(out, (q, k, v), dout)
    visible = mask if mask.dtype == torch.bool else mask == 0
    hidden = ~visible.expand(BATCH, HEADS, QUERIES, KEYS)[:, :, 0]
    for ours, theirs in zip(found, wanted):
        for sequence in range(BATCH):
            error = (ours[sequence] - theirs[sequence]).norm()
            assert error <= 0.04 * theirs[sequence].norm(), name
    assert not found[2][hidden].any() and not found[3][hidden].any()


def test_what_a_mask_hides_does_not_matter():
    q, k, v, dout = inputs()
    mask = MASKS["holes"]
    hidden = ~mask[:, 0, 0]
    found = results(sagebwd.scaled_dot_product_attention, q, k, v, dout, mask)
    with torch.no_grad():
        for t in (k, v):
            t.transpose(1, 2)[hidden] = float("nan")
    again = results(sagebwd.scaled_dot_product_attention, q, k, v, dout, mask)
    assert all(torch.equal(x, y) for x, y in zip(found, again))


WRONG = {
    "window": (torch.ones(QUERIES, KEYS).tril().triu(-3) > 0, "of any two queries one sees all"),
    "by head": (holes() ^ torch.eye(HEADS, KEYS, dtype=torch.bool)[:, None], "hide the same keys"),
    "bias": (torch.full((KEYS,), 0.5), "with 0 for keys that are seen and at most -9984"),
    "-10000 everywhere": (added(padding(5, 0), -10000.0), "of which each sequence sees one"),
    "integers": (torch.ones(KEYS, dtype=torch.int64), "attn_mask of torch.int64: pass bool"),
    "shape": (torch.ones(BATCH, KEYS, dtype=torch.bool), r"shape \(2, 40\): it must broadcast"),
    "learned": (torch.zeros(KEYS).requires_grad_(), "arbitrary masks are not supported"),
    "elsewhere": (torch.ones(KEYS, dtype=torch.bool, device="meta"), "is on meta and key on cpu"),
    "sparse": (holes().to_sparse(), "arbitrary masks are not supported"),
    "complex": (torch.ones(KEYS, dtype=torch.complex64), "attn_mask of torch.complex64: pass bool"),
    "a word": ("causal", "attn_mask='causal': arbitrary masks"),
}


@pytest.mark.parametrize("name", WRONG)
def test_other_masks_are_refused(name):
    mask, message = WRONG[name]
    q, k, v, _ = inputs()
    with pytest.raises(sagebwd.SpecError, match=message):
        sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@pytest.mark.parametrize("more", [
    {"is_causal": True}, {"window_left": 3}, {"seqused_k": torch.tensor([3, 4], dtype=torch.int32)},
], ids=str)  # fmt: skip
def test_a_mask_beside_others_is_refused(more):
    q, k, v, _ = inputs()
    with pytest.raises(sagebwd.SpecError, match="attn_mask beside is_causal, seqused_k or a win"):
        sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=MASKS["padding"], **more)


def test_a_mask_is_asked_once_until_it_changes(monkeypatch):
    asked = []
    told = _key_masks._told
    monkeypatch.setattr(_key_masks, "_told", lambda *given: asked.append(1) or told(*given))
    q, k, v, _ = inputs()
    mask = padding(17, 33)
    first, again = (sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=mask)
                    for _ in range(2))  # fmt: skip
    assert len(asked) == 1 and torch.equal(first, again)
    mask[1, ..., 20:] = False
    other = sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert len(asked) == 2 and not torch.equal(other, first)
    other = sagebwd.scaled_dot_product_attention(q, k[:, :, :, :], v, attn_mask=mask[..., :1])
    assert len(asked) == 3
    mask.data = holes()  # of which its version says nothing
    other = sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert torch.equal(other, sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=holes()))


class OnGPU(torch.Tensor):
    is_cuda = True


def test_each_stream_asks_for_itself(monkeypatch):
    """The results of another stream may not be there yet."""
    asked, stream = [], [1]
    told = _key_masks._told
    monkeypatch.setattr(_key_masks, "_told", lambda *given: asked.append(1) or told(*given))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_key_masks.forms, "stream_of", lambda device: stream[0])
    mask, (_, k, v, _) = holes().as_subclass(OnGPU), inputs()
    for wanted, stream[0] in ((1, 1), (1, 1), (2, 2), (2, 2)):
        _key_masks.applied(mask, k, k, v, "bhsd")
        assert len(asked) == wanted


def test_nothing_is_kept_of_masks_that_are_gone():
    q, k, v, dout = inputs()
    gc.collect()
    before = len(_key_masks._asked)
    for _ in range(3):
        results(sagebwd.scaled_dot_product_attention, q, k, v, dout, holes())
    gc.collect()
    assert len(_key_masks._asked) == before


@pytest.mark.parametrize("inside", [False, True])
def test_inference_and_then_training(inside):
    q, k, v, dout = inputs()
    mask = holes()
    with torch.inference_mode():
        given = mask.clone() if inside else mask
        out = sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=given)
    found = results(sagebwd.scaled_dot_product_attention, q, k, v, dout, given)
    wanted = results(sagebwd.scaled_dot_product_attention, q, k, v, dout, holes())
    assert torch.equal(out, found[0])
    assert all(torch.equal(x, y) for x, y in zip(found, wanted))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    q, k, v, dout = inputs()
    mask = holes()

    def attend(*qkv, attn_mask):
        return checkpoint.checkpoint(
            lambda *x: sagebwd.scaled_dot_product_attention(*x, attn_mask=attn_mask), *qkv,
            use_reentrant=reentrant)  # fmt: skip

    wanted = results(sagebwd.scaled_dot_product_attention, q, k, v, dout, holes())
    out = attend(q, k, v, attn_mask=mask)
    out.backward(dout)
    for ours, theirs in zip((out, q.grad, k.grad, v.grad), wanted):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_queries_that_see_nothing_have_zeros(layout):
    q, k, v, _ = inputs()
    given = [t.transpose(1, 2) if layout == "bshd" else t for t in (q, k, v)]
    mask = MASKS["queries and keys"]
    out, lse = sagebwd.scaled_dot_product_attention(*given, attn_mask=mask, layout=layout,
                                                    return_lse=True)  # fmt: skip
    out = out if layout == "bshd" else out.transpose(1, 2)
    assert not out[~SEEING].any() and out[SEEING].any(-1).all()
    assert torch.equal(lse == -torch.inf, ~SEEING[:, None].expand_as(lse))


@pytest.mark.parametrize("name", ["padding", "holes", "-10000", "nothing", "queries and keys"])
def test_compiled_it_does_not_ask(name):
    q, k, v, dout = inputs()
    mask = MASKS[name]
    compiled = torch.compile(sagebwd.scaled_dot_product_attention, fullgraph=True,
                             backend="aot_eager")  # fmt: skip
    found = results(compiled, q, k, v, dout, mask)
    wanted = results(pytorchs, q.float(), k.float(), v.float(), dout.float(),
                     mask.float() if mask.is_floating_point() else mask)  # fmt: skip
    for ours, theirs in zip(found, wanted):
        assert (ours - theirs).norm() <= 0.04 * theirs.norm()
    with pytest.raises(RuntimeError, match="hide the same keys"):
        compiled(q, k, v, attn_mask=torch.full_like(mask, 0.5, dtype=torch.float32))


def test_in_a_model_that_stays_as_it_is():
    q, k, v, dout = inputs()
    with sagebwd.sdpa() as mode:
        found = results(torch.nn.functional.scaled_dot_product_attention, q, k, v, dout,
                        MASKS["holes"])  # fmt: skip
    assert mode.calls == 1 and not mode.fallbacks
    ours = results(sagebwd.scaled_dot_product_attention, q, k, v, dout, MASKS["holes"])
    assert all(torch.equal(x, y) for x, y in zip(found, ours))


def test_compiled_for_any_sizes_and_types():
    torch.compiler.reset()  # PyTorch compiles one function eight times at most
    compiled = torch.compile(sagebwd.scaled_dot_product_attention, fullgraph=True, dynamic=True,
                             backend="aot_eager")  # fmt: skip
    q, k, v, _ = inputs()
    for keys in (KEYS, KEYS - 7):
        for mask in (holes()[..., :keys], added(holes(), -10000.0)[..., :keys]):
            given = q, k[:, :, :keys], v[:, :, :keys]
            found = compiled(*given, attn_mask=mask)
            assert torch.equal(found, sagebwd.scaled_dot_product_attention(*given, attn_mask=mask))


def test_torch_func():
    q, k, v, dout = inputs()
    mask = holes()
    wanted = results(sagebwd.scaled_dot_product_attention, q, k, v, dout, holes())[1:]
    q, k, v = (t.detach() for t in (q, k, v))

    def loss(q, k, v, dout, mask=mask):
        out = sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return (out.float() * dout.float()).sum()

    grad = torch.func.grad(loss, (0, 1, 2))
    per_sample = torch.func.vmap(grad, (0, None, None, 0))
    for found in (grad(q, k, v, dout), grad(q, k, v, dout, mask),
                  [x[1] for x in per_sample(torch.stack([q + 1, q]), k, v,
                                            torch.stack([dout, dout]))]):  # fmt: skip
        assert all(torch.equal(x, y) for x, y in zip(found, wanted))
    with pytest.raises(sagebwd.SpecError, match="attn_mask is mapped by torch.func.vmap"):
        torch.func.vmap(lambda m: loss(q, k, v, dout, m))(torch.stack([mask, mask]))
    with pytest.raises(sagebwd.SpecError, match="carries a tangent"):
        torch.func.jvp(lambda k: loss(q, k, v, dout), (k,), (k,))


def test_without_data():
    with FakeTensorMode():
        q = torch.empty(BATCH, HEADS, KEYS, 64, dtype=torch.bfloat16)
        mask = torch.ones(BATCH, 1, 1, KEYS, dtype=torch.bool)
        assert sagebwd.scaled_dot_product_attention(q, q, q, attn_mask=mask).shape == q.shape


def test_without_queries():
    q, k, v, dout = inputs()
    q, dout = q[:, :, :0], dout[:, :, :0]
    for mask in (holes(), holes().expand(BATCH, 1, 0, KEYS)):
        out, dq, dk, _ = results(sagebwd.scaled_dot_product_attention, q, k, v, dout, mask)
        assert out.shape == dq.shape == q.shape and not dk.any()


@pytest.mark.parametrize("mask", [holes(), padding(17, 33)], ids=["holes", "padding"])
def test_tensors_that_do_not_belong_together(mask):
    q, k, v, _ = inputs()
    for wrong in ((q, k, v[:, :, :30]), (q, k[:, :, :30], v), (q, k, v[:1]), (q, k[:1], v[:1])):
        with pytest.raises(sagebwd.SpecError, match="must be equal") as without:
            sagebwd.scaled_dot_product_attention(*wrong)
        with pytest.raises(sagebwd.SpecError) as error:
            sagebwd.scaled_dot_product_attention(*wrong, attn_mask=mask)
        assert str(error.value) == str(without.value)
