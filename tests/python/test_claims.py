"""Figures in the text of README.md and of the pages of docs/ are those of the records.

bench/tables.py writes the tables; sentences are written by hand.
"""

import json
import re
from collections import Counter

import pytest
from documents import PAGES, ROOT


def record(name):
    results = ROOT / "bench/results" / name
    return json.loads((results if results.exists() else ROOT / "bench" / name).read_text())


def speed(name, attention, peer, head_dim, causal, tokens):
    """Relative to the peer, forward and backward, of bf16 tensors in PyTorch's layout."""
    plain = {"dtype": "bf16", "layout": "bhsd", "heads_kv": 0}
    shape = {"head_dim": head_dim, "causal": causal, "tokens": tokens}
    rows = {r["attention"]: r["forward+backward"]["median_ms"] for r in record(name)["rows"]
            if "error" not in r and all(r.get(k, v) == v for k, v in (plain | shape).items())
            }  # fmt: skip
    return rows[peer] / rows[attention]


def final(found, run):
    """The last validation loss of a run of experiments.warning."""
    return [loss for loss in found["runs"][run]["val_loss"] if loss is not None][-1]


def regime(name, tokens, steps, bare=False, model="26m"):
    """The arms of a study's regime of a model, by their attentions."""
    found = [arms["arms"] for key, arms in record(f"{name}/study.json")["regimes"].items()
             if key.startswith(f"{model},") and f" {tokens}K a step, {steps} steps," in key
             and ("no QK-norm" in key) == bare]  # fmt: skip
    assert len(found) == 1, (name, tokens, steps, bare)
    return found[0]


def at_step(arm, column, step=-1):
    """A column of an arm of the study at a step, or at its end."""
    found = record(f"study-full/{arm}.json")
    rows = (row for row in reversed(found["curve"]) if step in (-1, row[0]))
    return float(next(rows)[found["columns"].index(column)])


def scores(arm, step=-1):
    """The largest |score| at a step of an arm of the study, or at its end."""
    return at_step(arm, "max_score", step)


def ends(stem):
    """The smallest and the largest of three seeds' scores at the end."""
    found = sorted(scores(f"{stem}-{seed}") for seed in range(3))
    return f"{found[0]:.0f} to {found[-1]:.0f}"


def each(stem):
    """The three seeds' scores at the end."""
    first, *others = (f"{scores(f'{stem}-{seed}'):.0f}" for seed in range(3))
    return f"{first}, {' and '.join(others)}"


def shown(arm):
    """How far an arm is from SDPA, with its band."""
    return f"{arm['paired']:+.4f} ±{arm['paired_half_width']:.4f}"


def test_verdicts_are_those_of_the_study():
    few, bare = regime("study-full", 64, 3052), regime("study-full", 64, 3052, bare=True)
    many, larger = (regime("study-full", 512, 382, bare=no) for no in (False, True))
    wider, big = (regime("study-full", *shape, model="110m") for shape in ((512, 382), (64, 3052)))
    pilot = regime("study", 64, 512)
    paper, worst = (few[f"sagebwd:granularity=block{more},no-rotate"]
                    for more in ("", ",no-smooth-k"))  # fmt: skip
    dp = regime("study-full", 64, 382)["emulated:precision=s+pv+dv+dp+dq+dk"]
    looped, without = (record(f"study-full/small-no-qk-norm-{arm}-0.json")["curve"]
                       for arm in ("paper-no-smooth-k", "sdpa"))  # fmt: skip
    scaled = "sagebwd:granularity=block,no-rotate"  # as in the paper
    at = [row[0] for row in looped].index(1064)
    lora = next(iter(record("study/lora/study.json")["regimes"].values()))["arms"]
    last = {name: record(f"study/errors-{name}.json")["stages"][-1]["mean_over_layers"]
            for name in ("qk", "noqk")}  # fmt: skip
    dq = {(name, setting): f"{last[name][setting]['dQ']['rel_l2']:.3f}"
          for name in last for setting in ("row", "dq-in-16", "pv-in-16")}  # fmt: skip
    again = record("study/warning-no-smooth-k.json")
    claims = [
        f"at 64K the default ends {shown(few['sagebwd'])} from SDPA, without QK-norm "
        f"{shown(bare['sagebwd'])}, with 110 million parameters {shown(big['sagebwd'])}; the "
        f"paper's scales {shown(paper)}, with 110 million {shown(big[scaled])} (one seed each)",
        f"at 512K the default ends {shown(many['sagebwd'])} from SDPA, with 110 million parameters "
        f"{shown(wider['sagebwd'])}; the paper's scales "
        f"{shown(many[scaled])}, with 110 million {shown(wider[scaled])} (one seed each)",
        f"without it the default ends {shown(bare['sagebwd'])} from SDPA at 64K, and "
        f"{shown(larger['sagebwd'])} at 512K; the paper's scales {shown(bare[scaled])} and "
        f"{shown(larger[scaled])} (one seed each). SDPA itself is {bare['sdpa']['final_val_loss'] - few['sdpa']['final_val_loss']:.2f} and "
        f"{larger['sdpa']['final_val_loss'] - many['sdpa']['final_val_loss']:.2f} worse without it",
        f"the paper's scales at 64K: {paper['paired']:+.4f} from SDPA with it, "
        f"{worst['paired']:+.4f} without; without QK-norm {bare[scaled]['paired']:+.4f} with it",
        f"without K-smoothing: {shown(few['sagebwd:no-smooth-k'])} from SDPA at 64K; with 110 "
        f"million parameters {shown(big['sagebwd:no-smooth-k'])} at 64K and "
        f"{shown(wider['sagebwd:no-smooth-k'])} at 512K",
        f"alone {few['sagebwd:no-smooth-k,smooth-q']['paired']:+.4f}, with K-smoothing "
        f"{shown(few['sagebwd:smooth-q']).replace(' ', ', ')}",
        f"in INT8 {dp['paired']:+.2f} ±{dp['paired_half_width']:.2f} after 382 steps",
        f"falls from {dq['qk', 'row']} to {dq['qk', 'dq-in-16']} if the product of dS and K",
        f"from {dq['noqk', 'row']} to {dq['noqk', 'pv-in-16']} if P·V is",
        f"SDPA ends at {ends('small-sdpa')}, that of `gradients16` at "
        f"{scores('small-gradients16-0'):.0f}, of the default at {ends('small-row')}, of the "
        f"paper's scales at {scores('small-paper-0'):.0f}, and of these without K-smoothing at "
        f"{scores('small-paper-no-smooth-k-0'):.0f}. With 110 million parameters it is "
        f"{ends('110m-small-sdpa')} with SDPA, {ends('110m-small-row')} with the default, and "
        f"{scores('110m-small-paper-0'):.0f} with the paper's scales",
        f"end at {each('small-no-qk-norm-sdpa')}, the default's at {each('small-no-qk-norm-row')}, "
        f"those of `gradients16` at {each('small-no-qk-norm-gradients16')}, and those of `qk16` at "
        f"{each('small-no-qk-norm-qk16')}, with the same loss",
        f"They were {scores('small-no-qk-norm-paper-0', 1520):.0f} at step 1520 and "
        f"{scores('small-no-qk-norm-paper-0'):,.0f} at the end",
        f"they were {looped[at][5]:.0f} at step 1064, when the loss was "
        f"{looped[at][3] - without[at][3]:.2f} above SDPA's, "
        f"{scores('small-no-qk-norm-paper-no-smooth-k-0', 1520):,.0f} at step 1520",
        f"the default ended {pilot['sagebwd:no-smooth-k']['paired']:+.3f} there, "
        f"{final(again, 'monitored') - final(again, 'sdpa'):+.3f} in a second such run "
        f"(`warning-no-smooth-k.json`), and {few['sagebwd:no-smooth-k']['paired']:+.4f} in the "
        "study",
        f"`six-of-seven` {lora['sagebwd']['paired']:+.5f}, `gradients16` "
        f"{lora['sagebwd:precision=gradients16']['paired']:+.5f} "
        f"(±{lora['sagebwd']['paired_half_width']:.5f})",
        f"{lora['sagebwd:granularity=block,no-rotate']['paired']:+.4f}, outside the noise",
    ]
    text = " ".join(" ".join((ROOT / f"docs/{name}.md").read_text() for name in
                             ("training", "training-further")).split())  # fmt: skip
    for claim in claims:
        assert claim in text, claim


def test_arms_that_the_page_calls_missing_are_missing():
    pytest.importorskip("torch")
    from experiments import study_plan

    done = {path.stem for path in (ROOT / "bench/results/study-full").glob("*.json")}
    arms = study_plan.full()
    missing = Counter(arm.model for arm in arms if arm.name not in done)
    text = " ".join((ROOT / "docs/training.md").read_text().split())
    assert missing.keys() == {"110m"}
    assert (
        f"The plan has {len(arms)} arms, and {len(arms) - missing.total()} are done, among them all "
        f"with 26 million parameters; {missing['110m']} with 110 million are missing"
    ) in text


def test_dates_are_those_of_the_records():
    """A date is followed by its record."""
    text = {page.stem: " ".join(page.read_text().split()) for page in PAGES}
    said = [(int(day), name) for page in text.values()
            for day, name in re.findall(r"(\d+) November 2026 \(`([\w-]+\.json)`", page)]  # fmt: skip
    assert len(said) >= 10
    for day, name in said:
        assert record(name)["environment"]["date"].startswith(f"2026-11-{day:02}"), (day, name)


def test_claims_are_those_of_the_records():
    grid = "speed-grid.json"
    deterministic = [speed(grid, "sagebwd", "fa2, deterministic", d, causal, 8192)
                     for d in (64, 128, 256) for causal in (False, True)]  # fmt: skip
    few, big = (regime("study-full", 64, 3052, model=model)["sagebwd"] for model in ("26m", "110m"))
    ours = ("sagebwd", "sagebwd:precision=gradients16,no-deterministic")
    long, causal = ([[speed(grid, name, "cudnn", 256, causal, 2**n) for n in range(first, 18)]
                     for name in ours] for causal, first in ((False, 12), (True, 14)))  # fmt: skip
    longest = [speeds[2:] for speeds in long]  # from 16384 tokens
    peaks = {(r["attention"], r["head_dim"]): r["peak_mib"] for r in record("speed.json")["rows"]
             if r["tokens"] == 8192 and not r["causal"]}  # fmt: skip
    memory = [peaks["sagebwd", d] / peaks["cudnn", d] for d in (64, 128, 256)]
    tests = record("gpu-tests.json")
    layers = {
        peer: [
            r[f"speed of the layer, of {peer} and cuDNN's, gradients16"]
            for r in record("layer.json")["ratios"]
        ]
        for peer in ("compiled", "eager")
    }
    ratios = [r["speed of the layer, of compiled and cuDNN's, six-of-seven"]
              for r in record("layer.json")["ratios"]]  # fmt: skip
    default = f"{min(ratios):.2f} to {max(ratios):.2f}"
    scores = {}
    for row in record("scores.json")["rows"]:
        flex, own = (row["forward+backward"][who]["median_ms"] for who in ("flex", "gradients16"))
        scores.setdefault(row["function"], []).append(flex / own)
    masked = {word: [row["forward+backward"]["flex"]["median_ms"] /
                     row["forward+backward"][word]["median_ms"]
                     for row in record("intervals.json")["rows"]]
              for word in ("gradients16", "six-of-seven")}  # fmt: skip
    short, shorter = (f"{min(of):.2f} to {max(of):.2f}" for of in masked.values())
    capped, alibi, bias = (f"{min(of):.2f} to {max(of):.2f}" for of in scores.values())
    claims = {
        f"soft-capping [{capped} times as fast as in flex_attention](use/scores.md#speed), ALiBi "
        f"{alibi} times and a relative bias {bias} times": {"index"},
        f"[{short} times as fast](": {"README", "index"},
        f"with which layer and masks are {default} and {shorter} times as fast":
            {"README", "index"},
        f"`gradients16` is {alibi.split()[0]} to {capped.split()[-1]} times as fast as "
        "`flex_attention`": {"which-attention"},
        f"{min(layers['compiled']):.2f} to {max(layers['compiled']):.2f} times as fast":
            {"README", "index", "which-attention"},
        f"{min(layers['eager']):.2f} to {max(layers['eager']):.2f} times as fast as eager modules":
            {"which-attention"},
        f"{min(map(min, long)):.2f} to {max(map(max, long)):.2f} times": {"which-attention"},
        f"{min(map(min, causal)):.2f} to {max(map(max, causal)):.2f} times": {"which-attention"},
        f"`six-of-seven` is {min(longest[0]):.2f} to {max(longest[0]):.2f} times as fast as cuDNN, "
        f"`gradients16` {min(longest[1]):.2f} to {max(longest[1]):.2f}; causal "
        f"{min(causal[0]):.2f} to {max(causal[0]):.2f} and {min(causal[1]):.2f} to "
        f"{max(causal[1]):.2f} |": {"which-attention"},
        f"it is {min(long[1]):.2f} to "
        f"{speed('speed.json', ours[1], 'cudnn', 256, False, 8192):.2f} times": {"which-attention"},
        f"{peaks['sagebwd', 128]:.0f} MiB": {"benchmarks"},
        f"{min(memory):.2f} to {max(memory):.2f} times": {"benchmarks"},
        f"{min(deterministic):.1f} to {max(deterministic):.1f} times": {"index", "which-attention"},
        f"{min(deterministic[:4]):.1f} to {max(deterministic[:4]):.1f} times as fast as what "
        "PyTorch has": {"README"},
        f"{speed(grid, 'sagebwd', 'cudnn', 256, False, 131072):.2f} times": {"which-attention"},
        f"{tests['total_passed']:,} GPU tests": {"benchmarks"},
        f"{few['paired']:.4f} ±{few['paired_half_width']:.4f} above bf16 with 26 million "
        f"parameters, {big['paired']:.4f} ±{big['paired_half_width']:.4f} with 110 million":
            {"README", "index"},
    }  # fmt: skip
    text = {page.stem: " ".join(page.read_text().split()) for page in PAGES}
    for claim, pages in claims.items():
        assert all(claim in text[page] for page in pages), f"{claim}: {pages}"


def test_the_limit_of_the_default_precision_is_that_of_the_record():
    """Both deterministic: one kernel forms all gradients in INT8, and two in 16 bits."""
    tflops = {tuple(row[key] for key in ("head_dim", "precision", "pass")): row["tflops"]
              for row in record("instructions.json")["bounds"]
              if row["gpu"] == "RTX 4090" and row["causal"] == "none"}  # fmt: skip
    text = " ".join((ROOT / "docs/use/which-attention.md").read_text().split())
    for head_dim in 64, 128:
        forward = 4 / tflops[head_dim, "six-of-seven", "forward"]
        default, other = (forward + 10 / tflops[head_dim, precision, kernels] for precision, kernels
                          in (("six-of-seven", "fused"), ("gradients16", "backward")))  # fmt: skip
        assert (f"On an RTX 4090 the limit from instruction counts is {other / default:.1f} times "
                "that of deterministic `gradients16`, at D64 and D128 (`instructions.json`)"
                ) in text  # fmt: skip


def test_warnings_are_those_of_the_records():
    """The page docs/use/monitor.md speaks of runs that a Monitor watched."""
    text = " ".join((ROOT / "docs/use/monitor.md").read_text().split())
    paper, rotated, block, scales, bare = (record(f"study/warning-{name}.json") for name in (
        "paper-no-smooth-k", "block-no-smooth-k", "block", "no-smooth-k",
        "no-qk-norm-no-smooth-k"))  # fmt: skip

    def gaps(found, run):
        """The training loss above SDPA's, averaged over ten steps."""
        each = [a - b for a, b in zip(*(found["runs"][name]["train_loss"]
                                        for name in (run, "sdpa")))]  # fmt: skip
        return [sum(each[max(0, i - 9) : i + 1]) / min(i + 1, 10) for i in range(len(each))]

    def times(found, run):
        return sum(gap > 0.054 for gap in gaps(found, run))

    def dq(found):
        return {one["step"]: one["dQ"] for one in found["monitor"]["records"]}

    def over(found):
        """The first step with an error of dQ above today's limit."""
        return next(step for step, error in dq(found).items() if error > 0.06)

    high = record("study/warning.json")
    shorter = regime("study", 64, 512)["sagebwd:no-smooth-k"]
    longer, without_k = (
        regime("study-full", 64, 3052)[f"sagebwd:granularity=block{more},no-rotate"]
        for more in ("", ",no-smooth-k")
    )
    ended = sorted(final(run, "monitored") - final(run, "sdpa")
                   for run in (paper, rotated, block, scales))  # fmt: skip
    assert max(dq(block).values()) < 0.1 and max(dq(scales).values()) < 0.05
    assert times(scales, "monitored") == 0 == times(paper, "remedied")
    for claim in (
        f"warned at step {paper['monitor']['first_warning']}, when the limit of dQ was 0.1",
        f"at step {paper['leaves_at']}, and {times(paper, 'monitored')} steps had it in all",
        f"was {max(gaps(paper, 'remedied')):.3f} above at most",
        f"exact attention was {max(gaps(paper, 'sdpa-other')):.3f} above at most",
        f"came at step {rotated['monitor']['first_warning']}, too. The gap first came at step "
        f"{rotated['leaves_at']}, and {times(rotated, 'monitored')} steps had it in all",
        f"at step {rotated['remedied_leaves_at']}, and {times(rotated, 'remedied')} steps had it",
        f"gap at step {block['leaves_at']}. With",
        f"would have come at steps {over(paper)}, {over(rotated)} and {over(block)}",
        f"ended {-gaps(high, 'monitored')[-1]:.2f} below SDPA's; another exact attention had it "
        f"{times(high, 'sdpa-other')} times",
        f"runs of this length is ±{shorter['paired_half_width']:.3f}",
        f"losses {ended[0]:.3f} to {ended[-1]:.3f} above SDPA's",
        f"band is ±{longer['paired_half_width']:.3f}, and `block` as in the paper is outside it, "
        f"{longer['paired']:.3f} above SDPA, or {without_k['paired']:.3f} without K-smoothing",
        f"step {bare['monitor']['first_warning']} and had the gap {times(bare, 'monitored')} "
        f"times, but another exact attention had it {times(bare, 'sdpa-other')} times",
    ):
        assert claim in text, claim


def test_losses_of_the_video_model_are_those_of_the_record():
    found = record("sparse-video.json")

    def mean(arm, density=0.0):
        ends = [run["final"] for run in found["runs"].values()
                if (run["arm"], run["density"]) == (arm, density)]  # fmt: skip
        return f"{sum(ends) / len(ends):.4f}"

    densities = (0.03, 0.05, 0.1)

    def means(arm):
        return "{}, {} and {}".format(*(mean(arm, density) for density in densities))

    def verdicts(name):
        return "{}, {} and {}".format(*(found["verdict"][f"{d:g}"][name].split()[0]
                                        for d in densities))  # fmt: skip

    listed = [layer["mass"] for layer in found["stage_one"]["0.05"]["d"]]
    text = " ".join((ROOT / "docs/training-further.md").read_text().split())
    assert verdicts("e_below_d_in_seeds") == "3, 3 and 3"
    for claim in (
        f"{found['dense']['steps']} dense steps and then {found['plan']['steps']} with each "
        f"attention; {len(found['runs'])} of {len(found['plan']['runs'])} runs)",
        f"{means('d')} with the pooled router, and {means('e')} with the learned one, lower in "
        "every seed.",
        f"full attention in {verdicts('e_below_d_in_layers')} of 8 layers",
        f"attention has {mean('a')}: 5 % of the blocks have "
        f"{100 * sum(listed) / len(listed):.0f} % of its weight",
        f"listed blocks alone have {mean('b', 0.05)}, random lists {mean('f', 0.05)}, an estimated "
        f"alpha {mean('h-estimated', 0.05)}, and training in bf16 {mean('g', 0.05)}, as INT8",
    ):  # fmt: skip
        assert claim in text, claim
    guide = " ".join((ROOT / "docs/use/sparse.md").read_text().split())
    pooled, learned, alone = (f"{float(mean(arm, 0.05)):.3f}" for arm in "deb")
    assert f"loss of {pooled} with the pooled router and {learned} with the learned one" in guide
    assert f"with {float(mean('a')):.3f} if it kept all keys" in guide
    assert f"with listed blocks alone the loss was {alone}." in guide


def test_records_that_did_not_pass_are_explained():
    page = (ROOT / "bench/README.md").read_text()
    section = page.split("## Records that did not pass\n")[1].split("\n## ")[0]
    explained = {line.split("`")[1] for line in section.splitlines() if line.startswith("- ")}
    records = {path.name: record(path.name) for path in (ROOT / "bench/results").glob("*.json")}
    missed = {name for name, found in records.items() if not found.get("passed", True)}
    assert explained == missed
    count = {2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six", 7: "Seven"}[len(missed)]
    benchmarks = (ROOT / "docs/benchmarks.md").read_text()
    assert f'{count} records say `"passed": false`' in " ".join(benchmarks.split())
