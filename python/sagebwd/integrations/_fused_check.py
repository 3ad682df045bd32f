"""Holds the fused forward of an attention module of transformers against the module's own.

Both forwards run on a replica of the module. It has the module's own norms and other children with
random weights, so that a gain of ones or a bias of zeros hides nothing, and in the place of the
four projections modules that give random tensors: what these compute is the same before and after,
be they wrapped by PEFT, sharded, quantised or on the meta device. In the place of attention is a
function that records what it is given and adds it up with random factors, because attention itself
would blur a difference in the queries, and hide a lost window. Compared are the queries, keys and
values, every keyword, what the cache is given, the output, and the gradients in the queries, keys,
values and all weights, in training without a cache and in evaluation with one.
"""

import copy
import inspect
from typing import NamedTuple

import torch

from sagebwd.core import ops
from sagebwd.integrations._fused_forward import CACHES, Plan, attribute, code_of, fused_class
from sagebwd.integrations._fused_parts import (
    BATCH,
    PROJECTIONS,
    TOKENS,
    Draws,
    Unfit,
    called,
    check_parts,
    is_near,
    norm_of,
    replica,
    rope_of,
    tables_of,
)

_NAME = "sagebwd: what a fused layer gives attention"
#: Attributes that have what attention is handed under a name.
_SOURCES = {
    "dropout": ("attention_dropout", "config.attention_dropout"),
    "scaling": ("scaling",),
    "sliding_window": ("sliding_window", "config.sliding_window"),
    "s_aux": ("sinks",),
    "softcap": ("attn_logit_softcapping", "config.attn_logit_softcapping"),
    "is_causal": ("is_causal",),
}  # fmt: skip
#: Values of their own show where a number comes from.
_NUMBERS = {
    "scaling": 0.7, "attention_dropout": 0.25, "sliding_window": 3,
    "attn_logit_softcapping": 11.0, "config.attention_dropout": 0.375, "config.sliding_window": 4,
    "config.attn_logit_softcapping": 13.0,
}  # fmt: skip


class _Given(torch.nn.Module):
    """This stands for a projection: it keeps what it gets, and gives a tensor."""

    def __init__(self, value):
        super().__init__()
        self.value, self.inputs = torch.nn.Parameter(value), []

    def forward(self, x):
        self.inputs.append(x)
        return self.value * 1  # somebody may clamp it in place


class _Kept(torch.nn.Module):
    """This stands for the projection of the output."""

    def forward(self, x):
        return x


def _replica_of_layer(module, draws):
    """The module with stand-ins for its projections, and a number of its own for each attribute."""
    stand_ins = {"o_proj": _Kept()}
    for name in PROJECTIONS[:3]:
        value = draws(BATCH, TOKENS, getattr(module, name).out_features)
        if draws.dtype == torch.float32:  # eps counts for small tokens, and a clamp for large ones
            sizes = torch.logspace(-4, 4, TOKENS, device=draws.device)
            value = value * torch.stack([sizes, sizes.flip(0)])[..., None]
        stand_ins[name] = _Given(value)
    made = replica(module, draws, stand_ins)
    made.config = copy.copy(module.config)
    made.config.__dict__["_attn_implementation_internal"] = _NAME
    for path, number in _NUMBERS.items():
        owner, name = (made.config, path[7:]) if path.startswith("config.") else (made, path)
        if getattr(owner, name, None) is not None:
            setattr(owner, name, number)
    return made


# ---- both forwards -------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """This tells all that a forward did."""

    tensors: dict  #: those that have to be near each other, by what they are
    attention: tuple  #: the mask, and what is beside it in keywords
    cache: list  #: what the cache's update was given beside tensors
    beside: object  #: the second of the two results


class _Cache:
    def __init__(self):
        self.calls = []

    def update(self, key, value, *given, **more):
        self.calls.append((given, more))
        return key, value


def _run(made, given, cache_name, keywords):
    """Calls the forward of a replica, and gives what it did. Keywords and a cache come by name."""
    calls, cache, beside = [], _Cache(), object()
    functions = code_of(type(made)).__globals__["ALL_ATTENTION_FUNCTIONS"]
    draws = Draws(given[0].dtype, given[0].device)

    def attend(module, query, key, value, attention_mask, **handed):
        calls.append(((query, key, value), attention_mask, handed))
        if key.shape != value.shape or query.shape[1] % key.shape[1]:
            raise Unfit("its queries, keys and values have heads that do not belong together")
        groups = query.shape[1] // key.shape[1]
        sums = query * draws(*query.shape)
        for t in (key, value):
            sums = sums + t.repeat_interleave(groups, 1) * draws(*query.shape)
        return sums.transpose(1, 2), beside

    parameters = dict(made.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    for name in PROJECTIONS[:3]:
        getattr(made, name).inputs.clear()
    functions[_NAME] = attend
    device = given[0].device
    of_gpus = [device] if device.type == "cuda" else []
    try:  # a module may draw numbers of its own, for dropout
        with torch.enable_grad(), ops.no_autocast(device.type), torch.random.fork_rng(of_gpus):
            results = made.forward(*given, **{cache_name: None if made.training else cache},
                                   **keywords)  # fmt: skip
            if len(calls) != 1 or not isinstance(results, tuple) or len(results) != 2:
                raise Unfit("it does not call attention once and give two results")
            out, second = results
            (out * draws(*out.shape)).sum().backward()
    finally:
        del functions[_NAME]
    ((qkv, mask, handed),) = calls
    tensors = {"the output": out, **dict(zip(("queries", "keys", "values"), qkv))}
    for name in PROJECTIONS[:3]:
        tensors |= {f"input {i} of {name}": x for i, x in enumerate(getattr(made, name).inputs)}
    tensors |= {f"the gradient of {name.removesuffix('.value')}": parameter.grad
                for name, parameter in parameters.items()}  # fmt: skip
    return _Seen(tensors, (mask, handed), cache.calls, second is beside)


def _runs(made, kind, *given):
    """Runs the forward of a class, in training and in evaluation."""
    made.__class__ = kind
    return [_run(made.train(training), *given) for training in (True, False)]


def _of_cache(calls):
    """Gives `Plan.of_cache` for the update that a cache has seen."""
    if len(calls) != 1 or not calls[0][0]:
        raise Unfit("it does not hand its cache the keys and values once, with the layer's number")
    (_, *given), more = calls[0]
    if not given and not more:
        return ()
    if not given and list(more) == ["kwargs"]:
        return "kwargs"
    told = given[0] if len(given) == 1 else None
    known = {"cos", "sin", "cache_position", "sliding_window"}
    if more or not isinstance(told, dict) or not told.keys() <= known:
        raise Unfit("it hands its cache more than is known")
    return tuple(told)


def _handed(made, handed, keywords):
    """Finds where the keywords of attention come from that are not the caller's."""
    found = []
    for name, value in handed.items():
        if name in keywords and value is keywords[name]:
            continue
        for path in _SOURCES.get(name, ()):
            try:
                is_it = attribute(made, path) is value or attribute(made, path) == value
            except AttributeError:
                continue
            if is_it:
                found.append((name, path))
                break
        else:
            if name in _SOURCES and value is None:  # as in layers without a window
                found.append((name, ""))
                continue
            raise Unfit(f"it hands attention {name}={value!r}, whose source is not known")
    return tuple(found)


def _difference(new, old):
    """Tells what the fused forward does otherwise, None if nothing."""
    for what, x in old.tensors.items():
        y = new.tensors.get(what)
        if not is_near(y, x, old.tensors["queries"].dtype):
            return f"{what} would be {_distance(y, x)}"
    if new.tensors.keys() != old.tensors.keys():
        return "it would call other modules"
    if new.attention[0] is not old.attention[0]:
        return "attention would be handed another mask"
    (_, new_words), (_, old_words) = new.attention, old.attention
    others = [name for name in {**new_words, **old_words} if name not in new_words
              or name not in old_words or not _same(new_words[name], old_words[name])]  # fmt: skip
    if others:
        return f"attention would be handed another {' and '.join(others)}"
    if len(new.cache) != len(old.cache) or not all(map(_same, new.cache, old.cache)):
        return "its cache would be handed something else"
    return None if new.beside == old.beside else "its second result would be another one"


def _distance(y, x):
    if y is None or x is None or y.shape != x.shape:
        return f"{None if y is None else tuple(y.shape)}, not {None if x is None else x.shape}"
    difference = (y.detach().double() - x.detach().double()).norm() / x.detach().double().norm()
    return f"off by {float(difference):.2g} of their size"


def _same(x, y):
    """Whether two structures have the same objects, or equal numbers."""
    if isinstance(x, dict) and isinstance(y, dict):
        return x.keys() == y.keys() and all(_same(x[name], y[name]) for name in x)
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(map(_same, x, y))
    return x is y or (not isinstance(x, torch.Tensor) and x == y)


def plan_of(module, rotary, dtype, device):
    """The `Plan` of a module, after its forward and the fused one gave the same.

    Raises `Unfit` where they do not, or the module is none that is known.
    """
    check_parts(module)
    own = getattr(type(module), "original", type(module))
    code = code_of(own)
    named = tuple(name for name, p in inspect.signature(code).parameters.items()
                  if p.kind is not p.VAR_KEYWORD)[1:]  # fmt: skip
    cache_name = next((name for name in CACHES if name in named), None)
    if cache_name is None:
        raise Unfit(f"its forward has no parameter for a cache ({' or '.join(CACHES)})")
    gate = module.q_proj.out_features == 2 * getattr(module.o_proj, "in_features", 0)
    width = module.q_proj.out_features // (2 if gate else 1)
    draws = Draws(torch.float32, device)
    q_norm = norm_of(module, "q_norm", width, draws)
    k_norm = norm_of(module, "k_norm", module.k_proj.out_features, draws)
    rope = rope_of(module, rotary, draws)
    if q_norm is k_norm is rope is None:
        raise Unfit("it has neither q_norm and k_norm nor a function that rotates")
    if q_norm and k_norm and getattr(module.q_norm, q_norm.eps) != getattr(
        module.k_norm, k_norm.eps
    ):  # fmt: skip
        raise Unfit("the eps of its q_norm is not that of its k_norm")
    draws = Draws(dtype, device)
    tables, positions = None, torch.arange(TOKENS, device=device).expand(BATCH, -1)
    if rope:
        tables, positions = tables_of(module, rotary, draws)
    made = _replica_of_layer(module, draws)
    hidden = getattr(module.q_proj, "in_features", 8)
    given = (draws(BATCH, TOKENS, hidden), tables, draws(BATCH, 1, TOKENS, TOKENS))
    keywords = {"position_ids": positions, "cache_position": positions[0],
                "of_the_caller": object()}  # fmt: skip
    old = called("forward", _runs, made, own, given, cache_name, keywords)
    plan = Plan(q_norm, k_norm, rope, gate, named, _of_cache(old[1].cache),
                _handed(made, old[0].attention[1], keywords))  # fmt: skip
    reasons = []
    # Layers without positions have a function that rotates, too, and do not call it.
    for fitting in (plan, plan._replace(rope=None)):
        kind = fused_class(own, fitting)
        new = called("fused forward", _runs, made, kind, given, cache_name, keywords)
        reasons.append(next(filter(None, map(_difference, new, old)), None))
        if reasons[-1] is None:
            break
    if None not in reasons:
        raise Unfit(f"fused, {reasons[0]}{_others_of(module)}")
    if q_norm is k_norm is fitting.rope is None:
        raise Unfit("it has no norm, and does not call its function that rotates")
    return fitting


def _others_of(module):
    """A hint names what a module has and the fused forward does not call."""
    others = {name for name, _ in module.named_children()} - {*PROJECTIONS, "q_norm", "k_norm"}
    return f". It also has {', '.join(sorted(others))}, which would not be called" * bool(others)
