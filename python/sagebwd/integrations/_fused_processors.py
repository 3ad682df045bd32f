"""Attention processors of diffusers whose QK-norm and RoPE of queries and keys are one kernel.

Each stands in for one class of diffusers and takes what that takes. Projections, masks, attention
and output projections are the model's, attention by the backend that is chosen. Queries, keys and
values are (batch, tokens, heads, head_dim) here, as the dispatcher of diffusers takes them. All
these models rotate neighbouring channels, and their tables have each angle twice.
"""

import contextlib
import functools
import importlib

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from sagebwd.core.compat import not_compiled
from sagebwd.core.not_kept import not_kept
from sagebwd.core.options import SpecError
from sagebwd.integrations._fusing import formed_again_if
from sagebwd.integrations._processor_norms import of_each_head, over_all_heads, turned

WITHOUT_ROPE = "cross-attention has no RoPE, and recent versions of PyTorch norm by one kernel"
_WHERE = "diffusers.models.transformers.transformer_"


def _table(cos, sin, device):
    """(cos, sin) with each angle once; they are copied once here, and not for q and k each."""
    return tuple(t.to(device)[..., ::2].contiguous() for t in (cos, sin))


def _rows(rope, begin=None, end=None):
    """The table of some of the tokens."""
    return None if rope is None else tuple(t[begin:end] for t in rope)


def _left_out_if_asked(call):
    """A processor's call, which compilers leave out of their graphs if it forms queries and keys
    again in the backward."""
    left_out = not_compiled("attention that is fused with recompute_qk=True")(call)

    @functools.wraps(call)
    def wrapper(self, *given, **named):
        return (left_out if self.recompute_qk else call)(self, *given, **named)

    return wrapper


class Processor:
    """What the processors share. diffusers sets the two attributes with an underscore."""

    _attention_backend = None
    _parallel_config = None
    replaces = ""  #: the class of diffusers, whose arguments and results are those of a call here
    what = "QK-norm of each head and RoPE"  #: what is fused
    norms = ()  #: the names of an attention's norms; those of text come last
    recompute_qk = False  #: whether queries and keys are formed again in the backward

    def __init_subclass__(cls):
        cls.__call__ = _left_out_if_asked(cls.__call__)

    def __init__(self, replaced=None):
        """`replaced`: what `unfuse` puts back. diffusers makes processors without it, such as when
        it loads IP-Adapters."""
        if replaced is None:
            module, _, name = self.replaces.rpartition(".")
            replaced = getattr(importlib.import_module(module), name)()
        self.replaced = replaced
        hand_on(replaced, self)

    @staticmethod
    def left_because(attn, name):
        """Why an attention of this class's kind is not fused, or None. `name`: in its model."""

    @classmethod
    def sample(cls, attn, draw):
        """The arguments of a small random call; `draw(*shape)` gives normal numbers."""
        raise NotImplementedError  # each kind of processor has its own

    def said(self):
        """What is fused, for the report."""
        return self.what + formed_again_if(self.recompute_qk)

    def attend(self, query, key, value, mask):
        """Attention by the backend that was chosen; (batch, tokens, channels)."""
        further = {}
        if self._parallel_config is not None:  # which older versions of diffusers do not have
            further["parallel_config"] = self._parallel_config
        with not_kept(query, key) if self.recompute_qk else contextlib.nullcontext():
            out = dispatch_attention_fn(query, key, value, attn_mask=mask,
                                        backend=self._attention_backend, **further)  # fmt: skip
        return out.flatten(2, 3).to(query.dtype)


def _drawn_table(draw, tokens, channels, *batch):
    """(cos, sin) of (*batch, tokens, channels), with each angle twice."""
    angles = draw(*batch, tokens, channels // 2).repeat_interleave(2, -1)
    return angles.cos(), angles.sin()


def joins(attn):
    """Whether text and picture are normed and rotated each, and joined for attention."""
    return getattr(attn, "add_q_proj", None) is not None


def hand_on(source, target):
    """Gives a processor the backend and the parallel configuration that another one has."""
    for name in ("_attention_backend", "_parallel_config"):
        if hasattr(target, name):  # older versions of diffusers do not have both
            setattr(target, name, getattr(source, name, None))


def _projected(attn, x, names=("to_q", "to_k", "to_v"), fused="to_qkv"):
    """Queries, keys and values of (batch, tokens, channels), by the fused projection if the
    attention computes by it."""
    if fused is not None and getattr(attn, "fused_projections", False):
        return getattr(attn, fused)(x).chunk(3, -1)
    return [getattr(attn, name)(x) for name in names]


_ADDED = ("add_q_proj", "add_k_proj", "add_v_proj")


def _heads(tensors, head_dim):
    return [t.unflatten(-1, (-1, head_dim)) for t in tensors]


def _put_out(attn, x):
    """The output projection, and dropout behind it."""
    for module in attn.to_out:
        x = module(x)
    return x


class WanProcessor(Processor):
    """Wan's self-attention, with norms over all heads."""

    replaces = _WHERE + "wan.WanAttnProcessor"
    what = "QK-norm over all heads and RoPE"
    norms = ("norm_q", "norm_k")

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None,
                 rotary_emb=None):  # fmt: skip
        if encoder_hidden_states is not None or rotary_emb is None:
            raise SpecError(
                "this attention of Wan was fused as self-attention with RoPE and is called "
                f"{'without RoPE' if encoder_hidden_states is None else 'as cross-attention'}: "
                "call sagebwd.integrations.diffusers.unfuse(model)"
            )
        query, key, value = _projected(attn, hidden_states)
        cos, sin = (t.squeeze(2) for t in rotary_emb)
        query, key = over_all_heads(attn, query, key, attn.heads, _table(cos, sin, query.device))
        out = self.attend(query, key, value.unflatten(2, (attn.heads, -1)), attention_mask)
        return _put_out(attn, out)

    @staticmethod
    def left_because(attn, name):
        is_cross = attn.is_cross_attention or attn.add_k_proj is not None
        return WITHOUT_ROPE if is_cross else None

    @classmethod
    def sample(cls, attn, draw):
        table = _drawn_table(draw, 9, attn.inner_dim // attn.heads, 1)
        return dict(hidden_states=draw(2, 9, attn.to_q.in_features),
                    rotary_emb=tuple(t.unsqueeze(2) for t in table))  # fmt: skip


class FluxProcessor(Processor):
    """Flux's, where text comes before the picture and both are rotated. Single blocks have them as
    one sequence."""

    replaces = _WHERE + "flux.FluxAttnProcessor"
    norms = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None,
                 image_rotary_emb=None):  # fmt: skip
        query, key, value = _heads(_projected(attn, hidden_states), attn.head_dim)
        rope = None
        if image_rotary_emb is not None:
            rope = _table(*image_rotary_emb, query.device)
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        if attn.added_kv_proj_dim is None:
            query, key = of_each_head(attn, self.norms[:2], query, key, rope)
        else:
            added = _projected(attn, encoder_hidden_states, _ADDED, "to_added_qkv")
            added = _heads(added, attn.head_dim)
            added[:2] = of_each_head(attn, self.norms[2:], *added[:2], _rows(rope, end=text))
            query, key = of_each_head(attn, self.norms[:2], query, key, _rows(rope, text))
            query, key, value = (torch.cat(both, 1) for both in zip(added, (query, key, value)))
        out = self.attend(query, key, value, attention_mask)
        if encoder_hidden_states is None:
            return out
        text, picture = out[:, :text], out[:, text:]
        return _put_out(attn, picture.contiguous()), attn.to_add_out(text.contiguous())

    @classmethod
    def sample(cls, attn, draw):
        given = dict(hidden_states=draw(2, 9, attn.to_q.in_features),
                     image_rotary_emb=_drawn_table(draw, 9, attn.head_dim))  # fmt: skip
        if attn.added_kv_proj_dim is not None:
            given["encoder_hidden_states"] = draw(2, 5, attn.add_q_proj.in_features)
            given["image_rotary_emb"] = _drawn_table(draw, 14, attn.head_dim)
        return given


class QwenImageProcessor(Processor):
    """Qwen-Image's, where text comes before the picture, with complex tables of their own."""

    replaces = _WHERE + "qwenimage.QwenDoubleStreamAttnProcessor2_0"
    norms = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")

    def __call__(self, attn, hidden_states, encoder_hidden_states=None,
                 encoder_hidden_states_mask=None, attention_mask=None,
                 image_rotary_emb=None):  # fmt: skip
        if encoder_hidden_states is None or attention_mask is not None:
            raise SpecError(
                "attention of Qwen-Image needs encoder_hidden_states and makes its mask of "
                "encoder_hidden_states_mask: pass these, and no attention_mask"
            )
        head_dim, text = attn.inner_dim // attn.heads, encoder_hidden_states.shape[1]
        if encoder_hidden_states_mask is not None:
            seen = encoder_hidden_states_mask.new_ones(hidden_states.shape[:2], dtype=torch.bool)
            attention_mask = torch.cat([encoder_hidden_states_mask, seen], 1)[:, None, None]
        parts = []
        for i, (x, names) in enumerate(((encoder_hidden_states, _ADDED),
                                        (hidden_states, ("to_q", "to_k", "to_v")))):  # fmt: skip
            query, key, value = _heads(_projected(attn, x, names, fused=None), head_dim)
            rope = None
            if image_rotary_emb is not None:
                table = image_rotary_emb[1 - i]
                rope = table.real.contiguous(), table.imag.contiguous()
            norms = self.norms[2:] if i == 0 else self.norms[:2]
            parts.append((*of_each_head(attn, norms, query, key, rope), value))
        out = self.attend(*(torch.cat(both, 1) for both in zip(*parts)), attention_mask)
        words, picture = out[:, :text], out[:, text:]
        return _put_out(attn, picture.contiguous()), attn.to_add_out(words.contiguous())

    @classmethod
    def sample(cls, attn, draw):
        pairs = attn.inner_dim // attn.heads // 2
        tables = (torch.polar(torch.ones_like(t), t) for t in (draw(9, pairs), draw(5, pairs)))
        return dict(hidden_states=draw(2, 9, attn.to_q.in_features),
                    encoder_hidden_states=draw(2, 5, attn.add_q_proj.in_features),
                    encoder_hidden_states_mask=draw(2, 5) < 1,
                    image_rotary_emb=tuple(tables))  # fmt: skip


class HunyuanVideoProcessor(Processor):
    """HunyuanVideo's, where text comes behind the video and is not rotated. Single blocks project
    and norm both as one sequence."""

    replaces = _WHERE + "hunyuan_video.HunyuanVideoAttnProcessor2_0"
    norms = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None,
                 image_rotary_emb=None):  # fmt: skip
        text = 0 if encoder_hidden_states is None else encoder_hidden_states.shape[1]
        is_single = attn.add_q_proj is None
        if is_single and text:
            hidden_states = torch.cat([hidden_states, encoder_hidden_states], 1)
        head_dim = attn.inner_dim // attn.heads
        query, key, value = _heads(_projected(attn, hidden_states, fused=None), head_dim)
        rope = None
        if image_rotary_emb is not None:
            cos, sin = _table(*image_rotary_emb, query.device)
            if is_single and text:  # no rotation of the last tokens
                cos = torch.cat([cos, cos.new_ones(text, cos.shape[1])])
                sin = torch.cat([sin, sin.new_zeros(text, sin.shape[1])])
            rope = cos, sin
        query, key = of_each_head(attn, self.norms[:2], query, key, rope)
        if text and not is_single:
            added = _heads(_projected(attn, encoder_hidden_states, _ADDED, fused=None), head_dim)
            added[:2] = of_each_head(attn, self.norms[2:], *added[:2], None)
            query, key, value = (torch.cat(both, 1) for both in zip((query, key, value), added))
        out = self.attend(query, key, value, attention_mask)
        if encoder_hidden_states is None:
            return out, None
        video, words = out[:, : out.shape[1] - text], out[:, out.shape[1] - text :]
        if getattr(attn, "to_out", None) is not None:
            video = _put_out(attn, video)
        if getattr(attn, "to_add_out", None) is not None:
            words = attn.to_add_out(words)
        return video, words

    @classmethod
    def sample(cls, attn, draw):
        of_text = (attn.to_q if attn.add_q_proj is None else attn.add_q_proj).in_features
        table = _drawn_table(draw, 9, attn.inner_dim // attn.heads)
        return dict(hidden_states=draw(2, 9, attn.to_q.in_features), image_rotary_emb=table,
                    encoder_hidden_states=draw(2, 5, of_text),
                    attention_mask=draw(2, 1, 1, 14) < 1)  # fmt: skip


class LTXProcessor(Processor):
    """LTX-Video's self-attention. Each head has other angles, which tables of `qk_norm_rope` have
    for other tokens only: the norms over all heads are the model's own, and behind them the heads
    of a token are rotated as so many tokens with one head."""

    replaces = _WHERE + "ltx.LTXVideoAttnProcessor"
    what = "RoPE"
    norms = ("norm_q", "norm_k")

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None,
                 image_rotary_emb=None):  # fmt: skip
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        if attention_mask is not None:
            batch, tokens = source.shape[:2]
            attention_mask = attn.prepare_attention_mask(attention_mask, tokens, batch)
            attention_mask = attention_mask.unflatten(0, (batch, attn.heads))
        query = attn.norm_q(attn.to_q(hidden_states))
        key, value = attn.norm_k(attn.to_k(source)), attn.to_v(source)
        query, key, value = (t.unflatten(2, (attn.heads, -1)) for t in (query, key, value))
        if image_rotary_emb is not None:
            rope = _table(*image_rotary_emb, query.device)
            rope = tuple(t.unflatten(2, (attn.heads, -1)).flatten(1, 2) for t in rope)
            of_tokens = (t.flatten(1, 2).unsqueeze(2) for t in (query, key))
            found = turned(*of_tokens, rope)
            query, key = (t.view(like.shape) for t, like in zip(found, (query, key)))
        return _put_out(attn, self.attend(query, key, value, attention_mask))

    @staticmethod
    def left_because(attn, name):
        return WITHOUT_ROPE if name.split(".")[-1] == "attn2" else None

    @classmethod
    def sample(cls, attn, draw):
        return dict(hidden_states=draw(2, 9, attn.to_q.in_features),
                    image_rotary_emb=_drawn_table(draw, 9, attn.inner_dim, 2))  # fmt: skip


PROCESSORS = {of.replaces: of for of in (WanProcessor, FluxProcessor, QwenImageProcessor,
                                         HunyuanVideoProcessor, LTXProcessor)}  # fmt: skip
