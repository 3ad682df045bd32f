"""diffusers: model.set_attention_backend("sagebwd"), once this module is imported.

    import sagebwd.integrations.diffusers
    pipe.transformer.set_attention_backend("sagebwd")
    sagebwd.integrations.diffusers.use(precision="gradients16")        # sagebwd.attention's options

For models whose attention goes by diffusers' dispatcher, as Wan's and Flux's. Others, as CogVideoX,
call PyTorch's function: for them there is `with sagebwd.sdpa():`, which serves all. Masks, dropout,
context parallelism and whatever else is not honoured are refused by name.
"""

from sagebwd._needs import need

need("torch", "sagebwd.integrations.diffusers")
need("diffusers", "sagebwd.integrations.diffusers")

from diffusers.models.attention_dispatch import (  # noqa: E402
    AttentionBackendName,
    _AttentionBackendRegistry,
)

from sagebwd.dropins import scaled_dot_product_attention, window_bounds  # noqa: E402
from sagebwd.integrations._options import Chosen  # noqa: E402
from sagebwd.options import SpecError  # noqa: E402

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
    if attn_mask is not None:
        raise SpecError(
            f"attn_mask: the backend '{NAME}' has no masks except sliding windows (window_size in "
            "attention_kwargs): leave the mask out, or take diffusers' backend 'native'"
        )
    return scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, layout="bshd",
        **window_bounds(window_size), **_chosen.options)  # fmt: skip


def _name_backend():
    """The name among diffusers' backends, which has no other way for one from elsewhere."""
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
