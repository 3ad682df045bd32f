"""The machine that figures are from: software, and the GPU's clocks, power and temperature."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Callable

from sagebwd import _core
from sagebwd.benchmark.common import torch
from sagebwd.benchmark.environment import environment, output_of

#: Columns of text that is pasted somewhere.
WIDTH = 100
#: nvidia-smi is asked for these, by the names that JSON has for them. The answers are numbers.
QUERIES = {
    "sm_clock_mhz": "clocks.sm", "sm_clock_max_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem", "temperature_c": "temperature.gpu",
    "power_w": "power.draw", "power_limit_w": "power.limit",
}  # fmt: skip


def nvrtc_identity() -> str:
    """Version and build of the NVRTC that compiles our kernels, or why there is none."""
    found = _core.nvrtc()
    return found["identity"] or f"missing: {found['missing']}"


def state(uuid: str | None, ask: Callable[..., str | None] = output_of) -> dict:
    """Clocks, power and temperature of a GPU now, by nvidia-smi or NVML's Python module.

    A number that neither of them gives is None. `ask` runs a program and gives what it prints.
    """
    query = f"--query-gpu={','.join(QUERIES.values())}", "--format=csv,noheader,nounits"
    for chosen in [("-i", f"GPU-{uuid.removeprefix('GPU-')}"), ()] if uuid else [()]:
        lines = (ask("nvidia-smi", *chosen, *query) or "").splitlines()
        # Several lines do not say which GPU was used.
        values = lines[0].split(",") if len(lines) == 1 else []
        if len(values) == len(QUERIES):
            return {name: _number(value) for name, value in zip(QUERIES, values)}
    return _state_by_nvml(uuid)


def _number(text: str) -> float | None:
    """None for "[N/A]" and its like."""
    try:
        value = float(text)
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


def _state_by_nvml(uuid: str | None) -> dict:
    found = dict.fromkeys(QUERIES)
    try:
        import pynvml

        pynvml.nvmlInit()
        gpu = (pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}") if uuid
               else pynvml.nvmlDeviceGetHandleByIndex(0))  # fmt: skip
    except Exception:  # not installed, or no such GPU for it
        return found
    questions = {
        "sm_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "sm_clock_max_mhz": lambda: pynvml.nvmlDeviceGetMaxClockInfo(gpu, pynvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda: pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_MEM),
        "temperature_c": lambda: pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU),
        "power_w": lambda: pynvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
        "power_limit_w": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1e3,
    }
    for name, ask in questions.items():
        try:
            found[name] = ask()
        except Exception:  # this GPU does not say
            continue
    return found


def uuid_of(device: torch.device) -> str | None:
    """Returns what nvidia-smi and NVML call a GPU of PyTorch's; None where PyTorch does not say."""
    found = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if found is None else str(found)


def version_of(distributions: tuple[str, ...]) -> str:
    """The version of the first one that is installed, or "not installed"."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "not installed"


def described(arch: str) -> dict:
    """Returns what does not change while figures are taken."""
    return environment() | {
        "sagebwd": _core.__version__, "numerics": _core.Spec().numerics, "arch": arch,
        "nvrtc": nvrtc_identity(),
        "flash_attention_3": version_of(("flash_attn_3", "flash-attn-3")),
        "flash_attention_4": version_of(("flash-attn-4", "flash_attn_cute", "flash-attn-cute")),
    }  # fmt: skip


def block(machine: dict) -> str:
    """Lines about the machine, for a report."""
    def shown(value, unit: str) -> str:
        return f"{'?' if value is None else f'{value:.0f}'} {unit}"

    memory = machine.get("gpu_memory_bytes")
    before, after = machine["before"], machine["after"]
    rows = {
        "GPU": f"{machine['gpu']}, {machine['arch']}, {machine.get('multiprocessors')} SMs, "
               + shown(memory and memory / 2**30, "GiB"),
        "driver": f"{(machine.get('driver') or '?').splitlines()[0]}; "
                  f"CUDA {machine['torch_cuda']}; "
                  f"NVRTC {machine['nvrtc'].removeprefix('nvrtc ')}",
        "clocks": f"SM {shown(after['sm_clock_mhz'], 'MHz')} right after measuring, at most "
                  f"{shown(after['sm_clock_max_mhz'], 'MHz')}; memory "
                  + shown(after["memory_clock_mhz"], "MHz"),
        "heat": f"{shown(before['temperature_c'], 'C')} before, "
                f"{shown(after['temperature_c'], 'C')} after; "
                f"{shown(after['power_w'], 'W')} right after measuring, limit "
                + shown(after["power_limit_w"], "W"),
        "software": f"sagebwd {machine['sagebwd']}, PyTorch {machine['torch']}, "
                    f"cuDNN {machine.get('cudnn')}, Python {machine['python']}",
        "other": f"FlashAttention-3 {machine['flash_attention_3']}, "
                 f"FlashAttention-4 {machine['flash_attention_4']}",
        "measured": f"{machine['date']}: {machine['command']}",
    }  # fmt: skip
    return "\n".join(textwrap.fill(f"{name:<9} {text}", WIDTH, subsequent_indent=" " * 10)
                     for name, text in rows.items())  # fmt: skip
