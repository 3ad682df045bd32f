"""Hugging Face transformers: attn_implementation="sagebwd", once sagebwd is imported.

    import sagebwd
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="sagebwd",
                                                 torch_dtype=torch.bfloat16)
    sagebwd.integrations.transformers.use(precision="gradients16")     # sagebwd.attention's options
    sagebwd.integrations.transformers.use(mesh=mesh)                     # ranks share sequences
    sagebwd.integrations.transformers.fuse(model)    # QK-norm and RoPE by sagebwd.qk_norm_rope

Causal and bidirectional attention, sliding windows of both, grouped heads, learned sinks (gpt-oss),
soft-capping (Gemma 2), position biases (T5), padding on the right, packed sequences (cu_seq_lens_q
and cu_seq_lens_k, as DataCollatorWithFlattening gives them with return_flash_attn_kwargs=True, or
position_ids alone), dynamic and static caches. Other masks, such as image spans, chunks and padding
on the left, are traced as expressions (sagebwd.masks.from_flex), whose blocks are found once for
all layers. What is no expression is refused, and so is every keyword that is not known: a mask is
compared with what the kernels would compute, once for all layers. Generation works, but
its single queries quantise all keys again: for that "sdpa" is faster.
"""

import functools
import inspect
import sys
import warnings

from sagebwd.core.compat import need

torch = need("torch", "sagebwd.integrations.transformers")
need("transformers", "sagebwd.integrations.transformers")

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel  # noqa: E402

from sagebwd.core import options, seams  # noqa: E402
from sagebwd.core.arguments.checks import SpecError, a_kind, yes_or_no  # noqa: E402
from sagebwd.core.functional import attention  # noqa: E402
from sagebwd.core.keywords import Words, absent  # noqa: E402
from sagebwd.integrations import _scores  # noqa: E402
from sagebwd.integrations._fused_layers import fuse, unfuse  # noqa: E402, F401
from sagebwd.integrations._fusing import FuseReport  # noqa: E402, F401
from sagebwd.integrations._masks import Pattern, Unwritten, masking_utils, packed_mask, visible_of  # noqa: E402
from sagebwd.integrations._options import Chosen  # noqa: E402
from sagebwd.integrations._short_calls import ShortCalls  # noqa: E402

NAME = "sagebwd"
_chosen = Chosen()
_ranks = None  #: an `OverRanks`, where ranks share sequences
_short = ShortCalls(None, {})
_calls = 0


def use(*given, mesh=None, method="ring", positions_checked=True, min_tokens=None, **options):
    """Options of `sagebwd.attention` for all models from here on; none: its defaults.

    Args:
        mesh: a torch DeviceMesh, whose ranks share every sequence from here on: each gives models
            its part of input_ids, position_ids and shift_labels (the next tokens), as
            `sagebwd.distributed.shard` cuts them up. None: each rank has whole sequences.
        method: as in `sagebwd.distributed.attention`; windows need 'ulysses'.
        positions_checked: whether calls are refused in which no position_ids come to attention.
            False is for models that do not hand them on, such as ModernBERT: nothing shows then
            whether they were sharded, and without them each rank counts from 0, which is wrong.
        min_tokens: calls of fewer tokens are left to torch's scaled_dot_product_attention, if they
            are causal or see all keys: a number; 'auto', `sagebwd.crossover_tokens` of the call's
            GPU; or None. `report` counts them. It needs mesh=None.
        options: keywords, such as use(precision="gradients16").

    Raises TypeError for what is no option, or is the model's to say; SpecError for a value that no
    kernel takes.
    """
    global _ranks, _short, _calls
    ranks = None
    short = ShortCalls(min_tokens, options)
    if min_tokens is not None and mesh is not None:
        raise SpecError("min_tokens with mesh: ranks that share sequences compute long ones; leave "
                        "one of the two out")  # fmt: skip
    yes_or_no("positions_checked", positions_checked)
    if mesh is not None:
        ranks = seams.over_ranks(mesh, method, positions_checked)
    elif method != "ring" or not positions_checked:
        name = f"method={method!r}" if method != "ring" else "positions_checked=False"
        raise SpecError(f"{name} without mesh: pass both")
    _chosen.use(*given, **options)
    _ranks, _short, _calls = ranks, short, 0


def report():
    """Says in a line how many calls there were since `use`, and how many of them were left to
    PyTorch as they were short. Calls in what torch.compile has compiled are not counted."""
    ours = f"of {_calls} calls sagebwd computed {_calls - _short.count}"
    return f"{ours}; PyTorch {_short.told()}" if _short.count else ours


#: Models call arguments of `sagebwd.attention` by these names.
_words = Words({"q": "query", "k": "key", "v": "value", "softmax_scale": "scaling",
                "sink_logits": "s_aux", "cu_seqlens_q": "cu_seq_lens_q",
                "cu_seqlens_k": "cu_seq_lens_k"}, {})  # fmt: skip

#: Models hand these on to attention, which they do not change: where tokens lie, which is in q and
#: k already, what caches, logits and losses want, and the longest lengths, which the GPU reads.
HARMLESS = frozenset((
    "position_ids", "cache_position", "use_cache", "max_length_q", "max_length_k", "seq_idx",
    "num_items_in_batch", "shift_labels", "output_hidden_states", "output_router_logits",
    "return_dict", "logits_to_keep",
))  # fmt: skip


def mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None,
         attention_mask=None, allow_is_causal_skip=True, allow_is_bidirectional_skip=False,
         local_size=None, use_vmap=False, device="cpu", **_):  # fmt: skip
    """Returns what the models hand to `attend`: None where the kind of attention says it all."""
    if _ranks is not None:
        return _ranks.check_mask(attention_mask)
    shift = q_offset - kv_offset
    says_all = allow_is_bidirectional_skip or (
        allow_is_causal_skip and isinstance(shift, int) and shift == 0
    )
    if says_all and attention_mask is None and local_size is None and q_length == kv_length:
        return None
    # A static cache's offset is a tensor, which moves on before anybody asks for the mask.
    pattern = Pattern.of_interface(
        batch_size, q_length, kv_length, int(q_offset), int(kv_offset), attention_mask,
        mask_function=mask_function, use_vmap=use_vmap, device=device)  # fmt: skip
    if not torch.compiler.is_compiling():
        return Unwritten.of(pattern)
    written = pattern.written()  # of which a graph computes what somebody reads
    written.pattern = pattern
    return written


def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None,
           sliding_window=None, softcap=None, s_aux=None, position_bias=None, cu_seq_lens_q=None,
           cu_seq_lens_k=None, deterministic=None, **more):  # fmt: skip
    """Attention of (batch, heads, tokens, head_dim) tensors: (out, None), out being (batch,
    tokens, heads, head_dim)."""
    _refuse(module, dropout, s_aux, more)
    if query.dtype == torch.float32:
        dtype = _dtype_of(module, query.device.type)
        query, key, value = (t.to(dtype) for t in (query, key, value))
    if sliding_window is not None:
        options.whole_number("sliding_window", sliding_window)
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    given = {**_chosen.options, "softmax_scale": scaling, "sink_logits": s_aux}
    if deterministic:
        given["deterministic"] = True
    if (score := _score(softcap, position_bias, query, key)) is not None:
        given["score"] = score
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    if _ranks is not None:
        return _over_ranks(module, q, k, v, causal, sliding_window, attention_mask, given,
                           cu_seq_lens_q, more.get("position_ids")), None  # fmt: skip
    pattern = _pattern(attention_mask, query.shape[2], key.shape[2])
    if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
        if cu_seq_lens_q is None or cu_seq_lens_k is None:
            raise SpecError("pass cu_seq_lens_q and cu_seq_lens_k, or neither")
        if q.shape[0] != 1:
            raise SpecError(
                f"cu_seq_lens_q with a batch of {q.shape[0]}: packed sequences are one row"
            )
        if pattern is not None:
            pattern.check_packed(causal, sliding_window, cu_seq_lens_q, cu_seq_lens_k)
        given |= packed_mask(causal, sliding_window)
        given |= {"cu_seqlens_q": cu_seq_lens_q.int(), "cu_seqlens_k": cu_seq_lens_k.int()}
    elif pattern is not None:
        given |= pattern.told(causal, sliding_window, more.get("position_ids"))
    else:
        given["causal"] = _causal_without_mask(causal, query.shape[2], key.shape[2])
    if position_bias is not None:
        given = _beside_bias(given)
    return _computed(q, k, v, given), None


def _score(softcap, position_bias, query, key):
    if not softcap and position_bias is None:
        return None
    if _ranks is not None:
        name = f"softcap={softcap!r}" if softcap else "position_bias"
        raise SpecError(f"{name}: sequences that ranks share have no functions of the score")
    score = _scores.softcapped(softcap)
    return score if position_bias is None else _scores.biased(score, position_bias, query, key)


def _beside_bias(given):
    """Padding as a mask: kernels that read a bias take no lengths."""
    if "cu_seqlens_q" in given:
        raise SpecError("position_bias with packed sequences: kernels for these read no tensors in "
                        "the score. Pass padded batches")  # fmt: skip
    used = given.pop("seqused_k", None)
    if used is None:
        return given
    if given.pop("seqused_q", None) is not None and given.get("causal") != "top-left":
        raise SpecError("position_bias with padding and fewer queries than keys, or with a window: "
                        "use attn_implementation='sdpa' or 'eager'")  # fmt: skip
    return {**given, "mask": seams.traced("mask", "k < used[b]", {"used": used})}


def _over_ranks(
    module, q, k, v, causal, window, attention_mask, given, cu_seq_lens, position_ids
):
    for name, value in (("attention_mask", attention_mask), ("cu_seq_lens_q", cu_seq_lens)):
        if value is not None:
            raise SpecError(f"{name}: sequences that ranks share have no masks and are not packed")
    _ranks.check_call(type(module).__name__, position_ids, causal, q.shape[1], k.shape[1])
    named = (given.pop(name) for name in ("softmax_scale", "sink_logits"))
    return _ranks.attend(q, k, v, position_ids, *named, given | packed_mask(causal, window))


def _computed(q, k, v, given):
    """Attention of (batch, tokens, heads, head_dim) tensors, with errors in words of models."""
    if torch.compiler.is_compiling():  # which raises errors of its own, around ours
        return _attention(q, k, v, given)
    try:
        return _attention(q, k, v, given)
    except (TypeError, ValueError) as error:
        _words.put_into(error)
        raise


#: PyTorch's function can be told this of a call. Others have masks, sinks or functions of scores.
_OF_PLAIN_CALLS = {"causal", "softmax_scale", "sink_logits"}


def _is_short(q, k, given):
    if _short.min_tokens is None:
        return False
    told = given.keys() - _chosen.options.keys()
    is_plain = told <= _OF_PLAIN_CALLS and given["sink_logits"] is None
    of_last = q.shape[1] == 1 and given.get("causal") == "bottom-right"  # which sees all keys
    if not is_plain or not of_last and given.get("causal", False) not in (False, "top-left"):
        return False
    of_pytorch = (t.transpose(1, 2) for t in (q, k))
    return _short.takes(*of_pytorch, given.get("causal") == "top-left")


def _of_pytorch(q, k, v, given):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=given.get("causal") == "top-left", scale=given["softmax_scale"],
        enable_gqa=q.shape[1] != k.shape[1])  # fmt: skip
    return out.transpose(1, 2)


def _attention(q, k, v, given):
    global _calls
    if not torch.compiler.is_compiling():
        _calls += 1
    if _is_short(q, k, given):
        return _of_pytorch(q, k, v, given)
    if "cu_seqlens_q" not in given:
        return attention(q, k, v, layout="bshd", **given)
    out = attention(*(t.flatten(0, 1) for t in (q, k, v)), **given)
    return out.unflatten(0, q.shape[:2])  # rows of the batch were one after the other


def _dtype_of(module, device_type):
    """Returns the type that float32 queries, such as PEFT's layers give, are cast to.

    It is that to which they are cast for flash-attention.
    """
    if torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    config = getattr(module, "config", None)
    if getattr(config, "_is_quantized", False):  # its weights are of no dtype that counts
        return config.dtype
    if before := getattr(config, "_pre_quantization_dtype", None):  # transformers 4
        return before
    linear = (x for x in module.modules() if isinstance(x, torch.nn.Linear))
    return next((x.weight.dtype for x in linear), torch.float32)


def _refuse(module, dropout, s_aux, more):
    """SpecError for what asks for another attention than the kernels'."""
    if dropout:
        raise SpecError(f"dropout={dropout!r}: {absent('dropout_p')}")
    if more.get("output_attentions"):
        raise SpecError("output_attentions=True: the weights are never written; use "
                        "attn_implementation='eager'")  # fmt: skip
    for name, value in more.items():
        if value is not None and value is not False and name not in HARMLESS:
            raise SpecError(
                f"{name}: {type(module).__name__} hands it to its attention, and what it asks for "
                "is not known here, such as a choice of keys by an indexer. Use "
                "attn_implementation='sdpa' or 'eager'"
            )
    if s_aux is None and getattr(module, "sinks", None) is not None:
        raise SpecError(
            f"{type(module).__name__} has sinks and does not hand them to its attention as s_aux: "
            "use attn_implementation='eager'"
        )


def _pattern(attention_mask, queries, keys):
    """The `Pattern` of a mask, None of none."""
    if attention_mask is None:
        return None
    pattern = getattr(attention_mask, "pattern", None)
    if isinstance(attention_mask, Unwritten) and attention_mask.is_changed():
        pattern, attention_mask = None, attention_mask.mask
    if pattern is None and not isinstance(attention_mask, torch.Tensor):
        raise SpecError(
            f"attention_mask is {a_kind(attention_mask)}: pass the (batch, tokens) mask of "
            "padding, or use attn_implementation='flex_attention', which takes a BlockMask"
        )
    if pattern is None and (visible := visible_of(attention_mask, keys)) is not None:
        pattern = Pattern.of_tensor(visible)
    if pattern is None or tuple(pattern.shape[1:]) != (queries, keys):
        raise SpecError(
            f"attention_mask has shape {tuple(attention_mask.shape)} for {queries} queries and "
            f"{keys} keys, and masks of other shapes are not supported: pass the (batch, tokens) "
            "mask of padding, or use attn_implementation='sdpa'"
        )
    return pattern


def _causal_without_mask(causal, queries, keys):
    if not causal or queries == 1:
        return False
    if queries != keys:
        raise SpecError(
            f"{queries} queries and {keys} keys, causal and without a mask: nobody says which keys "
            "the queries belong to. Hand over a mask, or all queries (such as logits_to_keep=0 "
            "where the last layers share keys), or use attn_implementation='sdpa'"
        )
    return "top-left"


def _asks_no_function(model):
    """Whether the file of transformers that defines the model has attention of its own, and no
    place where it asks for a function by name."""
    files = [sys.modules.get(of.__module__) for of in type(model).__mro__
             if of.__module__.startswith("transformers.models.")]  # fmt: skip
    return any("Attention" in name for file in files for name, x in vars(file).items()
               if isinstance(x, type) and x.__module__ == file.__name__) and not any(
                   hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files)  # fmt: skip


def _check_model(model):
    """SpecError for a model that would go on as before, in silence; a warning where its parts,
    which are models themselves, may ask."""
    if not _asks_no_function(model):
        return
    said = (
        f"attn_implementation='{NAME}': the attention of {type(model).__name__} itself does not "
        "ask transformers for a function by its name, and goes on as before"
    )
    if getattr(model.config, "sub_configs", None) or model._supports_attention_backend:
        warnings.warn(f"{said}; that of models within it may ask", stacklevel=4)
        return
    raise SpecError(
        f"{said}: use 'eager' or 'sdpa'. Where it calls PyTorch's function, put 'with "
        "sagebwd.sdpa():' around its calls"
    )


def _with_check(check_name):
    """PreTrainedModel's check of the name, which takes each that is registered for every model."""

    @functools.wraps(check_name)
    def check(self, attn_implementation, *given, **more):
        if attn_implementation == NAME:
            _check_model(self)
        return check_name(self, attn_implementation, *given, **more)

    check.of_sagebwd = check_name
    return check


def _register():
    """The name, among those of transformers. Before 4.53 models write their masks themselves, and
    before 5.5 the function of masks is asked in other words: there ours is that of "sdpa"."""
    if isinstance(ALL_ATTENTION_FUNCTIONS, dict):  # before 4.50
        ALL_ATTENTION_FUNCTIONS[NAME] = attend
    else:
        ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    if masking_utils is not None:
        sdpa_mask = masking_utils.sdpa_mask
        ours = "q_length" in inspect.signature(sdpa_mask).parameters
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, mask if ours else sdpa_mask)
    name = "_check_and_adjust_attn_implementation"  # from 4.55 on
    if theirs := getattr(PreTrainedModel, name, None):
        setattr(PreTrainedModel, name, _with_check(getattr(theirs, "of_sagebwd", theirs)))


_register()
