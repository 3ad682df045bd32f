"""The experiments have left the package: whoever imports or runs them from here is told."""

_SAID = ("sagebwd.experiments is no part of the package: in a checkout of the sources run python "
         "-m experiments, or import experiments there")  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(_SAID)
raise ImportError(_SAID, name=__name__)  # with its name, -m of a module below says it in one line
