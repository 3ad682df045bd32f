"""The tests read what `sagebwd bench` says of a machine, by stand-ins for nvidia-smi and NVML."""

import sys
import types

from sagebwd.benchmark import machine


def test_nvidia_smi_is_asked_about_the_gpu_that_was_used():
    asked = []

    def ask(*words):
        asked.append(words)
        return "1980, 1980, 2619, 61, 412.51, 700.00\n"

    assert machine.state("12-ab", ask) == {
        "sm_clock_mhz": 1980, "sm_clock_max_mhz": 1980, "memory_clock_mhz": 2619,
        "temperature_c": 61, "power_w": 412.51, "power_limit_w": 700}  # fmt: skip
    (program, option, uuid, query, form) = asked[0]
    assert (program, option, uuid, form) == (
        "nvidia-smi", "-i", "GPU-12-ab", "--format=csv,noheader,nounits")  # fmt: skip
    assert query == ("--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,temperature.gpu,power.draw,"
                     "power.limit")  # fmt: skip


def test_a_uuid_that_nvidia_smi_does_not_know_is_left_out():
    def ask(*words):
        return None if "-i" in words else "1, 2, 3, 4, 5, 6"

    assert machine.state("MIG-7", ask)["power_limit_w"] == 6


def test_what_nvidia_smi_does_not_say_is_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = machine.state(None, lambda *words: "[N/A], 2505, 10001, 40, [Not Supported], 450.00")
    assert found["sm_clock_mhz"] is None and found["power_w"] is None
    assert found["sm_clock_max_mhz"] == 2505
    one = "1, 2, 3, 4, 5, 6"
    for said in (None, "", "No devices were found", f"{one}\n{one}"):  # two GPUs: which is it?
        assert set(machine.state(None, lambda *words, said=said: said).values()) == {None}


def test_nvml_is_asked_where_nvidia_smi_is_not(monkeypatch):
    def unknown(gpu):
        raise RuntimeError("Not Supported")

    fake = types.SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid, NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0, nvmlDeviceGetPowerUsage=unknown,
        nvmlDeviceGetClockInfo=lambda gpu, kind: {1: 1410, 2: 1593}[kind],
        nvmlDeviceGetMaxClockInfo=lambda gpu, kind: 1410,
        nvmlDeviceGetTemperature=lambda gpu, kind: 55 if gpu == "GPU-1" else 0,
        nvmlDeviceGetEnforcedPowerLimit=lambda gpu: 400000,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert machine.state("1", lambda *words: None) == {
        "sm_clock_mhz": 1410, "sm_clock_max_mhz": 1410, "memory_clock_mhz": 1593,
        "temperature_c": 55, "power_w": None, "power_limit_w": 400}  # fmt: skip


def test_the_block_for_a_report():
    before = dict.fromkeys(machine.QUERIES) | {"temperature_c": 41}
    after = dict(zip(machine.QUERIES, (1755, 1980, 2619, 62, 511.5, 700)))
    text = machine.block({
        "gpu": "NVIDIA H100 80GB HBM3", "arch": "sm_90a", "multiprocessors": 132,
        "gpu_memory_bytes": 85 * 10**9, "driver": "580.65.06\n580.65.06", "torch_cuda": "13.0",
        "nvrtc": "13.0 build 36424714", "before": before, "after": after, "sagebwd": "0.1.0",
        "torch": "2.11.0", "cudnn": 91900, "python": "3.12.3", "date": "2026-11-25T10:00:00+00:00",
        "flash_attention_3": "not installed", "flash_attention_4": "4.0.0",
        "command": "sagebwd bench --models " + "llama-3-8b," * 12,
    })  # fmt: skip
    assert max(map(len, text.splitlines())) <= 100
    whole = " ".join(text.split())
    for part in ("H100 80GB HBM3, sm_90a, 132 SMs, 79 GiB", "driver 580.65.06; CUDA 13.0; NVRTC",
                 "SM 1755 MHz right after measuring, at most 1980 MHz; memory 2619 MHz",
                 "41 C before, 62 C after; 512 W right after measuring, limit 700 W",
                 "PyTorch 2.11.0, cuDNN 91900, Python 3.12.3", "FlashAttention-4 4.0.0",
                 "2026-11-25T10:00:00+00:00: sagebwd bench --models"):  # fmt: skip
        assert part in whole
