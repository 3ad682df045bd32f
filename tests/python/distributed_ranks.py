"""Ranks of torch.distributed: processes over gloo or, on GPUs, NCCL, and what they run.

A server that has imported everything forks them, so that they begin at once.
"""

import contextlib
import multiprocessing
import os
import sys
import traceback
import types
from datetime import timedelta
from multiprocessing import forkserver

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import sagebwd
from sagebwd import distributed

#: Seconds after which a message that does not come is an error, and a rank that does not end hangs.
TIMEOUT, HANGS = 30, 90

_context = multiprocessing.get_context("forkserver")
#: A name that is not here is passed over. An import of transformers takes two seconds of a core.
#: The last one has the garbage collector look through none of it in any of the processes.
_context.set_forkserver_preload([
    "pytest", "distributed_ranks", "sagebwd.emulation", "torch._dynamo", "torch.distributed.fsdp",
    "torch.distributed.tensor", "torch.distributed.tensor.experimental",
    "transformers.models.llama.modeling_llama", "transformers.models.bert.modeling_bert",
    "transformers.models.modernbert.modeling_modernbert", "frozen"])  # fmt: skip


def _forking(how="spawn"):
    """The context whose processes the server forks. Python before 3.13 does not tell the server
    where modules are."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    return _context


#: In place of the module, for code that asks it for new processes.
FORKING = types.SimpleNamespace(get_context=_forking)


def run(folder, ranks, function, *given, timeout=TIMEOUT, backend="gloo", hangs=HANGS):
    """The list has what `function(rank, *given)` gives in each rank, or its error as text."""
    room = folder / f"ranks{len(list(folder.iterdir()))}"
    room.mkdir()
    processes = [_forking().Process(target=_rank, args=(
        str(room), rank, ranks, timeout, backend, function, given))
                 for rank in range(ranks)]  # fmt: skip
    for process in processes:
        process.start()
    for process in processes:
        process.join(hangs)
    hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hanging:
        processes[rank].kill()
    assert not hanging, f"ranks {hanging} hang"
    return [torch.load(room / f"{rank}.pt", weights_only=False)
            if (room / f"{rank}.pt").exists() else None for rank in range(ranks)]  # fmt: skip


def _rank(room, rank, ranks, timeout, backend, function, given):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{room}/rendezvous", rank=rank,
                            world_size=ranks, timeout=timedelta(seconds=timeout))  # fmt: skip
    try:
        result = function(rank, *given)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    torch.save(result, f"{room}/{rank}.pt")
    if torch.__version__.startswith("2.6."):  # whose gloo may wait for a thread that waits for it
        os._exit(0)
    dist.destroy_process_group()


def device():
    """This rank's tensors are on this device, which is the CPU where there are no ranks."""
    return "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"


def mesh_of(method, ranks):
    if method == "both":
        return init_device_mesh(device(), (ranks // 2, 2), mesh_dim_names=("ring", "heads"))
    return init_device_mesh(device(), (ranks,))


def draw(heads=4, heads_kv=2, tokens=100, d=32, dtype=torch.bfloat16, layout="bhsd", batch=1,
         keys=None):  # fmt: skip
    """(q, k, v, dout) and dlse; keys have a mean, and it changes along the sequence."""
    generator = torch.Generator().manual_seed(tokens + heads_kv)
    keys = tokens if keys is None else keys

    def randn(heads, tokens):
        return torch.randn(batch, heads, tokens, d, generator=generator)

    q, k, v, dout = (randn(heads, tokens), randn(heads_kv, keys), randn(heads_kv, keys),
                     randn(heads, tokens))  # fmt: skip
    k += 1 + torch.linspace(-1, 1, keys)[:, None]
    dlse = torch.randn(batch, heads, tokens, generator=generator)
    tensors = [t.to(dtype) for t in (q, k, v, dout)]
    if layout == "bshd":
        tensors = [t.transpose(1, 2).contiguous() for t in tensors]
    return [t.to(device()) for t in tensors], dlse.to(device())


def together(rank, method, ranks, drawn, chosen, use_dlse, times=1):
    """Whole out, lse, dq, dk and dv of attention by all ranks; `times` of them."""
    mesh = mesh_of(method, ranks)
    (q, k, v, dout), dlse = draw(**drawn)
    token = 1 if drawn.get("layout") == "bshd" else 2

    def own(x, dim):
        return distributed.shard(x, mesh, dim=dim, method=method)

    results = []
    for _ in range(times):
        leaves = [own(t, token).detach().requires_grad_() for t in (q, k, v)]
        out, lse = distributed.attention(*leaves, mesh=mesh, method=method, return_lse=True,
                                         **chosen)  # fmt: skip
        loss = (out.float() * own(dout, token)).sum()
        if use_dlse:
            loss = loss + (lse * own(dlse, 2)).sum()
        gradients = torch.autograd.grad(loss, leaves)
        results.append([
            distributed.unshard(x, mesh, dim=2 if i == 1 else token, method=method)
            for i, x in enumerate((out, lse, *gradients))])  # fmt: skip
    return results if rank == 0 else None


def through_pytorch(rank, ranks, drawn, causal, ours_outside=False):
    """Whole out, dq, dk and dv of F.scaled_dot_product_attention in PyTorch's context_parallel and
    sagebwd.sdpa(), and how many calls the latter saw."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(device(), (ranks,))
    (q, k, v, dout), _ = draw(**drawn)
    tokens = q.shape[2]
    every = torch.arange(tokens, device=q.device)
    sdpa = sagebwd.sdpa()
    buffers = [q, k, v, dout, every]
    split = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2, 2, 0])
    with contextlib.ExitStack() as stack:
        for context in (sdpa, split) if ours_outside else (split, sdpa):
            stack.enter_context(context)
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, is_causal=causal, enable_gqa=drawn["heads"] != drawn["heads_kv"])
        gradients = torch.autograd.grad(out, leaves, dout)
        mine = every.clone()
    return in_order(ranks, mine, (out.detach(), *gradients)), sdpa.calls


def on_two_dimensions(rank, drawn, causal):
    """Whole out, dq, dk and dv of DTensors whose tokens two dimensions of a mesh share, in the
    order of PyTorch's context_parallel if that is causal."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel

    ranks = dist.get_world_size()
    mesh = init_device_mesh(device(), (ranks // 2, 2))
    (q, k, v, dout), _ = draw(**drawn)
    every = torch.arange(q.shape[2], device=q.device)
    buffers = [q, k, v, dout, every]
    line = init_device_mesh(device(), (ranks,))
    with context_parallel(line, buffers=buffers, buffer_seq_dims=[2, 2, 2, 2, 0]):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        placed = [DTensor.from_local(t, mesh, [Shard(2)] * 2) for t in leaves]
        out = sagebwd.scaled_dot_product_attention(
            *placed, is_causal=causal, enable_gqa=drawn["heads"] != drawn["heads_kv"]).to_local()
        gradients = torch.autograd.grad(out, leaves, dout)
        mine = every.clone()
    return in_order(ranks, mine, (out.detach(), *gradients))


def in_order(ranks, mine, tensors):
    """Whole tensors of the parts of ranks, of which `mine` are this rank's positions."""
    found = []
    for x in (mine, *tensors):
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous())
        found.append(parts)
    order = torch.cat(found[0]).argsort()
    return [torch.cat(parts, 2)[:, :, order] for parts in found[1:]]


def alone(drawn, chosen, use_dlse):
    """One process computes the same."""
    (q, k, v, dout), dlse = draw(**drawn)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    attention = sagebwd.attention
    if device() == "cpu":
        attention = sagebwd.emulation.emulated_attention
    out, lse = attention(*leaves, return_lse=True, **chosen)
    loss = (out.float() * dout).sum()
    if use_dlse:
        loss = loss + (lse * dlse).sum()
    return [x.detach() for x in (out, lse, *torch.autograd.grad(loss, leaves))]


def exactly(drawn, chosen, use_dlse):
    """PyTorch's operations compute the same in FP64."""
    layout = drawn.get("layout", "bhsd")
    (q, k, v, dout), dlse = draw(**drawn)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    q, k, v = (t.transpose(1, 2) if layout == "bshd" else t for t in leaves)
    groups = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(groups, 1).mT * q.shape[-1] ** -0.5
    if chosen.get("causal"):
        s = s.masked_fill(torch.ones_like(s[0, 0], dtype=torch.bool).triu(1), -torch.inf)
    out, lse = s.softmax(-1) @ v.repeat_interleave(groups, 1), s.logsumexp(-1)
    out = out.transpose(1, 2) if layout == "bshd" else out
    loss = (out * dout).sum()
    if use_dlse:
        loss = loss + (lse * dlse).sum()
    return [x.detach() for x in (out, lse, *torch.autograd.grad(loss, leaves))]


def train_example(rank, ranks, words, teams=1):
    """The losses of examples/long_context.py, with these arguments, where so many teams of ranks
    train, each by itself."""
    import importlib.util
    from pathlib import Path

    path = Path(__file__).parents[2] / "examples/long_context.py"
    spec = importlib.util.spec_from_file_location("long_context", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    mesh = init_device_mesh(device(), (teams, ranks), mesh_dim_names=("team", "own"))["own"]
    return module.train(module.options([*words, "--device", device()]), mesh)


def train_transformer(rank, ranks, method, wrong="", batch=1, family="Llama", again=False):
    """The loss of a step of a small model whose sequences ranks share, and its gradients, summed
    over the ranks. A Qwen3 is fused, with recompute_qk=True if it is to form them `again`."""
    import transformers

    import sagebwd.integrations.transformers as door

    mesh = init_device_mesh(device(), (ranks,))
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=100, hidden_size=128, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32)  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sagebwd", torch_dtype=torch.bfloat16).to(device())  # fmt: skip
    if family == "Qwen3":
        assert len(door.fuse(model, recompute_qk=again).fused) == 2
    tokens = torch.randint(100, (batch, 203), device=device())
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = torch.arange(inputs.shape[1], device=device())[None]
    door.use(mesh=mesh, method=method)
    try:
        ids, next_ids, places = (distributed.shard(t, mesh, dim=1, method=method)
                                 for t in (inputs, targets, positions))  # fmt: skip
        told = {"position_ids": None if wrong == "positions" else places}
        if wrong == "padding":
            told["attention_mask"] = torch.arange(ids.shape[1], device=device())[None] > 0
        found = model(ids, labels=next_ids, shift_labels=next_ids, **told).loss
        loss = found * next_ids.numel() / tokens.numel()
        loss.backward()
    finally:
        door.use()
    found = [loss.detach(), *(p.grad.float() for p in model.parameters())]
    for x in found:
        dist.all_reduce(x)
    return found if rank == 0 else None
