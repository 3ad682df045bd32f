"""`fuse` and `unfuse` of models of diffusers, and the check that a fused attention has to pass."""

import copy

import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from sagebwd.core import not_kept, ops
from sagebwd.core.options import SpecError, a_kind, yes_or_no
from sagebwd.integrations import _fused_processors as fused
from sagebwd.integrations._fusing import FuseReport, check_fused_before, nothing_fused
from sagebwd.integrations._processor_norms import unlike_an_rms_norm

#: How much queries, keys, each output and each gradient may differ in a small random call, as the
#: norm of the difference over the norm, by the dtype of the call. In 16 bits both sides round, the
#: processors of diffusers behind norm, gain and RoPE, ours once. That made differences of 1.7 unit
#: roundoffs at most (tiny models of each kind, and heads of 128 channels), of which 8 are allowed.
#: In FP32 it made 6, as sums have another order. There 2000 are allowed, as TF32, if it is in use,
#: turns such differences into about 100; in FP64 models of diffusers rotate in FP32. A gain that is
#: left out, pairs or tokens that are mistaken and a sign of sin make 0.1 and more.
_MOST = {torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8, torch.float32: 2.0**-13,
         torch.float64: 2.0**-13}  # fmt: skip
_JOINED = ", kept as well, as text and picture are joined behind it"


def fuse(model, *, recompute_qk=False):
    """Has a model's attention compute QK-norm and RoPE by `sagebwd.qk_norm_rope`.

    That is one kernel each way, in FP32 inside and with one rounding, where the processors of
    diffusers take about thirty operations and round behind norm, gain and RoPE. Projections (also
    fused ones and PEFT's), masks, attention by whatever backend is chosen, before or later, and
    output projections go on as before. Call it before fully_shard and enable_parallelism, on
    weights that are loaded; get_peft_model, set_attention_backend, fuse_qkv_projections and
    torch.compile may come before or after it. Call it again after set_attn_processor.

    Known are the processors of Wan, with norms over all heads (its self-attention), of Flux,
    Qwen-Image and HunyuanVideo, with norms of each head, and of LTX-Video, of which RoPE alone is
    fused, as each head has other angles; and models that take these processors, such as Chroma.
    Tables are taken to have each angle twice, as these models make them. Classes that derive from
    these processors are left, and so are IP-Adapters and norms that are no RMSNorm.

    Before a processor is replaced, it and the new one compute a small random call with all
    gradients, in the dtype and on the device of the weights (in FP32 on a CPU). Queries, keys,
    outputs and gradients may differ by 8 roundings of 16 bits, as ||x - y|| / ||y||, and by 2^-13
    in FP32, where TF32 may be in use.

    A norm that gets hooks or is replaced afterwards is called again, and only RoPE stays fused.

    Args:
        model: a model of diffusers, such as pipe.transformer, or a part of one; it is changed.
        recompute_qk: keep queries and keys once from the forward to the backward, which forms them
            again behind norm and RoPE, as for `sagebwd.attention`: the same bits for one more
            launch of that kernel. It needs PyTorch 2.8, and torch.compile leaves such attention out
            of its graphs. Attention that joins text and picture behind norm and RoPE (double blocks
            of Flux and HunyuanVideo, Qwen-Image) keeps what it joins, as without this option, and
            the report says so.

    Returns:
        A `FuseReport` of what is fused and of what is left and why. Attention that was fused before
        is among the fused.

    Raises:
        SpecError if nothing can be fused, with the reasons; for `recompute_qk` where all attention
        that can be fused joins text and picture, where PyTorch is too old for it, and for attention
        that was fused with another; TypeError for what is no module.
    """
    _check_module(model)
    if yes_or_no("recompute_qk", recompute_qk):
        not_kept.check_pytorch()
    done, left, new = {}, {}, []
    for name, attn in _attentions(model):
        processor = attn.processor
        again = recompute_qk and not fused.joins(attn)
        if isinstance(processor, fused.Processor):
            check_fused_before(name, processor.recompute_qk, again)
        else:
            processor, reason = _fused(attn, name)
            if reason is not None:
                left[name] = reason
                continue
            processor.recompute_qk = again
            new.append((attn, processor))
        done[name] = processor.said() + (_JOINED if recompute_qk and not again else "")
    report = FuseReport(done, left)
    if not done:
        known = ", ".join(of.rpartition(".")[2] for of in fused.PROCESSORS)
        reasons = str(report) or "It has no processors of attention"
        raise nothing_fused(model, f"{reasons}. Known are {known}", "diffusers", "transformers")
    if recompute_qk and all(said.endswith(_JOINED) for said in done.values()):
        raise SpecError(
            f"recompute_qk=True saves nothing in {type(model).__name__}, all of whose attention "
            "joins text and picture behind norm and RoPE, and keeps what it joins: leave it out"
        )
    for attn, processor in new:
        attn.set_processor(processor)
    return report


def unfuse(model):
    """Puts back the processors that `fuse` replaced, with the backend that was chosen since.

    Args:
        model: that which `fuse` was given, or a module around it, or a copy.

    Returns:
        The names of the modules, a list, which is empty where nothing was fused.

    Raises:
        TypeError for what is no module.
    """
    _check_module(model)
    names = []
    for name, attn in _attentions(model):
        processor = attn.processor
        if isinstance(processor, fused.Processor):
            fused.hand_on(processor, processor.replaced)
            attn.set_processor(processor.replaced)
            names.append(name)
    return names


def _check_module(model):
    if not isinstance(model, torch.nn.Module):
        raise TypeError(
            f"model is {a_kind(model)}: pass a model of diffusers, such as pipe.transformer"
        )


def _attentions(model):
    """(name, module) of all modules that have a processor of attention, without the wrappers of
    torch.compile and PEFT, which show the attributes of what is inside."""
    for name, module in model.named_modules():
        own = module.__dict__.get("processor", module._modules.get("processor"))
        if own is not None and hasattr(module, "set_processor"):
            yield name or type(module).__name__, module


def _fused(attn, name):
    """(the processor for an attention, None), or (None, why it has none)."""
    kind = type(attn.processor)
    found = fused.PROCESSORS.get(f"{kind.__module__}.{kind.__qualname__}")
    if found is None:
        is_adapter = "IPAdapter" in kind.__name__
        return None, (
            f"{kind.__name__} has the keys and values of an IP-Adapter as well" if is_adapter else
            f"{kind.__name__} of {kind.__module__} is not a known processor"
        )  # fmt: skip
    reason = found.left_because(attn, name) or _unlike(attn, found)
    if reason is not None:
        return None, reason
    processor = found(attn.processor)
    reason = _difference(attn, processor)
    return (processor, None) if reason is None else (None, reason)


def _unlike(attn, kind):
    """Says what in an attention's modules no processor of ours takes, or None."""
    for name in kind.norms:
        norm = getattr(attn, name, None)
        unlike = norm is not None and unlike_an_rms_norm(norm)
        if unlike:
            return f"its {name} is {unlike}"
    parameters = list(attn.parameters())
    if any(p.is_meta for p in parameters):
        return "its weights are on the meta device: load them before fuse"
    if any(hasattr(p, "device_mesh") for p in parameters):
        return "its weights are sharded already: call fuse before fully_shard and parallelize"
    return None


# ---- the check -----------------------------------------------------------------------------------


class _Recorded(TorchFunctionMode):
    """Keeps the queries and keys that PyTorch's attention is given."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is scaled_dot_product_attention:
            named = (kwargs.get(name) for name in ("query", "key"))
            self.tensors += args[:2] or named
        return function(*args, **kwargs)


def _difference(attn, processor):
    """Why a processor may not take the place of an attention's own, or None: a small random call
    and its gradients differ by more than roundings, or one of both fails.

    The call is in the weights' dtype and on their device; on a CPU in FP32 where they have 16 bits,
    unless some have fewer (layerwise casting), which only their hooks can widen.
    """
    norms = [getattr(attn, name, None) for name in processor.norms]
    like = next((p for p in (*attn.to_q.parameters(), *(p for norm in norms if norm is not None
                                                        for p in norm.parameters()))
                 if p.dtype in _MOST), None)  # fmt: skip
    if like is None:
        return "none of its weights has 16, 32 or 64 bits"
    dtype = like.dtype
    if (
        like.device.type == "cpu"
        and dtype.itemsize == 2
        and all(p.dtype in _MOST for p in attn.parameters())
    ):
        attn, dtype = copy.deepcopy(attn).float(), torch.float32
    training = {module: module.training for module in attn.modules()}
    attn.eval()  # dropout would differ
    try:
        return _compared(attn, processor, dtype, like.device)
    finally:
        for module, was in training.items():
            module.training = was


def _compared(attn, processor, dtype, device):
    results = []
    for one, whose in ((processor.replaced, "its own"), (processor, "the fused")):
        try:
            results.append(_called(attn, one, processor.sample, dtype, device))
        except Exception as error:  # whatever is wrong, the attention stays as it is
            return f"{whose} processor fails in a small random call: {_first_line(error)}"
    most = _MOST[dtype]
    for name, right in results[0].items():
        found = results[1].get(name)
        if found is None:
            return f"{name} would be missing in a small random call"
        if right.shape != found.shape or right.dtype != found.dtype:
            return (f"{name} would be {found.dtype} of {tuple(found.shape)} in place of "
                    f"{right.dtype} of {tuple(right.shape)}")  # fmt: skip
        right, found = right.double(), found.double()
        error = float((found - right).norm() / right.norm().clamp(min=1e-30))
        if not error <= most:  # nor NaN
            return f"{name} would differ by {error:.2g} in a small random call, over {most:.2g}"
    return None


def _called(attn, processor, sample, dtype, device):
    """Queries, keys, outputs and gradients of a small random call, by their names."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    one = copy.copy(processor)
    one._attention_backend, one._parallel_config = AttentionBackendName.NATIVE, None
    with torch.inference_mode(False), torch.enable_grad(), ops.no_autocast(device.type):
        given = sample(attn, draw)
        leaves = {}
        for name in ("hidden_states", "encoder_hidden_states"):
            if name in given:
                given[name] = leaves[name] = given[name].to(dtype).requires_grad_()
        leaves.update((name, p) for name, p in attn.named_parameters()
                      if "norm" in name and p.requires_grad)  # fmt: skip
        with _Recorded() as recorded:
            out = one(attn, **given)
        out = out if isinstance(out, tuple) else (out,)
        if len(recorded.tensors) != 2:
            raise SpecError("it does not call PyTorch's attention once")
        found = dict(zip(("queries", "keys"), recorded.tensors))
        found.update((f"output {i}", t) for i, t in enumerate(out) if t is not None)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        loss = sum((t.to(wide) * draw(*t.shape)).sum() for t in found.values())
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found.update((f"the gradient of {name}", g) for name, g in zip(leaves, gradients)
                 if g is not None)  # fmt: skip
    return {name: t.detach() for name, t in found.items()}


def _first_line(error):
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
