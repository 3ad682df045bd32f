"""Errors over training time and depth: what is traced, what is said of it, and wrong use."""

import csv
import json
import re
import math
import shutil

import pytest

torch = pytest.importorskip("torch")

from corpus_cases import corpus_of  # noqa: E402

import sagebwd  # noqa: E402
from experiments import error_traces, errors, train  # noqa: E402
from experiments.capture import Captured  # noqa: E402
from sagebwd.numerics.quantizers import signs  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")
SIZES = ("--device cpu --attention sdpa --model toy --layers 2 --tokens 64 --batch 2 --warmup 2 "
         "--val-sequences 2 --eval-every 100 --save-every 4 --steps 8")  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A corpus, and checkpoints of a run's steps 4 and 8."""
    folder = tmp_path_factory.mktemp("run")
    corpus_file = corpus_of(folder)
    words = ["--corpus", str(corpus_file), "--out", str(folder / "results"), *SIZES.split()]
    assert train.main([*words, "--save", str(folder / "a-{step}.pt")]) == 0
    words += ["--no-qk-norm", "--name", "b"]
    assert train.main([*words, "--save", str(folder / "b-{step}.pt")]) == 0
    yield folder
    shutil.rmtree(folder)


def drawn(offset=0.0, tokens=160, heads=2):
    """bf16 tensors of two sequences; queries and keys have a mean of this magnitude, which the
    rotation gathers in one channel."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = torch.randn(4, 2, heads, tokens, 64, generator=generator)
    offset = offset * signs(64)
    return Captured(*(x.bfloat16() for x in (q + offset, k + offset, v, dout)))


# ---- what is traced ------------------------------------------------------------------------------


def test_errors_are_those_of_the_reference():
    """`sagebwd.trace` on the CPU is another implementation, in C++."""
    captured = drawn()
    found = error_traces.traced_layer(captured)["errors"]
    assert found.keys() == error_traces.SETTINGS.keys()
    for name, how in error_traces.SETTINGS.items():
        expected = sagebwd.trace(*captured, causal=True, device="cpu", **how)
        for tensor, figures in found[name].items():
            rel = expected[tensor]["rel_l2"]
            assert figures["rel_l2"] == pytest.approx(rel, rel=0.02, abs=2e-6), (name, tensor)
            assert figures["cosine"] == pytest.approx(expected[tensor]["cosine"], abs=1e-5)
            bias = expected[tensor]["bias"]
            assert figures["bias"] == pytest.approx(bias, rel=0.05, abs=2e-5), (name, tensor)


def test_chunks_of_heads_give_the_same(monkeypatch):
    captured = drawn(tokens=64)
    whole = error_traces.traced_layer(captured)
    monkeypatch.setitem(error_traces.SCORES, "cpu", 1)
    parts = error_traces.traced_layer(captured)
    for setting, tensors in whole["errors"].items():
        for tensor, figures in tensors.items():
            assert parts["errors"][setting][tensor] == pytest.approx(figures, rel=1e-6, abs=1e-9)
    for name in ("sizes", "heads"):
        for figure, x in whole[name].items():
            assert parts[name][figure] == pytest.approx(x, rel=1e-6), figure


def test_a_product_in_16_bits_takes_its_own_error_away():
    found = error_traces.traced_layer(drawn())["errors"]
    before = found["row"]
    for product, tensor in (("pv", "O"), ("dv", "dV"), ("dq", "dQ"), ("dk", "dK"), ("s", "P")):
        after = found[error_traces.OF_PRODUCT[product]]
        assert after[tensor]["rel_l2"] < 0.9 * before[tensor]["rel_l2"], product
    for product, tensor in (("dv", "O"), ("dq", "dK"), ("dk", "dQ"), ("pv", "P")):
        same = found[error_traces.OF_PRODUCT[product]][tensor]
        assert same == pytest.approx(before[tensor], rel=1e-6, abs=1e-8), product


# ---- sizes and the bounds of claim 5 -------------------------------------------------------------


def by_hand(captured):
    """Sums over single queries and keys, in Python's numbers."""
    q, k, v, dout = (x.double().tolist() for x in captured)
    rows = []
    for b in range(len(q)):
        for h in range(len(q[0])):
            for i, (qi, di) in enumerate(zip(q[b][h], dout[b][h])):
                keys, values = k[b][h][: i + 1], v[b][h][: i + 1]
                s = [sum(map(float.__mul__, qi, x)) / math.sqrt(len(qi)) for x in keys]
                p = [math.exp(x - max(s)) for x in s]
                p = [x / sum(p) for x in p]
                dp = [sum(map(float.__mul__, di, x)) for x in values]
                delta = sum(map(float.__mul__, p, dp))
                ds = [x * (y - delta) for x, y in zip(p, dp)]
                rows.append((p, dp, ds, max(abs(y - delta) for y in dp)))
    return rows


def rms(values):
    return math.sqrt(sum(x * x for x in values) / len(values))


def test_sizes_and_bounds():
    captured = Captured(*(x[:, :1, :12, :].contiguous() for x in drawn(tokens=12)))
    rows, found = by_hand(captured), error_traces.traced_layer(captured)["sizes"]
    for name, place in (("rms_p", 0), ("rms_dp", 1), ("rms_ds", 2)):
        assert found[name] == pytest.approx(rms([x for row in rows for x in row[place]])), name
    to_bound = [rms(ds) / (rms(p) * top) for p, _, ds, top in rows if len(p) > 1]
    assert found["ds_to_bound_largest"] == pytest.approx(max(to_bound))
    assert max(to_bound) <= 1
    spread = sum(len(p) * (rms(p) * top) ** 2 for p, _, _, top in rows)
    entries = sum(len(p) for p, *_ in rows)
    assert found["rms_ds_bound"] == pytest.approx(math.sqrt(spread / entries))
    of_p = [rms(p) * math.sqrt(len(p)) for p, *_ in rows]
    assert found["p_to_bound_largest"] == pytest.approx(1) == pytest.approx(max(of_p))
    tops = sum(top**2 for *_, top in rows)  # RMS(P_i) = 1 / sqrt N instead of what it is
    assert found["rms_ds_bound_by_keys"] == pytest.approx(math.sqrt(tops / entries))


# ---- queries with a common offset ----------------------------------------------------------------


def test_queries_with_an_offset_are_worse_with_rotation():
    """Of a mean of 4 and a deviation of 1 the mean has 16 of 17 parts; without one, 1 of the
    number of tokens."""
    layers = [error_traces.traced_layer(drawn(offset)) for offset in (0.0, 4.0)]
    without, with_offset = (layer["heads"] for layer in layers)
    assert with_offset["q_offset"] == pytest.approx([16 / 17] * 2, abs=0.002)
    assert without["q_offset"] == pytest.approx([1 / 160] * 2, abs=0.002)
    names = ("O", "O_no_rotate", "O_smooth_q")
    for rotated, plain, smooth in zip(*(with_offset[name] for name in names)):
        assert rotated > 1.5 * plain > 1.5 * smooth
    found = error_traces.rotation(layers)
    assert found["all"]["heads"] == 4 and found["q_offset>=0.5"]["heads"] == 2
    assert found["q_offset>=0.5"]["worse_with_rotation"] == 2
    ratios = [a / b for a, b in zip(with_offset["O"], with_offset["O_no_rotate"])]
    assert found["q_offset>=0.5"]["ratio_median"] == pytest.approx(sum(ratios) / 2)
    assert error_traces.rotation(layers[:1])["q_offset>=0.5"] is None


def test_which_product_helps_most():
    def of(error):
        return {name: {"rel_l2": error} for name in error_traces.TENSORS}

    found = {name: of(0.1) for name in error_traces.SETTINGS}
    found["qk16"] = of(0.09)
    found["dk-in-16"]["dK"] = {"rel_l2": 0.02}
    found["row"]["dP"] = {"rel_l2": 0.09}
    best = error_traces.best_products(found)
    assert best["dK"]["product"] == "dk" and best["dK"]["left"]["s"] == 0.09
    assert best["dK"]["before"] == 0.1
    assert best["O"]["product"] == "s"
    assert best["dP"]["product"] is None  # 0.09 is what it was


# ---- the command ---------------------------------------------------------------------------------


def call(run, tmp_path, *words):
    return errors.main(["--corpus", str(run / "c.bin"), "--device", "cpu", "--out",
                        str(tmp_path / "out"), *map(str, words)])  # fmt: skip


def test_the_command_writes_every_stage_and_layer(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    stages = [run / "a-8.pt", run / "a-4.pt"]
    assert call(run, tmp_path, *stages, "--sequences", "1") == 0
    said = capsys.readouterr().out
    assert said.index("step 4") < said.index("step 8") and "helps most in 16 bits: " in said
    assert re.search(r"bias: row delta [+-]\d.*; block delta .*; 16-bit .*dV [+-]\d", said)
    record = json.loads((tmp_path / "out/errors.json").read_text())
    assert [stage["step"] for stage in record["stages"]] == [4, 8]
    assert str(tmp_path) not in json.dumps(record) and record["attention"] == "sdpa"
    for stage in record["stages"]:
        assert [layer["layer"] for layer in stage["layers"]] == [0, 1]
        mean = [layer["errors"]["block"]["dS"]["rel_l2"] for layer in stage["layers"]]
        assert stage["mean_over_layers"]["block"]["dS"]["rel_l2"] == pytest.approx(
            sum(mean) / 2, rel=1e-5), "both have six digits"
    with (tmp_path / "out/errors.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * len(error_traces.SETTINGS) * len(error_traces.TENSORS)
    last = record["stages"][1]["layers"][1]["errors"]["smooth-q"]["dV"]["rel_l2"]
    (row,) = (r for r in rows if (r["step"], r["layer"], r["setting"], r["tensor"])
              == ("8", "1", "smooth-q", "dV"))  # fmt: skip
    assert float(row["rel_l2"]) == pytest.approx(last, rel=1e-5) and abs(float(row["bias"])) < 0.1
    assert (tmp_path / "out/errors.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "errors.csv", "errors.json", "errors.png"]  # fmt: skip


def test_one_layer_as_json(run, tmp_path, capsys):
    words = (run / "b-4.pt", "--layer", "1", "--json", "--name", "no-norm", "--sequences", "1")
    assert call(run, tmp_path, *words) == 0
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "out/no-norm.json").read_text())
    assert [layer["layer"] for layer in record["stages"][0]["layers"]] == [1]
    assert record["config"]["model"]["qk_norm"] is False


def test_no_record_is_replaced_by_that_of_other_options(run, tmp_path, capsys):
    words = (run / "a-4.pt", "--layer", "1", "--sequences", "1")
    assert call(run, tmp_path, *words) == call(run, tmp_path, *words) == 0
    path = tmp_path / "out/errors.json"
    kept = path.read_bytes()
    for changed, part in (((run / "b-4.pt", *words[1:]), "qk_norm False (not True), checkpoints "),
                          ((run / "a-8.pt", *words), "['a-4.pt', 'a-8.pt'] (not ['a-4.pt'])"),
                          (words[:3], "sequences 2 (not 1)"),
                          ((*words, "--layer", "0"), "traced_layers [0] (not [1])"),
                          ((*words, "--attention", "emulated"), "emulated (not sdpa)")):
        with pytest.raises(SystemExit) as left:
            call(run, tmp_path, *changed)
        said = capsys.readouterr().err
        assert left.value.code == 2 and part in said and said.endswith(
            "pass another --out or --name (--help lists the options)\n")
    with pytest.raises(SystemExit):
        train.main(["--corpus", str(run / "c.bin"), "--out", str(path.parent), *SIZES.split(),
                    "--name", "errors", "--save", str(tmp_path / "a.pt")])  # fmt: skip
    assert "errors.json is there, and no record of this command: pass" in capsys.readouterr().err
    assert path.read_bytes() == kept


def test_no_table_that_is_of_no_record_is_replaced(run, tmp_path, capsys):
    table = tmp_path / "out/errors.csv"
    table.parent.mkdir()
    table.write_text("mine")
    with pytest.raises(SystemExit) as left:
        call(run, tmp_path, run / "a-4.pt", "--layer", "1", "--sequences", "1")
    said = capsys.readouterr().err
    assert left.value.code == 2 and f"{table} is there without errors.json" in said
    assert table.read_text() == "mine"


def test_wrong_use_of_errors(run, tmp_path, capsys):
    other = tmp_path / "other"
    elsewhere = corpus_of(other, files=10)
    shutil.copy(run / "a-4.pt", tmp_path / "copy.pt")
    weights = torch.load(run / "a-4.pt", weights_only=True)
    weights["model"].popitem()
    torch.save(weights, tmp_path / "part.pt")
    good = run / "a-4.pt"
    for words, part in (
        ([run / "a-4.pt", run / "b-8.pt"], "b-8.pt is of another run than"),
        ([good, tmp_path / "copy.pt"], "are both of step 4"),
        ([run / "c.bin"], "c.bin is no checkpoint of these commands"),
        ([good, tmp_path / "part.pt", "--layer", "0"], "part.pt"),
        ([run / "absent.pt"], "absent.pt: there is no such file; its folder has a-"),
        ([good, "--corpus", elsewhere], "was trained on another corpus"),
        ([good, "--layer", "2"], "no layer 2: the model has 2"),
        ([good, "--sequences", "0"], "sequences 0: it must be at least 1"),
        ([good, "--sequences", "9999"], "--sequences 9999: the corpus has "),
        ([good, "--name", "a/b"], "--name a/b"),
        ([good, "--attention", "flash"], "unknown attention 'flash'"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as left:
            call(run, tmp_path, *words)
        assert left.value.code == 2 and part in capsys.readouterr().err, words
    assert call(run, tmp_path, good, "--attention", "sagebwd") == 1
    assert "CUDA GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
