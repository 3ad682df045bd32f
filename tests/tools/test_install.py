"""CMake and pkg-config find what `cmake --install` gives; LLVM and CUDA are not asked for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from places import BINARY, ROOT

BUILD = BINARY.parents[1]
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
BARE = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "ld-linux-x86-64.so.2"}


def output(*command, **options):
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def needed(file):
    return set(re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", file)))


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    """An installed tree that was moved afterwards."""
    for tool in ("cmake", "ninja", "cc", "c++", "readelf"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, and this test builds with it")
    folder = tmp_path_factory.mktemp("install")
    output("cmake", "--install", BUILD, "--prefix", folder / "first")
    return (folder / "first").rename(folder / "tree")


@pytest.fixture(scope="module")
def programs(prefix, tmp_path_factory):
    """The example project, configured and built outside of the repository."""
    source, build = (tmp_path_factory.mktemp(name) for name in ("source", "build"))
    shutil.copytree(ROOT / "examples", source, dirs_exist_ok=True)
    output("cmake", "-G", "Ninja", "-S", source / "find_package", "-B", build,
           f"-DCMAKE_PREFIX_PATH={prefix}")  # fmt: skip
    output("cmake", "--build", build)
    return build


def test_a_project_finds_the_static_library(programs):
    printed = output(programs / "plan", env=NO_GPU)
    kernels = re.findall(r"^kernel sagebwd_(\w+?)_d64\w*: (\d+) characters$", printed, re.M)
    assert {"forward", "backward_dq", "backward_dkv"} <= {name for name, _ in kernels}
    assert all(int(size) > 10_000 for _, size in kernels)
    forward, backward = re.search(r"workspace: (\d+) bytes forward, (\d+) b", printed).groups()
    assert 0 < int(forward) < int(backward)
    errors = dict(re.findall(r"^(\w+) +relative L2 error (\S+)$", printed, re.M))
    assert all(0 < float(errors[name]) < 0.05 for name in ("O", "dQ", "dK", "dV"))
    assert re.search("^does not run here: .*(libcuda|GPU)", printed, re.M)
    assert needed(programs / "plan") <= BARE


# Inline functions and templates whose variables the library has as well.
ORDINARY = r"""
#include "sagebwd/generator/emit.h"
#include "sagebwd/generator/operation.h"
#include "sagebwd/runtime/attention.h"
#include "sagebwd/runtime/version.h"
#include <charconv>
#include <cstdio>
#include <future>
#include <memory>
int main() {
  const auto text = std::make_shared<std::string>(sagebwd::version());
  char digits[32];
  *std::to_chars(digits, digits + 31, 4.5).ptr = 0;
  int number = 0;
  std::from_chars(digits, digits + 1, number);
  for (int width : sagebwd::kWidths)
    number += std::async(std::launch::async, [=] { return width; }).get();
  const std::string words = sagebwd::known_words<sagebwd::Precision>(" ");
  try {
    sagebwd::Attention attention(sagebwd::AttentionSpec{});
  } catch (const std::exception&) {
  }
  std::printf("%s %d %s %s", text->c_str(), number, words.c_str(),
              std::string(sagebwd::to_string(sagebwd::Causal::none)).c_str());
}
"""


@pytest.mark.parametrize("flags", [["-O0"], ["-O2"], ["-O2", "-static-libstdc++"]], ids=" ".join)
def test_an_ordinary_program_links_the_static_library(prefix, tmp_path, flags):
    source, program = tmp_path / "program.cpp", tmp_path / "program"
    source.write_text(ORDINARY)
    archive = next(prefix.rglob("libsagebwd.a"))
    output("c++", "-std=c++20", *flags, f"-I{prefix / 'include'}", source, archive, "-o", program,
           "-lpthread", "-ldl")  # fmt: skip
    assert re.fullmatch(r"[\d.]+ 964 six-of-seven qk16 .*none", output(program, env=NO_GPU))


def test_no_symbol_stays_global_against_what_the_bundle_asks():
    """Programs that have it, too, could not be linked with some versions of binutils."""
    for layer in ("c", "runtime", "cache", "generator"):
        archive = BUILD / f"libsagebwd_{layer}.a"
        assert not re.findall(r" u (\S+)", output("nm", archive)), layer


def test_the_example_project_can_be_copied_out(prefix, tmp_path):
    shutil.copytree(ROOT / "examples/find_package", tmp_path / "project")
    output("cmake", "-G", "Ninja", "-S", tmp_path / "project", "-B", tmp_path / "build",
           f"-DCMAKE_PREFIX_PATH={prefix}")  # fmt: skip
    output("cmake", "--build", tmp_path / "build")
    assert (tmp_path / "build/plan").exists()


def test_a_c_program_is_told_what_is_missing(programs):
    result = subprocess.run([programs / "attention"], capture_output=True, text=True, env=NO_GPU)
    assert result.returncode == 1 and result.stdout == ""
    assert re.match("attention_c_example: sagebwd_create: .*(libcuda|GPU)", result.stderr)


def test_pkg_config_finds_the_shared_library(prefix, tmp_path):
    if shutil.which("pkg-config") is None:
        pytest.skip("needs pkg-config")
    source = ROOT / "examples/attention.c"
    words = re.search(r"^ \*   (cc .*?[^\\])$", source.read_text(), re.MULTILINE | re.DOTALL)[1]
    command = words.replace("\\\n *", "").replace("attention.c", str(source))
    settings = {**NO_GPU, "PKG_CONFIG_PATH": str(next(prefix.rglob("pkgconfig")))}
    settings.pop("LD_LIBRARY_PATH", None)
    output("sh", "-c", f"{command} -std=c99 -Wall -Werror -D_GNU_SOURCE -o attention",
           cwd=tmp_path, env=settings)  # fmt: skip
    program = tmp_path / "attention"
    assert "libsagebwd.so" in " ".join(needed(program))
    result = subprocess.run([program], capture_output=True, text=True, check=False, env=settings)
    assert result.returncode == 1  # for want of a GPU: the library was found
    assert result.stderr.startswith("attention_c_example: sagebwd_create: ")
    variable = output("pkg-config", "--variable=includedir", "sagebwd", env=settings).strip()
    assert (Path(variable) / "sagebwd.h").is_file()


def test_the_shared_library_shows_its_c_functions_alone(prefix):
    (library,) = (path for path in prefix.rglob("libsagebwd.so.*") if not path.is_symlink())
    symbols = output("nm", "-D", "--defined-only", library).splitlines()
    header = (prefix / "include/sagebwd.h").read_text()
    declared = set(re.findall(r"^\w[\w *]* (sagebwd_\w+)\(", header, re.M))
    assert len(declared) > 7
    assert {line.split()[-1] for line in symbols} == declared
    assert needed(library) <= BARE


def test_the_shared_library_stays_loaded(prefix):
    """Behind dlclose() a thread that compiles would run code that is no longer there."""
    (library,) = (path for path in prefix.rglob("libsagebwd.so.*") if not path.is_symlink())
    code = """if True:
        import _ctypes, sys
        _ctypes.dlclose(_ctypes.dlopen(sys.argv[1], 2))
        print(sys.argv[1] in open("/proc/self/maps").read())"""
    assert output(sys.executable, "-c", code, library).strip() == "True"


def test_the_static_library_shows_nothing_of_llvm(prefix):
    (library,) = prefix.rglob("libsagebwd.a")
    lines = output("nm", "--extern-only", "--defined-only", library).splitlines()
    symbols = [line.split()[-1] for line in lines if line.count(" ") == 2]
    assert sum(name.startswith("_ZN7sagebwd") for name in symbols) > 100
    foreign = [name for name in symbols if re.match("_ZN?K?4llvm|LLVM|setupterm|arc4random", name)]
    assert not foreign


def test_every_header_is_complete_without_llvm(prefix, tmp_path):
    folder = prefix / "include/sagebwd"
    headers = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.h"))
    assert {"runtime/attention.h", "generator/plan.h", "cache/store.h"} <= set(headers)
    program = tmp_path / "all.cpp"
    names = [*(f"sagebwd/{header}" for header in headers), "sagebwd.h"]
    program.write_text("".join(f'#include "{name}"\n' for name in names))
    # A program's own folders may have the names of ours.
    for header in headers:
        own = tmp_path / "own" / header
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text("#error this is not a header of sagebwd\n")
    output("c++", "-std=c++20", "-fsyntax-only", "-I", tmp_path / "own", "-I", folder.parent,
           program)  # fmt: skip


def files_of(tree):
    return {path.relative_to(tree).as_posix() for path in tree.rglob("*") if not path.is_dir()}


def test_the_light_build_installs_the_same(prefix, tmp_path):
    """`./run build library` without its compiles: what this build made lies in the places."""
    script = (ROOT / "tools/run/build.sh").read_text()
    (targets,) = re.findall(r"--build build/library .* --target (.*)$", script, re.M)
    cache = (BUILD / "CMakeCache.txt").read_text()
    llvm = re.findall(r"^(SAGEBWD_LLVM_(?:LIB|INCLUDE)DIR:PATH=.+)$", cache, re.M)
    light = tmp_path / "light"
    output("cmake", "-G", "Ninja", "-S", ROOT, "-B", light, "-DSAGEBWD_TESTS=OFF",
           "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON",
           "-DCMAKE_DISABLE_FIND_PACKAGE_Python=ON", *(f"-D{setting}" for setting in llvm))
    steps = output("ninja", "-C", light, "-t", "commands", *targets.split())
    assert "tests/" not in steps and "gtest" not in steps
    made = {path.name for path in BUILD.glob("libsagebwd.*")} | {"bin/sagebwd"}
    outputs = set(re.findall(r"(?:-o|qc) (libsagebwd\.\S+|bin/\S+) ", steps))
    assert outputs <= made and len(outputs) == 3
    for name in made:
        (light / name).parent.mkdir(exist_ok=True)
        shutil.copy(BUILD / name, light / name, follow_symlinks=False)
    output("cmake", "--build", light, "--target", "sagebwd_public_headers")
    output("cmake", "--install", light, "--prefix", tmp_path / "tree")
    assert files_of(tmp_path / "tree") == files_of(prefix)


@pytest.mark.parametrize("asked", ["9.9", "0.0.9"])
def test_another_version_is_refused(prefix, tmp_path, asked):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.22)\nproject(asks LANGUAGES CXX)\n"
        f"find_package(sagebwd {asked} REQUIRED)\n"
    )
    configure = ["cmake", "-G", "Ninja", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}"]
    result = subprocess.run(configure, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode != 0 and f'requested version "{asked}"' in result.stderr


def test_a_wrong_llvm_config_is_named(tmp_path):
    for tool in ("cmake", "ninja", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, and this test builds with it")
    folder_of_none = tmp_path / "none-config"
    folder_of_none.write_text(f"#!/bin/sh\necho {tmp_path}\n")  # an LLVM without its headers
    folder_of_none.chmod(0o755)
    for wrong in ("/nope", shutil.which("true"), folder_of_none):
        configure = ["cmake", "-G", "Ninja", "-S", ROOT, "-B", tmp_path / "build",
                     f"-DSAGEBWD_LLVM_CONFIG={wrong}"]  # fmt: skip
        result = subprocess.run(configure, capture_output=True, text=True, check=False)
        said = " ".join(result.stderr.split())
        assert result.returncode != 0 and "SAGEBWD_LLVM_CONFIG" in said
        if wrong != folder_of_none:
            assert f"SAGEBWD_LLVM_CONFIG is '{wrong}', which is no llvm-config" in said
        shutil.rmtree(tmp_path / "build")


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_without_llvm_every_setting_is_named():
    nowhere = [f"-DCMAKE_FIND_USE_{where}=OFF" for where in (
        "CMAKE_ENVIRONMENT_PATH", "SYSTEM_ENVIRONMENT_PATH", "CMAKE_SYSTEM_PATH")]  # fmt: skip
    result = subprocess.run(["cmake", *nowhere, "-P", ROOT / "cmake/LLVMSupport.cmake"],
                            capture_output=True, text=True, check=False)  # fmt: skip
    assert result.returncode != 0 and "LLVM's libSupport (14 to 19) was not found" in result.stderr
    for setting in ("CONFIG", "LIBDIR", "INCLUDEDIR"):
        assert f"SAGEBWD_LLVM_{setting} " in " ".join(result.stderr.split())
    settings = "--config-settings=cmake.define.SAGEBWD_LLVM_CONFIG=FILE"
    assert f"  pip install . {settings}\n" in result.stderr
