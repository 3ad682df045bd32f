"""Captures q, k, v and dO of attention layers on a real batch and traces their errors.

    python -m experiments.capture --checkpoint model.pt --corpus corpus.bin --out results

Queries and keys are taken after QK-norm and rotary positions: just what attention is handed. The
table stands beside the paper's Table 2, one layer of its trained 325M Llama.
"""

from __future__ import annotations

import sys
from collections import namedtuple
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from sagebwd import Spec
from sagebwd.benchmark.environment import write_json, write_tensors

from . import command
from .attentions import AttentionChoice, check_runs_on
from .checkpoints import in_force, load_weights, read_checkpoint
from .command import torch
from .config import TrainConfig, add_captured_arguments, add_common_arguments
from .data import Corpus
from .train import check_record, origin
from .training import autocast, build_model

if TYPE_CHECKING:
    from torch import Tensor

    from .language_model import LanguageModel

#: Cosine and relative L2 in the paper's Table 2.
PAPER_TABLE_2 = {
    "delta": (0.9973, 0.0736), "P": (0.9917, 0.1293), "dP": (1.0, 0.0), "dS": (0.9789, 0.2045),
    "O": (0.9969, 0.0793), "dQ": (0.9664, 0.2579), "dK": (0.9537, 0.3074), "dV": (0.9985, 0.0540),
}  # fmt: skip
#: Granularity and rotation of each traced column.
VARIANTS = {granularity + ("" if rotate else ",no-rotate"): {"granularity": granularity,
                                                             "rotate": rotate}
            for granularity in ("row", "block") for rotate in (True, False)}  # fmt: skip
#: One attention layer was handed these (batch, heads, tokens, head_dim) tensors.
Captured = namedtuple("Captured", ("q", "k", "v", "dout"))


def capture(model: LanguageModel, sequences: Tensor, config: TrainConfig) -> list[Captured]:
    """One forward and backward of the loss; the layers' attention runs as the model has it."""
    layers = [block.attention for block in model.blocks]
    originals = [layer.attend for layer in layers]
    tensors: list[list[Tensor]] = [[] for _ in layers]

    def recorded(attend, kept, *inputs):
        out = attend(*inputs)
        kept.extend(t.detach().contiguous() for t in inputs)
        out.register_hook(lambda dout: kept.append(dout.detach().contiguous()))
        return out

    try:
        for layer, attend, kept in zip(layers, originals, tensors):
            layer.attend = partial(recorded, attend, kept)
        with autocast(config):
            loss = model(sequences[:, :-1], sequences[:, 1:])
        loss.backward()
    finally:
        for layer, attend in zip(layers, originals):
            layer.attend = attend
        model.zero_grad(set_to_none=True)
    return [Captured(*kept) for kept in tensors]


def statistics(captured: Captured) -> dict[str, float]:
    """These figures say what makes a layer hard to quantise."""
    q, k, dout = captured.q.float(), captured.k.float(), captured.dout.float()
    mean = k.mean(dim=2, keepdim=True)
    rows = dout.norm(dim=-1).flatten(1)
    medians = rows.median(1).values.clamp_min(1e-30)
    return {
        "q_std": float(q.std()),
        "k_std": float(k.std()),
        "k_mean_over_k_norm": float(mean.norm() * k.shape[2] ** 0.5 / k.norm()),
        "q_max": float(q.abs().max()),
        "k_max": float(k.abs().max()),
        "dout_row_norm_max_over_median": float((rows.amax(1) / medians).max()),
    }


def trace_layer(captured: Captured) -> dict[str, dict[str, dict[str, float]]]:
    """Per variant and tensor, cosine and relative L2 against FP64; on a GPU the emulation's, and
    under ``kernels`` the kernels' own."""
    from sagebwd import trace

    return {name: trace(*captured, causal=True, **how) for name, how in VARIANTS.items()}


def table(title: str, traced: dict[str, dict[str, dict[str, float]]]) -> str:
    """Cosine / relative L2 of every variant, the paper's column last."""
    lines = [f"{title:10}" + "".join(f"{name:>16}" for name in (*traced, "paper's Table 2"))]
    for tensor, paper in PAPER_TABLE_2.items():
        cells = [(v[tensor]["cosine"], v[tensor]["rel_l2"]) for v in traced.values()] + [paper]
        lines.append(f"{tensor:10}" + "".join(f"  {cos:.4f}/{l2:.4f} " for cos, l2 in cells))
    return "\n".join(lines)


def mean_over_layers(layers: dict[str, dict]) -> dict:
    """The mean of every figure over the traced layers."""
    every = [layer["variants"] for layer in layers.values()]
    return {variant: {tensor: {figure: fmean(one[variant][tensor][figure] for one in every)
                               for figure in ("cosine", "rel_l2")}
                      for tensor in PAPER_TABLE_2} for variant in VARIANTS}  # fmt: skip


def load_checkpoint(
    path: Path, device: str, attention: str | None, corpus: Corpus | None = None
) -> tuple[LanguageModel, TrainConfig, AttentionChoice]:
    saved, config, choice = read_checkpoint(path)
    config = replace(config, device=device, compile=False, graph=False)
    choice = (AttentionChoice.parse(attention) if attention
              else in_force(saved["step"], config, choice))  # fmt: skip
    check_runs_on(choice, torch.device(device))
    model = build_model(config, choice)
    load_weights(model, saved["model"], path)
    if corpus and saved["corpus"] != corpus.header["sha256"]:
        raise ValueError(f"{path} was trained on another corpus than --corpus: its held-out text "
                         "may be what the model has seen")  # fmt: skip
    return model, config, choice


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("capture", __doc__)
    add_common_arguments(parser)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", required=True,
                        help="a trained model, as train or study saved it")
    add_captured_arguments(parser, None, "the checkpoint's")
    parser.add_argument("--name", default="capture",
                        help="stem of the record's name (default: capture)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the captured tensors")

    def work(options) -> int:
        with command.wrong_use(parser):
            corpus = Corpus.open(options.corpus)
            if options.sequences < 1:
                raise ValueError(f"--sequences {options.sequences}: it must be at least 1")
            command.check_outputs(options)
            if options.save and options.save.exists():
                raise ValueError(f"--save {options.save} is there already: name another file, or "
                                 "remove it")  # fmt: skip
            command.check_device(options.device)
            given = (options.checkpoint, options.device, options.attention, corpus)
            model, config, choice = load_checkpoint(*given)
            layers = list(dict.fromkeys(options.layer or range(config.model.layers)))
            if unknown := [layer for layer in layers if not 0 <= layer < config.model.layers]:
                count = config.model.layers
                raise ValueError(f"no layer {unknown[0]}: the model has {count}, from 0")
            Spec(head_dim=config.model.head_dim)  # what can be traced
            corpus.check(0, config.tokens, options.sequences, "--sequences")
            path = options.out / f"{options.name}.json"
            asked = {"checkpoint": options.checkpoint.name, "sequences": options.sequences,
                     "traced_layers": layers}  # fmt: skip
            check_record(path, config, choice, corpus, "layers", **asked)
            sequences = corpus.validation(options.sequences, config.tokens).to(options.device)
        with command.alone(options.out, options.name):
            print(f"capturing {options.sequences} sequences of {config.tokens} tokens, then "
                  f"tracing layers {', '.join(map(str, layers))}", file=sys.stderr)  # fmt: skip
            captured = capture(model, sequences, config)
            if options.save:
                write_tensors(options.save, [layer._asdict() for layer in captured])
            write_traces(captured, layers, path, origin(config, choice, corpus) | asked)
        return 0

    return command.run(parser, arguments, work)


def write_traces(captured: list[Captured], layers: list[int], path: Path, record: dict) -> None:
    """Traces these layers; the record is written again after each, and a table printed."""
    q = captured[0].q
    record |= {
        "shape": dict(zip(("batch", "heads", "tokens", "head_dim"), q.shape)),
        "dtype": str(q.dtype).removeprefix("torch."),
        "paper_table_2": {t: {"cosine": c, "rel_l2": e} for t, (c, e) in PAPER_TABLE_2.items()},
        "layers": {},
    }
    for layer in layers:
        traced = trace_layer(captured[layer])
        figures = {"statistics": statistics(captured[layer]), "variants": traced}
        record["layers"][str(layer)] = figures
        write_json(path, record)
        print(table(f"layer {layer}", traced), flush=True)
    record["mean_over_layers"] = mean_over_layers(record["layers"])
    write_json(path, record)
    print(table("mean", record["mean_over_layers"]))
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
