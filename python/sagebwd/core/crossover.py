"""From how many tokens on sagebwd is faster than PyTorch's own attention.

Quantisation reads and writes each token once, so that it weighs the more the shorter a call is: of
M queries and N keys the time of a pass is a (M + N) + b M N, and PyTorch's about c M N. So the
speed of one relative to the other depends on 2 M N / (M + N), which is M where N is as large. The
figures are those of 32K tokens in all.
"""

import functools
import math

from sagebwd.core import measured_crossovers, options
from sagebwd.core.arguments import checks
from sagebwd.core.building import device_number, local_arch
from sagebwd.core.fastest import gpu_of

# By (head dimension of the kernels, causal): tokens of a forward, and of forward and backward.
# NEVER: PyTorch's attention is the faster one at every length that is known. Peers are PyTorch's
# fastest on the H200 (bench/results/speed-grid.json, 512 to 131072 tokens) and FlashAttention-2 of
# the others (balance.json there, 1024 to 8192 tokens): between two lengths the inverse speeds are
# taken to be a straight line in 1 / tokens.
NEVER = math.inf
_H200 = {
    "six-of-seven": {
        (64, False): (7457, NEVER), (64, True): (7955, NEVER),
        (128, False): (4375, 97876), (128, True): (NEVER, NEVER),
        (256, False): (3904, 3866), (256, True): (5947, 6166),
    },
    "gradients16": {
        (64, False): (7631, 8018), (64, True): (16582, 12991),
        (128, False): (4339, 22444), (128, True): (NEVER, 22030),
        (256, False): (3877, 2171), (256, True): (6006, 5100),
    },
}  # fmt: skip
_RTX_4090 = {
    "six-of-seven": {
        (64, False): (1024, 1204), (64, True): (1783, 2911),
        (128, False): (1024, 1232), (128, True): (1697, 3011),
    },
    "six-of-seven dp_sums=fp16": {
        (64, False): (1024, 1035), (64, True): (1783, 2290),
        (128, False): (1024, 1024), (128, True): (1694, 2230),
    },
}  # fmt: skip
_L40S = {
    "six-of-seven": {
        (64, False): (4921, NEVER), (64, True): (NEVER, NEVER),
        (128, False): (4255, NEVER), (128, True): (NEVER, NEVER),
    },
}  # fmt: skip
#: (major, minor, a part of the name, figures, where they are from). The first that fits counts.
_GPUS = (
    (9, 0, "H100", _H200, "measured on an H200"),
    (9, 0, "H200", _H200, "measured on an H200"),
    *((*of, "GeForce", _RTX_4090, "predicted for an RTX 4090") for of in ((8, 6), (8, 9), (12, 0))),
    *((*of, "", _L40S, "predicted for an L40S") for of in ((8, 6), (8, 9), (12, 0))),
)

generation = 0  #: rises whenever keep() may have changed a crossover


def crossover_tokens(
    device=None, *, head_dim=128, causal=False, training=True, precision="six-of-seven",
    dp_sums="fp32",
):  # fmt: skip
    """From how many tokens on sagebwd is faster than the fastest attention of PyTorch on a GPU.

    Figures that `tune_lengths` measured on this machine count first. The others are those of one
    GPU of a kind, for head dimensions of 64, 128 and 256: for H100 and H200 measured on an H200
    (PyTorch's fastest attention, which is not deterministic; `gradients16` with
    deterministic=False), for GeForce 30, 40 and 50 predicted for an RTX 4090, and for professional
    cards for an L40S (FlashAttention-2, from 1024 tokens on). A call of M queries and N keys counts
    as one of 2 M N / (M + N) tokens. Calls of few tokens in all, which leave a part of the GPU
    without work, may differ.

    Args:
        device: the number of a GPU, a torch.device, or a name such as 'cuda:1'; None means
            PyTorch's current one, or 0.
        head_dim: that of the calls, a multiple of 8 from 32 to 512.
        causal: whether they have a causal mask.
        training: whether a backward follows.
        precision, dp_sums: those of the calls, as for `attention`.

    Returns:
        The number of tokens; math.inf where PyTorch's attention is faster at every known length.

    Raises:
        SpecError: nothing is known of this GPU, this head dimension or this precision on it.
        LibraryError: there is no GPU.
    """
    checks.yes_or_no("causal", causal)
    checks.yes_or_no("training", training)
    number = device_number(device)
    text = options.text_of(dict(head_dim=head_dim, precision=precision, dp_sums=dp_sums))
    options.spec_of_text(text)
    local_arch(number, "The crossover is that of a GPU: ask where the kernels will run")
    major, minor, name = gpu_of(number)
    found = lookup((major, minor, text_of_name(name)), head_dim, causal, training, precision,
                   dp_sums)  # fmt: skip
    if isinstance(found, str):
        raise options.SpecError(found)
    return found


def lookup(gpu, head_dim, causal, training, precision, dp_sums):
    """The number of tokens, of a GPU (major, minor, name); a text that says why nothing is known
    of it."""
    width, words = width_of(head_dim), words_of(precision, dp_sums)
    if measured := measured_here(gpu[2], head_dim, causal, words):
        return measured[training]
    known = next((of for of in _GPUS if of[:2] == gpu[:2] and of[2] in gpu[2]), None)
    how = (f"Measure it with 'sagebwd tune --lengths 512,1024,2048,4096,8192 --head-dim {head_dim} "
           f"--causal {'top-left' if causal else 'none'} --precision {precision} --dp-sums "
           f"{dp_sums}', or pass a number")  # fmt: skip
    if known is None:
        return f"nothing is known of the crossover on {gpu[2]}. {how}"
    of_words = known[3].get(words, {})
    if (width, causal) not in of_words:
        return (f"nothing is known of the crossover of '{words}' with head dimension {head_dim} on "
                f"{gpu[2]}: known are {', '.join(map(repr, known[3]))} up to "
                f"{max(w for of in known[3].values() for w, _ in of)}. {how}")  # fmt: skip
    return of_words[width, causal][training]


@functools.cache
def measured_here(gpu, head_dim, causal, words):
    """Finds what `tune_lengths` kept, for a forward and for both passes, or None."""
    return measured_crossovers.find(key_of(gpu, head_dim, causal, words))


def keep(gpu, head_dim, causal, words, forward, training, figures):
    """Whether a crossover is on disk now, so that this process and later ones use it."""
    global generation
    key = key_of(gpu, head_dim, causal, words)
    kept = measured_crossovers.keep(key, forward, training, figures)
    measured_here.cache_clear()
    generation += 1
    return kept


def key_of(gpu, head_dim, causal, words):
    """Tells one measured crossover from others, as measured_crossovers takes it."""
    return {"schema": "sagebwd crossover 1", "version": options._core.__version__, "gpu": gpu,
            "head_dim": head_dim, "causal": causal, "words": words}  # fmt: skip


def crossing(speeds):
    """The crossover by some speeds, as a dict {tokens: speed relative to PyTorch's}.

    It is where the last speed below 1 becomes 1, with a straight line through the inverse speeds
    over 1 / tokens. It is the least number of tokens if no speed is below 1, and math.inf if that
    of the most tokens is.
    """
    lengths = sorted(speeds)
    slower = [tokens for tokens in lengths if speeds[tokens] < 1]
    if not slower:
        return lengths[0]
    if slower[-1] == lengths[-1]:
        return NEVER
    least = slower[-1]
    most = lengths[lengths.index(least) + 1]
    share = (1 / speeds[least] - 1) / (1 / speeds[least] - 1 / speeds[most])
    return round(1 / ((1 - share) / least + share / most))


def width_of(head_dim):
    """The head dimension of the kernels of a call."""
    return next(width for width in options.WIDTHS if head_dim <= width)


def words_of(precision, dp_sums):
    """The precision of a call and its options, as tables name them."""
    return precision if dp_sums == "fp32" else f"{precision} dp_sums={dp_sums}"


def text_of_name(name):
    """The name of a GPU, of which the driver has bytes."""
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def tokens_of(queries, keys):
    """The length of a call of so many queries and keys, as a crossover counts it."""
    return 2 * queries * keys // max(1, queries + keys)
