"""Figures beside FlashAttention-4, cuDNN and cudnn-frontend are those of the records."""

import pytest
from documents import ROOT
from test_claims import record

OTHERS = "../others-h100.json"


def ms(row):
    return row["forward+backward"]["median_ms"]


def dense(attention, head_dim, causal=False, tokens=8192):
    [row] = (r for r in record(OTHERS)["rows"] if (
        r["attention"], r["head_dim"], r["causal"], r["tokens"]) == (
        attention, head_dim, causal, tokens))  # fmt: skip
    return ms(row)


def text_of(page):
    return " ".join((ROOT / page).read_text().split())


def test_the_strongest_comparison_is_that_of_the_record():
    """At D256 among deterministic attentions, and among all."""
    ours, masked = (dense("six-of-seven", 256, causal) for causal in (False, True))
    rivals = ("cudnn-det", "fa4-det")
    assert min(rivals, key=lambda name: dense(name, 256)) == "fa4-det"
    assert min(rivals, key=lambda name: dense(name, 256, True)) == "cudnn-det"
    best, causal = dense("fa4-det", 256) / ours, dense("cudnn-det", 256, True) / masked
    pages = [text_of(page) for page in ("README.md", "docs/index.md", "docs/benchmarks.md",
                                        "docs/use/which-attention.md")]  # fmt: skip
    for page in pages:
        assert f"{best:.2f} times as fast" in page and "as FlashAttention-4's" in page
        assert f"causal {causal:.2f} times as fast as cuDNN's" in page
    free = [dense(name, 256, mask) / time for name in ("fa4", "cudnn")
            for mask, time in ((False, ours), (True, masked))]  # fmt: skip
    assert ("FlashAttention-4 without determinism takes {:.2f} and {:.2f} times as long, cuDNN "
            "{:.2f} and {:.2f} times").format(*free) in pages[2]  # fmt: skip
    assert ("next to FlashAttention-4 it is {:.2f} and {:.2f}, next to cuDNN {:.2f} and {:.2f} "
            "times as fast").format(*free) in pages[0]  # fmt: skip
    either = f"{min(free[:2]):.2f} to {max(free[:2]):.2f} times as fast as FlashAttention-4"
    assert either in pages[3]


def test_at_smaller_head_dimensions_flash_attention_4_is_faster():
    shares = [dense("fa4-det", d, causal) / dense("gradients16, deterministic", d, causal)
              for d in (64, 128) for causal in (False, True)]  # fmt: skip
    assert max(shares) < 1
    both = f"{min(shares):.2f} to {max(shares):.2f} of the time"
    assert both in text_of("README.md") and both in text_of("docs/benchmarks.md")
    guide = text_of("docs/use/which-attention.md")
    cudnn = [dense("cudnn", d) / dense("fa4", d) for d in (64, 128)]
    assert "is {:.2f} (D64) and {:.2f} (D128) times as fast as cuDNN".format(*cudnn) in guide
    times = [dense(name, 128) for name in ("fa4-det", "gradients16, deterministic", "cudnn-det")]
    assert "takes {:.1f} ms, `gradients16` {:.1f}, cuDNN {:.1f}".format(*times) in guide


def test_fp8_is_faster_and_less_exact():
    errors = {r["attention"]: r["rel_l2"] for r in record(OTHERS)["errors"] if r["head_dim"] == 128}
    ratios = [errors["cudnn-fp8"][x] / errors["six-of-seven"][x] for x in ("O", "dQ", "dK", "dV")]
    both = f"{min(ratios):.1f} to {max(ratios):.1f} times"
    for page in ("README.md", "docs/index.md", "docs/benchmarks.md", "docs/use/which-attention.md"):
        assert both in text_of(page), page
    fp8, ours = ([dense(name, 128, causal) for causal in (False, True)]
                 for name in ("cudnn-fp8", "gradients16"))  # fmt: skip
    assert f"takes {fp8[0]:.1f} ms where `gradients16` takes {ours[0]:.1f}" in text_of("README.md")
    assert (f"takes {fp8[0]:.1f} ms, `gradients16` {ours[0]:.1f}; causal {fp8[1]:.1f} and "
            f"{ours[1]:.1f}") in text_of("docs/use/which-attention.md")  # fmt: skip
    [casts] = (r["ms_with_casts"] for r in record(OTHERS)["rows"] if r["attention"] == "cudnn-fp8"
               and not r["causal"] and r["tokens"] == 8192)  # fmt: skip
    more = sorted(time - fp8[0] for time in casts.values())
    assert "which add {:.1f} to {:.1f} ms".format(*more) in text_of("docs/benchmarks.md")


def test_memory_of_deterministic_cudnn_is_that_of_the_record():
    peaks = {r["tokens"]: r["peak_mib"] / 1024 for r in record(OTHERS)["rows"] if (
        r["attention"], r["head_dim"], r["causal"]) == ("cudnn-det", 128, False)}  # fmt: skip
    assert (f"needs {peaks[8192]:.1f} GiB at 8192 tokens and {peaks[32768]:.1f} GiB at 32768"
            in text_of("docs/use/which-attention.md"))  # fmt: skip
    assert f"{peaks[32768]:.1f} GiB for 32768 tokens" in text_of("docs/benchmarks.md")


def test_the_order_at_many_tokens_is_that_of_the_record():
    said = {name: f"{dense(name, 128, tokens=32768):.1f}" for name in (
        "cudnn-fp8", "fa4-det", "fa4", "gradients16", "cudnn", "gradients16, deterministic",
        "cudnn-det", "six-of-seven")}  # fmt: skip
    form = ("cuDNN's FP8 {} ms, FlashAttention-4 deterministic {} and not {}, `gradients16` with "
            "`deterministic=False` {}, cuDNN {}, `gradients16` {}, cuDNN deterministic {}, "
            "`six-of-seven` {}.")  # fmt: skip
    assert form.format(*said.values()) in text_of("docs/benchmarks.md")


def test_lists_of_others_are_faster():
    times = {(r["attention"], r["density"]): ms(r) for r in record("sparse.json")["rows"]
             if r["cell"].startswith("1x16x32768x128 random")}  # fmt: skip
    ours, fa4, flex = ([times[f"{name} 128x128", share] for share in (0.1, 0.05, 0.03)] for name in (
        "sagebwd gradients16", "FlashAttention-4", "flex_attention"))  # fmt: skip
    shares = [a / b for a, b in zip(fa4, ours)]
    both = f"{min(shares):.2f} to {max(shares):.2f} of the time"
    assert both in text_of("README.md") and both in text_of("docs/use/sparse-speed.md")
    said = "{:.2f}, {:.2f} and {:.2f} times as fast as flex_attention".format(
        *(a / b for a, b in zip(flex, ours)))  # fmt: skip
    assert said in text_of("README.md")
    older = {(r["attention"], r["density"]): ms(r) for r in record(OTHERS)["lists"]}
    lists = [[f"{older[f'{name} 128x128', share]:.1f}" for share in (0.1, 0.05, 0.03)]
             for name in ("cudnn-frontend", "fa4")]  # fmt: skip
    form = ("cudnn-frontend's lists took {}, {} and {} ms on an H100, where FlashAttention-4's took "
            "{}, {} and {} ms.")  # fmt: skip
    assert form.format(*lists[0], *lists[1]) in text_of("docs/use/sparse-speed.md")


def test_lists_overtake_dense_attention_where_the_guide_says():
    pytest.importorskip("torch")
    from sparse_cases import TABLE, crossing, shape_of

    rows = [row for row in record("sparse.json")["rows"]
            if row["is_timed"] and shape_of(row) == TABLE]  # fmt: skip

    def lines(kind, **only):
        return [row | {"ms": ms(row)} for row in rows
                if row["lists"] in kind and only.items() <= row.items()]  # fmt: skip

    cudnn = min(row["ms"] for row in lines(("all", "random", "smooth", "popular"),
                                           attention="cudnn"))  # fmt: skip
    lists = {(r["attention"], r["density"]): ms(r) for r in record(OTHERS)["lists"]}
    beside = sorted(
        (
            lists["fa4", 0.05] / lists["cudnn", 0.05],
            dense("fa4", 128, tokens=32768) / dense("cudnn", 128, tokens=32768),
        )
    )
    text = " ".join((ROOT / "docs/use/sparse-speed.md").read_text().split())
    for blocks, name in ("128x128", "128 x 128"), ("128x64", "128 x 64"):
        shares = {factor: [100 * crossing(sorted((row["share"], row["ms"]) for row in
                                                 lines(("all", "random"), attention=attention)),
                                          factor * cudnn)
                           for attention in (f"sagebwd {blocks}", f"sagebwd gradients16 {blocks}")]
                  for factor in (1, *beside)}  # fmt: skip
        equal, low, high = shares.values()
        default = "" if blocks == "128x128" else " (default)"
        assert f"| {name}{default} | {' | '.join(f'{x:.0f} %' for x in equal)} |" in text
        both = " | ".join(f"{x:.0f} to {y:.0f} %" for x, y in zip(low, high))
        assert f"| {name} | {both} |" in text
    finer = [[f"{row['ms']:.1f}" for row in sorted(lines(("random",), attention=f"{name} 128x64"),
                                                   key=lambda row: -row["share"])]
             for name in ("sagebwd", "all in")]  # fmt: skip
    both = ["{}, {} and {}".format(*of[-3:]) for of in finer]
    assert f"`block_sparse_attention` takes {both[0]} ms, SLA2 {both[1]}." in text
    popular = [one["measured"] for one in record("sparse.json")["demands"]
               if one["what"].startswith("time, of random lists'")]  # fmt: skip
    assert f"cost at most {max(popular):.2f} times as much as lists at random" in text
    assert "{:.2f} and {:.2f} of cuDNN's time".format(*beside) in text
    shares = "78 % of the blocks of 128 x 128 are listed, and with the default, 128 x 64, at 62 %"
    guide = " ".join((ROOT / "docs/use/sparse.md").read_text().split())
    assert shares in guide and "| 78 % |" in text and "| 62 % |" in text
