"""A small model of transformers in compiled code, with its loss, for tests here and on a GPU."""

import pytest
from transformers_cases import (
    flash_keywords,
    llama_of_one_layer,
    model_of,
    packing,
    padding_of,
    tokens,
    torch,
)

LENGTHS = (60, 41)


def inputs(kind, device):
    """A step gives the model nothing beside tokens, a mask that hides nothing, padding, or packed
    sequences, also with a mask beside them."""
    n = sum(LENGTHS)
    if kind in ("plain", "whole", "padded"):
        ids = tokens(2, n, device=device)
        lengths = [n, n - 20 if kind == "padded" else n]
        mask = padding_of(lengths, n, device)
        labels = ids.masked_fill(mask == 0, -100)
        given = {} if kind == "plain" else {"attention_mask": mask}
        return {"input_ids": ids, "labels": labels, **given}
    ids = tokens(1, n, device=device)
    firsts, positions = packing(LENGTHS, device)
    beside = {"attention_mask": torch.ones_like(ids)} if kind == "packed beside" else {}
    return {"input_ids": ids, "labels": ids, "position_ids": positions,
            **flash_keywords(firsts, LENGTHS), **beside}  # fmt: skip


KINDS = ["plain", "whole", "padded", "packed", "packed beside"]
each = pytest.mark.parametrize("kind", KINDS)


def loss_and_gradients(kind, device, compiler=None):
    """`compiler` takes the model."""
    model = model_of(llama_of_one_layer, "sagebwd", device)
    call = model if compiler is None else compiler(model)
    loss = call(**inputs(kind, device), use_cache=False).loss
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.detach(), torch.cat(gradients)


def assert_as_eager(kind, device, backend, fullgraph):
    expected = loss_and_gradients(kind, device)
    torch._dynamo.reset()
    found = loss_and_gradients(kind, device, lambda model: torch.compile(
        model, backend=backend, fullgraph=fullgraph))  # fmt: skip
    for ours, eager in zip(found, expected):
        apart = (ours - eager).double().norm() / eager.double().norm()
        assert apart < 0.02, float(apart)
    assert abs(float(found[0] - expected[0])) < 2e-3 * float(expected[0])
