"""Figures in the text of the pages of docs/ on training are those of the records."""

import json
import math
from collections import Counter
from statistics import fmean, median

import pytest
from documents import ROOT
from test_claims import record, regime, shown

STUDY = ROOT / "bench/results/study-full"
#: Two-sided 95 % quantiles of Student's t, by degrees of freedom.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447}


def text():
    pages = (ROOT / f"docs/{name}.md" for name in ("training", "training-further"))
    return " ".join(" ".join(page.read_text() for page in pages).split())


def claimed(*claims):
    page = text()
    for claim in claims:
        assert claim in page, claim


def spread(values):
    return f"{min(values):.2f} to {max(values):.2f}"


def arms():
    found = [json.loads(path.read_text()) for path in STUDY.glob("*.json")]
    return [one for one in found if "regime" in one]


def test_the_corpus_and_the_hours_of_the_study():
    corpora = {json.dumps(one["corpus"]) for one in arms()}
    assert len(corpora) == 1
    corpus = json.loads(corpora.pop())
    assert corpus["train_tokens"] == 203_000_000 and corpus["vocab"] == 8192
    claimed(f"SHA-256 of the tokens begins with {corpus['sha256'][:16]}; all records have it")
    header = record("study-corpus.json")
    asked, kinds = header["asked"], header["suffixes"]
    assert header["sha256"] == corpus["sha256"]
    assert 0.7 < (kinds[".h"] + kinds[".c"]) / sum(kinds.values()) < 0.8
    claimed(f"a BPE vocabulary of {header['vocab']}, of {header['train']['files']:,} files "
            f"(`corpus {' '.join(asked['folders'])} --tokenizer {asked['tokenizer']} "
            f"--max-tokens {asked['max_tokens']}`, `study-corpus.json`)")
    hours = [sum(record(f"{path.parent.name}/{path.name}").get("seconds", 0) for path in paths)
             / 3600 for paths in ((ROOT / "bench/results/study").glob("*-[0-9]*.json"),
                                  STUDY.glob("*.json"))]  # fmt: skip
    page = " ".join((ROOT / "docs/use/experiments.md").read_text().split())
    assert (f"`pilot` took {hours[0]:.1f} hours of one GPU, and those of `full` that are done "
            f"{hours[1]:.1f}.") in page


def test_the_rates_of_the_study():
    for model, qk_norm, smallest in (("26m", True, True), ("26m", False, True),
                                     ("110m", True, True), ("110m", False, False)):  # fmt: skip
        sweep = [one for one in arms() if one["arm"]["sweep"] and one["arm"]["model"] == model
                 and one["arm"]["qk_norm"] == qk_norm]  # fmt: skip
        assert all(one["status"] == "finished" for one in sweep)
        best = min(sweep, key=lambda one: one["final_val_loss"])
        near = {one["arm"]["lr"] for one in sweep
                if one["final_val_loss"] <= best["final_val_loss"] + 0.1}
        used = {one["arm"]["lr"] for one in arms() if not one["arm"]["sweep"]
                and one["arm"]["model"] == model and one["arm"]["qk_norm"] == qk_norm}
        rates = [one["arm"]["lr"] for one in sweep]
        assert {max(near)} == used == {best["arm"]["lr"]}
        assert (min(rates) in used) == smallest  # no table has arms of the last one
        most = {"26m": "0.016 with 26 million parameters", "110m": "0.004 with 110 million"}[model]
        assert f"{max(rates):g}" in most
        claimed(most)


def pooled_differences(found):
    """Half the width of the band of one pair, as it was first pooled; None where it was not."""
    several = [arm["pairs"] for arm in found.values() if len(arm.get("pairs") or ()) > 1]
    freedom = sum(len(pairs) - 1 for pairs in several)
    if freedom < 2:
        return None
    squares = sum((x - fmean(pairs)) ** 2 for pairs in several for x in pairs)
    return T[freedom] * math.sqrt(squares / freedom)


def test_what_the_first_formula_of_the_bands_says():
    other = []
    for found in record("study-full/study.json")["regimes"].values():
        half = pooled_differences(found["arms"])
        for name, arm in found["arms"].items() if half else ():
            if "paired" in arm:
                own = half / math.sqrt(len(arm["pairs"]))
                if (abs(arm["paired"]) > own) != arm["verdict"].startswith("outside"):
                    other.append((name, f"{arm['paired']:+.4f} ±{own:.4f}"))
    assert [name for name, _ in other] == ["sagebwd:granularity=block,no-rotate"]
    claimed(f"the paper's scales at 512K would be within, {other[0][1]}")


def test_arms_that_were_added_are_the_last_of_the_plan():
    pytest.importorskip("torch")
    from experiments import study_plan

    added = study_plan.full()[-7:]
    assert Counter(arm.attention for arm in added) == {
        "sagebwd:granularity=block,no-rotate": 1, "sagebwd:precision=gradients16": 3,
        "sagebwd:precision=qk16": 3}  # fmt: skip
    assert not any(arm.qk_norm or arm.steps != 3052 or arm.model != "26m" for arm in added)
    claimed("7 arms without QK-norm at 64K were added")


def test_what_would_tell_more():
    emulated = record("study-full/few-steps-dp-int8-0.json")
    minutes = 3052 * 65536 / emulated["tokens_per_second"] / 60
    bands = [regime("study-full", 64, steps)["sagebwd"]["paired_half_width"]
             for steps in (382, 3052)]  # fmt: skip
    one = regime("study-full", 64, 3052)["sagebwd:granularity=block"]["paired_half_width"]
    claimed(f"takes about {minutes:.0f} minutes of one H200",
            f"±{bands[0]:.4f} after 382 steps and ±{bands[1]:.4f} after 3052",
            f"{3052 * 524288 / 1e9:.1f} billion tokens an arm",
            f"As many of the paper's 2.1M are {3052 * 2.1e6 / 1e9:.1f} billion",
            f"3052 steps may, with a band of ±{one:.4f}")


def test_large_models_without_qk_norm_have_no_band():
    sdpa, (ours,) = ([record(f"study-full/110m-large-no-qk-norm-{name}-{seed}.json")
                      for seed in seeds] for name, seeds in (("sdpa", range(3)), ("row", range(1))))
    first, *others = (f"{one['final_val_loss']:.4f}" for one in sdpa)
    claimed(f"a learning rate of {ours['arm']['lr']:g}, the three seeds of SDPA end at {first}, "
            f"{' and '.join(others)}, and `six-of-seven` with the first seed at "
            f"{ours['final_val_loss']:.4f}")
    assert "paired" not in regime("study-full", 512, 382, bare=True, model="110m")["sagebwd"]
    assert ours["status"] == "finished" and ours["arm"]["seed"] == sdpa[0]["arm"]["seed"]


def test_k_smoothing_at_many_tokens_a_step():
    many = regime("study-full", 512, 382)
    with_it, without = (many[f"sagebwd:granularity=block{more},no-rotate"]["paired"]
                        for more in ("", ",no-smooth-k"))  # fmt: skip
    claimed(f"At 512K they end {with_it:+.4f} with it, {without:+.4f} without")


def test_q_smoothing_gains_no_more_than_the_page_says():
    few = regime("study-full", 64, 3052)
    gains = [arm["paired_half_width"] - arm["paired"] for name, arm in few.items()
             if "smooth-q" in name]  # fmt: skip
    assert len(gains) == 2 and 0.006 < max(gains) < 0.007
    claimed("no gain above 0.007")


def test_products_that_help_most():
    best = {name: [{tensor: one["product"] for tensor, one in stage["best_products"].items()}
                   for stage in record(f"study/errors-{name}.json")["stages"]]
            for name in ("qk", "noqk")}  # fmt: skip
    of = {name: {tensor: Counter(one[tensor] for one in found) for tensor in found[0]}
          for name, found in best.items()}  # fmt: skip
    assert of["qk"]["O"] == {"pv": 8} and of["qk"]["dS"] == {"s": 6, "pv": 2}
    assert all(of["qk"][f"d{x}"] == {f"d{x.lower()}": 8} for x in "QKV")
    assert of["noqk"]["dS"] == of["noqk"]["dK"] == {"s": 8}
    assert of["noqk"]["O"] == of["noqk"]["dQ"] == {"s": 3, "pv": 5}
    claimed("by the product that forms them, in all eight. That of dS falls most by Q·Kᵀ in six",
            "Q·Kᵀ helps dS and dK most in all eight, and O and dQ in three, where P·V does in the "
            "other five")  # fmt: skip
    sixteen = [arm for found in record("study-full/study.json")["regimes"].values()
               for name, arm in found["arms"].items() if name.endswith(("gradients16", "qk16"))]
    assert len(sixteen) == 7 and {arm["verdict"] for arm in sixteen} <= {"within", "cannot tell"}


def test_weights_of_qk_norm_and_norms_of_gradients():
    def weight(name):
        return max(map(float, record(f"study-full/small-{name}.json")["gamma"]))

    def norm(name):
        return record(f"study-full/small-{name}.json")["grad_norm"]["median"]

    sdpa, row = ([f"{name}-{seed}" for seed in range(3)] for name in ("sdpa", "row"))
    all_but_one = [*sdpa, *row, "gradients16-0", "block-0", "paper-0", "smooth-q-0",
                   "smooth-q-k-0", "no-smooth-k-0"]  # fmt: skip
    claimed(f"QK-norm is {spread([*map(weight, sdpa)])} with SDPA, {spread([*map(weight, row)])} "
            f"with the default, {weight('paper-0'):.2f} with the paper's scales, and "
            f"{weight('paper-no-smooth-k-0'):.2f} without K-smoothing",
            f"norm of a gradient is {spread([*map(norm, all_but_one)])}, and "
            f"{norm('paper-no-smooth-k-0'):.2f} with the paper's scales and no K-smoothing")


def test_scores_of_three_seeds_without_qk_norm_cannot_be_told_apart():
    def end(name, seed):
        return float(record(f"study-full/small-no-qk-norm-{name}-{seed}.json")["curve"][-1][5])

    for name in "row", "gradients16", "qk16":
        ratios = [math.log(end(name, seed) / end("sdpa", seed)) for seed in range(3)]
        mean = fmean(ratios)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in ratios) / 2)
        assert abs(mean) < T[2] * deviation / math.sqrt(3), name
    claimed("three of them cannot tell any of these from SDPA")
    page = " ".join((ROOT / "docs/use/which-attention.md").read_text().split())
    assert "in two of three seeds, which may be chance" in page
    assert sum(end("row", seed) > 1.01 * end("sdpa", seed) for seed in range(3)) == 2


def test_what_the_rotation_does():
    pytest.importorskip("torch")
    import sagebwd

    offsets, ratios = [], []
    for name in "qk", "noqk":
        for stage in record(f"study/errors-{name}.json")["stages"]:
            heads = [layer["heads"] for layer in stage["layers"]]
            offsets += [x for head in heads for x in head["q_offset"]]
            ratios.append([a / b - 1 for head in heads
                           for a, b in zip(head["O"], head["O_no_rotate"])])  # fmt: skip
    every = [x for found in ratios for x in found]
    medians = [*map(median, ratios)]
    errors = [sagebwd.trace(inputs=dict(name="heavy-channels", seq_q=512, heads=2, head_dim=128),
                            causal=True, rotate=rotate)["O"]["rel_l2"] for rotate in (False, True)]
    claimed(f"at most {100 * max(offsets):.0f} % of a head's squared queries",
            f"error of O by {100 * min(every):.0f} to {100 * max(every):+.0f} %, in the median by "
            f"{100 * min(medians):.0f} to {100 * max(medians):+.0f} %",
            f"halves the error of O, from {errors[0]:.3f} to {errors[1]:.3f}")


def test_norm_and_rope_in_attention():
    (found,) = record("study-front/study.json")["regimes"].values()
    (fronts,) = found["fronts"].values()
    differences = [f"{fronts[seed]:+.4f}" for seed in "012"]
    claimed(f"losses of the same seed differ by {', '.join(differences[:2])} and {differences[2]}. "
            f"Pairs of attentions have a deviation of {found['paired']['deviation']:.3f} at so few")
    assert max(map(abs, fronts.values())) < found["paired"]["deviation"]
    arms = [record(f"study-front/small-{name}-{seed}.json")
            for name in ("row", "row-front", "sdpa") for seed in range(3)]  # fmt: skip
    assert {one["arm"]["lr"] for one in arms} == {0.001}
    assert {one["corpus"]["train_tokens"] for one in arms} == {40_000_000}
