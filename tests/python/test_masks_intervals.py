"""Masks as intervals: what they say, against loops over queries and keys, and what is refused."""

import random

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402
from sagebwd.masks import Intervals  # noqa: E402

KINDS = [(causal, columns) for causal in (False, True, "top-left", "bottom-right")
         for columns in ((1, 2) if causal else (2, 4))]  # fmt: skip


def looped(sees, tokens, queries=None):
    """A mask by its definition: (queries, keys) of sees(q, k)."""
    return torch.tensor([[bool(sees(q, k)) for k in range(tokens)]
                         for q in range(queries or tokens)])  # fmt: skip


def drawn(generator, causal, columns, queries, keys, batch=1, heads=1):
    """Random intervals, as nested lists."""

    def interval():
        return sorted(generator.randint(0, queries) for _ in range(2))

    def row():
        return interval() + interval() if columns == 4 else interval()[:columns] if (
            causal) else [generator.randint(0, queries) for _ in range(2)]  # fmt: skip

    return [[[row() for _ in range(keys)] for _ in range(heads)] for _ in range(batch)]


def hidden_by(row, causal, q, k, queries, keys):
    """Whether a query does not see a key, as PaddlePaddle's page of flashmask_attention has it."""
    if causal:
        ahead = k > (q + keys - queries if causal == "bottom-right" else q)
        end = row[1] if len(row) == 2 else queries
        return ahead or row[0] <= q < end
    if len(row) == 2:
        return q >= row[0] or q < row[1]
    return row[0] <= q < row[1] or row[2] <= q < row[3]


@pytest.mark.parametrize("causal, columns", KINDS)
@pytest.mark.parametrize("queries, keys", [(9, 9), (5, 8), (8, 5), (1, 3)])
def test_columns_mean_what_flashmask_says(causal, columns, queries, keys):
    if causal is True and queries != keys:
        return
    numbers = drawn(random.Random(queries), causal, columns, queries, keys, 2, 3)
    made = Intervals(torch.tensor(numbers, dtype=torch.int32), causal=causal)
    found = made.dense(queries)
    assert found.shape == (2, 3, queries, keys) and found.dtype == torch.bool
    for batch in range(2):
        for head in range(3):
            of = numbers[batch][head]
            expected = looped(lambda q, k, of=of: not hidden_by(
                of[k], causal, q, k, queries, keys), keys, queries)  # fmt: skip
            assert torch.equal(found[batch, head], expected)


def test_true_is_top_left_for_equal_numbers_alone():
    made = Intervals(torch.full((1, 1, 6, 1), 6, dtype=torch.int32), causal=True)
    assert torch.equal(made.dense(6)[0, 0], looped(lambda q, k: k <= q, 6))
    with pytest.raises(sagebwd.SpecError, match="ambiguous for 5 queries and 6 keys"):
        made.dense(5)


@pytest.mark.parametrize("t, causal, told", [
    ([[1]], False, "is a list; pass an int32 torch tensor"),
    (torch.zeros(1, 1, 4, 2), False, r"torch.float32; pass torch.int32"),
    (torch.zeros(1, 1, 4, 2, dtype=torch.int64), False, r"torch.int64; pass torch.int32"),
    (torch.zeros(1, 1, 4, 1, dtype=torch.int32), False, "causal=False pass .* with 2 or 4 columns"),
    (torch.zeros(1, 1, 4, 4, dtype=torch.int32), "top-left", "with 1 or 2 columns"),
    (torch.zeros(1, 4, 2, dtype=torch.int32), False, r"has shape \(1, 4, 2\)"),
    (torch.zeros(1, 1, 4, 2, dtype=torch.int32), "left", "causal='left': pass False"),
])  # fmt: skip
def test_what_intervals_refuse(t, causal, told):
    with pytest.raises(sagebwd.SpecError, match=told):
        Intervals(t, causal=causal)


@pytest.mark.parametrize("row, causal, told", [
    ([9], True, r"\[0, 0, 2\] is LTS=9: with 8 queries"),
    ([-1], True, "LTS=-1"), ([5, 4], True, "LTS=5, LTE=4"), ([5, 9], True, "LTS=5, LTE=9"),
    ([8, 9], False, "LTS=8, UTE=9"), ([8, -1], False, "LTS=8, UTE=-1"),
    ([0, 8, 3, 2], False, "LTS=0, LTE=8, UTS=3, UTE=2"), ([3, 2, 0, 0], False, "LTS=3, LTE=2"),
])  # fmt: skip
def test_numbers_that_are_no_intervals_are_named(row, causal, told):
    whole = {1: [8], 2: [8, 8] if causal else [8, 0], 4: [8, 8, 0, 0]}[len(row)]
    rows = torch.tensor([whole] * 8, dtype=torch.int32)[None, None]
    assert Intervals(rows.clone(), causal=causal).validate(8).dense(8).any()
    rows[0, 0, 2] = torch.tensor(row)
    made = Intervals(rows, causal=causal)  # which reads no number
    for read in (made.validate, made.dense):
        with pytest.raises(sagebwd.SpecError, match=told):
            read(8)


def test_intervals_are_compared_by_content():
    made = masks.documents([0, 3, 7])
    assert made == masks.documents(lengths=[3, 4]) and made == masks.documents([0, 3, 7])
    assert made != masks.documents([0, 4, 7]) and made != masks.documents([0, 3, 7], causal=False)
    assert made != 3 and made.to("cpu") == made
    assert made.to("meta").startend_row_indices.is_meta and made.to("meta").causal == "top-left"
    assert repr(made) == "Intervals(LTS of 1 x 1 x 7 keys, causal='top-left', device='cpu')"
    assert "LTS, LTE, UTS, UTE of 1" in repr(masks.window_and_global(9, 1, 2, causal=False))
    with pytest.raises(TypeError, match="unhashable"):
        hash(made)


# ---- constructors --------------------------------------------------------------------------------


def same(made, *expected):
    """Whether the sequences of a batch have these masks, and how many columns say so."""
    tokens = expected[0].shape[0]
    assert torch.equal(made.dense(tokens), torch.stack(expected)[:, None])
    assert made.startend_row_indices.dtype == torch.int32
    return len(made.columns)


def place_of(lengths, token):
    """Which document, or branch, a token is in."""
    for i, length in enumerate(lengths):
        if token < length:
            return i
        token -= length
    return len(lengths)


@pytest.mark.parametrize("lengths", [[5], [3, 1, 4], [0, 2, 0, 3, 0]])
@pytest.mark.parametrize("causal", [True, False])
def test_documents(lengths, causal):
    n = sum(lengths)
    expected = looped(lambda q, k: place_of(lengths, q) == place_of(lengths, k)
                      and (not causal or k <= q), n)  # fmt: skip
    cu = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    for made in (masks.documents(lengths=lengths, causal=causal),
                 masks.documents(torch.tensor(cu), causal=causal),
                 masks.documents(cu, causal="top-left" if causal else "none")):  # fmt: skip
        assert same(made, expected) == (1 if causal else 2)
    padded = masks.documents(cu, tokens=n + 3, causal=causal)
    assert same(padded, looped(lambda q, k: place_of(lengths, q) == place_of(lengths, k)
                               and (not causal or k <= q), n + 3))  # fmt: skip


def test_documents_of_a_batch():
    both = [[2, 3], [1, 4]]
    expected = [looped(lambda q, k, row=row: place_of(row, q) == place_of(row, k) and k <= q, 5)
                for row in both]  # fmt: skip
    assert same(masks.documents(lengths=both), *expected) == 1
    assert same(masks.documents(lengths=torch.tensor(both)), *expected) == 1
    assert same(masks.documents([[0, 2, 5], [0, 1, 5]]), *expected) == 1


@pytest.mark.parametrize("given, told", [
    ({}, "either cu_seqlens or lengths"),
    ({"cu_seqlens": [0, 2], "lengths": [2]}, "either cu_seqlens or lengths"),
    ({"cu_seqlens": [1, 2]}, "begin with 0"), ({"cu_seqlens": [0, 3, 2]}, "never fall"),
    ({"lengths": [-1]}, "lengths=-1: pass a whole number of at least 0"),
    ({"lengths": [1.5]}, "lengths=1.5"), ({"lengths": 3}, "lengths is an int; pass a list"),
    ({"lengths": [[1, 2], [4]]}, "sequences of 3 and 4 tokens: pass tokens="),
    ({"lengths": [[[1]]]}, "lists of several depths"),
    ({"lengths": [5], "tokens": 4}, "has 5 tokens, and tokens=4"),
    ({"lengths": [5], "causal": "left"}, "causal='left': pass False or 'none', True"),
])  # fmt: skip
def test_what_documents_refuse(given, told):
    with pytest.raises(sagebwd.SpecError, match=told):
        masks.documents(**given)


def test_prefix_lm():
    expected = [looped(lambda q, k, p=p: k <= q or k < p, 7) for p in (0, 3, 7)]
    assert same(masks.prefix_lm([0, 3, 7], 7), *expected) == 2
    assert same(masks.prefix_lm(torch.tensor([0, 3, 7]), 7), *expected) == 2
    assert same(masks.prefix_lm(3, 7), expected[1]) == 2
    with pytest.raises(sagebwd.SpecError, match="prefixes has 8 tokens, and tokens=7"):
        masks.prefix_lm(8, 7)
    with pytest.raises(sagebwd.SpecError, match="one number per sequence"):
        masks.prefix_lm([], 7)


def of_branches(prefix, branches, tokens):
    whole = [prefix, *branches]

    def sees(q, k):
        at, of = place_of(whole, q), place_of(whole, k)
        return k <= q and (at == of or (of == 0 and at < len(whole)))

    return looped(sees, tokens)


@pytest.mark.parametrize("prefix, branches", [(4, [2, 3, 1]), (0, [2, 3]), (3, []), (2, [0, 2])])
def test_shared_prefix(prefix, branches):
    n = prefix + sum(branches)
    assert same(masks.shared_prefix(prefix, branches), of_branches(prefix, branches, n)) == 1
    padded = masks.shared_prefix(prefix, branches, tokens=n + 2)
    assert same(padded, of_branches(prefix, branches, n + 2)) == 1


def test_shared_prefix_of_a_batch():
    made = masks.shared_prefix([2, 1], [[3, 1], [2]], tokens=7)
    assert same(made, of_branches(2, [3, 1], 7), of_branches(1, [2], 7)) == 1
    made = masks.shared_prefix([2, 3], [2, 2], tokens=7)
    assert same(made, of_branches(2, [2, 2], 7), of_branches(3, [2, 2], 7)) == 1
    for given in (dict(prefix=[1, 2, 3], branches=[[1], [2]]), dict(prefix=[1, 2], branches=[3])):
        with pytest.raises(sagebwd.SpecError, match=r"pass (as many|tokens=)"):
            masks.shared_prefix(**given)


def random_tree(generator, nodes):
    """Parents in depth-first order."""
    parents, path = [], []
    for node in range(nodes):
        del path[generator.randint(0, len(path)) :]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents


def of_tree(parents, lengths, tokens):
    def above(node, other):
        while node not in (-1, other):
            node = parents[node]
        return node == other

    def sees(q, k):
        at, of = place_of(lengths, q), place_of(lengths, k)
        return k <= q and (at == of if len(lengths) in (at, of) else above(at, of))

    return looped(sees, tokens)


@pytest.mark.parametrize("seed", range(20))
def test_tree(seed):
    generator = random.Random(seed)
    parents = random_tree(generator, 9)
    ones = of_tree(parents, [1] * 9, 9)
    assert same(masks.tree(parents), ones) == 1
    lengths = [generator.randint(1, 3) for _ in parents]
    n = sum(lengths)
    expected = of_tree(parents, lengths, n)
    assert same(masks.tree(parents, lengths=lengths), expected) == 1
    assert same(masks.tree(torch.tensor(parents), lengths=lengths, tokens=n + 2),
                of_tree(parents, lengths, n + 2)) == 1  # fmt: skip
    entry = [sum(lengths[:i]) for i in range(9)]
    last = [max(i for i in range(9) if expected[entry[i], entry[node]]) for node in range(9)]
    assert same(masks.tree(entry=entry, exit=[entry[i] + lengths[i] for i in last]), expected) == 1
    assert same(masks.tree([parents, [-1] * 9]), ones, torch.eye(9, dtype=torch.bool)) == 1


@pytest.mark.parametrize("given, told", [
    (dict(parents=[-1, 0, -1, 1]), r"parents\[3\] is 1, which is neither node 2"),
    (dict(parents=[-1, 1]), r"parents\[1\] is 1"), (dict(parents=[-1, 5]), r"parents\[1\] is 5"),
    (dict(parents=[-2]), "parents=-2"), (dict(parents=[0]), r"parents\[0\] is 0"),
    (dict(parents=[-1, 0], lengths=[3]), "parents has 2 nodes and lengths 1"),
    (dict(entry=[0, 2]), "or entry= and exit="), (dict(), "or entry= and exit="),
    (dict(parents=[-1], entry=[0], exit=[1]), "or entry= and exit="),
    (dict(entry=[0, 2], exit=[4]), "entry has 2 nodes and exit 1"),
    (dict(entry=[1, 2], exit=[4, 4]), r"entry\[0\] is 1"),
    (dict(entry=[0, 2, 2], exit=[4, 3, 4]), r"entry\[1\] is 2"),
    (dict(entry=[0, 2], exit=[3, 4]), r"entry\[1\] is 2 and exit\[1\] 4"),  # they overlap
    (dict(entry=[0, 2, 4], exit=[5, 3, 5]), r"entry\[1\] is 2 and exit\[1\] 3"),  # token 3: whose?
    (dict(entry=[0, 2], exit=[2, 2]), r"entry\[1\] is 2"),
    (dict(parents=[0], lengths=[3]), "the first one is a root, -1"),
])  # fmt: skip
def test_what_trees_refuse(given, told):
    with pytest.raises(sagebwd.SpecError, match=told):
        masks.tree(**given)


def of_spans(spans, tokens):
    return looped(lambda q, k: k <= q or any(b <= q < e and b <= k < e for b, e in spans), tokens)


@pytest.mark.parametrize("spans", [[], [(2, 5)], [(6, 9), (0, 3), (3, 4)], [(0, 9)], [(4, 4)]])
def test_spans(spans):
    assert same(masks.spans(9, spans), of_spans(spans, 9)) == 2
    batch = [spans, [(1, 3)]]
    assert same(masks.spans(9, batch), of_spans(spans, 9), of_spans([(1, 3)], 9)) == 2


@pytest.mark.parametrize("spans", [[(2, 5), (4, 6)], [(3, 2)], [(5, 10)], [(1, 2, 3)], [(1, 2), 3]])
def test_spans_that_are_none(spans):
    with pytest.raises(sagebwd.SpecError, match=r"from 0 to 9 that do not overlap"):
        masks.spans(9, spans)


def test_what_the_page_of_spans_says_of_two_later_images():
    """A span may be hidden from one interval of later queries, and not from two."""
    first, second, third = (2, 4), (5, 7), (9, 11)

    def without(*hidden):
        return of_spans([first, second, third], 12) & looped(
            lambda q, k: not (2 <= k < 4 and any(b <= q < e for b, e in hidden)), 12)  # fmt: skip

    assert same(masks.from_bool(without(second)), without(second)) == 4
    with pytest.raises(ValueError, match=r"key 3 .* \[0, 2\) and \[5, 7\) and \[9, 11\).*trace_mask"):
        masks.from_bool(without(second, third) | torch.tensor([k == 2 for k in range(12)]))


@pytest.mark.parametrize("tokens, window, first", [(9, 2, 0), (9, 2, 3), (9, 0, 1), (9, 20, 2),
                                                   (9, 1, 9), (9, 3, 8)])  # fmt: skip
@pytest.mark.parametrize("causal", [True, False])
def test_window_and_global(tokens, window, first, causal):
    expected = looped(lambda q, k: (abs(q - k) <= window or q < first or k < first)
                      and (not causal or k <= q), tokens)  # fmt: skip
    columns = same(masks.window_and_global(tokens, window, first, causal=causal), expected)
    assert columns == (1 if causal else 4 if first else 2)


def test_what_windows_refuse():
    for given, told in (((9, -1), "window=-1"), ((9, 1, 10), "10 tokens"), ((0, 1), "tokens=0")):
        with pytest.raises(sagebwd.SpecError, match=told):
            masks.window_and_global(*given)


@pytest.mark.parametrize("causal", [False, "none", True, "top-left", "bottom-right"])
@pytest.mark.parametrize("queries", [7, 4, 9])
def test_padding(causal, queries):
    if causal is True and queries != 7:
        with pytest.raises(sagebwd.SpecError, match="ambiguous"):
            masks.padding([3], 7, queries=queries, causal=causal)
        return
    made = masks.padding([3, 7, 0], 7, queries=queries, causal=causal)
    shift = {False: 99, "none": 99, "bottom-right": 7 - queries}.get(causal, 0)
    expected = [looped(lambda q, k, n=n: k < n and k <= q + shift, 7, queries) for n in (3, 7, 0)]
    assert same(made, *expected) == (1 if shift < 99 else 2)


def test_devices_are_those_of_what_is_given_or_as_told():
    assert masks.padding(torch.tensor([3]), 4).startend_row_indices.device.type == "cpu"
    for made in (masks.documents([0, 3], device="meta"), masks.prefix_lm(1, 3, device="meta"),
                 masks.shared_prefix(1, [2], device="meta"), masks.tree([-1], device="meta"),
                 masks.spans(3, [], device="meta"), masks.padding([1], 2, device="meta"),
                 masks.window_and_global(3, 1, device="meta"),
                 masks.from_bool(torch.ones(2, 2).bool(), device="meta")):  # fmt: skip
        assert made.startend_row_indices.is_meta


# ---- from a bool tensor --------------------------------------------------------------------------


@pytest.mark.parametrize("causal, columns", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_from_bool_and_back(causal, columns, seed):
    queries, keys = (8, 8) if causal is True else [(8, 8), (5, 7), (7, 5)][seed % 3]
    numbers = drawn(random.Random(seed), causal, columns, queries, keys, 2, 2)
    dense = Intervals(torch.tensor(numbers, dtype=torch.int32), causal=causal).dense(queries)
    made = masks.from_bool(dense, causal=causal)
    assert torch.equal(made.dense(queries), dense) and len(made.columns) <= columns


def test_from_bool_takes_the_fewest_columns():
    every = torch.ones(6, 6).bool()
    assert len(masks.from_bool(every).columns) == 2
    assert len(masks.from_bool(every.tril(), causal=True).columns) == 1
    assert len(masks.from_bool(~every).columns) == 2
    assert len(masks.from_bool(~every, causal="top-left").columns) == 1
    for made in (masks.documents([0, 2, 6]), masks.documents([0, 2, 6], causal=False),
                 masks.prefix_lm(2, 6), masks.window_and_global(6, 1, 1, causal=False),
                 masks.window_and_global(6, 1)):  # fmt: skip
        again = masks.from_bool(made.dense(6), causal=made.causal)
        assert again.columns == made.columns and torch.equal(again.dense(6), made.dense(6))


def test_random_eviction():
    generator = torch.Generator().manual_seed(0)
    until = torch.arange(16) + torch.randint(1, 16, (16,), generator=generator)
    dense = looped(lambda q, k: k <= q < until[k], 16)
    made = masks.from_bool(dense, causal="top-left")
    assert made.columns == ("LTS",) and torch.equal(made.dense(16)[0, 0], dense)


def test_masks_that_intervals_cannot_say_are_refused():
    dense = torch.ones(1, 2, 9, 9).bool()
    dense[0, 1, ::3, 4] = False
    told = r"key 4 of batch 0 and head 1 is .* \[0, 1\) and \[3, 4\) and \[6, 7\): .* at most 2"
    with pytest.raises(ValueError, match=told):
        masks.from_bool(dense)
    dense = torch.ones(1, 1, 9, 9).bool().tril()
    dense[0, 0, [5, 7], 3] = False
    assert masks.from_bool(dense.clone() | ~torch.ones(9, 9).bool().tril()).columns[1] == "LTE"
    with pytest.raises(ValueError, match=r"key 3 .* at most 1 .* below the diagonal"):
        masks.from_bool(dense, causal=True)
    with pytest.raises(ValueError, match=r"mask\[0, 0, 0, 1\] is True, and causal='top-left'"):
        masks.from_bool(torch.ones(3, 3).bool(), causal="top-left")
    for wrong, told in ((torch.ones(3, 3), "torch.float32; pass torch.bool"), ([[True]], "a list"),
                        (torch.ones(3).bool(), r"shape \(3,\)")):  # fmt: skip
        with pytest.raises(sagebwd.SpecError, match=told):
            masks.from_bool(wrong)


@pytest.mark.parametrize("spans", [[[], []], [[], [(2, 6)]], [[(2, 6)], []], torch.zeros(2, 0, 2)])
def test_sequences_without_spans(spans):
    """Texts without images are sequences of a batch, too."""
    same(masks.spans(16, spans), *(of_spans(of, 16) for of in spans))
