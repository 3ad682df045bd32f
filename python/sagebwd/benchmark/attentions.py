"""The attentions that are compared: PyTorch's, FlashAttention-3 and 4 where installed, and ours."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

from sagebwd.benchmark.cases import Case
from sagebwd.benchmark.common import torch
from sagebwd.benchmark.environment import brief
from sagebwd.benchmark.truth import visible
from sagebwd.core import options
from sagebwd.core.building import emit

#: It takes queries, keys and values of (batch, heads, tokens, head_dim).
Attend = Callable[..., "torch.Tensor"]
OURS = "sagebwd"
#: What PyTorch has without another package, by the members of SDPBackend: speeds are compared with
#: these.
OF_PYTORCH = {"cudnn": "CUDNN_ATTENTION", "fa2": "FLASH_ATTENTION",
              "efficient": "EFFICIENT_ATTENTION"}  # fmt: skip
#: Names that `backends` takes, and what each is.
BACKENDS = {
    **{name: f"PyTorch's attention, {what} (SDPBackend.{OF_PYTORCH[name]})" for name, what in (
        ("cudnn", "cuDNN"), ("fa2", "FlashAttention-2"), ("efficient", "memory-efficient"))},
    "flex": "PyTorch's flex_attention, compiled",
    "fa3": "FlashAttention-3, the module flash_attn_interface",
    "fa4": "FlashAttention-4, the module flash_attn.cute",
    OURS: "this library, in each precision",
}  # fmt: skip


#: Speeds are relative to the fastest of these.
BASELINES = (*OF_PYTORCH, "flex")


class Unavailable(RuntimeError):
    """Why an attention cannot run a case."""


def reason(error: Exception, warned: list[str] = ()) -> str:
    """One line that says why a contender cannot run. PyTorch gives its own reasons as warnings."""
    if isinstance(error, Unavailable):
        return str(error)
    told = [re.sub(r"\s*\(Triggered internally.*", "", text, flags=re.DOTALL).strip()
            for text in warned]  # fmt: skip
    told = [text for text in dict.fromkeys(told)
            if "not used because" not in text and "runtime disabled" not in text]  # fmt: skip
    if told and "No available kernel" in str(error):
        return " ".join(told)
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "the GPU's memory is too small for it"
    return brief(error)


def sdpa(backend: str | None, causal: bool, mask: torch.Tensor | None = None) -> Attend:
    """PyTorch's attention, by the named member of SDPBackend or not at all; None: any."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    forced = nullcontext if backend is None else partial(sdpa_kernel, getattr(SDPBackend, backend))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with forced():
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])

    return attend


def of_pytorch(name: str, device: torch.device | str, causal: bool) -> Attend:
    """One of OF_PYTORCH on a GPU; elsewhere what PyTorch chooses."""
    return sdpa(OF_PYTORCH[name] if torch.device(device).type == "cuda" else None, causal)


@dataclass(frozen=True)
class Contender:
    """One attention, ready for one case."""

    name: str  #: 'cudnn', or 'sagebwd gradients16'
    deterministic: bool  #: whether it promises the same bits in every run
    attend: Attend | None = None  #: None: it cannot run, or is another one's kernels
    context: Callable[[], AbstractContextManager] = nullcontext  #: for forward and backward
    refusal: str = ""  #: why it cannot run
    same_as: str = ""  #: the contender with the same kernels
    warmup: dict | None = None  #: of ours: keywords of `sagebwd.warmup`, for its kernels


@contextmanager
def deterministic_algorithms():
    """PyTorch's promise for its own attentions, without filling fresh memory first."""
    filled = torch.utils.deterministic
    before = (torch.are_deterministic_algorithms_enabled(),
              torch.is_deterministic_algorithms_warn_only_enabled())  # fmt: skip
    fill = filled.fill_uninitialized_memory
    filled.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        filled.fill_uninitialized_memory = fill


# ---- other libraries -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Flash2:
    """PyTorch's FlashAttention-2 by its operators, which take windows and packed sequences.

    Tensors are (batch, tokens, heads, head_dim), or (tokens, heads, head_dim) for packed sequences,
    which begin at `firsts`. A causal mask is aligned at the bottom right.
    """

    queries: int  #: of the longest sequence
    keys: int
    causal: bool
    window: tuple[int | None, int | None] = (None, None)
    firsts: torch.Tensor | None = None

    def _sizes(self) -> tuple:
        return self.firsts, self.firsts, self.queries, self.keys, 0.0, self.causal

    def _window(self) -> dict:
        left, right = self.window
        right = 0 if self.causal and left is not None else right
        return {"window_size_left": left, "window_size_right": right}

    def forward(self, q, k, v) -> tuple:
        """out, and what the backward needs of the forward."""
        return torch.ops.aten._flash_attention_forward(
            q, k, v, *self._sizes(), False, **self._window())[:4]  # fmt: skip

    def backward(self, dout, q, k, v, out, lse, rng, unused) -> tuple:
        """dq, dk and dv."""
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, *self._sizes(), rng, unused, **self._window())  # fmt: skip


def _windowed_flash2(case: Case) -> Attend:
    flash = Flash2(case.seq_len, case.seq_kv, case.causal != "none",
                   (case.window_left, case.window_right))  # fmt: skip

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            out, *rest = flash.forward(q, k, v)
            ctx.save_for_backward(q, k, v, out, *rest)
            return out.transpose(1, 2)

        @staticmethod
        def backward(ctx, dout):
            gradients = flash.backward(dout.transpose(1, 2), *ctx.saved_tensors)
            return tuple(x.transpose(1, 2) for x in gradients)

    return Attention.apply


def _needs_mask(case: Case) -> bool:
    """Whether PyTorch's `is_causal` cannot say the mask."""
    of_corner = case.causal != "none" and case.seq_len != case.seq_kv
    return bool(case.intervals) or case.is_windowed or of_corner


def _refuse_top_left(case: Case, who: str) -> None:
    if case.causal == "top-left" and case.seq_len != case.seq_kv:
        raise Unavailable(f"{who} aligns a causal mask at the bottom right: pass "
                          "causal='bottom-right'")  # fmt: skip


def _of_pytorch(name: str, case: Case, mask: torch.Tensor | None) -> Attend:
    if case.sinks:
        raise Unavailable("PyTorch's attention has no sinks")
    if name == "fa2" and case.intervals:
        raise Unavailable("FlashAttention-2 takes no such mask")
    if name == "fa2" and _needs_mask(case):
        _refuse_top_left(case, "FlashAttention-2")
        return _windowed_flash2(case)
    mask = None if name == "fa2" else mask
    return sdpa(OF_PYTORCH[name], mask is None and case.causal != "none", mask)


def _flex(case: Case, device) -> Attend:
    if case.sinks:
        raise Unavailable("it is not measured with sinks")
    from torch.nn.attention import flex_attention as flex

    from sagebwd.benchmark.masks import as_function

    whole = not _needs_mask(case) and case.causal == "none"
    seen = None if whole else flex.create_block_mask(
        as_function(case, device), None, None, case.seq_len, case.seq_kv,
        str(device))  # fmt: skip
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return partial(torch.compile(flex.flex_attention, dynamic=False), block_mask=seen,
                   enable_gqa=case.heads != case.heads_kv)  # fmt: skip


def module(name: str):
    """An installed module. Unavailable where it is not there, or cannot be imported."""
    try:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    except ModuleNotFoundError as error:  # the package around it
        if error.name and not name.startswith(error.name):
            raise Unavailable(f"{name} cannot be imported: {error}") from error
    except Exception as error:  # built for another PyTorch, say
        raise Unavailable(f"{name} cannot be imported: {error}") from error
    raise Unavailable(f"{name} is not installed")


def _of_flash_attention(name: str, case: Case, deterministic: bool, sink) -> Attend:
    if name == "fa3":
        who, function = "FlashAttention-3", module("flash_attn_interface").flash_attn_func
        if case.sinks:
            raise Unavailable("FlashAttention-3 has no sinks")
        window = tuple(-1 if w is None else w for w in (case.window_left, case.window_right))
        more = {}
    else:
        who, function = "FlashAttention-4", module("flash_attn.cute").flash_attn_func
        window = case.window_left, case.window_right
        more = {"learnable_sink": sink.bfloat16()} if case.sinks else {}
    if case.intervals:
        raise Unavailable(f"{who} takes no such mask")
    _refuse_top_left(case, who)

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = function(q, k, v, causal=case.causal != "none", window_size=window,
                       deterministic=deterministic, **more)  # fmt: skip
        out = out[0] if isinstance(out, (tuple, list)) else out  # lse behind it
        return out.transpose(1, 2)

    return attend


# ---- all of them ---------------------------------------------------------------------------------


def contenders_of(
    case: Case, backends: list[str], precisions: list[str], deterministic: list[bool], more: dict,
    arch: str, device, sink=None,
) -> list[Contender]:
    """Every contender of a case, also those that cannot run it; in each kind of `deterministic`.

    `more` has further options of `sagebwd.attention`, which all precisions get; `sink` a logit for
    each head.
    """
    found, mask = [], None
    if _needs_mask(case) and not case.sinks and {"cudnn", "efficient"} & set(backends):
        mask = visible(case, 0, case.seq_len, device)
    for kind in deterministic:
        for name in backends:
            if name == OURS:
                found += [_ours(case, precision, kind, True in deterministic, more, arch, device,
                                sink)
                          for precision in precisions]  # fmt: skip
                continue
            try:
                if name in OF_PYTORCH:
                    attend = _of_pytorch(name, case, mask)
                    context = deterministic_algorithms if kind else nullcontext
                elif name == "flex":
                    attend = _flex(case, device)
                    context = deterministic_algorithms if kind else nullcontext
                else:
                    attend = _of_flash_attention(name, case, kind, sink)
                    context = nullcontext
                found.append(Contender(name, kind, attend, context))
            except Unavailable as why:
                found.append(Contender(name, kind, refusal=str(why)))
    return found


def _ours(case, precision, deterministic, has_other_kind, more, arch, device, sink) -> Contender:
    from sagebwd.benchmark.masks import arguments_of
    from sagebwd.core.functional import attention

    name = f"{OURS} {precision}"
    operation = {**more, **case.of_spec(), "head_dim": case.head_dim, "dtype": case.dtype,
                 "precision": precision}  # fmt: skip
    try:
        options.Spec(**operation, deterministic=deterministic)
        if not deterministic and has_other_kind:
            kernels = [{source.name for source in emit(arch, deterministic=kind, **operation)}
                       for kind in (True, False)]  # fmt: skip
            if kernels[0] == kernels[1]:
                return Contender(name, False, same_as=name)
    except (options.SpecError, TypeError) as error:
        return Contender(name, deterministic, refusal=str(error))
    sinks = {} if sink is None else {"sink_logits": sink}
    attend = partial(attention, **arguments_of(case, device), **more, **sinks, precision=precision,
                     deterministic=deterministic)  # fmt: skip
    sizes = case.batch, case.heads, case.heads_kv, case.seq_len, case.seq_kv
    warmup = {**operation, "deterministic": deterministic, "sizes": sizes}
    return Contender(name, deterministic, attend, warmup=warmup)

