"""Predicts times on a GPU from those on an H100 with stretched tensor instructions.

This is arithmetic alone. A pass has attention kernels, which tensor cores or other pipes limit, and
kernels around them (quantisation, means, rounding), which memory limits on most cards. Attention
takes as many clocks of an SM on the card as here, divided by the clocks that stand for one of its
clocks; the card has another clock and another number of SMs. A kernel around it takes the longer of
two times: that of its bytes at the rate that copying reaches, and that of its clocks. Here the
clocks are longer, as this GPU's memory is fast for its SMs. Nothing is added for what the model
leaves out: a card that lowers its clock under load, its smaller L1 and larger L2 caches, and
attention kernels that wait for memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpus import Gpu

#: The products of each attention kernel.
PRODUCTS = {
    "forward": ("S", "PV"),
    "backward_dq": ("S", "dP", "dQ"),
    "backward_dkv": ("S", "dV", "dP", "dK"),
    "backward": ("S", "dV", "dP", "dK", "dQ"),
}
#: Those that are INT8 under each precision (which_int8() in generator/spec.h).
INT8 = {
    "six-of-seven": {"S", "PV", "dV", "dQ", "dK"},
    "qk16": {"PV", "dV", "dQ", "dK"},
    "dv16": {"S", "PV", "dQ", "dK"},
    "gradients16": {"S", "PV"},
}
#: The share of its memory's rate that a copy reaches: 4234 of 4800 GB/s on an H200.
COPY_SHARE = 0.88
#: How many times 4 D operations per score each pass counts, as in bench/speed.py.
OPERATIONS = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}
#: FlashAttention-2's share of its tensor bound: 91 to 95 % on an RTX 4090, in the paper of SageBwd.
FA2_SHARE = 0.93


@dataclass(frozen=True)
class Peer:
    """TFLOPS of FlashAttention-2, and where they are from."""

    forward: float
    backward: float
    source: str


#: NVIDIA's tables of September 2026, D128, 8192 tokens, by `deterministic`. FlashAttention-2 is far
#: from its bound on an A100.
A100_PEER = {
    True: Peer(213, 95, "published at D128 and 8192 tokens, deterministic"),
    False: Peer(213, 178, "published at D128 and 8192 tokens"),
}
#: Measured on an RTX 4090 by the SageBwd paper: forward + backward at 8192 tokens, TOPS by head
#: dimension, of its Triton kernels and of FlashAttention-2.
PAPER = {64: {"paper": 260.0, "fa2": 151.0}, 128: {"paper": 201.0, "fa2": 150.0}}


def operations(cell: dict, which: str) -> float:
    """Counts the operations of a pass of a cell, for TFLOPS. A cell has head_dim, tokens, batch,
    heads and causal; with lists of blocks it also has `share`, of the scores that are listed, and
    with a mask that intervals tell `share`, of those in blocks that somebody sees."""
    seen = cell["batch"] * cell["heads"] * cell["tokens"] ** 2 * (0.5 if cell["causal"] else 1.0)
    seen *= cell.get("share", 1.0)
    return 4 * seen * cell["head_dim"] * OPERATIONS[which]


def peer_of(gpu: Gpu, deterministic: bool) -> Peer:
    """FlashAttention-2 on a GPU."""
    if gpu.name == "A100":
        return A100_PEER[deterministic]
    tflops = FA2_SHARE * gpu.flash_attention_2
    return Peer(tflops, tflops, f"{100 * FA2_SHARE:.0f} % of its tensor bound")


def tensor_clocks(gpu: Gpu, kernels, precision: str, dp_half_sums: bool = False) -> float:
    """The fewest clocks of an SM for one score and one channel of the products of some kernels."""
    def rate(product: str) -> int:
        if product in INT8[precision]:
            return gpu.int8
        return gpu.bits16_half if product == "dP" and dp_half_sums else gpu.bits16

    return sum(2 / (rate(product) * gpu.mma_share)
               for kernel in kernels for product in PRODUCTS[kernel])  # fmt: skip


def bound_ms(gpu: Gpu, cell: dict, kernels, precision: str, dp_half_sums: bool = False) -> float:
    """The time in which tensor cores at their highest rate do the products of some kernels."""
    scores_channels = operations(cell, "forward") / 4
    clocks = scores_channels * tensor_clocks(gpu, kernels, precision, dp_half_sums)
    return clocks / gpu.sms / gpu.clock_ghz / 1e6


@dataclass(frozen=True)
class Here:
    """The GPU that measures, as it was while it did."""

    sms: int
    clock_ghz: float
    memory_gbs: float  #: read and written by a copy, for the record


def attention_factor(here: Here, gpu: Gpu, clocks_a_clock: float) -> float:
    """The card's time of an attention kernel divided by the time here."""
    return (here.sms * here.clock_ghz) / (gpu.sms * gpu.clock_ghz) / clocks_a_clock


def bytes_of(kernel: str, pass_name: str, cell: dict, plan: dict, fused: bool) -> float:
    """The bytes that a kernel around attention reads from memory and writes to it, each once: all
    products in INT8 except dP, under `row`, with as many key/value heads as query heads.

    A tensor of 16 bits counts 2, a copy in INT8 counts 1; vectors of a query count as they are.
    """
    elements = cell["batch"] * cell["heads"] * cell["tokens"] * cell["head_dim"]
    row = 4 * cell["batch"] * cell["heads"] * cell["tokens"]  # a number for each query
    if kernel == "key_mean":  # K
        return 2 * elements
    if kernel == "round_dq":  # sums in FP32; dQ
        return (4 + 2) * elements
    if kernel in ("transpose_bits", "interval_bits"):
        of_q, of_k = (-(-cell["tokens"] // size) for size in cell["block_size"])
        bits, turned = of_q * (of_k // 32 + 1), of_k * -(-of_q // 32)
        columns = cell.get("columns")  # numbers of a key, which all heads share, as their bits
        if kernel == "interval_bits":  # bits of blocks that are seen, and of those seen in part
            return 4 * (columns * cell["tokens"] + 2 * bits)
        lists = cell["batch"] * cell["heads"]
        return 4 * (bits * (1 if columns else lists) + turned * lists)
    if kernel == "order_lists":  # the length of each list, and its place
        of_k = -(-cell["tokens"] // cell["block_size"][1])
        return (4 + 16) * cell["batch"] * cell["heads"] * of_k
    assert kernel == "quantize", kernel
    if pass_name == "forward":  # Q, K and V; their copies, and scales of queries
        return (6 + 3) * elements + row
    # Q, K, O and dO, the lse; copies of Q and K, transposed copies of Q, K and dO, rows of dO for
    # dP, and 4 numbers for each query.
    count = 8 + 2 + 3 + 2
    if plan["dp_half_sums"]:
        count += 2 + 2  # V, and its copy for dP
    if fused:
        count += 4  # zeros
    return count * elements + (1 + 4) * row


def around_ms(here: Here, gpu: Gpu, ms: float, moved: float) -> float:
    """The card's time of a kernel that took so long here and moves so many bytes."""
    return max(moved / (COPY_SHARE * gpu.memory_gbs * 1e6),
               ms * here.sms * here.clock_ghz / (gpu.sms * gpu.clock_ghz))  # fmt: skip


def predicted(gpu: Gpu, here: Here, clocks_a_clock: float, cell: dict, plan: dict,
              kernels: dict[str, dict[str, float]]) -> dict:  # fmt: skip
    """The card's times and TFLOPS.

    `kernels` has the milliseconds of each kernel of each pass, measured here. `plan` has the words
    precision, deterministic and dp_half_sums.
    """
    of_attention = attention_factor(here, gpu, clocks_a_clock)
    found, sums = {}, dict.fromkeys(("attention_ms", "around_ms", "bound_ms"), 0.0)
    for name, times in kernels.items():
        attention = [kernel for kernel in times if kernel in PRODUCTS]
        one = {
            "attention_ms": of_attention * sum(times[kernel] for kernel in attention),
            "around_ms": sum(
                around_ms(here, gpu, ms, bytes_of(kernel, name, cell, plan, "backward" in times))
                for kernel, ms in times.items() if kernel not in PRODUCTS),
            "bound_ms": bound_ms(gpu, cell, attention, plan["precision"], plan["dp_half_sums"]),
        }  # fmt: skip
        sums = {key: value + one[key] for key, value in sums.items()}
        found[name] = one
    found["forward+backward"] = sums
    peer = peer_of(gpu, plan["deterministic"])
    fa2 = {"forward": operations(cell, "forward") / peer.forward / 1e9,
           "backward": operations(cell, "backward") / peer.backward / 1e9}  # fmt: skip
    fa2["forward+backward"] = sum(fa2.values())
    for name, one in found.items():
        total = one["attention_ms"] + one["around_ms"]
        one |= {
            "ms": total,
            "tflops": operations(cell, name) / total / 1e9,
            "share_of_tensor_bound": one["bound_ms"] / one["attention_ms"],
            "fa2_ms": fa2[name],
            "ratio_to_fa2": fa2[name] / total,
        }
    return {name: {key: float(f"{value:.5g}") for key, value in one.items()}
            for name, one in found.items()}  # fmt: skip


#: The bytes of a number of queries and keys that norm and RoPE have to move, each once: x and what
#: comes of it forward; the gradient of that, x and its gradient backward.
FRONT_BYTES = {"forward": 2 + 2, "backward": 2 + 2 + 2}


def front_ms(here: Here, gpu: Gpu, numbers: float, measured: dict[str, float],
             counted: bool) -> tuple[float, float]:  # fmt: skip
    """The least and the most that norm and RoPE of so many numbers of queries and keys take on the
    card, forward and backward together.

    `measured` has the milliseconds of each pass here. Kernels whose bytes are `counted` move those
    of FRONT_BYTES and no others, so that both results are one. Other kernels may move more: at the
    most all their time here was that of bytes.
    """
    least = most = 0.0
    for name, ms in measured.items():
        one = around_ms(here, gpu, ms, FRONT_BYTES[name] * numbers)
        least += one
        most += one if counted else max(one, ms * here.memory_gbs / (COPY_SHARE * gpu.memory_gbs))
    return least, most


def paper_of(gpu: Gpu, cell: dict) -> dict | None:
    """The published figures next to a cell, if there are any: TOPS of forward + backward."""
    if gpu.name != "RTX 4090" or cell["tokens"] != 8192 or cell["causal"]:
        return None
    figures = PAPER.get(cell["head_dim"])
    return figures and figures | {"ratio_to_fa2": round(figures["paper"] / figures["fa2"], 2)}


def compared(found: dict, cell: dict, plan: dict, bounds: list[dict], gpu: Gpu,
             fused: bool) -> dict | None:
    """For each pass: ms by the static model (bench/instructions.py), and how many times as long the
    attention kernels took by the instrument. None where the model has no such kernels."""
    causal = "top-left" if cell["causal"] else "none"
    model = {}
    for name, called in (("forward", "forward"), ("backward", "fused" if fused else "backward")):
        row = next((row for row in bounds if (row["gpu"], row["pass"], row["head_dim"],
                    row["causal"], row["precision"]) == (gpu.name, called, cell["head_dim"], causal,
                                                         plan["precision"])), None)  # fmt: skip
        if row is None:
            return None
        # The model counts D operations a score with a mask as without one.
        ms = operations(cell, name) / row["tflops"] / 1e9
        ratio = round(found[name]["attention_ms"] / ms, 3)
        model[name] = {"ms": float(f"{ms:.5g}"), "bound_by": row["bound_by"],
                       "instrument_to_model": ratio}  # fmt: skip
    return model


def of_blocks(found: dict) -> dict:
    """Of what `predicted` says, that which is right where only some scores are computed, or of
    which TFLOPS are counted otherwise."""
    kept = ("attention_ms", "around_ms", "ms", "share_of_tensor_bound")
    return {name: {key: one[key] for key in kept} for name, one in found.items()}


# ---- masks next to flex_attention ----------------------------------------------------------------

#: The products of flex_attention's passes. Its backward has one kernel (PyTorch's template
#: flex_backwards.py.jinja), whose programs form dQ, by S, dP and dQ, or dK and dV, by S, dV, dP and
#: dK.
FLEX_PRODUCTS = {"forward": 2, "backward": 7}
#: Any kernel has so many. FlashAttention-2 has no more.
FEWEST_PRODUCTS = {"forward": 2, "backward": 5}


def of_16_bits_ms(gpu: Gpu, cell: dict, products: dict[str, int]) -> dict[str, float]:
    """The milliseconds of each pass, and of both, with so many products in 16 bits and nothing
    else, at the share of the tensor bound that FlashAttention-2 reaches."""
    one = operations(cell, "forward") / 2 / (FA2_SHARE * gpu.flash_attention_2) / 1e9
    found = {name: count * one for name, count in products.items()}
    return found | {"forward+backward": sum(found.values())}


def beside_flex(found: dict, gpu: Gpu, cell: dict) -> dict:
    """Gives what `predicted` says of a mask, and the times of flex_attention and of the fewest
    products in 16 bits over the times of ours."""
    flex, fewest = (of_16_bits_ms(gpu, cell, of) for of in (FLEX_PRODUCTS, FEWEST_PRODUCTS))
    return {
        name: one | {
            "flex_ms": float(f"{flex[name]:.5g}"),
            "ratio_to_flex": round(flex[name] / one["ms"], 3),
            "ratio_to_fewest_products": round(fewest[name] / one["ms"], 3),
        } for name, one in of_blocks(found).items()}  # fmt: skip


# ---- lists of blocks -----------------------------------------------------------------------------


def attention_ms(passes: dict[str, dict[str, float]]) -> dict[str, float]:
    """The milliseconds of the attention kernels of each pass, and of both."""
    found = {name: sum(ms for kernel, ms in times.items() if kernel in PRODUCTS)
             for name, times in passes.items()}  # fmt: skip
    return found | {"forward+backward": sum(found.values())}


def of_dense(listed_ms: dict[str, float], dense_ms: dict[str, float],
             share: float) -> dict[str, float]:  # fmt: skip
    """For each pass, which share of the executed rate of attention to all keys attention to lists
    has. `share` of the scores are listed."""
    return {name: round(share * dense_ms[name] / ms, 4) for name, ms in listed_ms.items()}


def executed(found: dict, cell: dict) -> dict:
    """Gives what `predicted` says of lists, whose cell has `share`. TFLOPS are executed ones, of
    the attention kernels and with those around them."""
    return {
        name: of_blocks(found)[name] | {
            "executed_tflops": float(f"{operations(cell, name) / one['attention_ms'] / 1e9:.5g}"),
            "executed_tflops_with_around": one["tflops"],
        } for name, one in found.items()}  # fmt: skip
