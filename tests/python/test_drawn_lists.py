"""tests/drawn/cases.py --lists: what is drawn, and that it can fail, without a GPU."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import cases  # noqa: E402
import cases_of_lists  # noqa: E402
import doors  # noqa: E402
import draw  # noqa: E402
import draw_lists  # noqa: E402
import oracle  # noqa: E402
import specs  # noqa: E402
from plain_cases import add_to_first_dq, break_pass, case_of, wrong_of  # noqa: E402
from stand_in import listed_kernels_on_the_cpu  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("tiny_tensors")

BLOCKS = dict(sparse_q=64, sparse_kv=64)
PLAIN = draw_lists.Lists("mask", "all", False, 0.5, 0.0, 0.0, "any", "contiguous")


def listed_case(spec=None, lists=PLAIN, **what):
    return case_of(BLOCKS | (spec or {}), lists=lists, **dict(seq_q=200, seq_kv=330) | what)


@pytest.fixture(scope="module")
def drawn():
    drawn_specs = specs.draw_specs(40, random.Random(0), kind="lists")
    return [draw.draw_case(i, drawn_specs, 0) for i in range(1000)]


def test_specs_are_those_that_exist_and_each_kind_among_them(drawn):
    drawn_specs = [case.spec for case in drawn[:40]]
    for spec in drawn_specs:
        cases.sagebwd.Spec(**specs.warm_spec(spec))
        assert spec["group_kv"] <= spec["sparse_kv"]
        assert spec["granularity"] == "row" or (spec["sparse_q"], spec["group_kv"]) == (128, 64)
        assert spec["dq_sums"] == "fp32" and spec["gradient_kernels"] == "any"
    for name in ("precision", "causal", "head_dim", "family", "sparse_q", "sparse_kv", "dp_sums"):
        times = Counter(spec[name] for spec in drawn_specs)
        assert min(times.values()) >= 5, name
    sizes = {(spec["sparse_q"], spec["sparse_kv"]) for spec in drawn_specs}
    assert len(sizes) == 4


@pytest.mark.parametrize("name, holds", {
    **{form: lambda c, form=form: c.lists.form == form for form in draw_lists.FORMS},
    "one for all heads": lambda c: c.lists.heads == "one" and c.heads_kv * c.group > 1,
    "one for each key head": lambda c: c.lists.heads == "kv" and c.group > 1 and c.heads_kv > 1,
    "one for all batches": lambda c: c.lists.one_batch and c.batch > 1,
    "a list of several words": lambda c: c.seq_kv > 32 * c.spec["sparse_kv"],
    "many blocks of queries": lambda c: c.seq_q > 32 * c.spec["sparse_q"],
    "empty rows": lambda c: c.lists.empty,
    "full rows": lambda c: c.lists.full,
    "every block": lambda c: c.lists.density == 1,
    "a gradient of lse": lambda c: c.dlse != "none",
    "strides of zero": lambda c: c.lists.layout == "expanded" and c.lists.heads == "one",
    "a causal mask": lambda c: c.spec["causal"] != "none" and c.seq_q != c.seq_kv,
}.items())  # fmt: skip
def test_cases_cover_what_they_promise(drawn, name, holds):
    assert sum(map(bool, map(holds, drawn))) >= 10, name


@pytest.mark.parametrize("form", draw_lists.FORMS)
@pytest.mark.parametrize("layout", draw_lists.LAYOUTS)
def test_every_form_says_the_same_lists(form, layout):
    """Read here one number at a time, as the documentation of block_sparse_attention has it."""
    lists = replace(PLAIN, form=form, layout=layout, heads="kv", one_batch=True, empty=0.2)
    mask, given = draw_lists.lists_of(lists, (2, 4, 2, 200, 64 * 40), (64, 64), 3, "cpu")
    assert mask.shape == (2, 4, 4, 40) and torch.equal(mask[0], mask[1])
    assert torch.equal(mask[:, 0], mask[:, 1]) and not torch.equal(mask[:, 1], mask[:, 2])
    assert (form == "indices") == bool(mask.any(-1).all())
    name, x = next(iter(given.items()))
    for head in (0, 1):
        for row in range(4):
            numbers = x[0, head, row].tolist()
            if name == "block_mask":
                found = [block for block, number in enumerate(numbers) if number]
            elif name == "block_bits":
                found = [block for block in range(40) if numbers[block // 32] >> block % 32 & 1]
                assert numbers[-1] >= 0  # no list is marked as wrong
            else:
                found = numbers[: given["block_counts"][0, head, row]
                                if form == "counts" else None]  # fmt: skip
            assert sorted(set(found)) == mask[0, 2 * head, row].nonzero().flatten().tolist()


def test_what_does_not_count_is_anything():
    lists = replace(PLAIN, form="counts", density=0.3)
    given = draw_lists.lists_of(lists, (1, 2, 2, 640, 640), (64, 64), 3, "cpu")[1]
    beyond = torch.arange(given["block_indices"].shape[3]) >= given["block_counts"][..., None]
    values = given["block_indices"][beyond]
    assert (values < 0).any() and (values > 9).any()
    lists = replace(PLAIN, form="bits")
    bits = draw_lists.lists_of(lists, (1, 2, 2, 640, 640), (64, 64), 3, "cpu")[1]["block_bits"]
    assert (bits >> 10).any()


def test_the_oracle_expands_blocks_to_tokens():
    mask = torch.tensor([[True, False], [False, True]])
    seen = oracle.listed(mask, (2, 3), 3, 5)
    assert seen.int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [0, 0, 0, 1, 1]]


# ---- each kind of draw can fail ------------------------------------------------------------------


@pytest.mark.parametrize("door", ["halves", "autograd"])
@pytest.mark.parametrize("causal", ["none", "bottom-right"])
def test_a_list_that_emulation_and_package_read_wrongly(monkeypatch, causal, door):
    case = listed_case({"causal": causal}, door=door)
    assert wrong_of(case) == []
    right = doors.block_sparse.tokens_of

    def shifted(bits, q, k, sizes):
        listed, wrong = right(bits, q, k, sizes)
        return listed.roll(1, -1), wrong

    monkeypatch.setattr(doors.block_sparse, "tokens_of", shifted)
    assert wrong_of(case)


def _heads_swapped(options):
    options["block_mask"] = options["block_mask"].flip(1)


def _all_listed(options):
    options["block_mask"] = torch.ones_like(options["block_mask"])


def _a_head_of_one(options):
    options["block_mask"] = options["block_mask"][:, :1]


@pytest.mark.parametrize("change", [_heads_swapped, _all_listed, _a_head_of_one])
@pytest.mark.parametrize("method", ["forward", "backward"])
def test_lists_that_a_pass_takes_wrongly(monkeypatch, method, change):
    break_pass(monkeypatch, method, change)
    assert wrong_of(listed_case())


def test_a_gradient_where_nothing_is_listed(monkeypatch):
    case = listed_case(lists=replace(PLAIN, empty=0.5))
    assert wrong_of(case) == []
    add_to_first_dq(monkeypatch)
    found = wrong_of(replace(case, lists=replace(PLAIN, empty=1.0)))
    assert "dQ: not zero where nothing is seen" in found


def test_sums_in_fp16_lack_the_mean_of_values_that_nobody_lists():
    """Here all listed values are zero, and so is the exact dQ."""
    only_last = replace(PLAIN, density=0.0, column="one in every list")
    case = listed_case({"dp_sums": "fp16"}, only_last, zeros=("v", 0.1, 1.0), heads_kv=1,
                       seq_kv=2000, values=draw_values(v=20.0))  # fmt: skip
    given = cases.inputs_of(case, "cpu")
    assert given.mask.sum(-1).eq(1).all() and not given.mask[..., :4].any()
    result = cases.outcome_of(case, "cpu")
    assert result["wrong"] == [] and result["figures"]["dQ"]["worst_row_emulation"] > 1


def draw_values(**scales):
    return {name: ("gaussian", scales.get(name, 1.0)) for name in draw.TENSORS}


def test_the_package_takes_every_drawn_call(listed_kernels_on_the_cpu, monkeypatch):
    monkeypatch.setattr(cases, "doors_of", lambda device: doors.Kernels)
    drawn_specs = specs.draw_specs(24, random.Random(1), kind="lists")
    drawn = [draw.draw_case(i, drawn_specs, 1, 20000) for i in range(24)]
    for names, values in specs.CHOICES_OF_LISTS.items():
        names = [names] if isinstance(names, str) else names
        assert len({tuple(spec[name] for name in names) for spec in drawn_specs}) == len(values)
    assert {(case.layout, case.door) for case in drawn} == {
        (layout, door) for layout in ("bhsd", "bshd") for door in ("halves", "autograd")}
    assert [cases.outcome_of(case, "cpu")["wrong"] for case in drawn] == [[]] * 24
    assert len(set(listed_kernels_on_the_cpu)) >= 20


# ---- the command ---------------------------------------------------------------------------------


def test_cases_command_draws_lists(tmp_path):
    out = tmp_path / "lists.json"
    code = cases.main(["--lists", "--device", "cpu", "--out", str(out), "--scores", "20000",
                       "--specs", "12", "--cases", "12"])  # fmt: skip
    record = json.loads(out.read_text())
    assert code == 0 and record["passed"] and record["right"] == 12
    assert all(spec["sparse_q"] in (64, 128) for spec in record["parameters"]["specs"])


def test_the_record_of_lists_has_a_name_of_its_own(monkeypatch):
    monkeypatch.setattr(cases, "prove", lambda options: (options.out.name, options.cases))
    assert cases.main(["--lists", "--device", "cpu"]) == ("cases_of_lists.json", 3000)
    assert cases.main(["--device", "cpu"]) == ("cases.json", 3000)
    assert cases_of_lists.main(["--device", "cpu"]) == ("cases_of_lists.json", 1000)
