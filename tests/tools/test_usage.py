"""Exit codes, help and messages: 0 done, 1 failed, 2 wrong use."""

import ctypes.util
import re
import shlex

import pytest
from places import ROOT

COMMANDS = ["doctor", "emit", "build", "prebuild", "tune", "bench", "verify", "trace", "cache"]
OF_VERSION_1 = "d128 bf16 causal=none row 64x128 sink_keys=1 six-of-seven numerics=1"


def test_no_command_lists_them(sagebwd):
    result = sagebwd()
    assert result.code == 2
    assert all(command in result.err for command in COMMANDS)


@pytest.mark.parametrize("flag", ["--help", "-h", "help"])
def test_help_lists_commands(sagebwd, flag):
    result = sagebwd(flag)
    assert result.code == 0
    assert all(command in result.out for command in COMMANDS)
    assert "0 done, 1 failed, 2 wrong use" in result.out


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_an_example_and_json(sagebwd, command):
    result = sagebwd(command, "--help")
    assert result.code == 0
    assert f"\n  sagebwd {command}" in result.out
    assert "--json" in result.out
    assert sagebwd("help", command).out == result.out
    assert max(map(len, result.out.splitlines())) <= 80


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_the_examples_of_emit_work(sagebwd, tmp_path, arch):
    """On every GPU: an example without an architecture is for the one that is there."""
    examples = re.findall(r"^  sagebwd (emit .*?)(?:  #.*)?$", sagebwd("emit", "--help").out, re.M)
    assert len(examples) >= 4
    for example in examples:
        words = shlex.split(example.split(" > ")[0].replace("generated/", str(tmp_path)))
        result = sagebwd(*words, *([] if "--arch" in words else ["--arch", arch]))
        assert result.code == 0, (example, result.err)


@pytest.mark.parametrize("words", [
    ["emit", "--list", "--arch", "sm_90a"], ["build", "--arch", "sm_90a"],
    ["prebuild", "--arch", "sm_90a", "--dry-run"], ["verify"],
])  # fmt: skip
def test_the_fastest_precision_is_asked_of_the_doctor(sagebwd, words):
    result = sagebwd(*words, "--precision", "fastest")
    assert result.code == 2 and "pass what 'sagebwd doctor' says of the GPU" in result.err


COMPILED = ["--arch", "sm_90a", "--head-dim", 64]


@pytest.mark.parametrize("words", [
    ["build", *COMPILED], ["prebuild", *COMPILED, "--out", "OUT"], ["emit", "--list"],
    ["trace", "--seq-len", 64, "--head-dim", 64], ["cache", "ls"], ["cache", "explain"], ["verify"],
])  # fmt: skip
def test_a_command_warns_once_of_variables_that_nobody_reads(sagebwd, tmp_path, words):
    words = [tmp_path / "a.pack" if word == "OUT" else word for word in words]
    here = {"SAGEBWD_CACHE_DIR": str(tmp_path / "cache"), "SAGEBWD_NVRTC": str(tmp_path)}
    said = sagebwd(*words, **here, SAGEBWD_OFLINE="1", SAGEBWD_PYTHON_EXE="python3").err
    command = " ".join(words[: 2 if words[0] == "cache" else 1])
    hint = "did you mean SAGEBWD_OFFLINE? 'sagebwd doctor --help' lists the variables"
    assert said.startswith(f"sagebwd {command}: warning: nothing reads SAGEBWD_OFLINE; {hint}\n")
    assert said.count("warning") == 1
    assert "warning" not in sagebwd(*words, **here).err


def test_what_names_such_variables_itself_does_not_warn(sagebwd):
    for words in (["doctor"], ["completion", "bash"]):
        assert sagebwd(*words, SAGEBWD_OFLINE="1").err == ""


def test_help_of_a_subcommand_comes_before_or_after_its_name(sagebwd):
    result = sagebwd("cache", "ls", "--help")
    assert result.code == 0 and result.out.startswith("sagebwd cache ls - ")
    for arguments in (["cache", "help", "ls"], ["help", "cache", "ls"], ["cache", "ls", "help"]):
        assert sagebwd(*arguments).out == result.out


def test_help_of_a_whole_spec_says_what_a_word_left_out_means(sagebwd):
    shown = " ".join(sagebwd("build", "--help").out.split())
    assert "What a line such as 'd64 no-rotate' leaves out has its default" in shown
    assert "a switch that they do not name, such as rotate, is off" in shown
    part = sagebwd("trace", "--spec", "d64 no-rotate", "--seq-len", "64", "--json").json["spec"]
    assert part == ("d64 bf16 causal=none row 64x128 sink_keys=1 six-of-seven smooth_k "
                    "deterministic numerics=5")  # fmt: skip
    spec = "d128 bf16 causal=none row 0x0 sink_keys=-1 six-of-seven deterministic numerics=5"
    assert sagebwd("trace", "--spec", spec, "--seq-len", "64", "--json").json["spec"] == (
        spec.replace("0x0", "64x128").replace("=-1", "=1")
    )


def test_version(sagebwd):
    result = sagebwd("--version")
    assert result.code == 0
    assert result.out.startswith("sagebwd 0.")
    assert sagebwd("-V").out == result.out


def test_the_header_for_c_has_the_same_version(sagebwd):
    header = (ROOT / "c/sagebwd.h").read_text()
    numbers = [re.search(rf"#define SAGEBWD_VERSION_{part} (\d+)\n", header)[1]
               for part in ("MAJOR", "MINOR", "PATCH")]  # fmt: skip
    text = re.search(r'#define SAGEBWD_VERSION_STRING "(.*)"\n', header)[1]
    assert sagebwd("--version").out == f"sagebwd {text}\n" and text == ".".join(numbers)


def test_python_s_names_of_values_are_taken(sagebwd):
    words = ["--head-dim", 64, "--seq-len", 64, "--heads", 1, "--json"]
    spec = sagebwd("trace", *words, "--dtype", "float16", "--causal", "True").json["spec"]
    assert spec.startswith("d64 fp16 causal=top-left ")
    names = [kernel["name"] for words in (["bfloat16", "true,false"], ["bf16", "top-left,none"])
             for kernel in sagebwd("prebuild", "--arch", "sm_80", "--dtype", words[0], "--causal",
                                   words[1], "--dry-run", "--json").json["kernels"]]  # fmt: skip
    assert len(names) % 2 == 0 and names[: len(names) // 2] == names[len(names) // 2 :]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["biuld"], "unknown command 'biuld'; did you mean 'build'?"),
        (["frobnicate"], "unknown command 'frobnicate'"),
        (["trace", "--head-dims", "64"], "option '--head-dims'; did you mean '--head-dim'?"),
        (["trace", "64"], "unexpected argument '64'"),
        (["trace", "--seq-len"], "--seq-len needs a value"),
        (["prebuild", "--arch", "sm_80", "--causal", "--out", "x.pack"], "--causal needs a value"),
        (["emit", "--head-dim", "-o", "x"], "--head-dim needs a value"),
        (["trace", "--seq-len", "--heads=2"], "--seq-len needs a value"),
        (["--vresion"], "unknown option '--vresion'; did you mean '--version'?"),
        (["cache", "--hlep"], "unknown option '--hlep'; did you mean '--help'?"),
        (["emit", "--kernel", "forward", "--pass", "backward"],
         "--kernel is 'forward'; this backward pass has "),
        (["trace", "--json=1"], "--json takes no value"),
        (["trace", "--seq-len", "0"], "--seq-len is '0'; it takes a whole number from 1 to"),
        (["trace", "--seq-len", "1e3"], "--seq-len is '1e3'; it takes a whole number"),
        (["trace", "--sigma", "nan"], "--sigma is 'nan'; it takes a number from 0 to"),
        (["trace", "--device", "tpu"], "--device is 'tpu'; it is cpu or cuda"),
        (["trace", "--precision", "qk16,dp"], "a precision stands alone"),
        (["trace", "--precision", "s,pq"], "--precision names 'pq'; it takes six-of-seven"),
        (["trace", "--heads", "8", "--heads-kv", "3"], "3"),
        (["build", "--arch", "sm_91"], "'sm_91'"),
        (["build", "--arch", "sm_90"], "'sm_90': supported are"),
        (["build", "--arch", "sm_90"], "; did you mean 'sm_90a'?"),
        (["emit", "--list", "--arch", "SM_80"], "; did you mean 'sm_80'?"),
        (["build", "--arch", "80"], "; did you mean 'sm_80'?"),
        (["build", "--head-dim", "73"], "73"),
        (["build", "--head-dim", "abc"], "abc"),
        (["build", "--dtype", "fp8"], "fp8"),
        (["build", "--spec", OF_VERSION_1], "numerics = 1 is not what this version computes, whi"),
        (["build", "--smooth-k"], "'--smooth-k': that is the default, which '--no-smooth-k'"),
        (["trace", "--no-smooth-q"], "that is the default, which '--smooth-q' changes"),
        (["trace", "--packed"], "--packed: packed sequences have lengths"),
        (["trace", "--no-deterministic", "--precision", "gradients16", "--head-dim", "64",
          "--dq-sums", "fp16"], "--dq-sums fp16 is not emulated"),
        (["emit", "--list", "--numerics", "6"], "numerics = 6 is not what this version computes"),
        (["build", "--causal", "yes"], "yes"),
        (["build", "--arch", ","], "--arch is ','; it takes values with a comma between them"),
        (["build", "--head-dim", "64,"], "--head-dim is '64,'; it takes values with a comma"),
        (["build", "--head-dim", ",64"], "none of them empty"),
        (["build", "--head-dim", "64,,128"], "none of them empty"),
        (["prebuild", "--arch", "sm_80,"], "--arch is 'sm_80,'; it takes values"),
        (["emit", "--kernel", "forwrd"], "did you mean 'forward'?"),
        (["emit"], "--kernel"),
        (["cache", "clear"], "'sagebwd cache prune --all --yes' removes all"),
        (["emit", "--tile", "128x64w8s2"], "--kernel"),
        (["emit", "--kernel", "quantize", "--tile", "128x64w8s2"], "has no tile"),
        (["emit", "--kernel", "forward", "--tile", "banana"], "banana"),
        (["emit", "--kernel", "forward", "--pass", "sideways"], "sideways"),
        (["verify", "--cases", "0"], "--cases is '0'; it takes a whole number from 1"),
    ],
)
def test_wrong_use_says_what_was_given_and_exits_2(sagebwd, arguments, message):
    result = sagebwd(*arguments)
    assert result.code == 2, result.err
    assert message in result.err
    assert result.out == ""
    assert "--help" in result.err
    command = f" {arguments[0]}" if arguments[0] in COMMANDS else ""
    assert result.err.startswith(f"sagebwd{command}: ")  # as every other message of it


def test_cuda_device_plan_without_kernels_is_refused(sagebwd):
    result = sagebwd("trace", "--device", "cuda", "--precision", "s,pv,dv,dp,dq,dk")
    assert result.code == 2
    assert "six-of-seven or qk16" in result.err


@pytest.mark.parametrize("arguments", [["verify"], ["trace", "--device", "cuda"]])
def test_gpu_commands_say_so_without_one(sagebwd, doctor, arguments):
    if doctor["can_run"]:
        pytest.skip("this machine has a GPU")
    result = sagebwd(*arguments)
    assert result.code == 1
    assert "GPU" in result.err
    assert "trace --device cpu" in result.err
    if ctypes.util.find_library("cuda") is None:  # then there is nothing to say of a file
        assert result.err.count("libcuda") == 1
        assert "the dynamic linker does not find libcuda.so.1. It comes with" in result.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["build", "--arch", "sm_91"], 2),
        (["trace", "--head-dims", "64"], 2),
        (["cache", "import", "none.pack"], 1),
        (["cache", "export", "--out", "x.pack", "--kernel", "forward"], 1),
        (["prebuild", "--specs", "none.yaml", "--out", "x.pack"], 1),
    ],
)
def test_a_failure_is_json_where_json_is_asked_for(sagebwd, tmp_path, words, code):
    empty = {"SAGEBWD_CACHE_DIR": str(tmp_path / "empty"), "cwd": tmp_path}
    asked, plain = (sagebwd(*words, *more, **empty) for more in (["--json"], []))
    assert (asked.code, plain.code, plain.out) == (code, code, "")
    assert asked.err == plain.err and list(asked.json) == ["error"]
    assert plain.err.startswith(f"sagebwd {' '.join(asked.err.split(':')[0].split()[1:])}: "
                                + asked.json["error"])  # fmt: skip
