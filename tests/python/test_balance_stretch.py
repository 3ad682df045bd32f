"""bench/stretch.py and the rates of bench/gpus.py: which instructions come how often."""

import math
import os
import re
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

import balance_cards
import stretch
from gpus import named

MMA = (stretch.TEMPLATES / stretch.MMA).read_text()


# ---- the rates, and the multiples that stand for them --------------------------------------------


def test_rates_are_those_of_the_data_sheets():
    # Dense TOPS of INT8, TFLOPS with FP32 sums and with FP16 sums.
    sheets = {"A100": (624, 312, 312), "RTX 3090": (284, 71, 142), "RTX 4090": (661, 165, 330),
              "RTX 5090": (838, 209.5, 419), "A10": (250, 125, 125), "L4": (242, 121, 121),
              "RTX A6000": (309.7, 154.8, 154.8), "L40S": (733, 366, 366),
              "RTX 6000 Ada": (728.5, 364.2, 364.2), "RTX PRO 6000": (1007.6, 503.8, 503.8)}
    assert sheets.keys() == {card.name for card in balance_cards.CARDS}
    for name, published in sheets.items():
        gpu = named(name)
        rates = (gpu.int8, gpu.bits16, gpu.bits16_half)
        assert [gpu.tops(rate) for rate in rates] == pytest.approx(published, rel=0.005), name
        assert gpu.sm_kib == (164 if gpu.arch == "sm_80" else 100)


def test_sums_in_fp16_have_their_own_rate():
    geforce, a100 = named("rtx 4090"), named("A100")
    assert geforce.tensor_rate("HMMA.16816.F32") == geforce.tensor_rate("HMMA.16816.F32.BF16")
    assert geforce.tensor_rate("HMMA.16816.F32") == 512
    assert geforce.tensor_rate("HMMA.16816.F16") == 1024
    assert geforce.tensor_rate("IMMA.16832.S8.S8") == 2048
    assert a100.tensor_rate("HMMA.16816.F16") == 2048
    with pytest.raises(KeyError, match="A100: no rate of QMMA"):
        a100.tensor_rate("QMMA.16832.F32.E4M3.E4M3")


def test_clocks_of_an_instruction():
    assert stretch.card_clocks(named("RTX 4090")) == {"int8": 16, "bits16": 32, "bits16_half": 16}
    assert stretch.card_clocks(named("L40S")) == {"int8": 16, "bits16": 16, "bits16_half": 16}
    assert stretch.card_clocks(named("A100")) == {"int8": 8, "bits16": 8, "bits16_half": 8}
    h100 = stretch.card_clocks(named("H100, H200"))
    for rate, clocks in stretch.H100_CLOCKS.items():
        assert h100[rate] == pytest.approx(clocks, rel=0.02)


@pytest.mark.parametrize("name, factors, clocks", [
    ("RTX 3090", (3, 6, 3), 9 / 8), ("RTX 5090", (3, 6, 3), 9 / 8), ("L4", (3, 3, 3), 9 / 8),
    ("A100", (1, 1, 1), 6 / 8)])  # fmt: skip
def test_multiples_of_known_cards(name, factors, clocks):
    found = stretch.balance_of(named(name))
    assert tuple(found.factors.values()) == factors
    assert found.clocks_a_clock == pytest.approx(clocks)
    assert found.tensor_error == pytest.approx(0, abs=1e-12)
    assert found.other_error == pytest.approx(1 - 1 / clocks)
    assert f"{clocks:.3f} clocks" in found.words() and "within 0.0 %" in found.words()
    assert ("too cheap by 11.1 %" if clocks > 1 else "too dear by 33.3 %") in found.words()


def test_multiples_that_are_not_exact_have_an_error():
    # 2 and 3 times 7 clocks stand for 14 and 20: 14 / 14 = 1 and 21 / 20 = 1.05 of what they should
    # take. From the middle, 1.0247, each is off by 2.47 %.
    found = stretch.choose({"a": 14, "b": 20}, {"a": 7, "b": 7})
    assert found.factors == {"a": 2, "b": 3}
    assert found.clocks_a_clock == pytest.approx(math.sqrt(1.05))
    assert found.tensor_error == pytest.approx(math.sqrt(1.05) - 1)


def test_no_other_multiples_are_better():
    card, own = {"a": 13.0, "b": 29.0, "c": 17.0}, {"a": 6.0, "b": 5.0, "c": 7.0}

    def badness(numbers):
        costs = [n * own[k] / card[k] for n, k in zip(numbers, card)]
        middle = math.sqrt(min(costs) * max(costs))
        return math.log(max(costs) / min(costs)) + abs(math.log(middle))

    every = min(badness((a, b, c)) for a in range(1, 17) for b in range(1, 17)
                for c in range(1, 17))  # fmt: skip
    assert badness(stretch.choose(card, own).factors.values()) == pytest.approx(every)


# ---- the templates -------------------------------------------------------------------------------


def body_of(text, name):
    """This is the body of a function of the text, without spaces."""
    found = re.search(rf"void {name}\([^{{}}]*\) \{{(.*?)\n\}}", text, re.DOTALL)
    return "".join(found.group(1).split())


def test_each_form_comes_as_often_as_its_rate_says():
    text = stretch.stretched(MMA, {"int8": 3, "bits16": 6, "bits16_half": 4})
    for name, factor, once in (("mma_s8", 3, "mma_s8_once"), ("mma_u8", 3, "mma_u8_once"),
                               ("mma_16", 6, "mma_16_once<T>")):  # fmt: skip
        body = body_of(text, name)
        assert body.count("mma.sync.aligned") == factor - 1
        assert body.count("{idle_a0,") == 2 * -(-(factor - 1) // stretch.IDLE)
        assert body.endswith(f"{once}(d,a,b0,b1,c);")
    assert not re.search(r"\bmma_(s8|u8|16)\b(?=[(<])", text[: text.index("mma_s8(int (&d)")])
    assert "template <typename T>\n__device__ __forceinline__ void mma_16(float (&d)[4]" in text


HALF = """
__device__ __forceinline__ void {name}(u32 (&d)[2], const u32 (&a)[4], u32 b0, u32 b1,
                                       const u32 (&c)[2]) {{
  asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 ...");
}}
"""


def test_sums_in_fp16_are_in_the_table():
    text = stretch.stretched(MMA + HALF.format(name="mma_16_half_sums"),
                             {"int8": 3, "bits16": 6, "bits16_half": 5})  # fmt: skip
    body = body_of(text, "mma_16_half_sums")
    assert body.count("mma.sync.aligned") == 4
    assert body.endswith("mma_16_half_sums_once(d,a,b0,b1,c);")
    assert body_of(text, "mma_16").count("mma.sync.aligned") == 5


@pytest.mark.parametrize("text, message", [
    (MMA + HALF.format(name="mma_new"), "has mma_new, whose rate is not known: add it to FORMS"),
    (MMA + "__device__ __forceinline__ void mma_bad(u32 x) {\n}", r"mma_bad\(u32 x\) is not"),
    ("// nothing", "0 functions and 0 mma.sync"),
])  # fmt: skip
def test_unknown_templates_are_refused(text, message):
    with pytest.raises(stretch.StretchError, match=message):
        stretch.stretched(text, {"int8": 3, "bits16": 6, "bits16_half": 3})


def test_the_whole_folder_is_copied(tmp_path, capsys):
    out = tmp_path / "out"
    assert stretch.main([str(out), "--gpu", "rtx 4090"]) == 0
    assert "int8 x 3, bits16 x 6, bits16_half x 3" in capsys.readouterr().out
    files = {p.relative_to(stretch.TEMPLATES) for p in stretch.TEMPLATES.rglob("*.cuh")}
    assert {p.relative_to(out) for p in out.rglob("*.cuh")} == files
    changed = {f for f in files if (out / f).read_bytes()
               != (stretch.TEMPLATES / f).read_bytes()}  # fmt: skip
    hooked = [name for name, _, _ in stretch.HOOKS]
    assert changed == {stretch.MMA, *map(Path, (*hooked, *stretch.WAITING))}
    own = tmp_path / "own"
    stretch.write(own, {"int8": 1, "bits16": 1, "bits16_half": 1})
    (own / "kernels/more.cuh").write_text('asm("mma.sync.aligned")')
    assert stretch.main([str(out), "--templates", str(own)]) == 1
    assert "kernels/more.cuh has a mma.sync of its own" in capsys.readouterr().err
    assert stretch.main([str(out), "--templates", str(tmp_path)]) == 1
    assert "has no ptx/mma.cuh" in capsys.readouterr().err
    assert stretch.main([str(out), "--gpu", "RTX 2080"]) == 1
    assert "no GPU 'RTX 2080' is known: there are A100, RTX 3090" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["gradient_kernels=split", "gradient_kernels=split packed",
                                   "sparse_q=128 sparse_kv=128", "intervals=2"])  # fmt: skip
def test_a_kernel_declares_the_idle_registers_once(tmp_path, words):
    stretch.write(tmp_path, {"int8": 3, "bits16": 6, "bits16_half": 3})
    program = stretch.TEMPLATES.parent / "build/bin/sagebwd"
    kernels = tmp_path / "kernels"
    subprocess.run([program, "emit", "--arch", "sm_89", "--spec", f"d64 {words}", "-o", kernels],
                   check=True, env=os.environ | {"SAGEBWD_TEMPLATE_DIR": str(tmp_path)})
    for kind in ("forward", "backward_dq", "backward_dkv"):
        (kernel,) = kernels.glob(f"sagebwd_{kind}_*")
        assert kernel.read_text().count("begin_in_stream_order();") == 1, kind
