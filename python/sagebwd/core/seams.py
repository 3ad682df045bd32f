"""One room of the package asks another, which it does not know, for these. `sagebwd/__init__.py`,
which knows both, says who answers."""

#: sagebwd.distributed.dtensors.attention_of_dtensors, for drop-in functions of DTensors.
attention_of_dtensors = None
#: The function of 'mask' or 'score', of a function or a text, and of the tensors by name that a
#: text indexes, by which sagebwd.masks traces it.
traced = None
#: The function that gives sagebwd.masks.table_sums, which evaluates expressions and sums what the
#: tensors that they index get.
table_sums = None
#: The function that gives sagebwd.masks.slopes, which evaluates masks, and score functions with
#: their derivatives.
slopes = None
#: sagebwd.distributed.in_models.OverRanks, for transformers' models whose ranks share sequences.
over_ranks = None
