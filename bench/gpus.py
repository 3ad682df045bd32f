"""The highest rates of common GPUs, from public tables. The static model uses them.

| figure | source |
|---|---|
| SMs, boost clock | NVIDIA's data sheets and white papers: A100 (GA100), RTX 3090 (GA102), |
| | RTX 4090 (Ada), RTX 5090 (RTX Blackwell), H100 and H200 SXM, HGX B200 |
| tensor rates | the dense TOPS and TFLOPS there, 16 bits with FP32 sums, divided by SMs and clock |
| lanes per clock | CUDA C++ Programming Guide, "Arithmetic Instructions", per clock and SM |
| shared memory | CUDA C++ Programming Guide: 32 banks of 4 bytes per clock and SM |
| MMA_SHARE | measured: templates/kernels/README.md, "Floors" (1268 of 1930 TOPS, 629 of 927) |

The clock is the boost clock of the data sheet. Under load it may be lower. RTX Blackwell computes
integers at the rate of FP32, but perhaps not minima, maxima and conversions. For these the table
has the rate of its predecessors. `sagebwd doctor --measure` measures the rates of a GPU.
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
    fp8: int | None  #: with FP32 sums
    mma_share: float = 1.0  #: the share of the tensor rates that mma.sync reaches
    alu_lanes: int = 64
    imad_lanes: int = 64
    xu_lanes: int = 16
    issue_lanes: int = 128
    shared_bytes: int = 128

    def tops(self, operations: float) -> float:
        """10^12 per second, for this many per clock and SM."""
        return operations * self.sms * self.clock_ghz / 1e3

    def tensor_rate(self, base: str) -> float:
        """Operations per clock and SM of a matrix instruction of that name, such as "IMMA"."""
        of_kind = {"I": self.int8, "H": self.bits16, "Q": self.fp8}.get(base[0])
        if of_kind is None:
            raise KeyError(f"{self.name}: no rate of {base} is known; add it to bench/gpus.py")
        return of_kind * (1.0 if base.endswith("GMMA") else self.mma_share)

    @property
    def flash_attention_2(self) -> float:
        """The highest TFLOPS of its 16-bit products (mma.sync; two forward, five backward). It
        counts 4 D operations per score in the forward and 10 D in the backward."""
        return self.tops(self.bits16 * self.mma_share)


GPUS = (
    Gpu("A100", "sm_80", 108, 1.410, 64, 4096, 2048, None),
    Gpu("RTX 3090", "sm_86", 82, 1.695, 128, 2048, 512, None),
    Gpu("RTX 4090", "sm_89", 128, 2.520, 128, 2048, 512, 1024),
    Gpu("RTX 5090", "sm_120", 170, 2.407, 128, 2048, 512, 1024),
    Gpu("H100, H200", "sm_90a", 132, 1.830, 128, 8192, 4096, 8192, mma_share=MMA_SHARE),
    # The rates of mma.sync are not published, so the limits are those of tcgen05.
    Gpu("B200", "sm_100", 148, 1.850, 128, 16384, 8192, 16384),
)
