"""LoRA fine-tuning of a small Hugging Face Llama, once with PyTorch's attention and once with ours.

    python examples/lora.py --base a.txt --text b.txt             # makes its own small Llama
    python examples/lora.py --model path/to/a/llama --text b.txt  # Hugging Face's, with tokenizer

Both runs begin with the same weights and see the same batches; what differs is
attn_implementation. Needs torch, transformers and peft, and a GPU. Without --model a Llama of 26
million weights over bytes is trained on --base first, so that there is something to fine-tune.

This shows that training works, not that it is fast: on Hopper (H100, H200) a step takes longer with
sagebwd, because cuDNN is faster at this model's head dimension of 64. A run that is faster:
examples/deterministic_training.py.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import peft
import torch
import transformers

import sagebwd.integrations.transformers  # noqa: F401 (attn_implementation="sagebwd" is known)
from sagebwd.benchmark.common import wrong_use
from sagebwd.benchmark.environment import environment

#: This model has 8 heads of 64 channels.
SMALL = {"vocab_size": 256, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8,
         "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192,
         "tie_word_embeddings": True}  # fmt: skip
ADAPTED = {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
#: Tokens of the sequences that it learns from first.
BASE_LENGTH = 1024


def tokens_of(path, length, tokenizer=None):
    """OSError, or ValueError where the last tenth of the text holds no sequence of that length."""
    data = Path(path).read_bytes()
    ids = tokenizer(data.decode())["input_ids"] if tokenizer else list(data)
    if len(ids) < 10 * length:
        raise ValueError(
            f"{path} has {len(ids)} tokens; pass a text of at least {10 * length}, ten sequences"
        )
    return torch.tensor(ids)


def batches(tokens, length, batch, steps, seed):
    """A seed always gives the same batches, from the first nine tenths of the text."""
    generator = torch.Generator().manual_seed(seed)
    last = len(tokens) * 9 // 10 - length - 1
    for _ in range(steps):
        first = torch.randint(0, last, (batch,), generator=generator)
        yield torch.stack([tokens[i : i + length] for i in first.tolist()])


def loss_of(model, ids):
    ids = ids.to(model.device)
    with torch.autocast(ids.device.type, torch.bfloat16):
        return model(input_ids=ids, labels=ids).loss


@torch.no_grad()
def held_out_loss(model, tokens, length):
    """Over the text's last tenth."""
    rest = tokens[len(tokens) * 9 // 10 :]
    pieces = rest[: len(rest) // length * length].view(-1, length).split(4)
    return statistics.fmean(loss_of(model, piece).item() for piece in pieces)


def train(model, data, rate, warmup=20, prepared=lambda gradients: gradients):
    """(loss, seconds) of every step. `prepared` may make a CUDA graph of what gives gradients."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.01, fused=True)

    def gradients(ids):
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        return loss.detach()

    gradients = prepared(gradients)
    rows = []
    for step, ids in enumerate(data):
        optimizer.param_groups[0]["lr"] = rate * min(1, (step + 1) / warmup)
        start = time.perf_counter()
        loss = gradients(ids.to(model.device))
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        rows.append((loss.item(), time.perf_counter() - start))  # item() waits for the GPU
    return rows


def small_llama(tokens, options):
    """A Llama over bytes, trained with PyTorch's attention; its weights."""
    torch.manual_seed(options.seed)
    config = transformers.LlamaConfig(**SMALL, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config).cuda()
    data = batches(tokens, BASE_LENGTH, 16, options.base_steps, options.seed)
    rows = train(model, data, 6e-4)
    print(f"the small Llama: loss {rows[0][0]:.3f} to {rows[-1][0]:.3f} in {len(rows)} steps")
    return config, {name: weight.cpu() for name, weight in model.state_dict().items()}


def fine_tune(make_model, tokens, attention, options):
    torch.manual_seed(options.seed)
    model = peft.get_peft_model(make_model(attention), peft.LoraConfig(**ADAPTED)).cuda()
    before = held_out_loss(model, tokens, options.length)
    data = batches(tokens, options.length, options.batch, options.steps, options.seed + 1)
    rows = train(model, data, 1e-3)
    after = held_out_loss(model, tokens, options.length)
    ms = 1e3 * statistics.median(seconds for _, seconds in rows[10:])
    print(f"{attention:8} held-out loss {before:.4f} to {after:.4f}, {ms:.1f} ms a step")
    return {"attention": attention, "held_out_before": before, "held_out_after": after,
            "ms_per_step": ms, "train_loss": [loss for loss, _ in rows]}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a Llama of Hugging Face's; else a small one is made")
    parser.add_argument("--base", help="text that the small one is trained on")
    parser.add_argument("--text", required=True, help="text to fine-tune on")
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a JSON file for losses and times")
    options = parser.parse_args()
    if options.model and options.model.count("/") != 1 and not Path(options.model).is_dir():
        parser.error(f"--model {options.model}: there is no such folder, and a name on Hugging "
                     "Face's hub is OWNER/NAME")  # fmt: skip
    if not options.model and not options.base:
        parser.error("without --model the small Llama needs --base, a text to learn first")

    with wrong_use(parser):  # before anything is trained
        tokenizer = (transformers.AutoTokenizer.from_pretrained(options.model) if options.model
                     else None)  # fmt: skip
        tokens = tokens_of(options.text, options.length, tokenizer)
        base = None if options.model else tokens_of(options.base, BASE_LENGTH)
    if not torch.cuda.is_available():
        parser.error("this needs a GPU: python -m sagebwd.doctor says what is missing")

    if options.model:

        def make_model(attention):
            return transformers.AutoModelForCausalLM.from_pretrained(
                options.model, attn_implementation=attention)  # fmt: skip
    else:
        config, weights = small_llama(base, options)

        def make_model(attention):
            config._attn_implementation = attention
            model = transformers.LlamaForCausalLM(config)
            model.load_state_dict(weights)
            return model

    runs = [fine_tune(make_model, tokens, name, options) for name in ("sdpa", "sagebwd")]
    apart = max(abs(a - b) for a, b in zip(*(run["train_loss"] for run in runs)))
    print(f"training losses differ by at most {apart:.4f}; "
          f"speed {runs[0]['ms_per_step'] / runs[1]['ms_per_step']:.2f} x")  # fmt: skip
    if options.out:
        given = {name: Path(value).name if isinstance(value, (str, Path)) else value
                 for name, value in vars(options).items()}  # fmt: skip
        record = {"environment": environment(), "options": given, "runs": runs}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
