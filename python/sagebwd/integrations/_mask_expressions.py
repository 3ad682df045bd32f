"""Functions of masks that transformers hands over, as expressions that kernels take."""

import torch

from sagebwd.core import expressions
from sagebwd.core.arguments.checks import SpecError
from sagebwd.masks import evaluation, parsing, tracing
from sagebwd.masks.block_mask import block_mask
from sagebwd.masks.flex import from_flex

try:
    from transformers import masking_utils
except ImportError:  # before 4.53
    masking_utils = None


def expression_of(function, padding, keys, q_offset, kv_offset, device):
    """The expression of a mask's function of (batch, head, query, key).

    Args:
        padding: bool of (batch, tokens), False for tokens that are padding; None: none is.
        keys: how many there are.
        q_offset, kv_offset: what is added to the positions of queries and keys. Kernels read them,
            so that generation compiles none for each token.

    Raises SpecError, which says what an expression lacks.
    """
    if padding is not None:
        padding = masking_utils.prepare_padding_mask(padding, keys, kv_offset)
        function = masking_utils.and_masks(function, masking_utils.padding_mask_function(padding))
    if q_offset or kv_offset:
        offsets = (torch.tensor(offset, device=device) for offset in (q_offset, kv_offset))
        function = masking_utils.add_offsets_to_mask_function(function, *offsets)
    expression = from_flex(function)
    if expressions.depends(expression.text)[1]:
        raise SpecError(f"{expression.text!r} depends on the head, and transformers' masks are the "
                        "same for all")  # fmt: skip
    return expression


def rows_of(expression, batch, keys, device):
    """A function of queries that gives their part of a mask, (batch, queries, keys)."""
    tree = parsing.parse(expression.text, tracing.types_of(expression.operands))
    places = {"b": torch.arange(batch, device=device).view(-1, 1, 1),
              "h": torch.zeros((), dtype=torch.int64, device=device),
              "k": torch.arange(keys, device=device)}  # fmt: skip
    return lambda rows: evaluation.value_of(tree, places | {"q": rows[:, None]},
                                            expression.operands)  # fmt: skip


def kept(expression, batch, queries, keys, device):
    """The mask with its blocks, which all layers of a forward share."""
    return block_mask(expression, batch, 1, queries, keys, device=device)
