"""Machine code as nvdisasm prints it: instructions, their pipes, loops, and what a path executes.

If a branch can go either way, the path of a tile in the middle of a long sequence is taken. These
rules choose it, one after the other: the most matrix arithmetic; the fewest barriers (the work that
a block does once per 256 tokens has its own); the most bytes from and to global memory (there is
always a next tile); the fewest instructions (nothing is masked, and there is no slow path). A loop
within that path counts once, unless `times` says otherwise. The path with the most barriers shows
what the work that is done once per 256 tokens adds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

#: Pipes in the order of the tables; `other` is control, barriers, constants and special registers.
PIPES = ("fma", "alu", "xu", "lsu", "tensor", "uniform", "other")


def _pipes(**names: str) -> dict[str, str]:
    return {name: pipe for pipe, listed in names.items() for name in listed.split()}


PIPE_OF = _pipes(
    fma="FFMA FMUL FADD FFMA2 FMUL2 FADD2 FFMA32I FMUL32I FADD32I IMAD IDP HFMA2 HADD2 HMUL2"
    " FSWZADD",
    alu="IADD3 IADD IADD32I VIADD VIMNMX VIMNMX3 VIADDMNMX IMNMX LEA LOP3 LOP32I PLOP3 SHF SHL SHR"
    " SEL ISETP FSEL FSET FSETP FMNMX FMNMX3 FCHK IABS MOV MOV32I PRMT F2FP F2IP I2FP I2IP CS2R P2R"
    " R2P BMSK SGXT HSET2 HSETP2 HMNMX2 VHMNMX VABSDIFF VABSDIFF4",
    xu="MUFU I2F F2I F2F I2I FRND POPC BREV FLO",
    lsu="LD LDG LDS LDSM LDL LDGSTS ST STG STS STSM STL ATOM ATOMG ATOMS RED REDG SHFL MATCH CCTL"
    " MOVM UBLKCP UBLKRED UTMALDG UTMASTG",
    uniform="VOTEU R2UR S2UR LDCU REDUX CREDUX",
    other="BRA BRX JMP CALL RET EXIT BSSY BSYNC BREAK WARPSYNC BAR DEPBAR LDGDEPBAR NOP S2R LDC"
    " MEMBAR FENCE ERRBAR WARPGROUP WARPGROUPSET NANOSLEEP YIELD VOTE ARRIVES SYNCS ELECT ACQBULK"
    " PREEXIT USETMAXREG LEPC B2R R2B ENDCOLLECTIVE BPT UCGABAR_ARV UCGABAR_WAIT ACQSHMINIT",
)
_MATRIX = re.compile(r"[A-Z]+MMA\b")
#: 16832 is 16 x 8 x 32; a warpgroup's shapes are written 64x128x32.
_SHAPE = re.compile(r"\.(?:(\d+)x(\d+)x(\d+)|(16|8)(8|16)(\d+))\b")


class SassError(RuntimeError):
    """A listing that this model does not understand. The message says what and why."""


@dataclass(frozen=True)
class Instruction:
    address: int
    guard: str  #: "P0", "!UP1" or "" where nothing guards it; "!PT" never takes effect
    name: str  #: "LDSM.16.M88.4"
    operands: str

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]

    @property
    def pipe(self) -> str | None:
        """None for an instruction that PIPE_OF lacks."""
        if self.is_matrix:
            return "tensor"
        known = PIPE_OF.get(self.base)
        return known or ("uniform" if self.base.startswith("U") else None)

    @property
    def is_matrix(self) -> bool:
        return bool(_MATRIX.match(self.base))

    @property
    def of_warpgroup(self) -> bool:
        return self.base.endswith("GMMA")

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, columns and depth of a matrix instruction."""
        found = _SHAPE.search(self.name)
        if not found:
            raise SassError(f"{self.name}: no shape is known of this matrix instruction")
        wide = [group for group in found.groups() if group]
        return tuple(int(number) for number in wide)

    @property
    def macs(self) -> int:
        """The multiplications of a matrix instruction for one warp; four share a warpgroup's."""
        if not self.is_matrix:
            return 0
        rows, columns, depth = self.shape
        return rows * columns * depth // (4 if self.of_warpgroup else 1)

    @property
    def lane_bytes(self) -> int:
        """The bytes of a load or store, for each lane."""
        if self.base in ("LDSM", "STSM"):
            count = re.search(r"88\.([124])\b", self.name)
            return 4 * int(count.group(1) if count else 1)
        width = re.search(r"\.(?:[US])?(8|16|64|128)\b", self.name)
        return int(width.group(1)) // 8 if width else 4

    @property
    def shared_read_bytes(self) -> int:
        """The bytes that one warp reads from shared memory: a quarter of a warpgroup's operands."""
        if self.guard == "!PT":
            return 0
        if self.base in ("LDS", "LDSM"):
            return 32 * self.lane_bytes
        if self.of_warpgroup:
            rows, columns, depth = self.shape
            values = columns * depth
            # If A is in registers, they stand between the sums and the descriptor of B.
            if re.match(r"\s*R\d+, gdesc", self.operands):
                values += rows * depth
            return values * (1 if self.base[0] in "IQ" else 2) // 4
        return 0

    @property
    def hands_over(self) -> bool:
        """Whether it signals other threads: by a barrier, or by a word that it writes."""
        return self.base in ("BAR", "STS")

    @property
    def shared_write_bytes(self) -> int:
        if self.guard == "!PT" or self.base not in ("STS", "STSM", "LDGSTS"):
            return 0
        return 32 * self.lane_bytes

    @property
    def global_bytes(self) -> int:
        moves = ("LDG", "STG", "LDGSTS", "RED", "REDG", "ATOMG", "UBLKCP", "UTMALDG")
        return 32 * self.lane_bytes if self.base in moves else 0


_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P(?:\d+|T))\s+)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"^([.$\w]+):\s*$")
_TARGET = re.compile(r"`\(([.$\w]+)\)")


@dataclass
class Function:
    """One function of a listing: instructions, and where each can go on."""

    name: str
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._successors: list[list[int]] | None = None

    @property
    def successors(self) -> list[list[int]]:
        if self._successors is None:
            self._successors = [self._next_of(i) for i in range(len(self.code))]
        return self._successors

    def _next_of(self, index: int) -> list[int]:
        at = self.code[index]
        follows = [index + 1] if index + 1 < len(self.code) else []
        if at.guard == "!PT":
            return follows
        certain = at.guard in ("", "PT")
        if at.base in ("EXIT", "RET"):
            return [] if certain else follows
        if at.base in ("BRX", "JMX", "JMP"):
            raise SassError(f"{self.name}: {at.name} jumps to where no listing says")
        if at.base not in ("BRA", "CALL") or ".DIV" in at.name:  # lanes do not diverge here
            return follows
        label = _TARGET.search(at.operands)
        target = self.labels.get(label.group(1)) if label else None
        if target is None:
            if at.base == "CALL":  # to another function, which returns
                return follows
            raise SassError(f"{self.name}: {at.name}{at.operands} leads to no label of it")
        if re.match(r"\s*!?U?P\d", at.operands):
            certain = False
        return [target] if certain else [*follows, target]

    def back_edges(self) -> list[tuple[int, int]]:
        """(last instruction, first instruction) of each loop."""
        edges, on_path, done = [], set(), set()
        stack = [(0, iter(self.successors[0]))] if self.code else []
        on_path.add(0)
        while stack:
            at, rest = stack[-1]
            following = next(rest, None)
            if following is None:
                on_path.discard(at)
                done.add(at)
                stack.pop()
            elif following in on_path:
                edges.append((at, following))
            elif following not in done:
                on_path.add(following)
                stack.append((following, iter(self.successors[following])))
        return [edge for edge in edges if edge[0] != edge[1]]  # the trap after the end is no loop

    def path(self, start: int, stop: int | None, *, products: bool = True,
             barriers: bool = False) -> list[int] | None:  # fmt: skip
        """Finds what is executed from `start` to `stop`, including it (None: to an EXIT), by the
        rules above, with the most or fewest `products` and the fewest or most `barriers`. Gives
        None if no path leads there."""
        more_macs, more_bars = (1 if products else -1), (1 if barriers else -1)
        closed = set(self.back_edges())
        best: dict[int, tuple | None] = {}
        order, seen, stack = [], {start}, [(start, iter(self.successors[start]))]
        while stack:
            at, rest = stack[-1]
            following = None if at == stop else next(rest, None)
            if following is None:
                order.append(at)
                stack.pop()
            elif following not in seen and (at, following) not in closed and at != following:
                seen.add(following)
                stack.append((following, iter(self.successors[following])))
        for at in order:  # successors come first
            here = self.code[at]
            ends = at == stop if stop is not None else here.base == "EXIT" and here.guard != "!PT"
            choices = [] if at == stop else [
                (best[following][0], following) for following in self.successors[at]
                if best.get(following) and (at, following) not in closed
            ]  # fmt: skip
            if ends:
                choices.append(((0, 0, 0, 0), None))
            if not choices:
                best[at] = None
                continue
            (macs, bars, moved, less), following = max(choices, key=lambda choice: choice[0])
            value = (macs + more_macs * here.macs, bars + more_bars * here.hands_over,
                     moved + here.global_bytes, less - 1)  # fmt: skip
            best[at] = (value, following)
        if not best[start]:
            return None
        taken, at = [], start
        while at is not None:
            taken.append(at)
            at = best[at][1]
        return taken


def functions(listing: str) -> list[Function]:
    """The functions of a listing by `nvdisasm -c`."""
    found: list[Function] = []
    for line in listing.splitlines():
        if line.startswith(".text.") and line.endswith(":"):
            found.append(Function(line[len(".text.") : -1]))
        elif found and (label := _LABEL.match(line.strip())):
            found[-1].labels[label.group(1)] = len(found[-1].code)
        elif found and (at := _INSTRUCTION.match(line)):
            address, guard, name, operands = at.groups()
            found[-1].code.append(
                Instruction(int(address, 16), guard or "", name, operands.partition(";")[0]))
    if not found:
        raise SassError("no function in this listing: is it what `nvdisasm -c` prints?")
    return found


@dataclass
class Executed:
    """One warp executes each of these instructions so many times."""

    counts: Counter = field(default_factory=Counter)

    def add(self, code: Iterable[Instruction], times: float = 1) -> None:
        for instruction in code:
            self.counts[instruction] += times

    def total(self, of=lambda instruction: 1) -> float:
        return sum(times * of(instruction) for instruction, times in self.counts.items())

    def by_pipe(self) -> dict[str, float]:
        return {pipe: self.total(lambda i, pipe=pipe: i.pipe == pipe or
                                 (pipe == "other" and i.pipe is None)) for pipe in PIPES}

    def unknown(self) -> list[str]:
        return sorted({i.base for i in self.counts if i.pipe is None})


@dataclass(frozen=True)
class Loop:
    first: int  #: instruction
    last: int
    body: Executed  #: of one iteration
    steps: int  #: the tiles of one iteration: more than 1 if ptxas has unrolled the loop


def main_loop(function: Function, macs_per_step: int) -> Loop:
    """The loop that runs all products of a tile. Among the loops whose iteration has the matrix
    arithmetic of a whole number of tiles, it is the one with the fewest instructions per tile. This
    leaves out peeled tails, and copies of the loop that mask. If loops within it are not unrolled,
    each runs as often as one tile needs."""
    found: list[Loop] = []
    loops = function.back_edges()
    paths = {edge: function.path(edge[1], edge[0]) for edge in loops}
    code = function.code
    for edge, taken in paths.items():
        if not taken:
            continue
        body = Executed()
        body.add(code[i] for i in taken)
        macs = body.total(lambda i: i.macs)
        within = [
            other for other in loops
            if other != edge and {*other} <= {*taken} and any(code[i].macs for i in paths[other])
        ]  # fmt: skip
        if within and 0 < macs < macs_per_step:
            inner = [code[i] for other in within for i in paths[other]]
            inner_macs = sum(i.macs for i in inner)
            more, odd = divmod(macs_per_step - int(macs), inner_macs)
            if odd == 0:
                body.add(inner, more)
                macs = macs_per_step
        if macs and macs % macs_per_step == 0:
            found.append(Loop(edge[1], edge[0], body, int(macs // macs_per_step)))
    if not found:
        seen = sorted(sum(code[i].macs for i in taken) for taken in paths.values() if taken)
        raise SassError(
            f"{function.name}: no loop with {macs_per_step} multiplications a tile and warp; its "
            f"loops have {', '.join(map(str, seen)) or 'none'}. Correct what bench/instructions.py "
            "says of this kernel's products or rows"
        )
    return min(found, key=lambda loop: loop.body.total() / loop.steps)


def change_of_units(function: Function, loop: Loop) -> Counter:
    """The instructions that are executed once per 256 tokens, outside the iterations of the loop.
    If there is a loop around it, they are those between its end and its next beginning. Otherwise
    they are those that the iteration with the most barriers, or with the most words written to
    shared memory, has more than an ordinary one."""
    code, ordinary = function.code, function.path(loop.first, loop.last)
    exits = [exit for at in ordinary for exit in function.successors[at] if exit not in ordinary]
    for last, first in sorted(function.back_edges(), key=lambda edge: -edge[1]):
        back = function.path(first, loop.first, products=False, barriers=True)
        if (last, first) == (loop.last, loop.first) or back is None:
            continue
        for exit in reversed(exits):
            out = function.path(exit, last, products=False, barriers=True)
            if out is not None:
                return Counter(code[i] for i in [*out, *back[:-1]])
    longest = Counter(code[i] for i in function.path(loop.first, loop.last, barriers=True))
    longest.subtract(code[i] for i in ordinary)
    return longest
