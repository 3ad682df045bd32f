"""Hugging Face transformers: attn_implementation="sagebwd", once this module is imported.

    import sagebwd.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sagebwd",
                                                 dtype=torch.bfloat16)
    sagebwd.integrations.transformers.use(precision="gradients16")     # sagebwd.attention's options

Causal and bidirectional attention, sliding windows, grouped heads, learned sinks (gpt-oss), padding
on the right, packed sequences (cu_seq_lens_q and cu_seq_lens_k, as DataCollatorWithFlattening
gives them with return_flash_attn_kwargs=True), dynamic and static caches. Every other mask is
refused: a mask is compared with what the kernels would compute, once for all layers. Generation
works, but its single queries quantise all keys anew: for that "sdpa" is faster.
"""

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flash_attention import get_target_dtype
from transformers.masking_utils import sdpa_mask

from sagebwd import SpecError, attention
from sagebwd.integrations._options import Chosen
from sagebwd.keywords import absent

NAME = "sagebwd"
#: Queries whose part of a mask is looked at at a time.
ROWS = 1024
_chosen = Chosen()
use = _chosen.use


class Pattern:
    """A mask that nobody has written out: which keys queries see, as transformers says it."""

    def __init__(self, attention_mask, shift, **given):
        self._padding, self._shift, self._given = attention_mask, shift, given
        self._told = {}

    def told(self, causal, window):
        """The mask as keywords of `sagebwd.attention`; SpecError where it is another one."""
        key = causal, window
        if key not in self._told:
            self._told[key] = self._tell(causal, window)
        return self._told[key]

    def _tell(self, causal, window):
        batch, m, n = (self._given[name] for name in ("batch_size", "q_length", "kv_length"))
        keys = torch.arange(n, device=self._given["device"])
        told = {}
        used = keys.new_full((batch,), n)
        if causal and self._shift == 0:
            told["causal"] = "top-left"
        elif causal:  # behind what a cache holds already
            told["causal"] = "bottom-right"
            used = used.clamp(max=self._shift + m)
        if self._padding is not None and not (causal and self._shift):
            first = self._given["kv_offset"]
            used = torch.minimum(used, self._padding[:, first : first + n].sum(-1))
        if causal and window is not None:
            told["window_left"] = window - 1
        same = torch.ones((), dtype=torch.bool, device=keys.device)
        for first in range(0, m, ROWS):
            rows = torch.arange(first, min(first + ROWS, m), device=keys.device)
            behind = keys - rows[:, None] - self._shift
            seen = (keys < used[:, None, None]) & (behind <= 0 if causal else True)
            if causal and window is not None:
                seen = seen & (behind > -window)
            same &= (self._written(first, len(rows))[:, 0] == seen).all()
        if not same:
            raise SpecError(_UNKNOWN_MASK.format(
                "causal" if causal else "bidirectional",
                f" in windows of {window}" if window is not None else "", tuple((batch, m, n))))
        if bool((used < n).any()):
            told["seqused_k"] = used.int()
        return told

    def _written(self, first, rows):
        given = {**self._given, "q_length": rows, "q_offset": self._given["q_offset"] + first}
        return sdpa_mask(**given, attention_mask=self._padding, allow_is_causal_skip=False)


_UNKNOWN_MASK = (
    "this mask is not that of {} attention{} with padding on the right ((batch, queries, keys) = "
    "{}). Pad on the right (tokenizer.padding_side = 'right'); for packed sequences pass "
    "cu_seq_lens_q and cu_seq_lens_k (DataCollatorWithFlattening(return_flash_attn_kwargs=True)); "
    "for others use attn_implementation='sdpa'"
)


def mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None,
         attention_mask=None, allow_is_causal_skip=True, allow_is_bidirectional_skip=False,
         local_size=None, use_vmap=False, device="cpu", **_):  # fmt: skip
    """What the models hand to `attend`: None where the kind of attention says it all."""
    shift = q_offset - kv_offset
    says_all = allow_is_bidirectional_skip or (
        allow_is_causal_skip and isinstance(shift, int) and shift == 0
    )
    if says_all and attention_mask is None and local_size is None:
        return None
    # A static cache's offset is a tensor, which moves on before anybody asks for the mask.
    q_offset, kv_offset = int(q_offset), int(kv_offset)
    # Models hand on, and some look at, a tensor: it takes no memory, and who changes it loses the
    # pattern, without which it is refused.
    shape = batch_size, 1, q_length, kv_length
    stand_in = torch.zeros((), dtype=torch.bool, device=device).expand(shape)
    stand_in.pattern = Pattern(
        attention_mask, q_offset - kv_offset, batch_size=batch_size, q_length=q_length,
        kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset, mask_function=mask_function,
        use_vmap=use_vmap, device=device)  # fmt: skip
    # Generation with static caches asks for a contiguous one; a copy would have no pattern.
    stand_in.contiguous = lambda: stand_in
    return stand_in


def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
           sliding_window=None, softcap=None, s_aux=None, position_bias=None, cu_seq_lens_q=None,
           cu_seq_lens_k=None, **more):  # fmt: skip
    """Attention of (batch, heads, tokens, head_dim) tensors: (out, None), out being (batch,
    tokens, heads, head_dim)."""
    for name, value_given in {"dropout_p": dropout, "softcap": softcap}.items():
        if value_given:
            raise SpecError(f"{name.removesuffix('_p')}={value_given!r}: {absent(name)}")
    if position_bias is not None:
        raise SpecError(f"position_bias: {absent('attn_bias')}")
    if more.get("output_attentions"):
        raise SpecError("output_attentions=True: the weights are never written; use "
                        "attn_implementation='eager'")  # fmt: skip
    dtype = get_target_dtype(query, module)
    if dtype is not None:
        query, key, value = (t.to(dtype) for t in (query, key, value))
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    given = {**_chosen.options, "softmax_scale": scaling, "sink_logits": s_aux}
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if cu_seq_lens_q is not None:
        return _packed(q, k, v, causal, sliding_window, cu_seq_lens_q, cu_seq_lens_k, given), None
    if attention_mask is None:
        given["causal"] = "top-left" if causal and query.shape[2] > 1 else False
    elif hasattr(attention_mask, "pattern"):
        given |= attention_mask.pattern.told(bool(causal), sliding_window)
    else:
        raise SpecError(
            f"attention_mask has shape {tuple(attention_mask.shape)}: {absent('attn_mask')}. Pass "
            "the (batch, tokens) mask of padding, or use attn_implementation='sdpa'"
        )
    return attention(q, k, v, layout="bshd", **given), None


def _packed(q, k, v, causal, window, cu_seq_lens_q, cu_seq_lens_k, given):
    if q.shape[0] != 1:
        raise SpecError(f"cu_seq_lens_q with a batch of {q.shape[0]}: packed sequences are one row")
    if causal:
        given |= {"causal": "bottom-right", "window_left": None if window is None else window - 1}
    where = {"cu_seqlens_q": cu_seq_lens_q.int(), "cu_seqlens_k": cu_seq_lens_k.int()}
    return attention(q[0], k[0], v[0], **given, **where)[None]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, mask)
