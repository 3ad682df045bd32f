"""diffusers: model.set_attention_backend("sagebwd"), once sagebwd and diffusers are imported.

    import sagebwd.integrations.diffusers                              # for options and fuse
    pipe.transformer.set_attention_backend("sagebwd")
    sagebwd.integrations.diffusers.use(precision="gradients16")        # sagebwd.attention's options
    print(sagebwd.integrations.diffusers.fuse(pipe.transformer))       # QK-norm and RoPE

For models whose attention goes by diffusers' dispatcher, as Wan's and Flux's. Others, as CogVideoX,
call PyTorch's function: for them there is `with sagebwd.sdpa():`, and the backend, for which they
would not ask, is refused. Masks of padding are taken. Other masks, dropout, context parallelism and
whatever else is not honoured are refused by name.
"""

import functools
import sys
import warnings

from sagebwd.core.compat import need

need("torch", "sagebwd.integrations.diffusers")
need("diffusers", "sagebwd.integrations.diffusers")

from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry  # noqa: E402
from diffusers.models.modeling_utils import ModelMixin  # noqa: E402

from sagebwd.core.options import SpecError  # noqa: E402
from sagebwd.integrations import _diffusers_choice  # noqa: E402
from sagebwd.integrations._fusing import FuseReport  # noqa: E402, F401
from sagebwd.integrations._options import Chosen  # noqa: E402
from sagebwd.integrations._processor_check import fuse, unfuse  # noqa: E402, F401
from sagebwd.integrations.dropins import scaled_dot_product_attention, window_bounds  # noqa: E402

NAME = "sagebwd"
_chosen = Chosen()
use = _chosen.use


def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
           enable_gqa=False, window_size=None, _parallel_config=None, **further):  # fmt: skip
    """Attention of (batch, tokens, heads, head_dim) tensors, as diffusers asks for it."""
    for name, given in further.items():
        if given is not None and given is not False:
            raise SpecError(
                f"{name}: the backend '{NAME}' does not have it; take diffusers' 'native'"
            )
    if _parallel_config is not None:
        raise SpecError(
            "_parallel_config: sagebwd computes on one GPU; parallelise the model otherwise, or "
            "take diffusers' backend 'native'"
        )
    try:
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, layout="bshd",
            **window_bounds(window_size), **_chosen.options)  # fmt: skip
    except SpecError as error:
        if not str(error).startswith("attn_mask"):
            raise
        raise SpecError(
            f"{error}. For a model that needs this mask take diffusers' backend 'native', in 'with "
            "sagebwd.sdpa(fallback=\"torch\"):', where PyTorch computes such calls"
        ) from None


def _name_backend():
    """The name among diffusers' backends, which has no other way for one from elsewhere."""
    if NAME in AttentionBackendName._value2member_map_:  # this module is imported again
        return AttentionBackendName(NAME)
    member = str.__new__(AttentionBackendName, NAME)
    member._name_, member._value_ = NAME.upper(), NAME
    AttentionBackendName._member_map_[member.name] = member
    AttentionBackendName._member_names_.append(member.name)
    AttentionBackendName._value2member_map_[NAME] = member
    return member


class _Every(set):
    """Names of arguments, all of which `attend` takes: the dispatcher leaves out, in silence, those
    that a backend is not known to take."""

    def __contains__(self, name):
        return True


_backend = _name_backend()
_AttentionBackendRegistry.register(_backend)(attend)
_names = _AttentionBackendRegistry._supported_arg_names
_names[_backend] = _Every(_names[_backend])
if _diffusers_choice.is_ours:
    _AttentionBackendRegistry.set_active_backend(_backend)


def _asks_the_dispatcher(thing):
    """Whether a module or a processor of attention may: it has a place for the name of a backend,
    or the file of its class has the dispatcher's function."""
    if hasattr(thing, "_attention_backend"):
        return True
    files = (sys.modules.get(of.__module__) for of in type(thing).__mro__)
    return any(hasattr(file, "dispatch_attention_fn") for file in files)


def _check_model(model):
    """Raises SpecError if nothing in the model asks for a backend, as PyTorch would compute it in
    silence. Warns if some of its attention does not ask."""
    processors = [getattr(module, "processor", None) for module in model.modules()]
    processors = [processor for processor in processors if processor is not None]
    others = [processor for processor in processors if not _asks_the_dispatcher(processor)]
    named = ", ".join(sorted({type(processor).__name__ for processor in others}))
    instead = "put 'with sagebwd.sdpa():' around its calls, for what calls PyTorch's function"
    if not any(map(_asks_the_dispatcher, (*model.modules(), *processors))):
        raise SpecError(
            f"set_attention_backend('{NAME}'): in {type(model).__name__} no attention asks "
            f"diffusers for a backend{f' ({named})' if named else ''}, so it would go on as "
            f"before: {instead}"
        )
    if others:
        warnings.warn(
            f"set_attention_backend('{NAME}'): {len(others)} of {len(processors)} attentions in "
            f"{type(model).__name__} do not ask diffusers for a backend and go on as before "
            f"({named}): {instead}", stacklevel=3,
        )  # fmt: skip


def _checked(set_backend):
    """ModelMixin.set_attention_backend, which by itself says nothing where nobody asks for the
    backend."""

    @functools.wraps(set_backend)
    def set_attention_backend(self, backend):
        if isinstance(backend, str) and backend.lower() == NAME:
            _check_model(self)
        return set_backend(self, backend)

    set_attention_backend.of_sagebwd = set_backend
    return set_attention_backend


_set_backend = ModelMixin.set_attention_backend
ModelMixin.set_attention_backend = _checked(getattr(_set_backend, "of_sagebwd", _set_backend))
