"""Figures in the text of README.md and of the pages of docs/ are those of the records.

bench/tables.py writes the tables; sentences are written by hand.
"""

import json

from documents import PAGES, ROOT


def record(name):
    return json.loads((ROOT / "bench/results" / name).read_text())


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


#: Regimes of the study.
SMALL_AND_LARGE = [f"26m, D 64, 1024 tokens, QK-norm, {regime}, lr 0.001"
                   for regime in ("64K a step, 512 steps", "512K a step, 64 steps")]  # fmt: skip
FULL = [f"26m, D 64, 1024 tokens, QK-norm, {regime}, lr 0.001" for regime in (
    "64K a step, 3052 steps", "64K a step, 382 steps", "512K a step, 382 steps")]  # fmt: skip


def test_verdicts_are_those_of_the_study():
    study = record("study/study.json")["regimes"]
    regimes = [*SMALL_AND_LARGE, SMALL_AND_LARGE[0].replace("QK-norm", "no QK-norm").replace(
        "lr 0.001", "lr 0.002")]  # fmt: skip
    small, large, bare = (study[regime]["arms"] for regime in regimes)
    full = record("study-full/study.json")["regimes"]
    parity, _, full = (full[regime]["arms"]["sagebwd"] for regime in FULL)
    lora = next(iter(record("study/lora/study.json")["regimes"].values()))["arms"]
    last = {name: record(f"study/errors-{name}.json")["stages"][-1]["mean_over_layers"]
            for name in ("qk", "noqk")}  # fmt: skip
    dq = {(name, setting): f"{last[name][setting]['dQ']['rel_l2']:.3f}"
          for name in last for setting in ("row", "dq-in-16", "pv-in-16")}  # fmt: skip
    block = small["sagebwd:granularity=block,no-smooth-k,no-rotate"]
    later = {name: final(run := record(f"study/warning-{name}.json"), "monitored")
             - final(run, "sdpa") for name in (
                 "no-smooth-k", "paper-no-smooth-k", "block-no-smooth-k", "block")}  # fmt: skip
    claims = [
        f"at 64K {parity['paired']:+.4f} ±{parity['paired_half_width']:.4f} after 3052 steps "
        f"(`study-full`), {small['sagebwd']['paired']:+.4f} "
        f"±{small['sagebwd']['paired_half_width']:.3f} after 512",
        f"at 512K {full['paired']:+.4f} ±{full['paired_half_width']:.3f} after 382 steps "
        f"(`study-full`), {large['sagebwd']['paired']:+.4f} "
        f"±{large['sagebwd']['paired_half_width']:.3f} after 64",
        f"{small['sagebwd:no-smooth-k']['paired']:+.3f} ±{block['paired_half_width']:.3f} with QK"
        f"-norm, in a later run {later['no-smooth-k']:+.3f}; under `block` {block['paired']:+.3f}, "
        f"{later['paper-no-smooth-k']:+.3f} and {later['block-no-smooth-k']:+.3f}, and with it "
        f"{small['sagebwd:granularity=block']['paired']:+.3f}, {later['block']:+.3f} and "
        f"{small['sagebwd:granularity=block,no-rotate']['paired']:+.3f}",
        f"{bare['sagebwd:no-smooth-k']['paired']:+.2f} "
        f"±{bare['sagebwd:no-smooth-k']['paired_half_width']:.2f} without QK-norm",
        f"with K-smoothing {small['sagebwd:smooth-q']['paired']:+.3f}, alone "
        f"{small['sagebwd:no-smooth-k,smooth-q']['paired']:+.3f}",
        f"{small['sagebwd:granularity=block']['paired']:+.3f} ±0.059 worse than SDPA",
        f"falls from {dq['qk', 'row']} to {dq['qk', 'dq-in-16']} if the product of dS and K",
        f"from {dq['noqk', 'row']} to {dq['noqk', 'pv-in-16']} if P·V is",
        f"`six-of-seven` {lora['sagebwd']['paired']:+.5f}",
        f"{lora['sagebwd:granularity=block,no-rotate']['paired']:+.4f}, outside the noise",
    ]
    page = (ROOT / "docs/benchmarks.md").read_text()
    text = " ".join(page.split())
    for claim in claims:
        assert claim in text, claim


def test_claims_are_those_of_the_records():
    grid = "speed-grid.json"
    deterministic = [speed(grid, "sagebwd", "fa2, deterministic", d, causal, 8192)
                     for d in (64, 128, 256) for causal in (False, True)]  # fmt: skip
    study = record("study/study.json")["regimes"] | record("study-full/study.json")["regimes"]
    regimes = [study[regime]["arms"] for regime in (*SMALL_AND_LARGE, *FULL)]
    rows = [" | ".join(f"{arms[name]['final_val_loss']:.4f}" for name in (
        "sdpa", "sdpa-other", "sagebwd")) + f" | ±{arms['sagebwd']['paired_half_width']:.3f}"
        for arms in regimes]  # fmt: skip
    few, _, many = (arms["sagebwd"] for arms in regimes[2:])
    ours = ("sagebwd", "sagebwd:precision=gradients16,no-deterministic")
    long, causal = ([[speed(grid, name, "cudnn", 256, causal, 2**n) for n in range(first, 18)]
                     for name in ours] for causal, first in ((False, 12), (True, 14)))  # fmt: skip
    peaks = {(r["attention"], r["head_dim"]): r["peak_mib"] for r in record("speed.json")["rows"]
             if r["tokens"] == 8192 and not r["causal"]}  # fmt: skip
    memory = [peaks["sagebwd", d] / peaks["cudnn", d] for d in (64, 128, 256)]
    tests = record("gpu-tests.json")
    claims = {
        f"{min(map(min, long)):.2f} to {max(map(max, long)):.2f} times": {"which-attention"},
        f"{min(map(min, causal)):.2f} to {max(map(max, causal)):.2f} times": {"which-attention"},
        f"{min(long[1]):.2f} to {max(long[1]):.2f} times": {"which-attention"},
        f"{min(causal[1]):.2f} to {max(causal[1]):.2f} above": {"which-attention"},
        f"causal, {speed('speed.json', 'sagebwd', 'cudnn', 256, True, 8192):.2f} and "
        f"{speed(grid, 'sagebwd', 'cudnn', 256, True, 131072):.2f} times": {"README", "index"},
        f"{peaks['sagebwd', 128]:.0f} MiB": {"README", "benchmarks"},
        f"{min(memory):.2f} to {max(memory):.2f} times": {"benchmarks"},
        f"{min(deterministic):.1f} to {max(deterministic):.1f} times": {"README", "index",
                                                                        "which-attention"},
        f"{speed('speed.json', 'sagebwd', 'cudnn', 256, False, 8192):.2f} times":
            {"README", "index"},
        f"{speed(grid, 'sagebwd', 'cudnn', 256, False, 131072):.2f} times":
            {"README", "index", "which-attention"},
        f"{tests['total_passed']:,} GPU tests": {"README", "benchmarks"},
        f"loss {few['paired']:.4f} ±{few['paired_half_width']:.4f} above": {"README"},
        f"and {many['paired']:.4f} ±{many['paired_half_width']:.3f} above it": {"README"},
    } | {row: {"benchmarks"} for row in rows}  # fmt: skip
    text = {page.stem: " ".join(page.read_text().split()) for page in PAGES}
    for claim, pages in claims.items():
        assert all(claim in text[page] for page in pages), f"{claim}: {pages}"


def test_warnings_are_those_of_the_records():
    """What docs/use/monitor.md says of runs that a Monitor watched."""
    text = " ".join((ROOT / "docs/use/monitor.md").read_text().split())
    both, block, scales, bare = (record(f"study/warning-{name}.json") for name in (
        "paper-no-smooth-k", "block", "no-smooth-k", "no-qk-norm-no-smooth-k"))  # fmt: skip

    def dq(found):
        return [(one["step"], one["dQ"]) for one in found["monitor"]["records"]]

    assert both["remedied_leaves_at"] is None and bare["leaves_at"] is None
    assert max(dq(block), key=lambda one: one[1])[1] < 0.1
    assert max(dq(scales), key=lambda one: one[1])[1] < 0.05
    for claim in (
        f"warned at step {both['monitor']['first_warning']}, when the limit of dQ was 0.1",
        f"from step {both['leaves_at']} on",
        f"gap at step {block['leaves_at']}; its dQ first exceeds 0.06 at step "
        f"{next(step for step, error in dq(block) if error > 0.06)}",
        f"ended {final(scales, 'monitored') - final(scales, 'sdpa'):.3f} above SDPA",
        f"warned at step {bare['monitor']['first_warning']} and ended no further",
    ):
        assert claim in text, claim
    assert final(bare, "monitored") <= final(bare, "sdpa-other")
    small = record("study/study.json")["regimes"][SMALL_AND_LARGE[0]]["arms"]
    rotated = record("study/warning-block-no-smooth-k.json")
    gaps = [final(run, "monitored") - final(run, "sdpa") for run in (both, block, rotated)] + [
        arm["paired"] for name, arm in small.items() if "granularity=block" in name]
    assert len(gaps) == 6
    assert f"above SDPA, by {min(gaps):.3f} to {max(gaps):.3f}" in text


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
    text = " ".join((ROOT / "docs/benchmarks.md").read_text().split())
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
