"""A trained model: what each forward makes of its layers, and of LoRA that another one trained.

    python bench/trained.py --model MODEL.gguf --text TEXT     # or a folder of transformers

Each layer's queries, keys and values, causal and after RoPE, are those of the text's first tokens;
errors are against FP64, over all heads. Adapters of q, k, v and o learn the text's first nine
tenths with each attention that trains, and each attention says the loss of the last tenth. Runs of
one seed begin with the same adapters and see the same batches. Weights are bf16, adapters FP32.
comfy-kitchen is handed what is causal as a tensor, since it has no other way.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import Record, parse, parser, progress
from inference import compared, subjects, timed, version_of
from needs_torch import torch
from torch import Tensor

from examples.lora import ADAPTED, batches, held_out_loss, tokens_of, train
from sagebwd.benchmark.common import wrong_use

PACKAGES = ("comfy-kitchen", "transformers", "peft")
TRAINING = ("sdpa", "sagebwd")


def opened(path: Path, kind: str = "AutoModelForCausalLM"):
    """A model and its tokenizer, which transformers reads from a folder or a .gguf file."""
    import transformers

    where = {"gguf_file": path.name} if path.is_file() else {}
    folder, how = path.parent if where else path, {"torch_dtype": torch.bfloat16}
    if where and hasattr(transformers, "GgufConfig"):  # which would leave weights in few bits
        how["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = getattr(transformers, kind).from_pretrained(folder, **where, **how)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder, **where)


def known_attentions(attends: dict) -> list[str]:
    """Makes comfy-kitchen known to transformers; the names of all that evaluate."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "comfy-kitchen" not in attends:
        return [*TRAINING]

    def attend(module, query, key, value, attention_mask, scaling=None, **_):
        given = (x.contiguous() for x in (query, key, value))
        out = attends["comfy-kitchen"](*given, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("comfy-kitchen", attend)
    return [*TRAINING, "comfy-kitchen"]


@contextmanager
def keeping(model) -> Iterator[list[dict]]:
    """What each call of attention is given from here on: q, k and v as PyTorch's takes them, and
    whether it is causal; after a backward the gradient of its output as well, dout."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kept, attend = [], ALL_ATTENTION_FUNCTIONS["sdpa"]

    def keep(module, query, key, value, *given, **more):
        of_layer = {name: x.detach().contiguous() for name, x in zip("qkv", (query, key, value))}
        of_layer["causal"] = bool(getattr(module, "is_causal", True))
        kept.append(of_layer)
        out, weights = attend(module, query, key, value, *given, **more)
        if out.requires_grad:
            out.register_hook(lambda dout: of_layer.update(dout=dout.transpose(1, 2).contiguous()))
        return out, weights

    ALL_ATTENTION_FUNCTIONS.register("keeping", keep)
    before, model.config._attn_implementation = model.config._attn_implementation, "keeping"
    try:
        yield kept
    finally:
        model.config._attn_implementation = before


@torch.no_grad()
def layers_of(model, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of each layer."""
    with keeping(model) as kept:
        model.model(ids[None].to(model.device), use_cache=False)
    return [tuple(layer[name] for name in "qkv") for layer in kept]


@torch.no_grad()
def row_of(number: int, q: Tensor, k: Tensor, v: Tensor, attends: dict) -> dict:
    """A layer's errors; what its keys have in common says how hard it is to quantise."""
    common = k.float().mean(2, keepdim=True).expand_as(k).norm() / k.float().norm()
    return {"layer": number, "k_mean_over_k_norm": float(common),
            **compared(q, k, v, attends, 0, True)}  # fmt: skip


def losses_by(model, adapted, tokens: Tensor, who: list[str], length: int) -> dict[str, float]:
    found = {}
    for model.config._attn_implementation in who:
        found[model.config._attn_implementation] = held_out_loss(adapted, tokens, length)
    return found


def fine_tuned(model, attention: str, seed: int, tokens: Tensor, who, options) -> dict:
    """One run: the losses of the held-out text by each attention that evaluates."""
    import peft

    started = time.perf_counter()
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(model, peft.LoraConfig(**ADAPTED)).to(model.device)
    model.config._attn_implementation = attention
    data = batches(tokens, options.length, options.batch, options.steps, seed)
    rows = train(adapted, data, options.rate)
    losses = losses_by(model, adapted, tokens, who, options.length)
    adapted.unload()
    return {"attention": attention, "seed": seed, "held_out_by": losses,
            "train_loss": [round(loss, 5) for loss, _ in rows],
            "seconds": round(time.perf_counter() - started, 2)}  # fmt: skip


def said(losses: dict[str, float]) -> str:
    return ", ".join(f"{loss:.4f} by {who}" for who, loss in losses.items())


def digest(path: Path) -> dict[str, str]:
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def arguments_of(arguments: list[str] | None):
    options = parser(__doc__, "trained.json")
    add = options.add_argument
    add("--model", type=Path, required=True, help="a Llama of transformers: a folder, or a .gguf")
    add("--text", type=Path, required=True, help="what adapters learn")
    add("--captured", type=int, default=8192, help="tokens of the layers (default: 8192)")
    add("--length", type=int, default=1024, help="tokens of a sequence in training")
    add("--batch", type=int, default=4, help="sequences of a step")
    add("--steps", type=int, default=300)
    add("--seeds", type=int, default=3, help="runs of each attention that trains")
    add("--rate", type=float, default=1e-3, help="highest learning rate")
    add("--rounds", type=int, default=9)
    add("--json", action="store_true", help="print the record as well")
    parsed = parse(options, arguments)
    if not parsed.model.exists():
        options.error(f"--model {parsed.model}: there is no such folder or file")
    return options, parsed


def main(arguments: list[str] | None = None) -> int:
    command, options = arguments_of(arguments)
    model, tokenizer = opened(options.model)
    with wrong_use(command):
        tokens = tokens_of(options.text, max(options.length, options.captured // 10), tokenizer)
    model.to(options.device)
    config, device = model.config, options.device
    attends = {causal: subjects(device, causal) for causal in (True, False)}
    record = Record(
        options.out, model=digest(options.model), text=digest(options.text), tokens=len(tokens),
        heads=config.num_attention_heads, heads_kv=config.num_key_value_heads, adapters=ADAPTED,
        **{name: getattr(options, name) for name in
           ("captured", "length", "batch", "steps", "seeds", "rate", "rounds")},
        **{name: version_of(name) for name in PACKAGES})  # fmt: skip
    layers = layers_of(model, tokens[: options.captured])
    for number, layer in enumerate(layers):
        row = row_of(number, *layer, attends[True])
        record.add("layers", row)
        progress(number + 1, len(layers), "layers")
    middle = layers[len(layers) // 2]
    with torch.no_grad():
        record.set(forward={"causal" if causal else "all keys": timed(*middle, found, options)
                            for causal, found in attends.items()})  # fmt: skip
    del layers, middle
    who = known_attentions(attends[True])
    record.set(held_out_before=losses_by(model, model, tokens, who, options.length))
    print(f"before: {said(record.content['held_out_before'])}", flush=True)
    for seed in range(options.seeds):
        for attention in TRAINING:
            run = fine_tuned(model, attention, seed, tokens, who, options)
            record.add("fine_tunes", run)
            print(f"{attention}, seed {seed}: {said(run['held_out_by'])}, {run['seconds']:.0f} s",
                  flush=True)  # fmt: skip
    if options.json:
        print(json.dumps(record.content, indent=1))
    return record.finish(finite(record.content))


def finite(content: dict) -> bool:
    errors = [x for row in content["layers"] for of in row["errors"].values() for x in of.values()]
    losses = [x for run in content["fine_tunes"] for x in run["held_out_by"].values()]
    return all(map(math.isfinite, errors + losses))


if __name__ == "__main__":
    sys.exit(main())
