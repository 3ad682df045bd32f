"""bench/balance.py starts this: it runs kernels with the templates of its environment, on one GPU.

A process has one set of templates, so plain and stretched kernels run in two of these. Both build
the same kernels, with the tiles of another architecture, and run them on the same random inputs.
The job comes as JSON in the first line of standard input, and results go to standard output, one
JSON object a line. Before it uses the GPU, a process waits for a second line: for stretched kernels
it has the results of the plain ones, and only kernels with the same results are timed.

A plan is words of a spec, and a cell may have further ones as `words`. With lists of blocks
(sparse_q and sparse_kv are among them) a plan also has a word that is not of the spec, such as
"density=0.1", the share of the blocks that random lists have. A cell may have a mask that is told
by intervals. With lists and with masks (balance_told.py) the results of plain kernels for the last
head are compared with FP64.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median

from balance_told import DENSITY, PACKING, Told, started, told_of
from needs_torch import torch

from sagebwd import _core
from sagebwd.benchmark.environment import brief
from sagebwd.benchmark.measuring import normal
from sagebwd.benchmark.timing import FLUSH_BYTES, Timing, clock_of, in_turn
from sagebwd.benchmark.truth import relative_l2
from sagebwd.core.arguments.shapes import contiguous_strides

#: Kernels that have tiles.
TILED = ("forward", "backward_dq", "backward_dkv", "backward")
OF_SPLIT = ("backward_dq", "backward_dkv")
POISON = 0xFF  #: makes NaN of any two or four bytes
#: Relative L2 of sums that were added in different orders, rounded to 16 bits. A sum that lacks a
#: tile of 128 of 8192 keys is off by more than 0.1.
ANY_ORDER = 1e-3
SAMPLE_HEADS = 2  #: of dQ, where its bits may differ
GIB = 1 << 30
ALIGNMENT = 256  #: of a workspace


# ---- which kernels -------------------------------------------------------------------------------


def kernels_of(cell: dict, plan: str) -> str:
    """The words of a plan and its cell that the spec has, and so its kernels."""
    words = *plan.split(), *cell.get("words", "").split()
    return " ".join(word for word in words if not word.startswith(DENSITY))


def spec_of(cell: dict, plan: str) -> _core.Spec:
    """The spec of a plan, such as "gradients16 no-deterministic"."""
    causal = "top-left" if cell["causal"] else "none"
    return _core.Spec(f"d{cell['head_dim']} bf16 causal={causal} {kernels_of(cell, plan)}")


def tiles_of(spec: _core.Spec, arch: str, given: dict[str, str]) -> dict[str, str]:
    """The tiles of a call on another architecture: its default ones, or `given` instead.

    Raises SpecError for a tile that cannot be built there, for example as its blocks have less
    shared memory.
    """
    if any(kernel in given for kernel in OF_SPLIT):  # they make the backward split
        fixed = {kernel: given[kernel] for kernel in TILED if kernel in given}
    else:
        fixed = given
    kernels = _core.emit(spec, arch, True, fixed)
    tiles = {kernel["kind"]: kernel["tile"] for kernel in kernels if kernel["kind"] in TILED}
    if "backward" in tiles:  # short calls have others, which a plan of two kernels asks for
        tiles = {kernel: tile for kernel, tile in tiles.items() if kernel not in OF_SPLIT}
    return tiles


def built(spec: _core.Spec, tiles: dict[str, str], arch: str) -> dict[str, dict]:
    """Compiles a plan's kernels for this GPU: registers, spills, tile and so on by kernel."""
    sources = {source["name"]: source for source in _core.emit(spec, arch, True, tiles)}
    kernels = {}
    for one in _core.build(spec, arch, True, tiles):
        source = sources[one["name"]]
        if source["kind"] in TILED:
            kernels[source["kind"]] = {
                "tile": source["tile"], "threads": source["threads"],
                "registers": one["registers"], "spill_bytes": one["spill_bytes"],
                "shared_bytes": source["shared_bytes"],
            }  # fmt: skip
    return kernels


# ---- one operation on the GPU --------------------------------------------------------------------


def filled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, with NaN in every element."""
    tensor.view(torch.uint8).fill_(POISON)
    return tensor


class Tensors:
    """Inputs and outputs of a cell, which all plans share, and addresses for its passes."""

    def __init__(self, cell: dict, seed: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.problem = (cell["batch"], cell["heads"], cell["heads"], cell["tokens"], cell["tokens"])
        self.q, self.k, self.v, self.dout = (
            normal(cell["heads"], cell["tokens"], cell["batch"], cell["head_dim"], "bf16", "bhsd",
                   generator) for _ in range(4))  # fmt: skip
        self.out, self.dq, self.dk, self.dv = (torch.empty_like(self.q) for _ in range(4))
        self.lse = torch.empty(self.q.shape[:3], dtype=torch.float32, device=device)

    def outputs(self) -> dict[str, torch.Tensor]:
        return {"O": self.out, "lse": self.lse, "dQ": self.dq, "dK": self.dk, "dV": self.dv}


class Operation:
    """Both passes of a plan over the tensors of a cell, and over lists of blocks or a mask."""

    def __init__(self, spec: _core.Spec, tiles: dict[str, str], tensors: Tensors,
                 told: Told | None = None) -> None:  # fmt: skip
        x = tensors
        kernels = _core.Attention(spec, 0, tiles=tiles)
        strides = contiguous_strides(tuple(x.q.shape), "bhsd")
        scale = x.q.shape[3] ** -0.5
        self.told = told  # its tensors must live as long as the addresses
        self.pack = told and told.pack_before(kernels)
        prepare = {"forward": (kernels.prepare_forward, 4),
                   "backward": (kernels.prepare_backward, 8)}
        self.passes = {name: make(x.problem, [strides] * count, scale,
                                  **(told.strides if told else {}))
                       for name, (make, count) in prepare.items()}  # fmt: skip
        given = {"forward": (x.q, x.k, x.v, x.out, x.lse),
                 "backward": (x.q, x.k, x.v, x.out, x.dout, x.dq, x.dk, x.dv, x.lse)}
        more = {"forward": (0,), "backward": (0, 0)}  # k_mean; dlse and k_mean
        last = [t.data_ptr() for t in told.tensors] if told else []
        self.addresses = {name: (*(t.data_ptr() for t in given[name]), *more[name], *last)
                          for name in given}  # fmt: skip

    def workspace_bytes(self) -> int:
        return max(one.workspace_bytes for one in self.passes.values())

    def timed(self, name: str, workspace: torch.Tensor) -> dict[str, float]:
        """Runs a pass: the milliseconds of its kernels, by kernel. The forward has those of what
        a call packs before."""
        stream = torch.cuda.current_stream().cuda_stream if workspace.is_cuda else 0
        packed = None
        if self.pack and name == "forward":
            packed = started(lambda: self.pack(stream), workspace.is_cuda)
        found = self.passes[name].timed(*self.addresses[name], workspace.data_ptr(), stream)
        times = {PACKING: packed()} if packed else {}
        for kernel, ms in found:
            times[kernel] = times.get(kernel, 0.0) + ms
        return times


# ---- results -------------------------------------------------------------------------------------


def fingerprint(tensor: torch.Tensor) -> str:
    """A number of 64 bits of all bits of a tensor: a sum of its elements with random odd weights,
    so that a change of one element always changes it."""
    bits = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).flatten()
    generator = torch.Generator(bits.device).manual_seed(1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for part in bits.split(1 << 24):
        weights = torch.randint(-(2**62), 2**62, part.shape, generator=generator,
                                device=bits.device)  # fmt: skip
        total += (part.to(torch.int64) * (2 * weights + 1)).sum()
    return f"{total.item() & (2**64 - 1):016x}"


def results_of(tensors: Tensors, any_order: bool) -> dict:
    """Gives a fingerprint of each result to compare, or with `any_order` a sample of dQ."""
    found = {}
    for name, tensor in tensors.outputs().items():
        if bool(tensor.isnan().any()):
            raise RuntimeError(f"{name} has NaN, or elements that no kernel has written")
        if name == "dQ" and any_order:
            found[name] = tensor[-1, -SAMPLE_HEADS:, ::64].float().flatten().tolist()
        else:
            found[name] = fingerprint(tensor)
    return found


def errors_of(tensors: Tensors, told: Told) -> dict[str, float]:
    """Relative L2 against FP64 of the results for the last head."""
    x = tensors
    exact = told.exact(*(t[-1, -1:] for t in (x.q, x.k, x.v, x.dout)))
    found = {name: tensor for name, tensor in x.outputs().items() if name in exact}
    return {name: relative_l2(tensor[-1, -1:], exact[name]) for name, tensor in found.items()}


def difference(found: dict, plain: dict) -> str:
    """In what the results of stretched kernels differ from those of plain ones; empty if in
    nothing."""
    for name, one in found.items():
        other = plain.get(name)
        if isinstance(one, str) or isinstance(other, str) or other is None:
            if one != other:
                return f"{name} is not that of the plain kernels, bit for bit"
            continue
        x, reference = (torch.tensor(values, dtype=torch.float64) for values in (one, other))
        error = float((x - reference).norm() / reference.norm())
        if not error <= ANY_ORDER:
            return f"{name} differs from that of the plain kernels by {error:.2g} (relative L2)"
    return ""


# ---- the process ---------------------------------------------------------------------------------


def say(**what) -> None:
    print(json.dumps(what), flush=True)


def bandwidth_gbs() -> float:
    """10^9 bytes per second that a copy of 1 GiB reads and writes."""
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    clock = clock_of("cuda")
    times = [clock(lambda: target.copy_(source)) for _ in range(9)]
    return 2 * GIB / median(times[2:]) / 1e6


def rates() -> dict[str, dict]:
    return {rate.pop("name"): rate for rate in _core.measure_rates(0)}


def room(size: int, device: str) -> torch.Tensor:
    """A workspace of so many bytes."""
    memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device=device)
    return memory[-memory.data_ptr() % ALIGNMENT :][:size]


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(operations: dict[str, Operation], workspace: torch.Tensor, rounds: int, warmup: int):
    """{plan: {pass: {kernel: Timing}}} of operations that take turns."""
    device = workspace.device.type
    flush = torch.empty(FLUSH_BYTES if device == "cuda" else 0, dtype=torch.uint8, device=device)

    def one(operation: Operation) -> dict[str, dict[str, float]]:
        """Times its passes in order, because the backward reads what the forward has left."""
        times = {}
        for name in operation.passes:
            wait(device)
            flush.fill_(1)
            times[name] = operation.timed(name, workspace)
        return times

    def of(samples: list, name: str) -> dict[str, Timing]:
        return {kernel: Timing.of([sample[name][kernel] for sample in samples])
                for kernel in samples[0][name]}  # fmt: skip

    return {plan: {name: of(samples, name) for name in samples[0]}
            for plan, samples in in_turn(operations, one, rounds, warmup).items()}


def key_of(cell: dict, plan: str) -> tuple:
    """Plans with the same key have the same kernels."""
    return cell["head_dim"], cell["causal"], kernels_of(cell, plan)


def distinct(job: dict) -> dict[tuple, tuple[dict, str]]:
    """A cell and plan for each key of a job: those that only differ in lengths or in the density
    of lists are compiled once."""
    return {key_of(cell, plan): (cell, plan) for cell in job["cells"] for plan in job["plans"]}


def compiled(job: dict) -> Iterator[tuple[tuple, dict]]:
    """(key, what is built or why not) for each key."""
    def one(cell: dict, plan: str) -> dict:
        try:
            spec = spec_of(cell, plan)
            tiles = tiles_of(spec, job["arch"], job["tiles"])
            about = {"precision": spec.precision, "deterministic": spec.deterministic,
                     "dp_half_sums": getattr(spec, "dp_sums", "fp32") == "fp16"}
            return {"about": about, "tiles": tiles, "kernels": built(spec, tiles, job["own_arch"])}
        except Exception as error:
            return {"error": brief(error)}

    with ThreadPoolExecutor(4) as pool:
        asked = distinct(job)
        yield from zip(asked, pool.map(lambda pair: one(*pair), asked.values()))


def run_cell(job: dict, cell: dict, plans: dict[str, dict], plain: dict | None) -> Iterator[dict]:
    """A result for each plan of a cell: of plain kernels what can be compared, of others times."""
    device = job["device"]
    tensors = Tensors(cell, job["seed"], device)
    operations, results, workspace = {}, {}, None
    for plan, found in plans.items():
        results[plan] = {"cell": cell["label"], "plan": plan}
        try:
            if "error" in found:
                raise RuntimeError(found["error"])
            spec = spec_of(cell, plan)
            told = told_of(spec, cell, plan, tensors, job["seed"])
            operation = Operation(spec, found["tiles"], tensors, told)
            if workspace is None or workspace.numel() < operation.workspace_bytes():
                workspace = room(operation.workspace_bytes(), device)
            for tensor in (workspace, *tensors.outputs().values()):
                filled(tensor)
            for name in operation.passes:
                operation.timed(name, workspace)
            wait(device)
            if told:
                results[plan] |= told.about
            any_order = "backward" in found["tiles"] and not spec.deterministic
            compared = results_of(tensors, any_order)
            if plain is None:
                if told:
                    results[plan]["rel_l2"] = errors_of(tensors, told)
                results[plan]["results"] = compared
            elif why := difference(compared, plain.get(plan, {})):
                raise RuntimeError(why)
            else:
                operations[plan] = operation
        except Exception as error:
            results[plan]["error"] = brief(error)
    if plain is not None and operations:
        for plan, times in timed(operations, workspace, job["rounds"], job["warmup"]).items():
            results[plan]["passes"] = {
                name: {kernel: timing.json() for kernel, timing in kernels.items()}
                for name, kernels in times.items()}  # fmt: skip
    yield from results.values()


def work(job: dict, next_line: Callable[[], str]) -> None:
    """One process. Everything that it finds goes to standard output."""
    built_of = {}
    total, on_gpu = len(distinct(job)), job["device"] == "cuda"
    for index, (key, found) in enumerate(compiled(job), 1):
        built_of[key] = found
        say(event="compiled", done=index, total=total, head_dim=key[0], causal=key[1],
            plan=key[2], **found)  # fmt: skip
    say(event="ready")
    line = next_line()
    if not line:
        return  # the other process has failed
    plain = json.loads(line)
    if on_gpu:
        _core.live_as_with(job["sm_bytes"])
        properties = torch.cuda.get_device_properties(0)
        say(event="here", sms=properties.multi_processor_count, gpu=properties.name,
            rates=rates(), memory_gbs=bandwidth_gbs())  # fmt: skip
    else:  # the simulator
        say(event="here", sms=1, gpu="none", rates=None, memory_gbs=0.0)
    for index, cell in enumerate(job["cells"], 1):
        plans = {plan: built_of[key_of(cell, plan)] for plan in job["plans"]}
        for result in run_cell(job, cell, plans, plain and plain.get(cell["label"], {})):
            say(event="result", **result)
        if on_gpu:
            torch.cuda.empty_cache()
        say(event="measured", done=index, total=len(job["cells"]), cell=cell["label"])
    say(event="end", rates=rates() if on_gpu and plain is not None else None)


def main() -> int:
    work(json.loads(sys.stdin.readline()), sys.stdin.readline)
    return 0


if __name__ == "__main__":
    sys.exit(main())
