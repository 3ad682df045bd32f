"""SLA2 in the self-attention of a Wan video transformer of diffusers, on one GPU or the CPU.

    python examples/wan_sla2.py                      # a small model, which it trains first
    python examples/wan_sla2.py --model FOLDER       # a text-to-video Wan model's

Videos of moving sprites take the place of latents: put your own into `latents`. Stage 1 trains each
layer's router and alpha on what the dense model hands to attention; stage 2 trains the model with
sparse attention. Printed are losses on held-out videos, and the share of full attention's weight
that the listed blocks have. Cross-attention stays as it is. Needs torch, diffusers and a checkout,
whose experiments have the sprites.
"""

import argparse
import sys
from pathlib import Path

import diffusers
import torch
import torch.nn.functional as F

from sagebwd.nn import SparseLinearAttention

sys.path.append(str(Path(__file__).resolve().parents[1]))  # of a checkout
from experiments.sprites import videos

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HELD_OUT = 1


class SparseSelfAttention:
    """A processor that computes Wan's self-attention by the module `attn.sparse`; in stage 1 as the
    dense model does, and then the module gets the gradients of its own loss."""

    def __init__(self):
        self.stage_one = True
        self.seen = {}  # what each module was handed last in stage 1

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None,
                 rotary_emb=None):  # fmt: skip
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("this processor is for self-attention without a mask")
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, (attn.heads, -1))
        k = attn.norm_k(attn.to_k(hidden_states)).unflatten(2, (attn.heads, -1))
        v = attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))
        q, k = (rotated(x, *rotary_emb).to(v.dtype) for x in (q, k))
        if self.stage_one:
            self.seen[attn.sparse] = given = q.detach(), k.detach(), v.detach()
            with torch.enable_grad():
                attn.sparse.stage_one_loss(*given).backward()
            dense = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(*dense).transpose(1, 2)
        else:
            out = attn.sparse(q, k, v)
        return attn.to_out[1](attn.to_out[0](out.flatten(2)))


def rotated(x, cos, sin):
    """Rotary positions: channels 2n and 2n + 1 are the two coordinates of a point."""
    first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    return torch.stack((first * cos - second * sin, first * sin + second * cos), -1).flatten(-2)


def make_sparse(model, density):
    """Gives the self-attention of each layer a module for SLA2; its modules, and the processor."""
    processor, modules = SparseSelfAttention(), []
    for block in model.blocks:
        attn = block.attn1
        if attn.fused_projections:
            raise ValueError("projections are fused: call model.unfuse_qkv_projections() before")
        attn.sparse = SparseLinearAttention(
            attn.to_q.out_features // attn.heads, attn.heads, density=density, alpha="estimated",
            layout="bshd", precision="six-of-seven" if GPU else "exact").to(DEVICE)  # fmt: skip
        attn.set_processor(processor)
        modules.append(attn.sparse)
    return modules, processor


def latents(model, options, step):
    """Returns the latents of one video: (1, channels, frames, height, width)."""
    seed = HELD_OUT if step < 0 else 0
    video = videos(seed, abs(step), 1, options.frames, options.size, DEVICE).transpose(1, 2)
    repeats = -(-model.config.in_channels // 3)
    return video.repeat(1, repeats, 1, 1, 1)[:, : model.config.in_channels]


def loss_of(model, options, step):
    """The loss is that of flow matching: the model says in which direction noise lies. Steps below
    0 are of videos that are held out."""
    clean = latents(model, options, step)
    generator = torch.Generator(DEVICE).manual_seed(abs(step))
    noise = torch.randn(clean.shape, generator=generator, device=DEVICE)
    time = torch.rand(1, generator=generator, device=DEVICE)
    text = torch.zeros(1, 8, model.config.text_dim, device=DEVICE)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=GPU):
        said = model(hidden_states=(1 - time) * clean + time * noise, timestep=1000 * time,
                     encoder_hidden_states=text, return_dict=False)[0]  # fmt: skip
    return F.mse_loss(said.float(), noise - clean)


@torch.no_grad()
def held_out_loss(model, options):
    return sum(loss_of(model, options, -step).item() for step in range(1, 9)) / 8


def tell(step, steps, title):
    """Ten times in all: on a CPU a step takes seconds."""
    if step % max(1, steps // 10) == 0:
        print(f"{title}: step {step} of {steps}", file=sys.stderr, flush=True)


def train(model, options, steps, rate, title):
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate)
    for step in range(steps):
        tell(step, steps, title)
        loss_of(model, options, step).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"{title}: loss {held_out_loss(model, options):.4f}", flush=True)


def train_routers(model, modules, options):
    """Stage 1; only the modules learn."""
    optimizer = torch.optim.AdamW([p for m in modules for p in m.parameters()], lr=1e-3)
    for step in range(options.stage_one_steps):
        tell(step, options.stage_one_steps, "routers")
        with torch.no_grad():
            loss_of(model, options, step)
        optimizer.step()
        optimizer.zero_grad()


def made(options):
    """The model; SystemExit says what is wrong with the folder."""
    if not options.model:
        return diffusers.WanTransformer3DModel(
            num_attention_heads=4, attention_head_dim=64, in_channels=3, out_channels=3,
            text_dim=16, freq_dim=64, ffn_dim=512, num_layers=4, rope_max_seq_len=64,
        )  # fmt: skip
    folder = options.model / "transformer"  # of a pipeline; else as model.save_pretrained writes it
    folder = folder if folder.is_dir() else options.model
    if not (folder / "config.json").is_file():
        raise SystemExit(f"{options.model} has no folder 'transformer', as Wan's models have, and "
                         "no file 'config.json'")  # fmt: skip
    kind = diffusers.WanTransformer3DModel.load_config(folder).get("_class_name")
    if kind != "WanTransformer3DModel":
        raise SystemExit(f"{folder} has a {kind}: pass a WanTransformer3DModel's")
    return diffusers.WanTransformer3DModel.from_pretrained(folder)


def check_sizes(model, options):
    """SystemExit for a model that needs pictures, and videos that the model does not take."""
    config = model.config
    if config.in_channels != config.out_channels or config.image_dim is not None:
        raise SystemExit("this model makes videos from pictures, which this example does not have: "
                         "pass a text-to-video model")  # fmt: skip
    for name, size, patch in zip(("frames", "size", "size"),
                                 (options.frames, options.size, options.size),
                                 config.patch_size):  # fmt: skip
        if size % patch or size // patch > config.rope_max_seq_len:
            raise SystemExit(f"--{name} {size}: the model takes multiples of {patch} up to "
                             f"{patch * config.rope_max_seq_len}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="a folder; else a small model is made")
    parser.add_argument("--density", type=float, default=0.1, help="the share of listed blocks")
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--size", type=int, default=32, help="height and width of latents")
    parser.add_argument("--dense-steps", type=int, default=300, help="of a model that is made")
    parser.add_argument("--stage-one-steps", type=int, default=50)
    parser.add_argument("--steps", type=int, default=100, help="with sparse attention")
    options = parser.parse_args()
    if not 0 < options.density <= 1:
        parser.error(f"--density {options.density}: pass a share above 0 and at most 1")
    for name, least in (("frames", 1), ("size", 4), ("dense_steps", 0), ("stage_one_steps", 1),
                        ("steps", 0)):  # fmt: skip
        if (given := getattr(options, name)) < least:
            parser.error(f"--{name.replace('_', '-')} {given}: pass at least {least}")
    torch.manual_seed(0)
    model = made(options).to(DEVICE)
    check_sizes(model, options)
    if not options.model:
        train(model, options, options.dense_steps, 1e-3, "dense")
    modules, processor = make_sparse(model, options.density)
    train_routers(model, modules, options)
    for module in modules:
        module.freeze_router()
    reports = [module.report(*seen) for module, seen in processor.seen.items()]
    density, mass = (sum(r[name] for r in reports) / len(reports) for name in ("density", "mass"))
    processor.stage_one, processor.seen = False, {}
    print(f"with {density:.0%} of the blocks, which have {mass:.0%} of the weight: "
          f"loss {held_out_loss(model, options):.4f}")  # fmt: skip
    rate = 1e-4 if options.model else 3e-4
    train(model, options, options.steps, rate, "after training with them")


if __name__ == "__main__":
    main()
