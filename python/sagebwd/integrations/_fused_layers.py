"""`fuse` and `unfuse`: QK-norm and RoPE of models of transformers in one kernel each way."""

import torch

from sagebwd.core import not_kept
from sagebwd.core.arguments.checks import SpecError, a_kind, yes_or_no
from sagebwd.integrations._fused_check import plan_of
from sagebwd.integrations._fused_forward import (
    Fused,
    described,
    fused_class,
    is_hooked,
    is_replaced,
    put_class,
)
from sagebwd.integrations._fused_parts import EPS, PROJECTIONS, Unfit, layer_type
from sagebwd.integrations._fusing import FuseReport, check_fused_before, nothing_fused


def fuse(model, *, recompute_qk=False):
    """Computes QK-norm and RoPE of a model's queries and keys by `sagebwd.qk_norm_rope`.

    That is one kernel each way instead of about a dozen for each of both, in FP32 inside, with one
    rounding instead of up to five. Projections (also PEFT's), cache, attention, whatever its
    implementation, gates and the projection of the output go on as before. Call it before or after
    moving the model, get_peft_model, fully_shard and torch.compile, but before hooks of accelerate
    (device_map="auto"), as these replace forwards.

    A module is fused by what it has: q_proj, k_proj, v_proj and o_proj, q_norm and k_norm that are
    RMSNorm over a head or over all heads, with a gain of weight or 1 + weight, and a function that
    rotates in a known way. It gets a subclass of its class, with another forward, so that it stays
    the same object. Before that both forwards run, on random numbers, in FP32 and in the
    model's dtype on its device (on the CPU for a model on the meta device), in training and in
    evaluation. All that they give to attention, to the cache and back, and all gradients, have to
    be equal to 16 roundings of that dtype (1e-6 in FP32, as ||x - y|| / ||y||).

    A norm that gets hooks or is replaced afterwards is called again, and only RoPE stays fused.
    As `qk_norm_rope` is, fused models are differentiable once, and by autograd alone.

    Args:
        model: a model of transformers, or a module around it, such as PEFT's; it is changed.
        recompute_qk: keep queries and keys once from the forward to the backward, which forms them
            again behind norm and RoPE, as for `sagebwd.attention`: the same bits for one more
            launch of that kernel a layer. It needs PyTorch 2.8, and torch.compile leaves attention
            with its norm and RoPE out of its graphs. Attention that copies its queries and keys,
            as eager attention with fewer key heads and ranks with method='ulysses' do, keeps the
            copies.

    Returns:
        A `FuseReport` of what is fused and of what is left and why. Modules that were fused before
        are among the fused.

    Raises:
        SpecError if nothing can be fused, with the reasons, for modules that were fused with
        another `recompute_qk`, and where PyTorch is too old for it; TypeError for what is no
        module.
    """
    _check_model(model)
    if yes_or_no("recompute_qk", recompute_qk):
        not_kept.check_pytorch()
    modules = dict(model.named_modules())
    plans, known, left = {}, {}, {}
    for name, module in modules.items():
        if not _is_attention(name, module):
            continue
        if isinstance(module, Fused):
            check_fused_before(name, module.plan.recompute_qk, recompute_qk)
            plans[name] = module.plan
            continue
        rotary = _rotary_above(name, modules)
        kind = _kind_of(module, rotary)
        if kind not in known:
            known[kind] = _examined(module, rotary)
        plan, reason = known[kind]
        if plan is None:
            left[name] = reason
        else:
            plans[name] = plan._replace(recompute_qk=recompute_qk)
    report = FuseReport({name: described(plan) for name, plan in plans.items()}, left)
    if not plans:
        reasons = str(report) or "It has no modules of attention"
        raise nothing_fused(model, reasons, "transformers", "diffusers")
    for name, plan in plans.items():
        if not isinstance(modules[name], Fused):
            put_class(modules[name], fused_class(type(modules[name]), plan))
    return report


def unfuse(model):
    """Gives the modules that `fuse` has changed their own forward again.

    Args:
        model: that which `fuse` was given, or a module around it, or a copy.

    Returns:
        The names of the modules, a list, which is empty where nothing was fused.

    Raises:
        SpecError for a module whose forward was replaced after `fuse`, such as by hooks of
        accelerate, before anything is changed; TypeError for what is no module.
    """
    _check_model(model)
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, Fused)]
    if replaced := [name for name, module in found if is_replaced(module)]:
        raise SpecError(
            f"the forward of {', '.join(replaced)} was replaced after fuse, and calls the fused "
            "one: take that back first, such as by accelerate.hooks.remove_hook_from_submodules"
        )
    for _, module in found:
        put_class(module, _without(type(module)))
    return [name for name, _ in found]


def _without(kind):
    """The class of a module that is no longer fused; fully_shard may have put its own before."""
    if kind.__bases__[0] is Fused:
        return kind.original
    own = {name: value for name, value in vars(kind).items()
           if name not in ("__dict__", "__weakref__")}  # fmt: skip
    bases = (_without(base) if issubclass(base, Fused) else base for base in kind.__bases__)
    return type(kind.__name__.replace("Fused", ""), tuple(bases), own)


def _check_model(model):
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {a_kind(model)}: pass a model of transformers")


def _is_attention(name, module):
    """Whether a module has to be in the report: those that are called attention are, and so are
    those with projections of queries or keys."""
    if not any(True for _ in module.children()):
        return False
    names = (name.rpartition(".")[2], type(module).__name__)
    return any(hasattr(module, part) for part in PROJECTIONS[:2]) or any(
        of.endswith(("attn", "attention", "Attention")) for of in names)  # fmt: skip


def _rotary_above(name, modules):
    """The rotary_emb of the nearest module around, None without one."""
    while name:
        name = name.rpartition(".")[0]
        around = modules[name]
        rotary = getattr(around, "rotary_emb", getattr(around, "rotary_embs", None))
        if isinstance(rotary, torch.nn.ModuleDict):  # Olmo 3 has one for each kind of layers
            rotary = next(iter(rotary.values()))
        if isinstance(rotary, torch.nn.Module):
            return rotary
    return None


def _kind_of(module, rotary):
    """Modules of which this is the same are fused alike: one of them is examined."""
    plain = tuple((name, value) for name, value in sorted(vars(module).items())
                  if isinstance(value, (bool, int, float, str, type(None)))
                  and name not in ("layer_idx", "training"))  # fmt: skip
    children = tuple(
        (name, type(child), is_hooked(child), getattr(child, "out_features", None),
         *(getattr(child, eps, None) for eps in EPS),
         tuple(getattr(getattr(child, "weight", None), "shape", ())))
        for name, child in module.named_children()
    )  # fmt: skip
    config = getattr(module, "config", None)
    return (type(module), layer_type(module), is_replaced(module), id(config), id(rotary), plain,
            children)  # fmt: skip


def _examined(module, rotary):
    """(plan, None) or (None, reason)."""
    floats = [p for p in module.parameters() if p.is_floating_point()]
    device = floats[0].device if floats and not floats[0].is_meta else torch.device("cpu")
    dtypes = {torch.float32, *(p.dtype for p in floats if p.dtype.itemsize == 2)}
    try:
        with torch.inference_mode(False):  # in which there are no gradients
            # FP32, whose bound is close, is first.
            plans = [plan_of(module, rotary, dtype, device)
                     for dtype in sorted(dtypes, key=str, reverse=True)]  # fmt: skip
    except Unfit as reason:
        return None, str(reason)
    except Exception as error:  # of code that belongs to models: the others may be fused
        return None, f"examining it raises {type(error).__name__}: {error}"
    return plans[0], None
