"""Fine-tunes all weights of a trained language model, with several attentions and seeds.

    python bench/fine_tune.py --model MODEL.gguf --text TEXT     # or a folder of transformers
    python bench/fine_tune.py --model MODEL --text TEXT --processes 9 --no-graph

Runs learn the text's first nine tenths, and are judged by the loss of the last one. All begin with
the same weights, and runs of one seed see the same batches. Weights are FP32, products bf16. An
attention is a line of the experiments. Bands are those of `python -m experiments.study`.
"""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import fmean, median

from harness import Record, parse, parser, progress
from inference import version_of
from needs_torch import torch
from torch import Tensor
from trained import PACKAGES, digest, opened

from examples.lora import batches, held_out_loss, tokens_of, train
from experiments.attentions import AttentionChoice, check_runs_on, make_attention
from experiments.command import Failure
from experiments.graphed import GraphedStep
from experiments.study_summary import band_of, judged, paired_deviation
from sagebwd.benchmark.common import wrong_use

SDPA = "sdpa"
ATTENTIONS = (SDPA, "sagebwd", "sagebwd:granularity=block,no-rotate")


def known(attention: str, device: str) -> str:
    """Makes an attention known to transformers, which makes no mask for it; its name there."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend = make_attention(AttentionChoice.parse(attention), torch.device(device))

    def called(module, query, key, value, attention_mask, **_):
        # Outside of products autocast leaves FP32, as in RoPE.
        out = attend(*(x.to(torch.bfloat16).contiguous() for x in (query, key, value)))
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register(name := f"causal {attention}", called)
    return name


class Base:
    """What runs begin with; each process has its own."""

    def __init__(self, options) -> None:
        self.options, self.begun = options, time.monotonic()
        model, tokenizer = opened(options.model)
        self.tokens = tokens_of(options.text, options.length, tokenizer)
        self.model = model.float()
        self.model.config.use_cache = False

    def loss_by(self, model, attention: str) -> float:
        model.config._attn_implementation = known(attention, self.options.device)
        return held_out_loss(model, self.tokens, self.options.length)

    def run(self, attention: str, seed: int) -> dict | None:
        """The losses of the steps, and those of the held-out text by the attention that trained
        and by SDPA; None if it is too late to begin."""
        options, started = self.options, time.perf_counter()
        if options.within and time.monotonic() - self.begun > options.within:
            return None
        model = copy.deepcopy(self.model).to(options.device)
        model.config._attn_implementation = known(attention, options.device)
        graph = options.graph and model.device.type == "cuda"
        rows = train(model, self.batches(attention, seed), options.rate,
                     prepared=GraphedStep if graph else lambda gradients: gradients)  # fmt: skip
        return {"attention": attention, "seed": seed, "held_out": self.loss_by(model, attention),
                "held_out_by_sdpa": self.loss_by(model, SDPA),
                "train_loss": [round(loss, 5) for loss, _ in rows],
                "ms_per_step": round(1e3 * median(seconds for _, seconds in rows), 2),
                "seconds": round(time.perf_counter() - started, 2)}  # fmt: skip

    def batches(self, attention: str, seed: int) -> Iterator[Tensor]:
        options = self.options
        data = batches(self.tokens, options.length, options.batch, options.steps, seed)
        for step, ids in enumerate(data):
            yield ids
            progress(step + 1, options.steps, f"{attention}, seed {seed}: step")


# ---- several at a time ---------------------------------------------------------------------------

_base: Base | None = None  #: that of a process of the pool


def begin(options) -> None:
    global _base
    torch.set_num_threads(1)
    _base = Base(options)


def run(attention: str, seed: int) -> dict | None:
    return _base.run(attention, seed)


class Here(Executor):
    """Computes at once, in this process."""

    def __init__(self, base: Base) -> None:
        self.base = base

    def submit(self, _, *given) -> Future:
        done = Future()
        done.set_result(self.base.run(*given))
        return done


def pool_of(base: Base, options) -> Executor:
    if options.processes == 1:
        return Here(base)
    return ProcessPoolExecutor(options.processes, multiprocessing.get_context("spawn"), begin,
                               (options,))  # fmt: skip


# ---- what it says --------------------------------------------------------------------------------


def verdicts(runs: list[dict]) -> dict:
    """By attention the differences from SDPA in runs of one seed, and the band of their mean."""
    losses: dict[str, dict[int, float]] = {}
    for found in sorted(runs, key=lambda one: one["seed"]):
        losses.setdefault(found["attention"], {})[found["seed"]] = found["held_out"]
    of_sdpa = losses.get(SDPA, {})
    band, paired = band_of([*of_sdpa.values()]), paired_deviation(losses)
    told = {}
    for attention, own in losses.items():
        pairs = [loss - of_sdpa[seed] for seed, loss in own.items() if seed in of_sdpa]
        told[attention] = {"mean": fmean(own.values())}
        if attention != SDPA:
            told[attention] |= {"pairs": pairs, **judged([*own.values()], pairs, band, paired)}
    return {"band": band, "paired": paired, "attentions": told}


def said(told: dict) -> str:
    lines = []
    for attention, found in told["attentions"].items():
        line = f"{attention:40} {found['mean']:.4f}"
        if "paired" in found:
            line += f" {found['paired']:+.4f} ±{found['paired_half_width']:.4f}"
        lines.append(f"{line} {found.get('verdict', '')}".rstrip())
    return "\n".join(lines)


def arguments_of(arguments: list[str] | None):
    options = parser(__doc__, "fine-tune.json")
    add = options.add_argument
    add("--model", type=Path, required=True, help="a Llama of transformers: a folder, or a .gguf")
    add("--text", type=Path, required=True, help="what it learns")
    add("--attentions", nargs="+", default=list(ATTENTIONS), metavar="LINE")
    add("--length", type=int, default=1024, help="tokens of a sequence")
    add("--batch", type=int, default=2, help="sequences of a step")
    add("--steps", type=int, default=1000)
    add("--seeds", type=int, default=3, help="runs of each attention")
    add("--rate", type=float, default=3e-5, help="highest learning rate")
    add("--processes", type=int, default=3, help="runs at a time")
    add("--within", type=float, metavar="SECONDS", help="no run begins later than that")
    add("--no-graph", dest="graph", action="store_false", help="no CUDA graph of a step")
    add("--json", action="store_true", help="print the record as well")
    parsed = parse(options, arguments)
    if not parsed.model.exists():
        options.error(f"--model {parsed.model}: there is no such folder or file")
    for attention in parsed.attentions:
        try:
            check_runs_on(AttentionChoice.parse(attention), torch.device(parsed.device))
        except (ValueError, Failure) as error:
            options.error(f"--attentions {attention}: {error}")
    return options, parsed


def main(arguments: list[str] | None = None) -> int:
    command, options = arguments_of(arguments)
    with wrong_use(command):
        base = Base(options)
    record = Record(
        options.out, model=digest(options.model), text=digest(options.text),
        tokens=len(base.tokens), weights=base.model.num_parameters(), processes=options.processes,
        **{name: getattr(options, name) for name in
           ("attentions", "length", "batch", "steps", "seeds", "rate", "graph")},
        **{name: version_of(name) for name in PACKAGES[1:]})  # fmt: skip
    base.model.to(options.device)
    record.set(held_out_before=base.loss_by(base.model, SDPA))
    base.model.cpu()
    print(f"before: {record.content['held_out_before']:.4f}", flush=True)
    with pool_of(base, options) as pool:
        # An attention's seeds come together, so that what is cut short has all of the first ones.
        for done in as_completed([pool.submit(run, attention, seed)
                                  for attention in options.attentions
                                  for seed in range(options.seeds)]):  # fmt: skip
            if (found := done.result()) is None:
                continue
            record.add("runs", found)
            record.set(verdicts=verdicts(record.content["runs"]))
            print(f"{found['attention']}, seed {found['seed']}: {found['held_out']:.4f}, by sdpa "
                  f"{found['held_out_by_sdpa']:.4f}, {found['seconds']:.0f} s", flush=True)
    record.content["runs"].sort(key=lambda of: (options.attentions.index(of["attention"]),
                                                of["seed"]))  # fmt: skip
    record.set(verdicts=verdicts(record.content["runs"]))
    print(said(record.content["verdicts"]))
    if options.json:
        print(json.dumps(record.content, indent=1))
    losses = [of["held_out"] for of in record.content["runs"]]
    if missing := len(options.attentions) * options.seeds - len(losses):
        print(f"{missing} runs did not begin within {options.within:g} seconds")
    return record.finish(all(map(math.isfinite, losses)))


if __name__ == "__main__":
    sys.exit(main())
