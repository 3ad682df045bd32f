"""The tests of `sagebwd cache` share these."""


OPERATION = ["--arch", "sm_80", "--head-dim", 64]


def empty(tmp_path, name="empty"):
    return {"SAGEBWD_CACHE_DIR": str(tmp_path / name)}


def truncate(path):
    path.write_bytes(path.read_bytes()[:-7])
    return path
