"""SLA2's attention as a module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from sagebwd.core import front_end, options
from sagebwd.core.arguments.checks import whole_number
from sagebwd.lists import blocks
from sagebwd.lists.given import Lists
from sagebwd.nn.block_router import BlockRouter, InFP32, known_keywords
from sagebwd.nn.sharded import Together, as_shared, gathers, refuse_copies, whole
from sagebwd.sla import always as always_listed
from sagebwd.sla import best_lists, functional, mixing, router, stage_one
from sagebwd.sla.exact import weighted_attention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALPHAS = ("block", "head", "estimated")
ROUTINGS = ("hard", "soft", "straight-through")


@front_end.has_front_end
def _attended(q, k, v, *, module, routing, layout):
    q, k, v = module._prepared(q, k, v)
    lists = module._lists(q, k, routing)
    if routing == "hard" and module._attends_itself():
        out = functional.mixture(*module._told(q, k, v, lists))
    else:
        out = module._attend(q, k, v, lists, routing)[0]
    return functional.as_layout(layout, out)[0]


class SparseLinearAttention(InFP32):
    """SLA2's attention with its router and its alpha (arXiv 2602.12675, Algorithms 1 to 3).

    A block of queries attends to the keys of the `density` best key blocks exactly, with INT8
    products, and to the others by linear attention. alpha mixes the two.

    Args:
        head_dim: channels of q, k and v.
        heads, heads_kv: heads of q, and of k and v, which default to as many.
        density: the share of the key blocks that is exact, above 0 and at most 1.
        block_size: queries and keys of a block, 64 or 128 each; any with precision='exact'.
        seq_len: queries of each call with alpha='block', which needs it. Otherwise it says nothing,
            and calls may have any length.
        alpha: 'block', one number for each query block of a head, as in the paper; 'head', one for
            each head; or 'estimated', computed for each query from the input, with one learned
            number for each head (see `sagebwd.sparse_linear_attention`). The last two take any
            length.
        linear: which keys the linear branch sees: the 'complement' of the exact ones, or 'all'.
        router: 'learned'; 'pooled', which has no parameters (as in SLA); or a module that gives
            scores of (batch, heads, query blocks, key blocks) for q and k, such as a `BlockRouter`
            with maps for each head, which has a softmax_scale of its own.
        always: key blocks that every list has, whatever their scores, as for `top_blocks`, such as
            slice(0, 4) where text comes first. They count among the `density`. A mask is taken for
            its numbers.
        temperature: of soft lists, in stage 1. The paper has 0.1.
        score: 'logits', or 'softmax' of these (Algorithm 2, line 8), from which soft lists cannot
            single out a few blocks of many.
        layout: 'bhsd', or 'bshd' for (batch, tokens, heads, head_dim) tensors.
        feature_map, softmax_scale, smooth_k: as for `sagebwd.sparse_linear_attention`.
        granularity, group_kv, smooth_v, rotate, precision, deterministic, dp_sums: as for
            `block_sparse_attention`; precision='exact' takes PyTorch's own products, on any device,
            for which the others say nothing.

    Parameters, in FP32 also where the model is cast to 16 bits: router.query_map and
    router.key_map; alpha_logit of (heads, query blocks) or (heads, 1), whose sigmoid is alpha; or
    beta of (heads,). diffusers' `from_pretrained(torch_dtype=)` casts them unless the model's
    `_keep_in_fp32_modules` names them, and `load_state_dict(assign=True)` takes the types of the
    state.
    """

    alpha_logit: Tensor | None
    beta: Tensor | None
    router: nn.Module

    @known_keywords
    def __init__(
        self, head_dim: int, heads: int, *, heads_kv: int | None = None, density: float = 0.05,
        block_size: tuple[int, int] = (128, 64), seq_len: int | None = None,
        alpha: Literal["block", "head", "estimated"] = "block",
        linear: Literal["complement", "all"] = "complement",
        router: Literal["learned", "pooled"] | nn.Module = "learned",
        always: Tensor | Iterable[int] | slice | None = None, temperature: float = 0.1,
        score: Literal["logits", "softmax"] = "logits", feature_map: Literal["softmax"] = "softmax",
        softmax_scale: float | None = None, layout: Literal["bhsd", "bshd"] = "bhsd",
        granularity: Literal["row", "block"] = "row", group_kv: int | None = None,
        smooth_k: bool = True, smooth_v: bool = False, rotate: bool = True,
        precision: str = "six-of-seven", deterministic: bool = True,
        dp_sums: Literal["fp32", "fp16"] = "fp32",
    ) -> None:  # fmt: skip
        super().__init__()
        self.head_dim, self.heads = whole_number("head_dim", head_dim), whole_number("heads", heads)
        self.heads_kv = self.heads if heads_kv is None else whole_number("heads_kv", heads_kv)
        if self.heads % self.heads_kv:
            raise options.SpecError(f"heads={heads} is no multiple of heads_kv={heads_kv}")
        blocks.kept_of(density, 1)
        self.density = float(density)
        self.block_size = blocks.check_block_size(block_size, any_size=precision == "exact")
        self.alpha = blocks.one_of("alpha", alpha, ALPHAS)
        self.linear = blocks.one_of("linear", linear, blocks.LINEAR)
        self.score = blocks.one_of("score", score, blocks.SCORES)
        self.always = always_listed.as_numbers(always_listed.checked(always))
        self.temperature = blocks.check_temperature(temperature)
        functional.check_feature_map(feature_map)
        options.check_layout(layout)
        self.layout = layout
        self.softmax_scale = options.check_softmax_scale(softmax_scale, head_dim)
        self.kernels = dict(
            granularity=granularity, group_kv=group_kv,
            smooth_k=options.yes_or_no("smooth_k", smooth_k), smooth_v=smooth_v, rotate=rotate,
            precision=precision, deterministic=deterministic, dp_sums=dp_sums,
        )  # fmt: skip
        functional.check_kernels(self.kernels, self.block_size, self.head_dim)
        seq_len = None if seq_len is None else whole_number("seq_len", seq_len)
        self.seq_len = seq_len if alpha == "block" else None
        if alpha == "block" and seq_len is None:
            raise options.SpecError(
                "alpha='block' has a number for each query block: pass seq_len=, the queries of a "
                "call, or alpha='head' or 'estimated', which take any length"
            )
        if not isinstance(router, nn.Module):
            if router not in ("learned", "pooled"):
                raise options.SpecError(f"router={router!r}: pass 'learned', 'pooled', or a module "
                                        "that gives scores of q and k, as BlockRouter does")
            router = BlockRouter(self.head_dim, block_size=self.block_size,
                                 learned=router == "learned",
                                 softmax_scale=self.softmax_scale)  # fmt: skip
        elif isinstance(router, BlockRouter):
            router.check_fits(self.head_dim, self.heads, self.block_size)
        self.router = router
        logit = beta = None
        if alpha == "estimated":
            beta = nn.Parameter(torch.empty(self.heads, dtype=torch.float32))
        else:
            count = blocks.count_of(seq_len, self.block_size[0]) if alpha == "block" else 1
            logit = nn.Parameter(torch.empty(self.heads, count, dtype=torch.float32))
        self.register_parameter("alpha_logit", logit)
        self.register_parameter("beta", beta)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Makes alpha 1/2, or beta 0. The router has a function of that name of its own."""
        for parameter in self.parameters(recurse=False):
            parameter.zero_()

    def extra_repr(self) -> str:
        return (f"head_dim={self.head_dim}, heads={self.heads}, density={self.density}, "
                f"block_size={self.block_size}, alpha={self.alpha!r}, linear={self.linear!r}, "
                f"precision={self.kernels['precision']!r}")  # fmt: skip

    # ---- attention -------------------------------------------------------------------------------

    @known_keywords
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *,
        routing: Literal["hard", "soft", "straight-through"] = "hard",
        q_norm: Tensor | bool | None = None, k_norm: Tensor | bool | None = None,
        norm_eps: float = 1e-6, q_inv_rms: Tensor | None = None, k_inv_rms: Tensor | None = None,
        rope: tuple[Tensor, Tensor] | None = None, rope_k: tuple[Tensor, Tensor] | None = None,
        rope_style: Literal["halves", "interleaved"] = "halves", rope_begin: int = 0,
        gate: Tensor | None = None, recompute_qk: bool = False,
    ) -> Tensor:  # fmt: skip
        """Attention, like q.

        Args:
            q: (batch, heads, queries, head_dim) in layout='bhsd'; bfloat16 or float16 on a CUDA GPU
                for kernels.
            k, v: (batch, heads_kv, keys, head_dim), of the same dtype.
            routing: 'hard' lists the best blocks, and nothing reaches the router. 'soft' lists all
                blocks, with weights that the router is trained by. 'straight-through' computes what
                'hard' does; the gradient of its lists goes to the router as if they were soft. The
                last two take PyTorch's own products, and time quadratic in the length.
            q_norm, k_norm, norm_eps, q_inv_rms, k_inv_rms, rope, rope_k, rope_style, rope_begin,
                gate, recompute_qk: as for `sagebwd.sparse_linear_attention`. All other methods are
                given normed and rotated queries and keys, as the router and both branches are.

        Raises what `sagebwd.sparse_linear_attention` raises, and SpecError for tensors that the
        module was not made for.
        """
        return _attended(
            q, k, v, module=self, routing=routing, layout=self.layout, q_norm=q_norm, k_norm=k_norm,
            norm_eps=norm_eps, q_inv_rms=q_inv_rms, k_inv_rms=k_inv_rms, rope=rope, rope_k=rope_k,
            rope_style=rope_style, rope_begin=rope_begin, gate=gate, recompute_qk=recompute_qk,
        )  # fmt: skip

    def attend_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, lists: Lists, sizes: tuple[int, int], scale: float,
        kernels: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """(out, lse) of the listed keys; another sparse attention takes its place in a subclass, or
        as this attribute of a module."""
        return functional.sparse_branch(q, k, v, lists, sizes, scale, kernels)

    _ATTEND_BLOCKS = attend_blocks

    def _attention_to_blocks(self) -> Any:
        # A module that is set as an attribute of a module lies beside those of its class.
        return self._modules.get("attend_blocks") or self.attend_blocks

    def _attends_itself(self) -> bool:
        function = getattr(self._attention_to_blocks(), "__func__", None)
        return function is self._ATTEND_BLOCKS.__func__

    @gathers
    def block_mask(self, q: Tensor, k: Tensor) -> Tensor:
        """Which blocks a call of these tensors attends to exactly: bool of (batch, heads, query
        blocks, key blocks)."""
        q, k, _ = self._prepared(q, k, k)
        return self._lists(q, k, "hard").mask

    def _prepared(self, q: Tensor, k: Tensor, v: Tensor, some: bool = False) -> list[Tensor]:
        """`some`: refuse tensors without any tokens."""
        q, k, v = functional.prepared(q, k, v, self.layout)
        if some and 0 in (q.shape[0], q.shape[2], k.shape[2]):
            raise options.SpecError(f"q and k have shapes {tuple(q.shape)} and {tuple(k.shape)}: "
                                    "pass some queries and keys, which have a mean")  # fmt: skip
        given = q.shape[1], k.shape[1], q.shape[3]
        made = self.heads, self.heads_kv, self.head_dim
        if given != made:
            raise options.SpecError(
                f"q and k have {given[0]} and {given[1]} heads of {given[2]} channels; the module "
                f"was made for {made[0]} and {made[1]} heads of {made[2]} (is layout= right?)"
            )
        if self.alpha == "block" and q.shape[2] != self.seq_len:
            raise options.SpecError(
                f"q has {q.shape[2]} tokens and the module has alpha='block' for seq_len="
                f"{self.seq_len}: make it with another seq_len, or with alpha='head' or "
                "'estimated', which take any length"
            )
        return [q, k, v]

    def _lists(self, q: Tensor, k: Tensor, routing: str, temperature: float | None = None) -> Lists:
        blocks.one_of("routing", routing, ROUTINGS)
        lists = self._lists_of_kernels(q, k) if routing == "hard" else None
        if lists is not None:
            return lists
        with torch.set_grad_enabled(torch.is_grad_enabled() and routing != "hard"):
            scores = self.router(q, k)
            if not isinstance(scores, Tensor):
                raise TypeError(f"the router gives {options.a_kind(scores)}; it must give a torch "
                                "tensor")  # fmt: skip
            wanted = (*q.shape[:2], *(blocks.count_of(t.shape[2], size)
                                      for t, size in zip((q, k), self.block_size)))  # fmt: skip
            if tuple(scores.shape) != wanted:
                raise options.SpecError(
                    f"the router gives scores of {tuple(scores.shape)}, and {wanted} is needed for "
                    f"blocks of {self.block_size}: make it with this block_size, and with as many "
                    "heads"
                )
            if self.score == "softmax":
                scores = scores.softmax(-1)
            if routing != "soft":
                hard, bits = router.top_lists(scores, self.density, self.block_size, self.always)
            if routing == "hard":
                given = dict(block_mask=hard) if bits is None else dict(block_bits=bits)
                return Lists(hard, None, given)
            soft = router.soft_top_blocks(scores, self.density, temperature or self.temperature,
                                          always=self.always)  # fmt: skip
            if routing == "straight-through":
                soft = hard.to(soft.dtype) + (soft - soft.detach())
            return Lists(soft, None, dict(block_mask=soft))

    def _lists_of_kernels(self, q: Tensor, k: Tensor) -> Lists | None:
        """Hard lists by one operation, where the router is as it was made: scores and their softmax
        have one order. None where they are to be formed otherwise."""
        own = self.router
        if not isinstance(own, BlockRouter) or not own.scores_as_it_is():
            return None
        if (own.block_size, own.head_dim) != (self.block_size, self.head_dim):
            return None
        wants_mask = self.alpha_logit is None or self.kernels["precision"] == "exact"
        return best_lists.lists_of(q, k, own.query_map, own.key_map, self.density, self.always,
                                   self.block_size, wants_mask)  # fmt: skip

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, lists: Lists, routing: str
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sparse = self._attention_to_blocks() if routing == "hard" else weighted_attention
        return functional.branches(*self._told(q, k, v, lists), sparse)

    def _told(self, q: Tensor, k: Tensor, v: Tensor, lists: Lists) -> tuple[Any, ...]:
        alpha = "estimated" if self.alpha_logit is None else self.alpha_logit.sigmoid()
        return (q, k, v, alpha, self.beta, lists, self.block_size, self.softmax_scale, self.linear,
                self.kernels)  # fmt: skip

    # ---- stage 1 ---------------------------------------------------------------------------------

    @gathers
    def stage_one_loss(
        self, q: Tensor, k: Tensor, v: Tensor, *, temperature: float | None = None
    ) -> Tensor:
        """The mean squared distance between full attention and soft SLA2, which trains the router
        and alpha (arXiv 2602.12675, section 5, stage 1).

        q, k and v, as for `forward`, are data: take them from the dense model at the timesteps that
        it is trained for. They get no gradient. Scores exist for a few query blocks at a time.
        `temperature` stands for that of the module: at 0.1 lists are nearly hard, and few of their
        entries have a slope; at 1 they are another function than hard lists.

        Returns a scalar in FP32 (FP64 for q of FP64).
        """
        if temperature is not None:
            temperature = blocks.check_temperature(temperature)
        q, k, v = (t.detach() for t in self._prepared(q, k, v, some=True))
        full = stage_one.full_attention(q, k, v, self.softmax_scale)
        out = self._attend(q, k, v, self._lists(q, k, "soft", temperature), "soft")[0]
        return (out.to(mixing.wide(out.dtype)) - full).square().mean()

    @torch.no_grad()
    def calibrate_alpha(
        self, q: Tensor, k: Tensor, v: Tensor, *, group: ProcessGroup | None = None
    ) -> None:
        """Sets alpha to the best for these tensors, from 0.01 to 0.99: a good start for stage 1.

        The lists are those of the router as it is. With alpha='estimated' beta becomes that for
        which the mean of each head's alpha over the queries is the mean of the weight that it
        stands for.

        Args:
            q, k, v: as for `forward`.
            group: of torch.distributed, whose ranks call this together: alpha is then the best for
                the tensors of all of them, and the same everywhere. Without it ranks that have
                other tensors, as under DDP, keep other alphas for good. With `fully_shard` the
                ranks are those that share the parameters.

        Raises SpecError, and changes nothing, where q, k or v of a rank has NaN or infinite values.
        """
        name = "beta" if self.alpha_logit is None else "alpha_logit"
        refuse_copies([self], "calibrate_alpha")
        ranks = Together(getattr(self, name), group)
        best = self._best_alpha(q, k, v, ranks)
        parameter = getattr(self, name)
        now = whole(parameter)
        parameter.copy_(as_shared(parameter, torch.where(best.isfinite(), best.to(now.dtype), now)))

    @gathers
    def _best_alpha(self, q: Tensor, k: Tensor, v: Tensor, ranks: Together) -> Tensor:
        """Returns what alpha_logit or beta should be; it is not finite where nothing says it."""
        q, k, v = self._prepared(q, k, v, some=True)
        if not q.is_meta:
            wrong = ranks.most(torch.stack([~t.isfinite().all() for t in (q, k, v)]).int())
            for name, is_wrong in zip("qkv", wrong.tolist()):
                if is_wrong:
                    raise options.SpecError(f"{name} has NaN or infinite values, from which no "
                                            "alpha can be calibrated")  # fmt: skip
        lists = self._lists(q, k, "hard")
        _, sparse, linear, lse = self._attend(q, k, v, lists, "hard")
        if self.alpha_logit is None:
            return stage_one.best_beta(q, k, lse, lists.mask, self.block_size, self.softmax_scale,
                                       ranks)  # fmt: skip
        full = stage_one.full_attention(q, k, v, self.softmax_scale)
        return stage_one.best_alpha(full, sparse, linear, self.block_size[0],
                                    self.alpha == "head", ranks).logit()  # fmt: skip

    def freeze_router(self) -> SparseLinearAttention:
        """Ends stage 1: the router is trained no further. Returns the module."""
        refuse_copies(self.modules(), "freeze_router")
        self.router.requires_grad_(False)
        for parameter in self.router.parameters():
            parameter.grad = None  # or an optimiser that holds it would go on
        return self

    @torch.no_grad()
    @gathers
    def report(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, float]:
        """How near hard SLA2 is to full attention on these tensors, means over queries and heads.

        Returns:
            density: the share of the blocks that is exact.
            mass, best_mass: the weight of the listed blocks in full attention, and of the best
                lists of as many blocks.
            error, error_sparse, error_linear: relative L2 distance to full attention, of the output
                and of each branch.
            alpha, exact_alpha: mean of alpha, and of the weight that it stands for.
            alpha_distance: the root of the mean square of their difference, by query.
            unlisted: the share of key blocks that no query block lists.
            longest_column: how many query blocks list the most listed key block.
        """
        q, k, v = self._prepared(q, k, v, some=True)
        if q.is_meta:
            raise options.SpecError(f"q is on {q.device}, where there are no numbers to report: "
                                    "pass tensors of another device")  # fmt: skip
        lists = self._lists(q, k, "hard")
        mask, results = lists.mask, self._attend(q, k, v, lists, "hard")
        if self.alpha_logit is None:
            alpha = mixing.estimated_alpha(q, k, results[3], mask, self.beta, self.block_size,
                                           self.softmax_scale)  # fmt: skip
        else:
            alpha = mixing.alpha_rows(self.alpha_logit.sigmoid(), q, self.block_size[0])
        alpha = mixing.with_ends(alpha, mask, self.heads, self.block_size[0], q.shape[2],
                                 self.linear)  # fmt: skip
        return stage_one.report(q, k, v, mask, results, alpha, self.block_size, self.softmax_scale)
