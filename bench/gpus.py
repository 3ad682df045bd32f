"""The highest rates of common GPUs, from public tables. instructions.py and balance.py use them.

| figure | source |
|---|---|
| SMs, boost clock, memory | NVIDIA's data sheets: A100 SXM 80 GB (GA100), RTX 3090, |
| | A10 and RTX A6000 (GA10x), RTX 4090, L4, L40S and RTX 6000 Ada, RTX 5090 and |
| | RTX PRO 6000 Workstation (RTX Blackwell), H100 SXM, H200, HGX B200 |
| tensor rates | the dense TOPS and TFLOPS there, divided by SMs and clock |
| shared memory of an SM | CUDA C++ Programming Guide, "Compute Capabilities" |
| lanes per clock | CUDA C++ Programming Guide, "Arithmetic Instructions", per clock and SM |
| shared memory | CUDA C++ Programming Guide: 32 banks of 4 bytes per clock and SM |
| MMA_SHARE | measured: templates/kernels/README.md, "Floors" (1268 of 1930 TOPS, 629 of 927) |

GeForce cards halve the rate of 16-bit products when their sums are FP32; the professional cards of
the same chips do not. The clock is the boost clock of the data sheet. Under load it may be lower.
RTX Blackwell computes integers at the rate of FP32, but perhaps not minima, maxima and conversions.
For these the table has the rate of its predecessors. `sagebwd doctor --measure` measures the rates
of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The share of the tensor rate that mma.sync reaches on a data-centre GPU where wgmma reaches all.
MMA_SHARE = 0.66


@dataclass(frozen=True)
class Gpu:
    name: str
    arch: str  #: the architecture whose kernels it runs
    sms: int
    clock_ghz: float
    fp32_lanes: int  #: per clock and SM, as are the following
    int8: int  #: operations of the tensor cores; a multiply-add counts as two
    bits16: int  #: with FP32 sums
    bits16_half: int  #: 16-bit products with FP16 sums
    fp8: int | None  #: with FP32 sums
    memory_gbs: int  #: 10^9 bytes per second
    sm_kib: int  #: the most shared memory of an SM
    mma_share: float = 1.0  #: the share of the tensor rates that mma.sync reaches
    alu_lanes: int = 64
    imad_lanes: int = 64
    xu_lanes: int = 16
    issue_lanes: int = 128
    shared_bytes: int = 128

    def tops(self, operations: float) -> float:
        """10^12 per second, for this many per clock and SM."""
        return operations * self.sms * self.clock_ghz / 1e3

    def tensor_rate(self, instruction: str) -> float:
        """Operations per clock and SM of a matrix instruction, such as "IMMA.16832.S8.S8" or
        "HMMA.16816.F16", which has FP16 sums."""
        base, *parts = instruction.split(".")
        with_half_sums = base[0] == "H" and "F16" in parts
        of_kind = {"I": self.int8, "H": self.bits16_half if with_half_sums else self.bits16,
                   "Q": self.fp8}.get(base[0])  # fmt: skip
        if of_kind is None:
            raise KeyError(f"{self.name}: no rate of {base} is known; add it to bench/gpus.py")
        return of_kind * (1.0 if base.endswith("GMMA") else self.mma_share)

    @property
    def flash_attention_2(self) -> float:
        """The highest TFLOPS of its 16-bit products (mma.sync; two forward, five backward). It
        counts 4 D operations per score in the forward and 10 D in the backward."""
        return self.tops(self.bits16 * self.mma_share)


def _card(name: str, arch: str, sms: int, clock_ghz: float, memory_gbs: int,
          half_rate: bool) -> Gpu:
    """One of the chips that GeForce and professional cards share."""
    fp8 = None if arch == "sm_86" else 1024 if half_rate else 2048
    return Gpu(name, arch, sms, clock_ghz, 128, 2048, 512 if half_rate else 1024, 1024, fp8,
               memory_gbs, 100)  # fmt: skip


GPUS = (
    Gpu("A100", "sm_80", 108, 1.410, 64, 4096, 2048, 2048, None, 2039, 164),
    _card("RTX 3090", "sm_86", 82, 1.695, 936, half_rate=True),
    _card("A10", "sm_86", 72, 1.695, 600, half_rate=False),
    _card("RTX A6000", "sm_86", 84, 1.800, 768, half_rate=False),
    _card("RTX 4090", "sm_89", 128, 2.520, 1008, half_rate=True),
    _card("L4", "sm_89", 58, 2.040, 300, half_rate=False),
    _card("L40S", "sm_89", 142, 2.520, 864, half_rate=False),
    _card("RTX 6000 Ada", "sm_89", 142, 2.505, 960, half_rate=False),
    _card("RTX 5090", "sm_120", 170, 2.407, 1792, half_rate=True),
    _card("RTX PRO 6000", "sm_120", 188, 2.617, 1792, half_rate=False),
    # The memory is an H100's; an H200's is faster.
    Gpu("H100, H200", "sm_90a", 132, 1.830, 128, 8192, 4096, 4096, 8192, 3352, 228,
        mma_share=MMA_SHARE),
    # The rates of mma.sync are not published, so the limits are those of tcgen05.
    Gpu("B200", "sm_100", 148, 1.850, 128, 16384, 8192, 8192, 16384, 8000, 228),
)  # fmt: skip


def named(name: str) -> Gpu:
    """The GPU of that name, in any case. Raises KeyError, which lists the names."""
    for gpu in GPUS:
        if gpu.name.lower() == name.strip().lower():
            return gpu
    raise KeyError(f"no GPU '{name}' is known: there are {', '.join(g.name for g in GPUS)}; "
                   "add another to bench/gpus.py")
