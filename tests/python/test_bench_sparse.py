"""bench/sparse.py without a GPU: its lists, its FP64, what it demands, and the command."""

import json

import pytest

torch = pytest.importorskip("torch")

import plot  # noqa: E402
import sparse  # noqa: E402
import sparse_cases  # noqa: E402
import sparse_exact  # noqa: E402
import sparse_subjects  # noqa: E402
import tables  # noqa: E402
from sparse_cases import Cell, Shape  # noqa: E402

import sagebwd  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
TOY = Shape(1, 2, 200, 64)
SIZES = (64, 64)


def drawn(heads, tokens, channels=16):
    torch.manual_seed(0)
    return [torch.randn(heads, tokens, channels) for _ in range(4)]


def tokens_of(listed, queries, keys, sizes):
    by_query = listed.repeat_interleave(sizes[0], 1)[:, :queries]
    return by_query.repeat_interleave(sizes[1], 2)[..., :keys]


# ---- FP64 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [1, 1 << 25])
def test_exact_sparse_attention_is_attention_with_a_mask_of_tokens(monkeypatch, elements):
    monkeypatch.setattr(sparse_exact, "ELEMENTS", elements)
    q, k, v, dout = drawn(2, 70)
    k, v = k[:, :50], v[:, :50]
    sizes = (16, 8)
    listed = torch.rand(2, 5, 7) < 0.4
    listed[0, 1], listed[1, 2], listed[1, :, 3] = False, True, False
    found = sparse_exact.sparse(q, k, v, dout, listed, sizes)

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    seen = tokens_of(listed, 70, 50, sizes)
    scores = (leaves[0] @ leaves[1].mT / 4).masked_fill(~seen, -torch.inf)
    out = torch.softmax(scores, -1).nan_to_num(0) @ leaves[2]
    expected = out, *torch.autograd.grad(out, leaves, dout.double())
    for x, y in zip(found.values(), expected, strict=True):
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-13)
    assert not sparse_exact.sparse(q, k, v, dout, listed & False, sizes)["dK"].any()


def test_exact_linear_attention_weighs_the_keys_that_are_not_listed():
    q, k, v, dout = drawn(2, 40)
    listed = torch.rand(2, 3, 5) < 0.4
    listed[0, 1], listed[1, 2] = True, False
    found = sparse_exact.linear(q, k, v, dout, listed, (16, 8))

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    features = leaves[0].softmax(-1), (leaves[1] - leaves[1].mean(1, keepdim=True)).softmax(-1)
    weights = (features[0] @ features[1].mT) * ~tokens_of(listed, 40, 40, (16, 8))
    out = (weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)) @ leaves[2]
    expected = out, *torch.autograd.grad(out, leaves, dout.double())
    for x, y in zip(found.values(), expected, strict=True):
        assert torch.allclose(x, y, rtol=1e-11, atol=1e-13)


def test_exact_mixing_has_one_branch_where_the_other_sees_nothing():
    q, k, v, dout = drawn(1, 40)
    listed = torch.rand(1, 3, 5) < 0.5
    listed[0, 0], listed[0, 1] = True, False
    alpha = torch.tensor([[0.25, 0.5, 0.75]])
    found = sparse_exact.mixed(q, k, v, dout, listed, (16, 8), alpha)
    exact = sparse_exact.sparse(q, k, v, dout, listed, (16, 8))["O"]
    rest = sparse_exact.linear(q, k, v, dout, listed, (16, 8))["O"]
    both = 0.75 * exact[:, 32:] + 0.25 * rest[:, 32:]
    expected = torch.cat([exact[:, :16], rest[:, 16:32], both], 1)
    assert torch.allclose(found["O"], expected, rtol=1e-12, atol=1e-14)


# ---- what is measured ----------------------------------------------------------------------------


def test_the_cells_are_of_all_shapes_and_lists():
    cells = sparse_cases.cells_of(sparse_cases.SHAPES, (0.1, 0.05, 0.03), sparse_cases.LISTS)
    assert len({cell.key() for cell in cells}) == len(cells) == 2 + 3 * 10 + 7
    timed = [cell for cell in cells if cell.is_timed]
    assert [cell.lists for cell in timed if "fa2" in cell.dense] == ["all"] * 4
    assert [cell.with_lists() for cell in timed if cell.lists == "all"] == [True] * 3 + [False]
    assert all(("cudnn" in cell.dense) == (cell.shape.tokens < 75600 or cell.lists == "all")
               for cell in timed)  # fmt: skip
    quick = sparse_cases.cells_of([sparse_cases.TABLE], (0.1, 0.03), ["random"], True, False)
    assert [(cell.density, len(cell.dense)) for cell in quick] == [(0.1, 5), (0.03, 1)]
    assert Shape.parse("1x40x75600x128") == sparse_cases.SHAPES[-1]
    with pytest.raises(ValueError, match="1x2x3"):
        Shape.parse("1x2x3")


def test_lists_have_the_density_and_the_shape_that_they_are_named_for():
    shape = Shape(1, 2, 64 * 40, 64)
    columns = {}
    for kind in (*sparse_cases.LISTS, "all"):
        cell = Cell(shape, kind, 1.0 if kind == "all" else 0.1)
        q, k, v, dout = sparse_cases.inputs_of(cell, "bf16", "cpu", 0)
        assert q.requires_grad and v.requires_grad and not dout.requires_grad
        mask = sparse_cases.mask_of(cell, SIZES, q, k, 0)
        assert mask.shape == (1, 2, 40, 40)
        assert set(mask.sum(-1).flatten().tolist()) == {40 if kind == "all" else 4}
        assert sparse_cases.share_of(mask, shape.tokens, SIZES) == mask.double().mean()
        columns[kind] = mask.sum(2).max()
        if kind == "smooth":  # a block's own tokens are like it
            assert mask.diagonal(dim1=-2, dim2=-1).double().mean() > 0.8
    assert columns["popular"] > 1.5 * columns["random"]


def test_the_share_counts_tokens_of_short_blocks():
    mask = torch.zeros(1, 1, 2, 2, dtype=torch.bool)
    mask[..., 0, 1] = True
    assert sparse_cases.share_of(mask, 70, SIZES) == pytest.approx(64 * 6 / 70**2)


def row(attention, lists, density, forward, both, shape=sparse_cases.TABLE, **more):
    kind = {"a": "all in", "s": "sparse", "l": "linear"}.get(attention[0], "peer")
    block_size = attention.split()[-1] if kind != "peer" else None
    found = {"attention": attention, "kind": kind, "lists": lists, "density": density,
             "share": density, "is_timed": True, "block_size": block_size, "correct": True,
             "precision": "six-of-seven", **vars(shape)}  # fmt: skip
    for name, ms in (("forward", forward), ("forward+backward", both)):
        found[name] = {"median_ms": ms}
    return found | more


def test_demands_are_those_of_the_issue():
    rows = [
        row("sagebwd 128x128", "all", 1.0, 10.0, 40.0),
        row("sagebwd 128x128", "random", 0.05, 0.86, 3.8, packing_us=12.0),
        row("sagebwd 128x64", "random", 0.05, 0.86, 3.8),
        row("sagebwd 128x128", "popular", 0.05, 0.8, 4.6),
        row("all in 128x128", "random", 0.03, 9.0, 4.0, peak_mib=1, peak_of_v=6.0),
        row("cudnn", "random", 0.05, 12.0, 50.0),
        row("sagebwd 128x128", "random", 0.03, 1, 1) | {"error": "boom"},
        row("sagebwd 128x64", "random", 0.1, 1, 1, sparse_cases.ERRORS, is_timed=False,
            rel_l2={"O": 0.015, "dQ": 0.02, "dK": 0.0175, "dV": 0.01}),
        row("linear branch 128x64", "random", 0.1, 1, 1, sparse_cases.ERRORS, is_timed=False,
            rel_l2={"O": 0.002, "dQ": 1.0}),
    ]  # fmt: skip
    found = {one["what"]: one for one in sparse_cases.demands(rows)}
    at, wide = "sagebwd 128x128, random 0.05", "sagebwd 128x64, random 0.05"
    assert {what for what, one in found.items() if not one["reached"]} == {
        f"ms of forward, {at}", "time, of random lists', sagebwd 128x128, popular 0.05",
        "memory, of V, all in 128x128, random 0.03",
        f"cost of a score, of every block's, {at}",
        "error of O, sagebwd 128x64, random 0.1"}  # fmt: skip
    assert found[f"ms of forward, {wide}"]["must"] == pytest.approx(0.85 * 1.25, abs=1e-4)
    assert found[f"ms of forward, {at}"]["aim"] == 0.6
    assert found["ms of forward+backward, all in 128x128, random 0.03"]["must"] == 4.1
    assert found[f"us of packing, {at}"]["measured"] == 12.0
    cost = found[f"cost of a score, of every block's, {at}"]
    assert cost["measured"] == pytest.approx(3.8 / 0.05 / 40, abs=1e-3)
    assert cost["must"] == 1.25
    assert found["error of O, linear branch 128x64, random 0.1"]["reached"]
    # Whatever is not a number is not reached.
    (one,) = sparse_cases.demands([rows[-1] | {"rel_l2": {"O": float("nan")}}])
    assert not one["reached"]


def test_where_a_line_overtakes_a_dense_peer():
    line = [(0.1, 5.0), (0.5, 25.0), (1.0, 60.0)]
    crossing = sparse_cases.crossing
    assert crossing(line, 15.0) == pytest.approx(0.3)
    assert crossing(line, 32.0) == pytest.approx(0.6)
    assert crossing(line, 70.0) is crossing(line, 1.0) is crossing(line[:1], 9.0) is None
    assert crossing(line[:2], 30.0) == pytest.approx(0.6)  # further on
    rows = [row("sagebwd 128x64", "random", 0.1, 5.0, 5.0), row("cudnn", "random", 0.1, 15.0, 70.0),
            row("sagebwd 128x64", "all", 1.0, 50.0, 60.0)]  # fmt: skip
    found = sparse_cases.overtakes(rows)
    assert [(one["pass"], one["density"]) for one in found] == [("forward", 0.3),
                                                                 ("forward+backward", None)]


def test_flex_attention_gets_the_same_lists():
    cell = Cell(Shape(1, 2, 600, 64), "random", 0.5)
    q, k, _, _ = sparse_cases.inputs_of(cell, "bf16", "cpu", 0)
    mask = sparse_cases.mask_of(cell, (128, 128), q, k, 0)
    lists = sparse_subjects.Lists.of(mask, (128, 128), 600)
    given = sparse_subjects.flex(lists, cell.shape, False).attend.keywords["block_mask"]
    assert given.shape == (1, 2, 600, 600) and given.BLOCK_SIZE == (128, 128)
    assert torch.equal(given.to_dense().bool(), mask)
    for counts, indices, listed in (
        (given.full_kv_num_blocks, given.full_kv_indices, mask),
        (given.full_q_num_blocks, given.full_q_indices, mask.mT),
    ):
        assert torch.equal(counts.long(), listed.sum(-1))
        for place in listed.nonzero().tolist():
            row = tuple(place[:3])
            assert place[3] in indices[row][: counts[row]].tolist()
    assert not given.kv_num_blocks.any()


def test_what_is_compiled_first_are_our_operations_alone():
    cells = sparse_cases.cells_of([Shape(1, 2, 600, 64)], [0.5, 0.1], ["random"])
    specs = sparse_subjects.specs_of(cells, [(128, 64), (128, 128)], ["gradients16"], "bf16")
    sizes = {spec.pop("sizes") for spec in specs}
    assert sizes == {(1, 1, 1, cell.shape.tokens, cell.shape.tokens) for cell in cells}
    found = [sagebwd.Spec(**spec) for spec in specs if spec["head_dim"] == 64]
    assert [(one.precision, one.sparse_kv) for one in found] == [
        ("six-of-seven", 0), ("gradients16", 0), ("six-of-seven", 0), ("gradients16", 64),
        ("gradients16", 128)]  # fmt: skip


def test_few_rounds_where_they_take_long():
    asked = []

    def clock(call):
        asked.append(call())
        return 1000.0

    calls = {"a": sparse.Guarded(lambda: "a"), "b": sparse.Guarded(lambda: 1 / 0)}
    found = sparse.timed(calls, clock, 9, 0.1)
    assert found["a"].samples == 3 and len(asked) == 8
    assert isinstance(calls["b"].error, ZeroDivisionError) and calls["a"].error is None
    assert sparse.timed(calls, clock, 9, 10.0)["a"].samples == 5
    assert sparse.timed(calls, clock, 2, 0.1)["a"].samples == 2


# ---- the command ---------------------------------------------------------------------------------

WORDS = ["--device", "cpu", "--shape", "1x1x130x64", "--density", "0.5", "--lists", "random",
         "--block-size", "128x64", "--precision", "six-of-seven", "--rounds", "1", "--no-errors",
         "--flex", "no"]  # fmt: skip


def read(path):
    return json.loads(path.read_text())


def test_the_command_its_picture_and_going_on(tmp_path, monkeypatch, capsys):
    out = tmp_path / "sparse.json"
    measure, seen = sparse.measure, []

    def interrupted(options, cell, clock):
        if seen == ["all"]:
            raise KeyboardInterrupt
        seen.append(cell.lists)
        return measure(options, cell, clock)

    monkeypatch.setattr(sparse, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sparse.main([*WORDS, "--out", str(out)])
    monkeypatch.setattr(sparse, "measure", lambda options, cell, clock: seen.append(
        cell.lists) or measure(options, cell, clock))  # fmt: skip

    def broken(lists):
        raise RuntimeError("boom")

    monkeypatch.setattr(sparse_subjects, "linear", broken)
    assert sparse.main([*WORDS, "--out", str(out), "--resume"]) == 1
    assert seen == ["all", "random"]  # the first cell is not measured again
    record = read(out)
    assert record["cells"] == ["1x1x130x64 all 1", "1x1x130x64 random 0.5"]
    rows = {(one["attention"], one["lists"]): one for one in record["rows"]}
    assert len(rows) == len(record["rows"]) == 5 + 1 + 1 + 3
    assert rows["linear branch 128x64", "random"]["error"] == "RuntimeError: boom"
    wrong = [one["attention"] for one in record["rows"] if not one["correct"]]
    assert wrong == ["linear branch 128x64"] and not record["passed"]
    ours = rows["sagebwd 128x64", "random"]
    assert 0.003 < ours["rel_l2"]["dQ"] < 0.03 and ours["packing_us"] > 0
    assert ours["share"] in (64 / 130, 2 / 130, (128 * 64 + 2 * 2) / 130**2,
                             (128 * 2 + 2 * 64) / 130**2)  # fmt: skip
    both = ours["forward+backward"]
    operations = 3.5 * 4 * 130**2 * 64
    assert both["tflops"] == pytest.approx(operations / both["median_ms"] / 1e9, abs=0.01)
    assert rows["all in 128x64", "random"]["rel_l2"]["dK"] < 0.01
    assert {one["attention"] for one in record["overtakes"]} == {"sagebwd 128x64", "all in 128x64"}
    pytest.importorskip("matplotlib")
    assert plot.plot_sparse(out).read_bytes().startswith(b"\x89PNG")


def test_only_a_record_of_everything_goes_to_the_results(capsys):
    with pytest.raises(SystemExit):
        sparse.main(["--device", "cpu", "--quick"])
    assert "with --quick name another file" in capsys.readouterr().err


def test_trying_the_script_on_a_cpu_judges_no_speed(tmp_path, monkeypatch, capsys):
    missed = {"what": "ms", "measured": 2.0, "must": 1.0, "reached": False}
    monkeypatch.setattr(sparse, "demands", lambda rows: [missed])
    out, words = tmp_path / "sparse.json", [word for word in WORDS if word != "--no-errors"]
    assert sparse.main([*words, "--out", str(out)]) == 0
    record, said = read(out), capsys.readouterr().out
    assert record["passed"] and not record["demands"]
    assert record["cells"] == ["1x1x130x64 all 1", "1x1x130x64 random 0.5"]
    assert "is as fast as" not in said and "above 1" not in said and "FAILED" not in said


@pytest.mark.parametrize("words, said", [
    ("--density 1.5", "density=1.5: pass the share of the key blocks"),
    ("--density 0", "density=0.0: pass the share of the key blocks"),
    ("--density nan", "density=nan: pass the share of the key blocks"),
    ("--density x", "--density"),
    ("--precision foo", "--precision: invalid choice: 'foo'"),
    ("--rounds 0", "--rounds: 0: it must be at least 1"),
    ("--seconds nan", "--seconds: nan: pass a positive number"),
    ("--exact-heads 0", "--exact-heads: 0: it must be at least 1"),
    ("--block-size 3x3", "block_size=(3, 3): kernels have 64 and 128"),
    ("--block-size 128", "--block-size: 128: pass queries and keys"),
    ("--shape 1x2x3", "--shape: 1x2x3: pass batch, heads"),
    ("--shape 1x2xax64", "--shape: 1x2xax64: pass batch, heads"),
    ("--shape 1x2x256x65", "head dimension 65"),
])  # fmt: skip
def test_arguments_that_mean_nothing_are_refused_by_name(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit) as left:
        sparse.main(["--device", "cpu", "--out", str(tmp_path / "x.json"), *words.split()])
    err = capsys.readouterr().err
    assert left.value.code == 2 and said in err and words.split()[0] in err
    assert not list(tmp_path.iterdir())


def test_the_table_of_times():
    shape, densities = "1x16x32768x128", [0.1, 0.03]
    rows = [row(name, "random", density, 1.0, 5.0) | {"cell": f"{shape} random {density}"}
            for name in tables.LISTED for density in densities]  # fmt: skip
    rows.append(row("fa2", "all", 1.0, 2.0, 40.0) | {"cell": f"{shape} all 1"})
    lines = tables.listed({"rows": rows, "parameters": {"density": densities}})
    assert lines[0] == "| forward, forward + backward | 10% of blocks | 3% of blocks |"
    assert lines[2] == "| all keys, cuDNN | 1.0, 5.0 ms | 1.0, 5.0 ms |"
    assert lines[3].endswith("| 1.0, 5.0 ms (1.0x) | 1.0, 5.0 ms (1.0x) |")
    with pytest.raises(SystemExit, match="random 0.03, cudnn"):
        tables.listed({"rows": rows[:1] + rows[2:], "parameters": {"density": densities}})
