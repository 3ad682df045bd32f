"""Finds out what an attention module of transformers has: its norms, and how it rotates.

All of it is found by what the module's own functions compute of random numbers, and not by their
names. The module's tensors are left alone: replicas have weights of their own, so that this works
for modules whose parameters are sharded or on the meta device, too.
"""

import inspect
from collections import OrderedDict

import torch

from sagebwd.core.arguments.checks import a_kind
from sagebwd.core.front import qk_norm_rope
from sagebwd.integrations._fused_forward import GAINS, ROPES, Norm, code_of, is_hooked, is_replaced

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
BATCH, TOKENS = 2, 5

#: Results may differ by so many times the rounding of one number, as ||x - y|| / ||y||. A module
#: rounds up to five times (norm, gain, two products and their sum) where the kernel does once, and
#: its sums over channels are of another order. Families of tests/python/fused_models.py differ by
#: 0 to 1.6 roundings. 16 leaves room for GPUs and wide layers, and is 1e-6 in FP32 and 6 % in
#: bfloat16, where other pairs of channels, another gain, and none, are off by 26 % or more.
ROUNDINGS = 16

EPS = ("eps", "variance_epsilon", "epsilon")


class Unfit(Exception):
    """Why a module cannot be fused, in whole sentences."""


def rotary_of(module):
    """(name, function) with which a module rotates, or (None, None)."""
    code = code_of(type(module))
    found = [
        name
        for name in code.__code__.co_names
        if ("rotary" in name or "rope" in name) and callable(code.__globals__.get(name))
    ]
    if len(found) > 1:
        raise Unfit(f"it calls {' and '.join(found)}, and one function that rotates is known")
    return (found[0], code.__globals__[found[0]]) if found else (None, None)


def check_parts(module):
    """Unfit for a module that is built in another way."""
    missing = [name for name in PROJECTIONS if not isinstance(getattr(module, name, None),
                                                              torch.nn.Module)]  # fmt: skip
    if missing:
        raise Unfit(f"it has no {', '.join(missing)}")
    if is_replaced(module):
        raise Unfit("its forward was replaced, such as by hooks of accelerate: fuse before that")
    code = code_of(type(module))
    if "ALL_ATTENTION_FUNCTIONS" not in code.__code__.co_names:
        if "super" in code.__code__.co_names:
            raise Unfit(f"{code.__qualname__} calls another class's forward, and what it does "
                        "beside that would be lost: write that forward out, or take the other "
                        "class")  # fmt: skip
        raise Unfit("it asks transformers for no function of attention by its name")
    if any(isinstance(x, str) and "flash" in x for x in code.__code__.co_consts):
        raise Unfit("its forward does something else for flash-attention, which is not tried here")
    if not hasattr(module, "config") or not isinstance(getattr(module, "head_dim", None), int):
        raise Unfit("it has no config or head_dim")
    parameters = inspect.signature(code).parameters
    names = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    order = names[1:4] == ["hidden_states", "position_embeddings", "attention_mask"]
    if not order or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        raise Unfit(f"its forward takes ({', '.join(names[1:])}), and not hidden_states, "
                    "position_embeddings, attention_mask, a cache and keywords")  # fmt: skip
    for name in PROJECTIONS:
        if not isinstance(getattr(getattr(module, name), "out_features", None), int):
            raise Unfit(f"its {name} ({type(getattr(module, name)).__name__}) has no out_features")


# ---- replicas ------------------------------------------------------------------------------------


class Draws:
    """Random tensors, which leave PyTorch's own generators alone."""

    def __init__(self, dtype, device):
        self.generator = torch.Generator("cpu").manual_seed(0)
        self.dtype, self.device = dtype, device

    def __call__(self, *shape):
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return drawn.to(self.device, self.dtype)

    def like(self, t):
        """A weight: 1 on average, as a gain of zeros would hide the rest."""
        return 1 + 0.3 * self(*t.shape)


def _bare(module):
    """A module of the same class that shares the tensors, and has neither hooks nor children that
    belong to the other as well."""
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    made.__dict__.pop("forward", None)
    for name, value in module.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, dict):
            made.__dict__[name] = OrderedDict()
    for name in ("_parameters", "_buffers", "_modules"):
        made.__dict__[name] = dict(module.__dict__[name])
    return made


def replica(module, draws, replaced=None):
    """The module with random parameters, and buffers that are its own where they have numbers."""
    made, replaced = _bare(module), replaced or {}
    for name, parameter in made._parameters.items():
        if parameter is not None:
            made._parameters[name] = torch.nn.Parameter(draws.like(parameter))
    for name, buffer in made._buffers.items():
        if buffer is not None:
            made._buffers[name] = draws.like(buffer) if buffer.is_meta else buffer.detach().clone()
    for name, child in made._modules.items():
        if child is not None:
            made._modules[name] = replaced.get(name) or replica(child, draws)
    return made


def tables_of(module, rotary, draws):
    """((cos, sin), positions) of the model's own rotary module, (batch, tokens, columns)."""
    if rotary is None:
        raise Unfit("no module above it in what was given has a rotary_emb, which would show its "
                    "tables: pass the whole model")  # fmt: skip
    if any(True for _ in rotary.parameters()):
        raise Unfit(f"{type(rotary).__name__} has parameters, and tables get no gradient")
    rotary = replica(rotary, draws)
    takes = inspect.signature(rotary.forward).parameters
    given = {"layer_type": layer_type(module)} if "layer_type" in takes else {}
    # Some models scale queries by positions that are larger than any in their training.
    positions = torch.tensor([[1], [300_000]], device=draws.device)
    positions = positions + 3 * torch.arange(TOKENS, device=draws.device)
    x = draws(BATCH, TOKENS, 8)
    tables = called(type(rotary).__name__, rotary.forward, x, positions, **given)
    if not isinstance(tables, (tuple, list)) or len(tables) != 2 or any(
        t.dim() != 3 or t.is_complex() for t in tables
    ):  # fmt: skip
        raise Unfit(f"{type(rotary).__name__} gives no (cos, sin) of (batch, tokens, channels)")
    return tuple(tables), positions


def layer_type(module):
    """The name of the module's kind of layers, which may have tables of its own, or None."""
    for name in ("layer_type", "attention_type"):
        if isinstance(getattr(module, name, None), str):
            return getattr(module, name)
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    number = getattr(module, "layer_idx", None)
    return None if kinds is None or number is None else kinds[number]


def called(name, function, *given, **more):
    """The result of a model's function; Unfit where it raises anything."""
    try:
        with torch.no_grad():
            return function(*given, **more)
    except Unfit:
        raise
    except Exception as error:
        raise Unfit(f"its {name} raises {type(error).__name__}: {error}") from error


# ---- what a module has ---------------------------------------------------------------------------


def is_near(x, y, dtype):
    """Whether tensors are as near as both ways to round make them."""
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.shape != y.shape:
        return x is y
    x, y = x.detach().double(), y.detach().double()
    return bool((x - y).norm() <= ROUNDINGS * torch.finfo(dtype).eps / 2 * y.norm())


def norm_of(module, name, width, draws):
    """The `Norm` under a name, None where the module has none; Unfit for other kinds."""
    norm = getattr(module, name, None)
    if norm is None:
        return None
    if not isinstance(norm, torch.nn.Module):
        raise Unfit(f"its {name} is {a_kind(norm)}")
    said = f"its {name} ({type(norm).__name__})"
    if is_hooked(norm):
        raise Unfit(f"{said} has hooks or a forward of its own, which would not be called")
    if type(norm) is torch.nn.Identity:
        return None
    if any(True for _ in norm.children()):
        raise Unfit(f"{said} has modules within, which would not be called: fuse before PEFT or "
                    "others wrap it")  # fmt: skip
    eps = next((x for x in EPS if isinstance(getattr(norm, x, None), float)), None)
    if eps is None:
        raise Unfit(f"{said} has no eps that is a number: RMSNorm has one")
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.dim() != 1:  # Cohere's use_qk_norm
        raise Unfit(f"{said} has a weight of {tuple(weight.shape)}: RMSNorm of each head has "
                    f"({module.head_dim},), and over all heads ({width},)")  # fmt: skip
    whole = weight is not None and weight.numel() == width != module.head_dim
    if weight is not None and not whole and weight.numel() != module.head_dim:
        raise Unfit(f"{said} has a weight of {weight.numel()} numbers: RMSNorm of each head has "
                    f"{module.head_dim}, and over all heads {width}")  # fmt: skip
    made = replica(norm, draws)
    x = draws(TOKENS, width if whole else module.head_dim)
    x = x * torch.logspace(-4, 0, TOKENS, device=x.device, dtype=x.dtype)[:, None]
    unit = x * (x.square().mean(-1, keepdim=True) + getattr(norm, eps)).rsqrt()
    found = called(name, made.forward, x)
    with torch.no_grad():
        for gain, formed in GAINS.items():
            if (gain == "no weight") == (weight is None) and is_near(
                found, unit * formed(made, x.dtype), x.dtype
            ):  # fmt: skip
                return Norm(type(norm), eps, gain, whole)
    raise Unfit(f"{said} is not RMSNorm with a gain of weight or 1 + weight")


def rope_of(module, rotary, draws):
    """One of ROPES, None where the module has no function that rotates."""
    name, rotate = rotary_of(module)
    if rotate is None:
        return None
    tables, _ = tables_of(module, rotary, draws)
    q, k = (draws(BATCH, heads, TOKENS, module.head_dim) for heads in (4, 2))
    found = called(f"{name}(q, k, cos, sin)", rotate, q, k, *tables)
    for rope, (style, angles, again) in ROPES.items():
        once = tuple(angles(t) for t in tables)
        is_right = again is None or all(torch.equal(x, again(t)) for x, t in zip(once, tables))
        if not is_right or 2 * once[0].shape[-1] > module.head_dim:
            continue
        with torch.no_grad():
            wanted = qk_norm_rope(q, k, rope=once, rope_style=style)
        if isinstance(found, (tuple, list)) and len(found) == 2 and all(
            is_near(x, y, draws.dtype) for x, y in zip(found, wanted)
        ):  # fmt: skip
            return rope
    raise Unfit(
        f"{name} of {code_of(type(module)).__module__} rotates in none of the known ways ("
        f"{'; '.join(ROPES)})"
    )
