"""What a keyword that no function here knows may have meant."""

import difflib

# What other attention functions call an option of ours, for error messages.
_FOREIGN_NAMES = {
    "is_causal": "causal", "scale": "softmax_scale", "sm_scale": "softmax_scale",
    "tensor_layout": "layout", "return_softmax_lse": "return_lse", "smooth": "smooth_k",
    "plan": "precision", "cu_seqlens": "cu_seqlens_q", "cu_seqlens_kv": "cu_seqlens_k",
    "seqused_kv": "seqused_k",
}  # fmt: skip
_ABSENT = {
    "dropout_p": "dropout is not supported: leave it out",
    "attn_mask": "arbitrary masks are not supported: use causal=",
    "window_size": "pass window_left= and window_right=, its two numbers, None for -1",
    "softcap": "soft-capping is not supported",
    "alibi_slopes": "ALiBi is not supported",
    "max_seqlen_q": "leave it out: lengths are read on the GPU",
    "max_seqlen_k": "leave it out: lengths are read on the GPU",
    "enable_gqa": "grouped queries need no switch: pass k and v with fewer heads",
}


def refuse_keyword(function, name, known):
    """Raises the TypeError that names what serves, or the keywords near to it."""
    if name in _ABSENT:
        hint = _ABSENT[name]
    elif _FOREIGN_NAMES.get(name) in known:
        hint = f"did you mean {_FOREIGN_NAMES[name]!r}?"
    else:
        near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else f"known keywords: {', '.join(sorted(known))}"
        )
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}; {hint}")
