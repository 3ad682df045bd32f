"""bench/instructions.py and bench/sass.py: the parser on listings written by hand, and the record
against kernels compiled here."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

import instructions  # noqa: E402
import sass  # noqa: E402
from gpus import GPUS  # noqa: E402

MMA = "IMMA.16832.S8.S8 R4, R8.ROW, R12.COL, R4"
MACS = 16 * 8 * 32


def function(*lines):
    """A function of these instructions and labels, as nvdisasm prints them."""
    text, address = [".text.kernel:"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text.append(f"        /*{address:04x}*/        {line:>40} ;")
        address += 16
    (only,) = sass.functions("\n".join(text))
    return only


def names(function, path):
    return [function.code[i].name for i in path]


def test_instructions_are_read_with_guard_name_and_operands():
    code = function("MOV R1, c[0x0][0x28]", "@!P0 LDS.U.128 R4, [R2+0x10]",
                    "@UP1 UIADD3 UR4, UR4, 0x1, URZ", "EXIT").code
    assert [(i.guard, i.base) for i in code] == [
        ("", "MOV"), ("!P0", "LDS"), ("UP1", "UIADD3"), ("", "EXIT")]  # fmt: skip
    assert [i.pipe for i in code] == ["alu", "lsu", "uniform", "other"]
    assert code[1].operands.strip() == "R4, [R2+0x10]" and code[1].shared_read_bytes == 512


@pytest.mark.parametrize("line, macs, read, written", [
    (MMA, 16 * 8 * 32, 0, 0),
    ("HMMA.16816.F32.BF16 R4, R8, R12, R4", 16 * 8 * 16, 0, 0),
    ("HMMA.1688.F32 R4, R8, R12, R4", 16 * 8 * 8, 0, 0),
    ("IGMMA.64x64x32.S8.S8 R24, gdesc[UR4], R24", 16 * 64 * 32, (64 + 64) * 32 // 4, 0),
    ("IGMMA.64x64x32.U8.S8 R24, R120, gdesc[UR4], R24", 16 * 64 * 32, 64 * 32 // 4, 0),
    ("HGMMA.64x128x16.F32.BF16 R24, R120, gdesc[UR4], R24", 16 * 128 * 16, 128 * 32 // 4, 0),
    ("LDSM.16.M88.4 R4, [R2]", 0, 512, 0),
    ("LDSM.16.MT88.2 R4, [R2]", 0, 256, 0),
    ("LDS R4, [R2]", 0, 128, 0),
    ("LDS.64 R4, [R2]", 0, 256, 0),
    ("@!PT LDS RZ, [RZ]", 0, 0, 0),
    ("LDGSTS.E.BYPASS.128 [R35], [R48.64]", 0, 0, 512),
    ("STS.U16 [R35], R4", 0, 0, 64),
])  # fmt: skip
def test_what_an_instruction_moves_and_multiplies(line, macs, read, written):
    (only,) = function(line).code
    assert (only.macs, only.shared_read_bytes, only.shared_write_bytes) == (macs, read, written)


def test_a_matrix_instruction_of_unknown_shape_is_refused():
    with pytest.raises(sass.SassError, match="UTCIMMA"):
        assert function("UTCIMMA gdesc[UR4]").code[0].macs


def test_a_loop_counts_what_one_turn_executes():
    f = function("MOV R1, RZ", ".L_x_0:", MMA, "FADD R2, R2, R4", "@P0 BRA `(.L_x_0)", "EXIT")
    loop = sass.main_loop(f, MACS)
    assert (loop.steps, loop.body.total()) == (1, 3)
    assert loop.body.by_pipe() | {"fma": 1, "tensor": 1, "other": 1} == loop.body.by_pipe()
    assert instructions.outside_of_loop(f, loop) == 2  # MOV and EXIT


def test_a_branch_over_masks_is_taken_and_one_over_copies_is_not():
    f = function(".L_x_0:", "@P1 BRA `(.L_x_1)", "FSEL R1, R1, R2, P2", "FSEL R3, R3, R2, P2",
                 ".L_x_1:", "@P2 BRA `(.L_x_2)", "LDGSTS.E.128 [R1], [R2.64]", ".L_x_2:",
                 MMA, "@P0 BRA `(.L_x_0)", "EXIT")  # fmt: skip
    loop = sass.main_loop(f, MACS)
    assert sorted(i.base for i in loop.body.counts) == ["BRA", "BRA", "BRA", "IMMA", "LDGSTS"]


def test_a_change_of_units_with_a_barrier_of_its_own_is_no_part_of_a_turn():
    f = function(".L_x_0:", "BAR.SYNC.DEFER_BLOCKING 0x0", "@P1 BRA `(.L_x_1)",
                 "BAR.SYNC.DEFER_BLOCKING 0x0", "LDGSTS.E.128 [R1], [R2.64]", "FMUL R1, R1, R2",
                 ".L_x_1:", MMA, "@P0 BRA `(.L_x_0)", "EXIT")  # fmt: skip
    loop = sass.main_loop(f, MACS)
    assert sorted(i.base for i in loop.body.counts) == ["BAR", "BRA", "BRA", "IMMA"]


def test_a_change_of_units_within_a_turn_is_what_its_barrier_comes_with():
    f = function(".L_x_0:", "BAR.SYNC.DEFER_BLOCKING 0x0", "@P1 BRA `(.L_x_1)",
                 "BAR.SYNC.DEFER_BLOCKING 0x0", "LDGSTS.E.128 [R1], [R2.64]", "FMUL R1, R1, R2",
                 ".L_x_1:", "@P2 BRA `(.L_x_2)", "FSEL R1, R1, R2, P2", ".L_x_2:", MMA,
                 "@P0 BRA `(.L_x_0)", "EXIT")  # fmt: skip
    change = sass.change_of_units(f, sass.main_loop(f, MACS))
    assert sorted(i.base for i in change.elements()) == ["BAR", "FMUL", "LDGSTS"]


def test_a_change_of_units_around_a_loop_is_what_lies_between_its_turns():
    """Neither a masked copy of the turn nor the way around the change is taken."""
    f = function(".L_x_0:", "@P1 BRA `(.L_x_1)", "BAR.SYNC.DEFER_BLOCKING 0x0", "FMUL R1, R1, R2",
                 ".L_x_1:", "@P2 BRA `(.L_x_3)", ".L_x_2:", MMA, "FADD R1, R1, R2",
                 "@!P0 BRA `(.L_x_4)", "BRA `(.L_x_2)", ".L_x_3:", MMA, "FSEL R1, R1, R2, P2",
                 ".L_x_4:", "@P3 BRA `(.L_x_0)", "EXIT")  # fmt: skip
    loop = sass.main_loop(f, MACS)
    assert loop.body.total() == 4
    change = sass.change_of_units(f, loop)
    assert sorted(i.base for i in change.elements()) == ["BAR", "BRA", "BRA", "BRA", "FMUL"]


def test_units_have_the_tokens_that_the_generator_says():
    assert (f".channel_tokens = {instructions.UNIT_TOKENS},"
            in (ROOT / "generator/spec.h").read_text())


def test_predicated_branches_of_every_spelling():
    f = function("@!P3 BRA !P1, `(.L_x_1)", "BRA.U UP0, `(.L_x_1)",
                 "BRA.DIV UR4, `(.L_x_1)",
                 "@!PT BRA `(.L_x_1)", "CALL.REL.NOINC `(elsewhere)",
                 "@P0 CALL.REL.NOINC `(.L_x_1)", "BRA `(.L_x_1)", "NOP", ".L_x_1:",
                 "EXIT")  # fmt: skip
    assert f.successors == [[1, 8], [2, 8], [3], [4], [5], [6, 8], [8], [8], []]


def test_an_indirect_branch_and_a_lost_label_are_refused():
    with pytest.raises(sass.SassError, match="BRX"):
        assert function("BRX R2 -0x40", "EXIT").successors
    with pytest.raises(sass.SassError, match="no label"):
        assert function("BRA `(.L_x_9)", "EXIT").successors


def test_the_trap_after_the_end_is_no_loop():
    f = function("EXIT", ".L_x_0:", "BRA `(.L_x_0)")
    assert f.back_edges() == []


def test_of_several_loops_the_cheapest_a_tile_is_the_main_one():
    """One without products, one that masks, one that is unrolled twice."""
    f = function(".L_x_0:", "IADD3 R1, R1, R2, RZ", "@P0 BRA `(.L_x_0)",
                 ".L_x_1:", MMA, "FSEL R1, R1, R2, P2", "@P0 BRA `(.L_x_1)",
                 ".L_x_2:", MMA, MMA, "@P0 BRA `(.L_x_2)", "EXIT")  # fmt: skip
    loop = sass.main_loop(f, MACS)
    assert (loop.steps, loop.body.total()) == (2, 3)


def test_a_loop_within_is_repeated_until_the_products_are_complete():
    f = function(".L_x_0:", MMA, ".L_x_1:", MMA, MMA, "@P1 BRA `(.L_x_1)", "FADD R1, R1, R2",
                 "@P0 BRA `(.L_x_0)", "EXIT")  # fmt: skip
    loop = sass.main_loop(f, 7 * MACS)  # 1 + 3 turns of 2
    assert loop.body.total() == 3 + 3 * 3
    assert loop.body.total(lambda i: i.macs) == 7 * MACS


def test_loops_within_are_repeated_alike():
    f = function(".L_x_0:", MMA, ".L_x_1:", MMA, "@P1 BRA `(.L_x_1)", ".L_x_2:", MMA,
                 "FADD R1, R1, R2", "@P1 BRA `(.L_x_2)", "@P0 BRA `(.L_x_0)", "EXIT")  # fmt: skip
    loop = sass.main_loop(f, 5 * MACS)  # 1 + 2 turns of 1 and of 1
    assert loop.body.total() == 2 + 2 * (2 + 3)
    assert loop.body.total(lambda i: i.macs) == 5 * MACS


def test_products_that_no_loop_has_are_an_error_with_what_was_found():
    f = function(".L_x_0:", MMA, "@P0 BRA `(.L_x_0)", "EXIT")
    with pytest.raises(sass.SassError, match=rf"no loop with {3 * MACS} .*loops have {MACS}\."):
        sass.main_loop(f, 3 * MACS)


@pytest.mark.parametrize("family, kind, precision, warps, scores, multiplications", [
    ("mma", "forward", "six-of-seven", 4, 16 * 128, 2 * 64),
    ("mma", "backward_dkv", "gradients16", 4, 32 * 64, 4 * 64),
    ("wgmma", "backward_dq", "dv16", 2, 32 * 128, 3 * 64),
    ("wgmma", "backward_dq", "gradients16", 2, 32 * 64, 3 * 64),
    ("ws", "backward_dq", "gradients16", 2, 32 * 128, 3 * 64 + 16),
    ("mma", "backward", "gradients16", 4, 32 * 64, 5 * 64),
])  # fmt: skip
def test_scores_of_a_step_are_a_warps_rows_by_what_it_walks_over(family, kind, precision, warps,
                                                                 scores, multiplications):
    tile = {"kind": kind, "precision": precision, "family": family, "head_dim": "64",
            "block_q": "64", "block_kv": "128", "warps": str(warps)}  # fmt: skip
    kernel = instructions.Kernel("k", tile, "nvrtc", 0, 0, b"")
    assert instructions.scores_of_step(kernel) == scores
    assert instructions.multiplications_a_score(kernel) == multiplications


# ---- Nsight Compute ------------------------------------------------------------------------------

ROW = {"arch": "sm_90a", "kernel": "forward", "name": "sagebwd_forward_x", "causal": "none",
       "precision": "six-of-seven", "block_q": 64, "block_kv": 128, "warps": 4,
       "warp": {"steps_of_turn": 1, "turn": 1000, "outside": 500}}  # fmt: skip
RAW = '''==PROF== Connected to process 7
"ID","Kernel Name","Block Size","Grid Size","Device","CC","smsp__inst_executed.sum"
"","","","","","","inst"
"0","sagebwd_quantize_q(Params)","(128, 1, 1)","(9, 2, 1)","0","9.0","12"
"1","sagebwd_forward_x(Params)","(128, 1, 1)","(8, 2, 1)","0","9.0","304,000"
'''  # fmt: skip
DETAILS = '''"ID","Kernel Name","Block Size","Grid Size","CC","Metric Name","Metric Value"
"1","sagebwd_forward_x","(128, 1, 1)","(8, 2, 1)","9.0","launch__waves","1"
"1","sagebwd_forward_x","(128, 1, 1)","(8, 2, 1)","9.0","smsp__inst_executed.sum","288000"
'''  # fmt: skip


@pytest.mark.parametrize("text, percent", [(RAW, -5.26), (DETAILS, 0.0)])
def test_executed_instructions_are_compared_with_those_predicted(tmp_path, text, percent):
    (file := tmp_path / "a.csv").write_text(text)
    (found,) = instructions.check(file, [ROW], None, 1)
    assert found["predicted"] == 4 * 2 * 8 * (500 + 4 * 1000)
    assert found["percent"] == percent


def test_a_csv_without_our_kernels_says_what_to_do(tmp_path):
    (file := tmp_path / "a.csv").write_text(RAW.replace("forward_x", "forward_y"))
    with pytest.raises(RuntimeError, match="renew the record"):
        instructions.check(file, [ROW], None, 1)


def test_a_causal_mask_halves_the_tiles():
    causal = ROW | {"causal": "top-left"}
    # Blocks of 64 queries see 1, 1, 2, 2, ... tiles of 128 keys.
    assert instructions.steps_of_blocks(causal, 8, None, 1) == 2 * (1 + 2 + 3 + 4)
    keys = causal | {"kernel": "backward_dkv", "block_q": 64, "block_kv": 64}
    for kernel in "backward_dkv", "backward":
        steps = instructions.steps_of_blocks(keys | {"kernel": kernel}, 4, None, 2)
        assert steps == 2 * (4 + 3 + 2 + 1)


def test_a_part_of_all_kernels_does_not_replace_the_record(capsys):
    before = RECORD.read_bytes()
    with pytest.raises(SystemExit) as ended:
        instructions.main(["--arch=sm_80", "--tool", sys.executable, "--nvdisasm", sys.executable])
    assert ended.value.code == 2 and "--out" in capsys.readouterr().err
    assert RECORD.read_bytes() == before


# ---- the record ----------------------------------------------------------------------------------

RECORD = ROOT / "bench/results/instructions.json"
DEARER = 1.05
TOOL = ROOT / "build/bin/sagebwd"
OPERATIONS = ["--causal", "none", "--precision", "six-of-seven"]
FOUND_SOUND = ROOT / "tests/templates/found_sound.txt"


def by_operation(rows):
    return {(r["kernel"], r["head_dim"], r["causal"], r["precision"]): r for r in rows}


def recorded_of(arch):
    return [r for r in json.loads(RECORD.read_text())["kernels"] if r["arch"] == arch]


def expect_no_dearer(arch, head_dims):
    nvdisasm = instructions.find_nvdisasm()
    kernels = instructions.compiled(TOOL, arch, [*OPERATIONS, "--head-dim", head_dims])
    fresh = by_operation(instructions.row_of(kernel, nvdisasm) for kernel in kernels)
    fused = [head_dim for kernel, head_dim, *_ in fresh if kernel == "backward"]
    dims = [int(head_dim) for head_dim in head_dims.split(",")]
    assert sorted(fused) == (sorted(dims) if arch == "sm_89" else [])
    assert len(fresh) == 3 * len(dims) + len(fused)
    recorded = by_operation(recorded_of(arch))
    for operation, row in fresh.items():
        assert row["unknown_instructions"] == []
        limit = DEARER * recorded[operation]["per_score"]
        assert row["per_score"] <= limit, (
            f"{operation}: {row['per_score']} instructions a score, recorded "
            f"{recorded[operation]['per_score']}; if that is meant: python bench/instructions.py")


def found_sound_of(arch, nvrtc, empty):
    """The line that found_sound.txt has (tests/templates/found_sound.h) if these kernels of this
    NVRTC were no dearer than these records, as this test, bench/ and this nvdisasm count."""
    digest = hashlib.sha256(json.dumps(recorded_of(arch)).encode())
    version = [instructions.find_nvdisasm(), "--version"]
    digest.update(subprocess.run(version, capture_output=True, check=True).stdout)
    for more in [], ["--no-deterministic"], ["--gradient-kernels", "split"]:
        report, _ = instructions.run_json([TOOL, "cache", "explain", "--arch", arch, *OPERATIONS,
                                           *more, "--head-dim", "64,128", "--json"],
                                          SAGEBWD_CACHE_DIR=str(empty), SAGEBWD_CACHE_PACKS="",
                                          SAGEBWD_TUNE="off")
        digest.update("".join(k["digest"] for k in report["kernels"]).encode())
    for file in (Path(__file__), *sorted((ROOT / "runtime/nvrtc").iterdir()),
                 *(ROOT / f"bench/{name}.py" for name in ("harness", "instructions", "sass"))):
        digest.update(file.read_bytes())
    return f"{nvrtc} | test_instructions {arch} | {digest.hexdigest()}"


@pytest.fixture
def nvrtc():
    """The fixture gives the name of NVRTC."""
    if instructions.find_nvdisasm() is None:
        pytest.skip(f"{instructions.NO_NVDISASM} (no kernel is compared)")
    if not TOOL.exists():
        pytest.skip(f"no {TOOL.name} is built here: ./run build")
    doctor, _ = instructions.run_json([TOOL, "doctor", "--json"])
    if not doctor["can_compile"]:
        pytest.skip("no NVRTC: " + doctor["nvrtc"]["error"].splitlines()[0])
    return doctor["nvrtc"]["identity"]


@pytest.mark.usefixtures("nvrtc")
def test_a_default_kernel_is_compared_each_time():
    expect_no_dearer("sm_80", "64")


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_no_default_kernel_has_become_dearer_than_recorded(arch, nvrtc, tmp_path):
    line = found_sound_of(arch, nvrtc, tmp_path)
    listed = FOUND_SOUND.read_text().splitlines()
    if line in listed:
        return
    expect_no_dearer(arch, "64,128")
    if "SAGEBWD_UPDATE_GOLDEN" in os.environ:
        others = [old for old in listed if not old.startswith(line.rpartition("|")[0])]
        FOUND_SOUND.write_text("\n".join([*others, line]) + "\n")
    else:
        print(f"to be listed in found_sound.txt by SAGEBWD_UPDATE_GOLDEN=1: {line}")


def test_every_gpu_has_rates_of_an_architecture_that_is_recorded():
    archs = {row["arch"] for row in json.loads(RECORD.read_text())["kernels"]}
    assert {gpu.arch for gpu in GPUS} <= archs
    for gpu in GPUS:
        assert gpu.int8 >= 2 * gpu.bits16 and gpu.fp32_lanes in (64, 128)
