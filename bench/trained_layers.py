"""Errors in every layer of trained models, by precision, granularity, rotation and smoothing.

    python bench/trained_layers.py --models MODEL.gguf ENCODER --text TEXT

A model is a .gguf file or a folder of transformers, a causal language model or a sentence encoder.
Each layer's queries, keys, values and the gradient of its output are those of one forward and
backward of the loss that such a model is trained with, on the text's first tokens: of language
models the next token's, of encoders that of telling which piece of text follows a piece. They are
bf16. Errors are relative L2 against FP64, over all heads of a layer.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

from errors import BF16, sixteen_bit, subject_of
from harness import Record, parse, parser, progress, warm_up
from needs_torch import torch
from torch import Tensor
from trained import digest, keeping, opened

from examples.lora import tokens_of
from experiments.capture import Captured, statistics
from sagebwd.benchmark.common import wrong_use
from sagebwd.benchmark.truth import TENSORS, relative_l2
from sagebwd.core.options import PRECISIONS
from sagebwd.numerics.exact import exact_attention

#: Other options of the default, and the paper's scales without K-smoothing.
VARIANTS = {
    "row, no K-smoothing": {"smooth_k": False},
    "row, Q-smoothing": {"smooth_q": True},
    "row, V-smoothing": {"smooth_v": True},
    "row, first key not apart": {"sink_keys": 0},
    "row, groups of 64 keys": {"group_q": 64, "group_kv": 64},
    "block, no rotation, no K-smoothing": {"granularity": "block", "rotate": False,
                                           "smooth_k": False},
}  # fmt: skip
#: What sentence encoders multiply cosines with.
SHARPNESS = 20


def schemes() -> dict[str, dict]:
    """Options of `sagebwd.attention` by name: all precisions with each kind of scales, with the
    rotation and without, and the variants."""
    found = {}
    for granularity in ("row", "block"):
        for rotate in (True, False):
            for precision in PRECISIONS:
                name = f"{granularity}{'' if rotate else ', no rotation'}, {precision}"
                found[name] = {"granularity": granularity, "rotate": rotate, "precision": precision}
    return found | VARIANTS


# ---- what a layer is handed ----------------------------------------------------------------------


def language_loss(model, tokenizer, ids: Tensor) -> Tensor:
    ids = ids[None].to(model.device)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def sentence_loss(model, tokenizer, ids: Tensor) -> Tensor:
    """Pieces stand in pairs, each with what follows it in the text. A piece's vector is the mean of
    its tokens', and the cosines to all that follow are scores of its own."""
    pieces = ids[: len(ids) // PIECE * PIECE].view(-1, PIECE)
    pieces = pieces[: len(pieces) // 2 * 2].clone()
    pieces[:, 0], pieces[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    vectors = model(input_ids=pieces.to(model.device)).last_hidden_state.float().mean(1)
    vectors = torch.nn.functional.normalize(vectors, dim=1)
    scores = SHARPNESS * vectors[0::2] @ vectors[1::2].T
    own = torch.arange(len(scores), device=scores.device)
    return torch.nn.functional.cross_entropy(scores, own)


#: Tokens of a piece of text, as many as usual encoders take.
PIECE = 512
#: By the class that transformers opens a model with.
LOSSES = {"AutoModelForCausalLM": language_loss, "AutoModel": sentence_loss}


def kind_of(path: Path) -> str:
    """The class that opens it."""
    if path.is_file():
        return "AutoModelForCausalLM"
    names = json.loads((path / "config.json").read_text()).get("architectures") or [""]
    return "AutoModelForCausalLM" if names[0].endswith("ForCausalLM") else "AutoModel"


def captured(model, loss: Callable[[], Tensor]) -> tuple[list[tuple[Captured, bool]], float]:
    """Each layer's tensors, and whether it is causal; and the loss."""
    with keeping(model) as kept:
        found = loss()
        found.backward()
    model.zero_grad(set_to_none=True)
    layers = [(Captured(*(layer[name] for name in ("q", "k", "v", "dout"))), layer["causal"])
              for layer in kept]  # fmt: skip
    return layers, found.item()


# ---- errors --------------------------------------------------------------------------------------


def rounded(value: float) -> float:
    return float(f"{value:.4g}")


def row_of(layer: Captured, causal: bool, device: str, refused: set[str]) -> dict:
    """The errors of every scheme, and what makes the layer hard to quantise."""
    mask = "top-left" if causal else "none"
    exact = exact_attention(*layer, causal=mask).named()
    subject, errors = subject_of(device), {}
    for name, options in {BF16: None, **schemes()}.items():
        if name in refused:
            continue
        found = (sixteen_bit(*layer, causal=mask) if options is None
                 else subject(*layer, causal=mask, **options)).named()  # fmt: skip
        errors[name] = {t: rounded(relative_l2(found[t], exact[t])) for t in TENSORS}
    told = {name: rounded(x) for name, x in statistics(layer).items()}
    return {"causal": causal, "statistics": told, "errors": errors}


def measure(path: Path, options, record: Record) -> None:
    """One model: a row for each layer, written as it comes."""
    kind = kind_of(path)
    model, tokenizer = opened(path, kind)
    tokens = tokens_of(options.text, math.ceil(options.tokens / 10), tokenizer)[: options.tokens]
    model.to(options.device)
    layers, loss = captured(model, lambda: LOSSES[kind](model, tokenizer, tokens))
    q, k = layers[0][0][:2]
    record.add("models", {
        "name": path.name, "files": digest(path), "class": type(model).__name__, "loss": loss,
        "layers": len(layers), **dict(zip(("batch", "heads", "tokens", "head_dim"), q.shape)),
        "heads_kv": k.shape[1]})  # fmt: skip
    of_model = {"head_dim": q.shape[3], "dtype": "bf16",
                "causal": "top-left" if layers[0][1] else "none"}  # fmt: skip
    names = [*schemes()]
    specs = [spec | of_model for spec in schemes().values()]
    refused = {names[i] for i in warm_up(specs, options.device, record)}
    for number, layer in enumerate(layers):
        row = {"model": path.name, "layer": number, **row_of(*layer, options.device, refused)}
        record.add("rows", row)
        progress(number + 1, len(layers), f"layers of {path.name}")
    print(said(record.content["rows"], path.name), flush=True)


def said(rows: list[dict], model: str) -> str:
    """The mean over a model's layers."""
    found = [row["errors"] for row in rows if row["model"] == model]
    lines = [f"{model:36}" + "".join(f"{tensor:>8}" for tensor in TENSORS)]
    for name in found[0]:
        means = (sum(of[name][tensor] for of in found) / len(found) for tensor in TENSORS)
        lines.append(f"{name:36}" + "".join(f"{mean:8.4f}" for mean in means))
    return "\n".join(lines)


def arguments_of(arguments: list[str] | None):
    options = parser(__doc__, "trained-layers.json")
    add = options.add_argument
    add("--models", type=Path, nargs="+", required=True, metavar="MODEL",
        help="folders of transformers, or .gguf files")  # fmt: skip
    add("--text", type=Path, required=True)
    add("--tokens", type=int, default=4096, help="of the text (default: 4096)")
    add("--json", action="store_true", help="print the record as well")
    parsed = parse(options, arguments)
    for path in parsed.models:
        if not path.exists():
            options.error(f"--models {path}: there is no such folder or file")
    return options, parsed


def main(arguments: list[str] | None = None) -> int:
    command, options = arguments_of(arguments)
    record = Record(options.out, text=digest(options.text), tokens=options.tokens, piece=PIECE,
                    dtype="bf16", subject=subject_of(options.device).__name__,
                    schemes=schemes(), figure="relative L2 over all heads")  # fmt: skip
    for path in options.models:
        with wrong_use(command):
            measure(path, options, record)
    if options.json:
        print(json.dumps(record.content, indent=1))
    return record.finish(sound(record.content))


def sound(content: dict) -> bool:
    """Whether all was compiled and no error is NaN."""
    errors = [x for row in content["rows"] for of in row["errors"].values() for x in of.values()]
    return "not_compiled" not in content and all(map(math.isfinite, errors))


if __name__ == "__main__":
    sys.exit(main())
