"""griffe: functions that `options.takes` decorates, as their callers see them.

Parameters and types are those of the type stubs (python/stubs). `{options}` in a docstring is what
the package puts there. Arguments are in groups if the docstring lists groups.
"""

import dataclasses
import re
import sys
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python/stubs"), str(ROOT / "build/python")]

import types_of  # noqa: E402
import write as stubs  # noqa: E402

from sagebwd.core import front_arguments, options  # noqa: E402

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
        of_help = {field.name: field for field in dataclasses.fields(options.Operation)}
        lines = {"{options}": options.described(of_help[t.name] for t in taken or ()),
                 **front_arguments.lines()}  # fmt: skip
        for name, told in lines.items():
            # griffe has taken the docstring's indentation away, which options.py counts on.
            text = text.replace(name, told.replace("\n" + " " * 4, "\n"))
        function.docstring.value = with_groups(text)


def with_groups(text):
    """One section of arguments for each group, if a list of `- GROUP: NAME, NAME.` says which."""
    listed = re.search(r" The arguments are in \w+ groups:\n\n((?:(?:- |  ).*\n)+)\n", text)
    if not listed:
        return text
    groups = dict(re.findall(r"^- (\w+): ([^.]*)\.", listed[1], re.MULTILINE))
    text = text.replace(listed[0], "\n\n")
    before, _, after = text.partition("\nArgs:\n")
    section, gap, rest = after.partition("\n\n")
    entries = {re.match(r" *(\w+)", entry)[1]: entry
               for entry in re.split(r"\n(?=    \S)", section)}  # fmt: skip
    sections = []
    for group, names in groups.items():
        own = [entries.pop(n) for n in re.split(r",\s+", names) if n in entries]
        sections.append(f"Args: {group}\n" + "\n".join(own))
    if entries:
        raise SystemExit(f"docs: no group of arguments has {', '.join(entries)}")
    return before + "\n" + "\n\n".join(sections) + gap + rest


def with_raises_as_list(text):
    """Several errors share a line of `Raises:`, which griffe would take for one type."""
    before, found, after = text.partition("\nRaises:\n")
    section, gap, rest = after.partition("\n\n")
    lines = re.sub(r"^    (\S.*?):", r"- \1:", section, flags=re.MULTILINE)
    lines = re.sub(r"^      +", "  ", lines, flags=re.MULTILINE)
    return f"{before}\n**Raises:**\n\n{lines}{gap}{rest}" if found else text
