"""Kernels in which tensor instructions cost as much, beside all others, as on another GPU.

    python bench/stretch.py OUT --gpu "RTX 4090"          # a copy of templates/
    SAGEBWD_TEMPLATE_DIR=OUT python ...                   # on an H100 or H200, family mma

Ahead of each mma.sync stand idle ones, on zeros and on registers of their own. Results stay the same
bit for bit, the tensor cores take a whole multiple of the time, and all other pipes keep their
rates. A multiple of 3 for INT8 and of 6 for 16 bits gives an H100, where either instruction takes 6
clocks of a scheduler, the ratio that they have on a GeForce card, where they take 16 and 32 clocks:
18 and 36 clocks then stand for those. So 9 clocks of the H100 stand for 8 of the card. Instructions
of other pipes, which take as many clocks on both, are 1/8 too cheap. Idle products hand no sums on:
a product that waited for several others would take several times its latency, which no card does.
bench/balance.py measures with such kernels.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from gpus import GPUS, Gpu, named

TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
#: The file that has all mma.sync instructions.
MMA = Path("ptx/mma.cuh")
#: The functions there, and the rate of gpus.Gpu that each runs at.
FORMS = {
    "mma_s8": "int8",
    "mma_u8": "int8",
    "mma_16": "bits16",
    "mma_16_half_sums": "bits16_half",
}
#: Operations of one instruction: m16n8k32 for 8 bits, m16n8k16 for 16.
OPERATIONS = {"int8": 2 * 16 * 8 * 32, "bits16": 2 * 16 * 8 * 16, "bits16_half": 2 * 16 * 8 * 16}
SCHEDULERS = 4  #: of an SM
#: Clocks of a scheduler for each instruction on an H100, measured (templates/kernels/README.md,
#: "Floors": 1268 and 629 T at 1.76 GHz). FP16 sums are no faster there than FP32 sums.
H100_CLOCKS = {"int8": 6.0, "bits16": 6.0, "bits16_half": 6.0}
MOST = 16  #: the largest multiple that is tried


class StretchError(RuntimeError):
    """Templates that this file does not know how to change. The message says why."""


# ---- which multiples -----------------------------------------------------------------------------


def card_clocks(gpu: Gpu) -> dict[str, float]:
    """Clocks of a scheduler for each instruction on a GPU, by its data sheet."""
    return {rate: SCHEDULERS * operations / (getattr(gpu, rate) * gpu.mma_share)
            for rate, operations in OPERATIONS.items()}  # fmt: skip


@dataclass(frozen=True)
class Balance:
    """Multiples of tensor instructions, and how well they stand for those of a card."""

    factors: dict[str, int]  #: by rate
    clocks_a_clock: float  #: clocks of this GPU that stand for one of the card
    tensor_error: float  #: a tensor instruction costs so much more or less than it should, at most

    @property
    def other_error(self) -> float:
        """How much cheaper (above 0) or dearer instructions of other pipes are than they should be,
        as a share of their cost on the card."""
        return 1 - 1 / self.clocks_a_clock

    def json(self) -> dict:
        return {"factors": self.factors, "clocks_a_clock": round(self.clocks_a_clock, 4),
                "tensor_error": round(self.tensor_error, 4),
                "other_error": round(self.other_error, 4)}  # fmt: skip

    def words(self) -> str:
        """The balance for people."""
        multiples = ", ".join(f"{rate} x {n}" for rate, n in self.factors.items())
        kind = "cheap" if self.other_error >= 0 else "dear"
        return (f"{multiples}; {self.clocks_a_clock:.3f} clocks stand for one of the card; tensor "
                f"instructions are right within {100 * self.tensor_error:.1f} %, all others too "
                f"{kind} by {100 * abs(self.other_error):.1f} %")  # fmt: skip


def choose(card: dict[str, float], own: dict[str, float] = H100_CLOCKS,
           most: int = MOST) -> Balance:
    """The multiples with the best balance, of 1 to `most`.

    `card` and `own` are clocks of an instruction by its rate, on the GPU that is meant and on this
    one. Instructions of other pipes count as one clock on both. The best multiples have the least
    sum of two logarithms: how far tensor instructions are from each other, and all from the others.
    """
    ratios = {rate: card[rate] / own[rate] for rate in card}  # the multiples, if 1 clock were 1
    found = None
    for scale in sorted({n / ratio for ratio in ratios.values() for n in range(1, most + 1)}):
        nearest = {rate: min(most, max(1, round(scale * ratio))) for rate, ratio in ratios.items()}
        costs = [nearest[rate] / ratio for rate, ratio in ratios.items()]
        low, high = min(costs), max(costs)
        middle = math.sqrt(low * high)
        badness = math.log(high / low) + abs(math.log(middle))
        if found is None or badness < found[0] - 1e-9:
            found = badness, Balance(nearest, middle, math.sqrt(high / low) - 1)
    return found[1]


def balance_of(gpu: Gpu) -> Balance:
    """The multiples with which an H100 or H200 stands for a GPU."""
    return choose(card_clocks(gpu))


# ---- the templates -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A function of ptx/mma.cuh: `name(d, a, b..., c)`, as it is declared first."""

    name: str
    template: str  #: "template <typename T>", or empty
    parameters: tuple[tuple[str, str, str], ...]  #: type, name and size of an array, if it is one

    def declared(self) -> str:
        """The parameters as C++."""
        return ", ".join(f"{of} (&{name})[{size}]" if size else f"{of} {name}"
                         for of, name, size in self.parameters)  # fmt: skip


_DECLARED = re.compile(r"(template <typename T>\s+)?__device__ __forceinline__ void (\w+)"
                       r"\(([^{};]*)\)\s*[{;]")  # fmt: skip
_PARAMETER = re.compile(r"^((?:const )?\w+) (?:\(&(\w+)\)\[(\d+)\]|(\w+))$")


def forms_of(text: str) -> list[Form]:
    """The functions in a text of ptx/mma.cuh. StretchError for one that cannot be wrapped."""
    found = []
    for template, name, listed in _DECLARED.findall(text):
        read = [_PARAMETER.match(" ".join(p.split())) for p in listed.split(",")]
        if None in read or len(read) < 4 or not read[0][3] or read[-1][3] != read[0][3]:
            raise StretchError(f"{MMA}: {name}({' '.join(listed.split())}) is not of the form "
                               "(d, a, b, c) with arrays d and c of one size")  # fmt: skip
        found.append(Form(name, template.strip(),
                          tuple((m[1], m[2] or m[4], m[3] or "") for m in read)))  # fmt: skip
    return found


#: Idle products add to so many pairs of registers in turn, which each thread has for all of a kernel.
IDLE = 3
_EACH = range(IDLE)
_BEGIN = f"""asm volatile(".reg .b32 idle_a<{IDLE}>; .reg .b32 idle_b<{IDLE}>;" """ + " ".join(
    f"""
      "mov.u32 idle_{x}{i}, %nctaid.y; and.b32 idle_{x}{i}, idle_{x}{i}, 0x80000000;" """
    for i in _EACH for x in "ab") + ");\n"  # fmt: skip
#: To ptxas this is a use of them. They are zeros.
_USE = """asm volatile("{ .reg .b32 x; .reg .pred p; mov.u32 x, 0;" """ + " ".join(
    f"""
      "or.b32 x, x, idle_a{i}; or.b32 x, x, idle_b{i};" """ for i in _EACH) + """
      "setp.eq.u32 p, x, 1; @p trap; }");\n"""
_WAIT = "begin_in_stream_order();\n"
#: Idle instructions begin, and their results are used, here: (file, text in it, code behind it).
HOOKS = (
    ("ptx/stream_order.cuh", "void begin_in_stream_order() {\n", _BEGIN),
    ("ptx/cp_async.cuh", "void cp_async_wait() {\n", _USE),
    ("measure/rates.cuh", "void run(const MeasureParams& p) {\n", _BEGIN),
    ("measure/rates.cuh", "p.results[thread] = chains.result();\n", _USE),
)
#: What kernels of other families wait in. Those of mma.sync have begun before, and a register has
#: one declaration in a kernel.
WAITING = ("tile/walk/own_keys_in_order.cuh", "tile/walk/packed.cuh")


def _wrapped(form: Form, factor: int) -> str:
    """The function under its own name: `factor` instructions in place of one."""
    once = f"{form.name}_once" + ("<T>" if form.template else "")
    names = ", ".join(name for _, name, _ in form.parameters)
    idle = "".join(f"""
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {{idle_a{i % IDLE}, "
      "idle_b{i % IDLE}}}, {{%0, %0, %0, %0}}, {{%0, %0}}, {{idle_a{i % IDLE}, idle_b{i % IDLE}}};"
      ::"r"(0));""" for i in range(factor - 1))
    head = f"__device__ __forceinline__ void {form.name}({form.declared()})"
    return f"""
{form.template}
{head} {{{idle}
  {once}({names});
}}
"""


def stretched(text: str, factors: dict[str, int], forms: dict[str, str] = FORMS) -> str:
    """ptx/mma.cuh with as many instructions for each as the factor of its rate says.

    StretchError where the text and the table `forms` do not agree.
    """
    declared = forms_of(text)
    names = {form.name for form in declared}
    if not names or text.count("mma.sync.aligned") < len(names):
        raise StretchError(f"{MMA} has {len(names)} functions and "
                           f"{text.count('mma.sync.aligned')} mma.sync: another version of it?")
    if unknown := sorted(names - forms.keys()):
        raise StretchError(f"{MMA} has {', '.join(unknown)}, whose rate is not known: add it to "
                           "FORMS in bench/stretch.py")
    for name in names:
        text = re.sub(rf"\b{name}\b(?=[(<])", f"{name}_once", text)
    first = {form.name: form for form in reversed(declared)}  # a template before what it is for
    wrapped = [_wrapped(first[name], factors[rate])
               for name, rate in forms.items() if name in first]  # fmt: skip
    return text + "".join(wrapped)


def write(out: Path, factors: dict[str, int], templates: Path = TEMPLATES) -> Path:
    """Copies the templates with stretched instructions to a folder; gives the folder."""
    if not (templates / MMA).exists():
        raise StretchError(f"{templates} has no {MMA}: name a copy of the folder templates/")
    for path in sorted(templates.rglob("*.cuh")):
        if path != templates / MMA and re.search(r'"mma\.sync', path.read_text()):
            raise StretchError(f"{path.relative_to(templates)} has a mma.sync of its own: move it "
                               f"to {MMA}")  # fmt: skip
    text = stretched((templates / MMA).read_text(), factors)
    shutil.copytree(templates, out, dirs_exist_ok=True)
    (out / MMA).write_text(text)
    for name, place, put in (*((name, place, place + added) for name, place, added in HOOKS),
                             *((name, _WAIT, "\n") for name in WAITING)):  # fmt: skip
        text = (out / name).read_text()
        if text.count(place) != 1:
            raise StretchError(f"{name} has not one '{place.strip()}': another version of it?")
        (out / name).write_text(text.replace(place, put))
    return out


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    options.add_argument("--gpu", default="RTX 4090", metavar="NAME",
                         help=f"of {', '.join(gpu.name for gpu in GPUS)} (default: RTX 4090)")
    options.add_argument("--templates", type=Path, default=TEMPLATES, metavar="DIR",
                         help="the templates to copy (default: this tree's)")
    parsed = options.parse_args(arguments)
    try:
        balance = balance_of(named(parsed.gpu))
        write(parsed.out, balance.factors, parsed.templates)
    except (StretchError, KeyError, OSError) as error:
        print(f"stretch: {error.args[0] if isinstance(error, KeyError) else error}",
              file=sys.stderr)
        return 1
    print(balance.words())
    return 0


if __name__ == "__main__":
    sys.exit(main())
