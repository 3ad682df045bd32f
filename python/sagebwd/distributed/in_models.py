"""Models of transformers whose sequences several ranks share (sagebwd.distributed)."""

import weakref

import torch

from sagebwd.core.compat import not_compiled
from sagebwd.core.options import SpecError
from sagebwd.distributed.agreement import agree
from sagebwd.distributed.functional import attention
from sagebwd.distributed.sharding import by_place, place_of, spans_of

_NO_GENERATION = ("generation does not share sequences: call "
                  "sagebwd.integrations.transformers.use() before it")  # fmt: skip


class OverRanks:
    """Attention of a model's layers by the ranks of a mesh."""

    def __init__(self, mesh, method, positions_checked=True):
        place_of(mesh, method)  # raises what is wrong with them
        self.mesh, self.method, self.positions_checked = mesh, method, positions_checked
        self._checked = lambda: None  #: the position_ids that were found right

    def check_mask(self, attention_mask):
        """SpecError for a (batch, tokens) mask of padding."""
        if attention_mask is not None and not bool(attention_mask.all()):
            raise SpecError(
                "attention_mask has padding, which sequences that ranks share cannot have. Where "
                "attention is causal, pad on the right, leave the mask out, and give tokens of "
                "padding the label -100. Elsewhere tokens would see the padding: use batches of "
                "one length"
            )

    def check_call(self, layer, position_ids, causal, queries, keys):
        """SpecError for what only generation does, and for positions that nobody can check."""
        if causal and queries != keys:
            raise SpecError(f"{queries} queries and {keys} keys: {_NO_GENERATION}")
        if self.positions_checked and position_ids is None:
            raise SpecError(
                f"no position_ids came to the attention of {layer}, so each rank may count from 0: "
                "pass the model position_ids that sagebwd.distributed.shard cut up. For models "
                "that do not hand them on, also say positions_checked=False to "
                "sagebwd.integrations.transformers.use(mesh=mesh)"
            )

    @not_compiled("sagebwd.distributed")
    def attend(self, q, k, v, position_ids, softmax_scale, sink_logits, options):
        """Attention of this rank's (batch, tokens, heads, head_dim) tensors."""
        if position_ids is not None and position_ids is not self._checked():
            self._check_positions(position_ids, q.shape[1])
            self._checked = weakref.ref(position_ids)
        return attention(
            q, k, v, mesh=self.mesh, method=self.method, layout="bshd",
            softmax_scale=softmax_scale, sink_logits=sink_logits, **options)  # fmt: skip

    def _check_positions(self, position_ids, tokens):
        """SpecError, on every rank, unless positions are those of the tokens that shard() gives
        each rank."""
        place, error = place_of(self.mesh, self.method), None
        everybodys = agree(self.mesh, numbers={"tokens": tokens})
        lengths = by_place(place, [given["tokens"] for given in everybodys])
        spans = spans_of(sum(map(sum, lengths)), place)
        device = position_ids.device
        wanted = torch.cat([torch.arange(*span, device=device) for span in spans])
        given = position_ids.reshape(-1, position_ids.shape[-1])
        if given.shape[1] != len(wanted) or not bool((given == wanted).all()):
            shown = ", ".join(f"{first} to {end - 1}" for first, end in spans)
            error = SpecError(
                f"position_ids are not those of this rank's tokens, {shown}: shard position_ids "
                "as input_ids, by sagebwd.distributed.shard with this mesh and method; rows of "
                f"several sequences are not supported. In generate(): {_NO_GENERATION}"
            )
        agree(self.mesh, error)
