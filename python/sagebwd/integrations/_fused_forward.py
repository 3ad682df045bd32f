"""The forward of attention modules of transformers whose norm and RoPE are one kernel.

`_fused_check` finds a module's `Plan`, and holds what is here against what the module did before.
"""

import contextlib
import inspect
from typing import NamedTuple

import torch

from sagebwd.core.arguments.checks import SpecError, a_kind
from sagebwd.core.compat import not_compiled
from sagebwd.core.front import qk_norm_rope
from sagebwd.core.front_kernels import wide
from sagebwd.core.keywords import FRONT
from sagebwd.core.not_kept import not_kept
from sagebwd.integrations._fusing import formed_again_if

#: The names under which versions of transformers hand over the keys and values of before.
CACHES = ("cache", "past_key_values", "past_key_value")

#: A gain as the weight of a norm gives it.
GAINS = {
    "weight": lambda norm, dtype: norm.weight,
    "1 + weight": lambda norm, dtype: 1 + norm.weight.to(dtype),
    "no weight": lambda norm, dtype: True,
}


class Rope(NamedTuple):
    """A way to rotate, by the tables of a model."""

    style: str  #: as `qk_norm_rope` calls it
    angles: object  #: gives the columns of a table in which each angle is once
    again: object = None  #: gives those in which each is a second time, if it is


#: The tables (f, f) have first all angles and then all again, (f0, f0, f1, f1) each beside itself.
ROPES = {
    f"{style}, tables {form}": Rope(style, *columns)
    for style in ("halves", "interleaved")
    for form, columns in {
        "(f, f)": (lambda t: t[..., : t.shape[-1] // 2], lambda t: t[..., t.shape[-1] // 2 :]),
        "(f0, f0, f1, f1)": (lambda t: t[..., ::2], lambda t: t[..., 1::2]),
        "f": (lambda t: t,),
    }.items()
}


class Norm(NamedTuple):
    """An RMSNorm of a module: x / sqrt(mean(x^2) + eps) * gain."""

    kind: type  #: of the norm; where it is another one later on, it is called
    eps: str  #: the attribute that has eps
    gain: str  #: one of GAINS
    whole: bool  #: over all heads at once, before they are split


class Plan(NamedTuple):
    """This says what a module's forward does, as far as modules differ. It can be pickled."""

    q_norm: Norm | None
    k_norm: Norm | None
    rope: str | None  #: one of ROPES; None: positions change nothing
    gate: bool  #: whether q_proj gives each head's queries, then its gate
    named: tuple  #: the parameters of the forward, of which attention gets none
    of_cache: object  #: "kwargs", or the names in the dict that a cache's update is given
    handed: tuple  #: (keyword of attention, attribute that has its value)
    recompute_qk: bool = False  #: whether `fuse` was asked for it, as it changes no result


def is_replaced(module):
    """Whether the module's forward is not that of its class."""
    own = module.__dict__.get("forward")
    if own is None:
        return False
    # Transformers 4.5x leaves a module its own forward as an attribute after it recorded results.
    return getattr(own, "__self__", None) is not module or own.__func__ is not type(module).forward


def is_hooked(module):
    """Whether a call of the module does something beside its class's forward."""
    return bool(
        is_replaced(module) or module._forward_pre_hooks or module._forward_hooks
        or module._backward_pre_hooks or module._backward_hooks
    )  # fmt: skip


def put_class(module, kind):
    """Gives a module another class, and the forward of that."""
    if not is_replaced(module):
        module.__dict__.pop("forward", None)
    module.__class__ = kind


def attribute(module, path):
    """An attribute, or, after a dot, one of the module's config; None for an empty path."""
    if not path:
        return None
    owner, _, name = path.rpartition(".")
    return getattr(getattr(module, owner) if owner else module, name)


def _normed(module, name, x, plan):
    """(x, gain, 1/rms) for `qk_norm_rope` of (batch, tokens, heads, head_dim) tensors.

    A norm that has been given hooks since, or was replaced, such as by PEFT or fully_shard, is
    called, so that they take effect; nothing is left to do then.
    """
    if plan is None:
        return x, None, None
    norm = getattr(module, name)
    if type(norm) is not plan.kind or is_hooked(norm):
        return (norm(x.flatten(-2)).view(x.shape) if plan.whole else norm(x)), None, None
    gain = GAINS[plan.gain](norm, wide(x.dtype))
    if not plan.whole:
        return x, gain, None
    if gain is not True:
        gain = gain.view(-1, module.head_dim)
    square = x.to(wide(x.dtype)).square().mean((-2, -1))
    return x, gain, (square + getattr(norm, plan.eps)).rsqrt()


def _eps(module, plan):
    """The eps of norms of each head; that over all heads is in 1/rms."""
    found = [getattr(getattr(module, name), norm.eps)
             for name, norm in (("q_norm", plan.q_norm), ("k_norm", plan.k_norm))
             if norm and not norm.whole and type(getattr(module, name)) is norm.kind]  # fmt: skip
    if found and found[0] != found[-1]:
        raise SpecError(
            f"q_norm has eps={found[0]} and k_norm {found[-1]}, and the fused kernel takes one: "
            "give both the same, or call unfuse(model)"
        )
    return found[0] if found else FRONT["norm_eps"]


def _front(module, plan, q, k, tables):
    """Queries and keys, (batch, heads, tokens, head_dim), as attention takes them."""
    q, q_gain, q_inv_rms = _normed(module, "q_norm", q, plan.q_norm)
    k, k_gain, k_inv_rms = _normed(module, "k_norm", k, plan.k_norm)
    style, rope = "halves", None
    if plan.rope is not None:
        style = ROPES[plan.rope].style
        rope = tuple(ROPES[plan.rope].angles(t) for t in tables)
    q, k = qk_norm_rope(
        q, k, q_norm=q_gain, k_norm=k_gain, norm_eps=_eps(module, plan), q_inv_rms=q_inv_rms,
        k_inv_rms=k_inv_rms, rope=rope, rope_style=style, layout="bshd")  # fmt: skip
    return q.transpose(1, 2), k.transpose(1, 2)


def _updated(module, plan, cache, k, v, tables, kept, more):
    """Keys and values with those of before."""
    if plan.of_cache == "kwargs":
        return cache.update(k, v, module.layer_idx, kwargs=more)
    if not plan.of_cache:
        return cache.update(k, v, module.layer_idx)
    has = {**kept, **dict(zip(("cos", "sin"), tables or ())),
           "sliding_window": getattr(module, "sliding_window", None)}  # fmt: skip
    return cache.update(k, v, module.layer_idx, {name: has.get(name) for name in plan.of_cache})


def _attention(module, asked_for_weights):
    """The function that the model's config names, among those of the model's file."""
    name, functions, eager = module.config._attn_implementation, module.functions, module.eager[0]
    if hasattr(functions, "get_interface"):
        return functions.get_interface(name, eager)
    # Before transformers 5, modules themselves sent those who want weights from sdpa to eager.
    is_eager = name == "eager" or (name == "sdpa" and asked_for_weights)
    return eager if is_eager else functions[name]


def _attended(module, q, k, v, tables, mask, cache, kept, more):
    """What attention gives for the results of projections, which are not normed and rotated yet."""
    plan = module.plan
    q, k = _front(module, plan, q, k, tables)
    with not_kept(q, k) if plan.recompute_qk else contextlib.nullcontext():
        if cache is not None:
            k, v = _updated(module, plan, cache, k, v, tables, kept, more)
        handed = {name: attribute(module, path) for name, path in plan.handed}
        if "dropout" in handed and not module.training:
            handed["dropout"] = 0.0
        attend = _attention(module, more.get("output_attentions"))
        return attend(module, q, k, v, mask, **handed, **more)


_attended_and_not_kept = not_compiled("a layer that is fused with recompute_qk=True")(_attended)


def forward(module, hidden_states, position_embeddings, attention_mask, given, more):
    """The results of the module's own forward: (hidden states, what attention gives beside)."""
    plan = module.plan
    more.update(zip(plan.named[3:], given))
    cache = None
    for name in CACHES:
        if (before := more.pop(name, None)) is not None:
            cache = before
    kept = {name: more.pop(name) for name in plan.named[3:] if name in more}
    if plan.rope is not None and not isinstance(position_embeddings, (tuple, list)):
        raise TypeError(
            f"position_embeddings is {a_kind(position_embeddings)}: pass (cos, sin), as the "
            "model's rotary_emb gives them"
        )
    shape = hidden_states.shape[:-1]
    channels, gate = module.head_dim, None
    if plan.gate:
        q, gate = module.q_proj(hidden_states).view(*shape, -1, 2 * channels).chunk(2, -1)
    else:
        q = module.q_proj(hidden_states).view(*shape, -1, channels)
    k = module.k_proj(hidden_states).view(*shape, -1, channels)
    v = module.v_proj(hidden_states).view(*shape, -1, channels).transpose(1, 2)
    attended = _attended_and_not_kept if plan.recompute_qk else _attended
    out, beside = attended(module, q, k, v, position_embeddings, attention_mask, cache, kept, more)
    out = out.reshape(*shape, -1).contiguous()
    if gate is not None:
        out = out * torch.sigmoid(gate.flatten(-2))
    return module.o_proj(out), beside


class Fused:
    """Goes before the class of an attention module. The module is the same object, with the same
    parameters, hooks and children; the plan belongs to the class. So there is nothing that a copy,
    a state dict, a checkpoint or FSDP could lose, and torch.compile sees another class."""

    plan: Plan
    original: type
    functions: object  #: attention by its names
    eager: tuple  #: the function for attn_implementation="eager" alone, as it is no method

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, *given, **more):
        return forward(self, hidden_states, position_embeddings, attention_mask, given, more)

    def extra_repr(self):
        said = super().extra_repr()
        return f"{said}{', ' if said else ''}fused: {described(self.plan)}"

    def __reduce_ex__(self, protocol):
        """A class that was made here has no place where pickle would find it."""
        reduced = super().__reduce_ex__(protocol)
        if type(self) is not fused_class(self.original, self.plan):
            return reduced
        return (_unpickled, (self.original, self.plan), *reduced[2:])


def code_of(kind):
    """The function of a class's own forward, below its decorators."""
    return inspect.unwrap(getattr(kind, "original", kind).forward)


_classes = {}


def fused_class(original, plan):
    """The class of modules that were of class `original`."""
    known = code_of(original).__globals__
    functions, eager = (known.get(name) for name in ("ALL_ATTENTION_FUNCTIONS",
                                                     "eager_attention_forward"))  # fmt: skip
    key = original, plan, id(functions), eager
    if key not in _classes:  # where they stay, and with them what has this id
        _classes[key] = type(f"Fused{original.__name__}", (Fused, original), {
            "plan": plan, "original": original, "functions": functions, "eager": (eager,),
            "__doc__": original.__doc__})  # fmt: skip
    return _classes[key]


def _unpickled(original, plan):
    kind = fused_class(original, plan)
    return kind.__new__(kind)


def described(plan):
    """A few words on what is fused."""
    norms = [norm for norm in (plan.q_norm, plan.k_norm) if norm]
    parts = []
    if norms:
        over = "all heads at once" if norms[0].whole else "each head"
        of = "" if len(norms) == 2 else " of queries" if plan.q_norm else " of keys"
        parts.append(f"RMSNorm over {over}{of} (gain: {norms[0].gain})")
    if plan.rope:
        parts.append(f"RoPE ({plan.rope})")
    return " and ".join(parts) + formed_again_if(plan.recompute_qk)
