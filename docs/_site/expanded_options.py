"""griffe: functions that `options.takes` decorates, as their callers see them.

Parameters and types are those of the type stubs (python/stubs), `{options}` in a docstring is what
the package puts there.
"""

import re
import sys
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python/stubs"), str(ROOT / "build/python")]

import types_of  # noqa: E402
import write as stubs  # noqa: E402

from sagebwd import options  # noqa: E402

_KINDS = {
    "positional": griffe.ParameterKind.positional_or_keyword,
    "several": griffe.ParameterKind.var_positional,
    "keyword": griffe.ParameterKind.keyword_only,
    "keywords": griffe.ParameterKind.var_keyword,
}


class ExpandedOptions(griffe.Extension):
    def on_package(self, *, pkg, **_):
        for stub, modules in types_of.STUBS.items():
            for module, names in modules.items():
                for name in names:
                    found = pkg[f"{module.replace('/', '.')}.{name}"]
                    if found.is_function:
                        self._expand(found, stub, module)

    def _expand(self, function, stub, module):
        definitions, constants = stubs.definitions(module)
        taken = stubs.fields_taken(definitions[function.name], constants)
        listed = stubs.parameters(module, function.name, stub)
        function.parameters = griffe.Parameters(*(
            griffe.Parameter(p.name, annotation=p.annotation, kind=_KINDS[p.kind],
                             default=p.default)
            for p in listed
        ))  # fmt: skip
        function.returns = " | ".join(stubs.returned(stub, function.name))
        if not function.docstring:
            return
        text = with_raises_as_list(function.docstring.value)
        if taken:
            # griffe has taken the docstring's indentation away, which options.py counts on.
            lines = options.described(taken).replace("\n" + " " * 4, "\n")
            text = text.replace("{options}", lines)
        function.docstring.value = text


def with_raises_as_list(text):
    """Several errors share a line of `Raises:`, which griffe would take for one type."""
    before, found, after = text.partition("\nRaises:\n")
    section, gap, rest = after.partition("\n\n")
    lines = re.sub(r"^    (\S.*?):", r"- \1:", section, flags=re.MULTILINE)
    lines = re.sub(r"^      +", "  ", lines, flags=re.MULTILINE)
    return f"{before}\n**Raises:**\n\n{lines}{gap}{rest}" if found else text
