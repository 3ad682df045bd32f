"""What `sagebwd.trace` gives: a dict that prints as a table, and becomes a data frame."""

import difflib

from sagebwd._needs import need


class TraceTable(dict):
    """Name of a tensor -> {'cosine', 'rel_l2'}; on a GPU 'kernels' -> the same of the kernels.

    `print` shows it as a table.
    """

    def __missing__(self, name):
        near = {known.lower(): known for known in self}.get(str(name).lower()) or next(
            iter(difflib.get_close_matches(str(name), self, n=1)), None)  # fmt: skip
        raise KeyError(f"{name!r} is no row; " + (f"did you mean {near!r}? " if near else "")
                       + f"There are {', '.join(self)}")  # fmt: skip

    def rows(self):
        """(computed by, tensor, cosine, rel_l2) of each, in one list."""
        tables = {"emulation": {k: v for k, v in self.items() if k != "kernels"},
                  "kernels": self.get("kernels", {})}  # fmt: skip
        return [(by, tensor, figures["cosine"], figures["rel_l2"])
                for by, table in tables.items() for tensor, figures in table.items()]  # fmt: skip

    def to_dict(self):
        """Plain dicts, for json."""
        return {name: dict(figures) for name, figures in self.items()}

    def to_pandas(self):
        """A pandas.DataFrame with a row per tensor, and ImportError without pandas."""
        columns = ["computed by", "tensor", "cosine", "rel_l2"]
        return need("pandas", "to_pandas()").DataFrame(self.rows(), columns=columns)

    def __str__(self):
        lines = [("", "tensor", "cosine", "rel. L2")] + [
            (by, tensor, f"{cosine:.6f}", f"{rel_l2:.5f}")
            for by, tensor, cosine, rel_l2 in self.rows()
        ]
        with_source = "kernels" in self
        widths = [max(map(len, column)) for column in zip(*lines)]
        return "\n".join(
            (f"{by:{widths[0]}}  " if with_source else "")
            + f"{tensor:{widths[1]}}  {cosine:>{widths[2]}}  {rel_l2:>{widths[3]}}"
            for by, tensor, cosine, rel_l2 in lines
        )
