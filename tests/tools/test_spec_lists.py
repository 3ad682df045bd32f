"""Lists of specs that `sagebwd prebuild` refuses."""

import pytest


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1: it holds no specs, such as {arch: sm_90a, head_dim: 128}; prebuild --help has"),
        ("# nothing\n", "it holds no specs"),
        ("[]", "it holds no specs"),
        ("- arch: sm_80\n  headdim: 64\n", ":2: unknown key 'headdim'; did you mean 'head_dim'?"),
        ("- arch: sm_80\n- arch: sm_99\n", ":2: arch: unknown architecture 'sm_99'"),
        ("- head_dim: 64\n", ":1: a spec needs 'arch'"),
        ("- arch: sm_80\n  arch: sm_86\n", ":2: 'arch' is given twice"),
        ("- arch: [sm_80, sm_86, sm_80]\n", ":1: arch lists 'sm_80' twice"),
        ("- arch: sm_80\n  head_dim: 84\n", ":1: head dimension 84 is not built"),
        ("- arch: sm_80\n  head_dim: many\n", ":2: head_dim is 'many': it takes a whole number"),
        ("- arch: sm_80\n  dtype:\n    - bf16\n    - fp8\n", ":4: dtype: unknown dtype 'fp8'"),
        ("- arch: sm_80\n  rotate: maybe\n", ":2: rotate is 'maybe': it takes yes or no"),
        ("- arch: sm_80\n  pass: sideways\n", ":2: pass: unknown pass 'sideways'"),
        ("- arch: sm_80\n  granularity: [row, block]\n  group_kv: 128\n", ":1: group_kv = 128 is"),
        ("- arch: sm_80\n  granularity: block\n  sink_keys: 1\n", ":1: sink_keys = 1 is"),
        ("- arch: sm_80\n  numerics: 1\n", ":1: numerics = 1 is not what this version"),
        ("- arch:\n", "takes a word or a list"),
        ("- arch: []\n", ":1: arch has no value"),
        ("- arch: {sm_80: 1}\n", ":1: arch takes a word or a list"),
        ("- sm_80\n", ":1: a spec is a mapping"),
        ("sm_80", ":1: a spec is a mapping"),
        ("- arch: &a sm_80\n- arch: *a\n", ":2: anchors and aliases"),
        ("- arch: sm_80\n- *a\n", ":2: anchors and aliases"),
        ("- arch: sm_80\n  head_dim: !!int 64\n", ":2: tags are not taken; leave '!!int' out"),
        ("- arch: [sm_80, !mine sm_86]\n", ":1: tags are not taken; leave '!mine' out"),
        ("- arch: !!seq [sm_80]\n", ":1: tags are not taken"),
        ("- arch: sm_80\n- !!map {arch: sm_86}\n", ":2: tags are not taken"),
        ("!!seq\n- arch: sm_80\n", "tags are not taken"),
        ('- arch: "sm\\e[31m"\n', ":1: arch: unknown architecture 'sm?[31m'"),
        ('- arch: sm_80\n  "he\\u0085ad": 64\n', ":2: unknown key 'he??ad'"),
        ("arch: sm_80\n---\narch: sm_86\n", "one document"),
        ("- arch: [sm_80\n", ":"),
        ("- arch: sm_80\n  head_dim: [64\n", ":2: "),
        ('[{"arch": "sm_80"}', ":"),
        ("- arch: 'sm_80\n", ":"),
        ("\x00\x01", ":1: a control character"),
        ("[" * 5000, "nests too deeply"),
        ("- " * 5000, "nests too deeply"),
        ("- arch: sm_80\n" * 30000, "more than 256 KiB"),
    ],
)
def test_bad_lists_of_specs(sagebwd, tmp_path, text, message):
    path = tmp_path / "specs.yaml"
    path.write_text(text)
    result = sagebwd("prebuild", "--specs", path, "--dry-run")
    assert result.code == 2, result.err
    assert f"{path}" in result.err and message in result.err
    assert len(result.err.splitlines()) == 2  # the second says what has help
    assert result.out == ""
