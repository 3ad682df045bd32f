"""These checks are of models of transformers by sagebwd, for tests here and on a GPU.

Each check takes the device, and by how much sequences are longer than the least that shows it.
"""

import pytest
from alike import relative
from transformers_cases import (
    assert_right,
    flash_keywords,
    gemma4,
    llama,
    llama4,
    minimax_m3,
    model_of,
    modernbert,
    packing,
    padding_of,
    result,
    tokens,
    torch,
    transformers,
)

from sagebwd import SpecError


def an_indexer_is_refused(device, times):
    """Dense attention in its place would be .5 off."""
    ids = tokens(1, 160 * times, device=device)
    with pytest.raises(SpecError, match="block_indices: .*indexer.*'sdpa'"):
        model_of(minimax_m3, "sagebwd", device)(input_ids=ids)


def last_queries_alone(device, times):
    """Layers that share keys compute those of logits_to_keep: without a mask nobody says where they
    are, with one they are right."""
    n = 160 * times
    ids = tokens(1, n, device=device)

    def kept(rows, **given):
        return lambda model: [model(input_ids=ids, use_cache=True, logits_to_keep=rows,
                                    **given).logits]  # fmt: skip

    for rows, given in ((1, {}), (0, {}), (4, {"attention_mask": padding_of([n], n, device)})):
        assert_right(gemma4, device, kept(rows, **given))
    try:
        assert_right(gemma4, device, kept(4))  # by versions that compute all queries there
    except SpecError as refusal:
        assert f"4 queries and {n} keys, causal and without a mask" in str(refusal)


def packed_windows_around(device, times):
    lengths = (50 * times, 30 * times)
    firsts, positions = packing(lengths, device)
    ids = tokens(1, sum(lengths), device=device)
    where = flash_keywords(firsts, lengths)

    def packed(model):
        return [model(input_ids=ids, position_ids=positions, **where).last_hidden_state]

    def each(model):
        return [torch.cat([model(input_ids=x).last_hidden_state for x in ids.split(lengths, 1)], 1)]

    right = assert_right(modernbert, device, packed, each)[0]
    everything = model_of(modernbert, "sdpa", device)
    everything.config.sliding_window = sum(lengths)
    assert relative(each(everything)[0], right) > 0.1  # as without windows


def windows_around(device, times):
    """A batch is right with padding and without."""
    n = 64 * times
    ids, padding = tokens(2, n, device=device), padding_of([n, 40 * times], n, device)
    assert_right(modernbert, device, lambda m: result(m, input_ids=ids))
    assert_right(modernbert, device,
                 lambda m: result(m, padding, input_ids=ids, attention_mask=padding))  # fmt: skip


def chunks(device, times):
    """Kernels evaluate their mask, which is an expression."""
    ids = tokens(2, 64 * times, device=device)
    assert_right(llama4, device, lambda m: result(m, input_ids=ids, use_cache=False))


def positions_that_begin_anew(device, times):
    """In each row of a batch where sequences are packed, without anything else that says so."""
    one, other = ((20 * times, 44 * times), (64 * times,))
    ids = tokens(2, 64 * times, device=device)
    positions = torch.cat([packing(one, device)[1], packing(other, device)[1]])
    right = assert_right(llama, device, lambda m: result(m, input_ids=ids, position_ids=positions,
                                                         use_cache=False))  # fmt: skip
    alone = model_of(llama, "sdpa", device)(ids[:1, one[0] :]).logits
    assert relative(alone, right[0][:1, one[0] :]) < 0.05


def a_prefix(device, times):
    """Keys that a cache holds before those of the queries, which are padded on the right."""
    n, prefix = 48 * times, 8
    ids, padding = tokens(2, n, device=device), padding_of([n, 30 * times], n, device)
    everything = torch.cat([torch.ones_like(padding[:, :prefix]), padding], 1)
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(2, 2, 2, 1, prefix, 64, generator=generator).to(device)

    def call(model):
        cache = transformers.DynamicCache(config=model.config)
        for layer, (keys, values) in enumerate(states.to(model.dtype)):
            cache.update(keys, values, layer)
        return result(model, padding, input_ids=ids, attention_mask=everything,
                      past_key_values=cache)  # fmt: skip

    assert_right(llama, device, call)


def _trained(implementation, device, times):
    """Losses of steps on packed sequences of a few that repeat."""
    model = model_of(llama, implementation, device).train()
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randint(3, 100, (n * times,), generator=generator).tolist()
             for n in (9, 23, 14, 30, 6, 11)]  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    losses = []
    for step in range(30):
        batch = collate([{"input_ids": texts[(step + i) % 6]} for i in range(3)])
        batch = {k: x.to(device) if hasattr(x, "to") else x for k, x in batch.items()}
        loss = model(**batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        losses.append(float(loss.detach()))
    return torch.tensor(losses)


def training_with_packing(device, times):
    """Losses follow those of PyTorch's attention: no step is more than .15 away, and on average
    they are less than .05, where all fall by more than 1."""
    found, expected = (_trained(name, device, times) for name in ("sagebwd", "sdpa"))
    for losses in (found, expected):
        assert losses[-5:].mean() < losses[:5].mean() - 1
    away = (found - expected).abs()
    assert away.max() < 0.15 and away.mean() < 0.05, away


def _checkpointed(device, times, reentrant, **given):
    results = []
    for checkpoints in (False, True):
        model = model_of(llama, "sagebwd", device).train()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        results.append(result(model, use_cache=False, **given))
    for x, y in zip(*results):
        assert relative(x, y) < 1e-3  # PyTorch's attention would be 1e-2 away


def checkpoints(device, times):
    """Both kinds are right with padding and with packed sequences."""
    n = 48 * times
    lengths = (16 * times, 32 * times)
    firsts, positions = packing(lengths, device)
    packed = {"input_ids": tokens(1, n, device=device), "position_ids": positions}
    calls = ({"input_ids": tokens(2, n, device=device),
              "attention_mask": padding_of([n, 30 * times], n, device)},
             packed, {**packed, **flash_keywords(firsts, lengths)})  # fmt: skip
    for reentrant in (True, False):
        for given in calls:
            _checkpointed(device, times, reentrant, **given)


ALL = [an_indexer_is_refused, last_queries_alone, packed_windows_around, windows_around,
       chunks, positions_that_begin_anew, a_prefix, training_with_packing,
       checkpoints]  # fmt: skip
each = pytest.mark.parametrize("check", ALL, ids=lambda check: check.__name__)
