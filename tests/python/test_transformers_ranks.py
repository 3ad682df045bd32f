"""Models of transformers whose sequences ranks share: what is checked, over gloo."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
transformers = pytest.importorskip("transformers", reason="needs transformers")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

import distributed_ranks as ranks_of  # noqa: E402
from alike import relative  # noqa: E402

import sagebwd  # noqa: E402
import sagebwd.integrations.transformers as door  # noqa: E402
from sagebwd import distributed  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

SIZES = dict(vocab_size=100, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
             num_attention_heads=2)  # fmt: skip


def model_of(kind, attention="sagebwd"):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **SIZES, attn_implementation=attention, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    config.initializer_range = 0.3  # so that positions count
    config.local_attention = 32  # of ModernBert
    made = getattr(transformers, "LlamaForCausalLM" if kind == "Llama" else f"{kind}Model")
    return made(config).eval().to(torch.bfloat16)


def said_by(call):
    try:
        call()
    except sagebwd.SpecError as error:
        return str(error)
    return "nothing"


@torch.no_grad()
def not_causal(rank, kind):
    """The results are what is said without position_ids, with them and with a mask, and the errors
    of what two ranks compute with position_ids and without."""
    model, tokens = model_of(kind), torch.randint(3, 100, (1, 90))
    expected = model_of(kind, "sdpa")(tokens).last_hidden_state
    mesh = ranks_of.mesh_of("ulysses", 2)

    def own(x):
        return distributed.shard(x, mesh, dim=1, method="ulysses")

    def error(**given):
        found = model(own(tokens), **given).last_hidden_state
        return relative(distributed.unshard(found, mesh, dim=1, method="ulysses"), expected)

    ids, places = own(tokens), own(torch.arange(90)[None])
    try:
        door.use(mesh=mesh, method="ulysses")
        said = [said_by(lambda: model(ids)), said_by(lambda: model(ids, position_ids=places)),
                said_by(lambda: model(ids, attention_mask=(ids != ids[0, -1]).long()))]
        door.use(mesh=mesh, method="ulysses", positions_checked=False)
        return said, error(position_ids=places), error()
    finally:
        door.use()


@pytest.mark.parametrize(("kind", "handed_on"), [("Bert", True), ("ModernBert", False)])
def test_positions_that_nobody_can_check_are_refused(kind, handed_on, tmp_path):
    if not hasattr(transformers, f"{kind}Model"):
        pytest.skip(f"this transformers has no {kind}")
    for result in ranks_of.run(tmp_path, 2, not_causal, kind):
        assert not isinstance(result, str), result
        (without, given, padded), right, wrong = result
        assert f"no position_ids came to the attention of {kind}" in without
        assert "also say positions_checked=False" in without
        assert given == ("nothing" if handed_on else without)
        assert "has padding" in padded and "use batches of one length" in padded
        assert right < 0.05 and wrong > 0.1


def generated(rank):
    """The results are what is said of generation, and of a model that continues a cache."""
    model, ids = model_of("Llama"), torch.randint(3, 100, (1, 8))
    mesh = ranks_of.mesh_of("ring", 2)
    with torch.no_grad():
        cache = model_of("Llama", "sdpa")(ids, use_cache=True).past_key_values
    door.use(mesh=mesh)
    try:
        return (said_by(lambda: model.generate(ids, max_new_tokens=2, do_sample=False)),
                said_by(lambda: model(ids[:, :1], past_key_values=cache)))  # fmt: skip
    finally:
        door.use()


def test_generation_is_refused(tmp_path):
    for result in ranks_of.run(tmp_path, 2, generated):
        assert not isinstance(result, str), result
        for said in result:
            assert "generation does not share sequences: call sagebwd.integrations" in said
            assert "transformers.use() before it" in said


def test_what_is_for_ranks_needs_a_mesh():
    for given in (dict(positions_checked=False), dict(method="ulysses")):
        with pytest.raises(sagebwd.SpecError, match=f"{next(iter(given))}=.* without mesh"):
            door.use(**given)
    with pytest.raises(sagebwd.SpecError, match="positions_checked='no': pass True or False"):
        door.use(positions_checked="no")
