"""The kernel for the Hub that hub/write.py writes: how it is loaded, and calls of it with what they
should give. As a program, hub_kernel.py FOLDER, it checks all of them on a GPU: it needs PyTorch
and `kernels`, and compares bits with sagebwd where that is installed.
"""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch


def by_hand(folder):
    """Imports a build variant as `kernels` does, without it."""
    variant = sorted((Path(folder) / "build").iterdir())[-1]
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def by_kernels(folder):
    from kernels import get_local_kernel

    return get_local_kernel(Path(folder))


#: Sizes (batch, heads, heads_kv, queries, keys, channels), dtype, and options of `attention`.
CASES = {
    "plain": ((2, 4, 2, 130, 130, 64), torch.bfloat16, {}),
    "causal": ((1, 2, 2, 200, 200, 128), torch.float16, dict(causal=True)),
    "bottom right": ((1, 2, 1, 70, 150, 64), torch.bfloat16, dict(causal="bottom-right")),
    "bshd": ((2, 4, 2, 90, 90, 64), torch.bfloat16, dict(layout="bshd", softmax_scale=0.2)),
    "gradients16": ((1, 2, 2, 100, 100, 72), torch.bfloat16, dict(precision="gradients16")),
    "window": ((1, 2, 2, 150, 150, 64), torch.float16, dict(causal=True, window_left=40)),
    "softcap": ((1, 2, 2, 80, 80, 64), torch.bfloat16, dict(softcap=3.0)),
    "sink": ((1, 2, 2, 80, 80, 64), torch.bfloat16, dict(causal=True, sink_logits=(0.5, -1.0))),
}  # fmt: skip
#: Relative L2 to FP64; with six INT8 products the largest of these cases is 0.02.
LIMIT = 0.03


def inputs(name, device):
    """((q, k, v), dout, dlse, options) of a case."""
    (batch, heads, heads_kv, queries, keys, channels), dtype, options = CASES[name]
    options = dict(options)
    random = torch.Generator().manual_seed(7)

    def tensor(heads, tokens):
        t = torch.randn(batch, heads, tokens, channels, generator=random)
        if options.get("layout") == "bshd":
            t = t.transpose(1, 2).contiguous()
        return t.to(device, dtype)

    leaves = [tensor(heads, queries), tensor(heads_kv, keys), tensor(heads_kv, keys)]
    dout, dlse = tensor(heads, queries), torch.randn(batch, heads, queries, generator=random)
    if "sink_logits" in options:
        options["sink_logits"] = torch.tensor(options["sink_logits"], device=device)
    return [t.requires_grad_() for t in leaves], dout, dlse.to(device), options


def results(attention, leaves, dout, dlse, options):
    """out, lse and the gradients."""
    out, lse = attention(*leaves, return_lse=True, **options)
    return [out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))]


def exact(q, k, v, *, causal=False, softmax_scale=None, layout="bhsd", window_left=None,
          softcap=None, sink_logits=None, return_lse=True, precision=None):  # fmt: skip
    """Computes a case in FP64, with all scores at once."""
    q, k, v = (t.double() if layout == "bhsd" else t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    other = torch.arange(k.shape[2], device=q.device)
    if causal:
        scores = scores.masked_fill(other > own, -torch.inf)
    if window_left is not None:
        scores = scores.masked_fill(other < own - window_left, -torch.inf)
    lse = scores.logsumexp(-1)
    if sink_logits is not None:
        lse = torch.logaddexp(lse, sink_logits.double()[None, :, None])
    out = (scores - lse[..., None]).exp() @ v
    return out if layout == "bhsd" else out.transpose(1, 2), lse


def distances(found, expected):
    """Relative L2; infinity for NaN."""
    return [float(((x.detach().double() - y.detach()).norm() / y.detach().norm()).nan_to_num(
        torch.inf)) for x, y in zip(found, expected)]  # fmt: skip


def check_case(kernel, name, device):
    """Compares a case with FP64; returns what the kernel gave."""
    leaves, dout, dlse, options = inputs(name, device)
    found = results(kernel.attention, leaves, dout, dlse, options)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    expected = results(exact, doubles, dout.double(), dlse.double(), options)
    far = distances(found, expected)
    assert max(far) < LIMIT, (name, far)
    assert found[0].is_contiguous() and [t.dtype for t in found[2:]] == [t.dtype for t in leaves]
    return found


def check_bits(package, name, device, found):
    """Compares what the kernel gave with the package's attention, which rounds sinks elsewhere."""
    *given, options = inputs(name, device)
    if cap := options.pop("softcap", None):
        options["score"] = f"{cap} * tanh(s / {cap})"
    expected = results(package.attention, *given, options)
    if "sink_logits" not in options:
        assert all(map(torch.equal, found, expected)), name
    assert max(distances(found, expected)) < 1e-2, name


def check_packed(kernel, device):
    """Packed sequences are those alone, also by flash-attention's function."""
    lengths, random = (50, 1, 77), torch.Generator().manual_seed(3)
    firsts = torch.tensor([0, 50, 51, 128], dtype=torch.int32, device=device)
    q, k, v, dout = (torch.randn(128, 2, 64, generator=random).to(device, torch.bfloat16)
                     for _ in range(4))  # fmt: skip
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = kernel.flash_attn_varlen_func(*leaves, firsts, firsts, 77, 77, causal=True)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    parts = []
    for part in zip(*(t.split(lengths) for t in (q, k, v, dout))):
        alone = [t.detach().double()[None].requires_grad_() for t in part[:3]]
        there, _ = exact(*alone, causal=True, layout="bshd")
        parts.append([there, *torch.autograd.grad(there, alone, part[3].double()[None])])
    expected = [torch.cat(pieces, 1)[0] for pieces in zip(*parts)]
    assert max(distances(found, expected)) < LIMIT, distances(found, expected)


def check_compiled(kernel, device, backend):
    """A graph without breaks gives the same bits."""
    leaves, dout, dlse, options = inputs("causal", device)
    compiled = torch.compile(kernel.attention, fullgraph=True, backend=backend)
    found = results(compiled, leaves, dout, dlse, options)
    expected = results(kernel.attention, leaves, dout, dlse, options)
    assert all(map(torch.equal, found, expected))


def check_stream(kernel):
    """On the current stream, behind what is there; and in a graph that is replayed."""
    leaves, dout, dlse, options = inputs("plain", "cuda")
    expected = results(kernel.attention, leaves, dout, dlse, options)
    late = [torch.zeros_like(t).requires_grad_() for t in leaves]
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        for to, t in zip(late, leaves):
            to.detach().copy_(t.detach())
        found = results(kernel.attention, late, dout, dlse, options)
        torch.cuda.current_stream().synchronize()
    assert all(map(torch.equal, found, expected))
    q, k, v = (torch.zeros_like(t) for t in leaves)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = kernel.attention(q, k, v)
    for to, t in zip((q, k, v), leaves):
        to.copy_(t.detach())
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected[0])


def check_model(name, device):
    """Loss and gradients of a small Llama by transformers with this attn_implementation."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(vocab_size=100, hidden_size=128, intermediate_size=128, head_dim=64,
                         num_hidden_layers=2, num_attention_heads=2,
                         num_key_value_heads=1)  # fmt: skip
    tokens = torch.randint(100, (2, 40), generator=torch.Generator().manual_seed(1)).to(device)
    padding = torch.ones_like(tokens)
    padding[1, 30:] = 0
    found = []
    for implementation in (name, "sdpa"):
        torch.manual_seed(2)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation,
                                                 dtype=torch.bfloat16).to(device)  # fmt: skip
        labels = tokens.masked_fill(padding == 0, -100)
        model(input_ids=tokens, attention_mask=padding, labels=labels).loss.backward()
        found.append([torch.cat([p.grad.double().flatten() for p in model.parameters()])])
    assert max(distances(*found)) < LIMIT, distances(*found)


def transformers_takes_kernels():
    """Whether transformers is here, and takes the version of `kernels` that is here."""
    try:
        from transformers.utils.import_utils import is_kernels_available
    except ImportError:
        return False
    return is_kernels_available()


def main(folder):
    kernel = by_kernels(folder)
    print(kernel.__name__, kernel.version(), torch.cuda.get_device_name(), torch.__version__)
    package = importlib.util.find_spec("sagebwd") and importlib.import_module("sagebwd")
    for name in CASES:
        found = check_case(kernel, name, "cuda")
        if package:
            check_bits(package, name, "cuda", found)
    check_packed(kernel, "cuda")
    check_compiled(kernel, "cuda", "inductor")
    check_stream(kernel)
    if torch.cuda.device_count() > 1:
        check_case(kernel, "plain", "cuda:1")
    if transformers_takes_kernels():
        os.environ["LOCAL_KERNELS"] = f"sagebwd/attention={folder}"
        check_model("sagebwd/attention", "cuda")
        print("transformers, too")
    print("the same bits as the package's" if package else "without the package")
    print("all are right")


if __name__ == "__main__":
    main(sys.argv[1])
