"""Writes the type stubs of the package's public functions: write.py FOLDER, the built package.

Names, kinds and defaults of parameters are those of the sources, with the options that
`options.takes` adds; types come from the tables in types_of.py, by name. The sources are read, not
run, so this needs nothing but Python. Generators of stubs run the module, and find none of the
options that functions take as keywords. Written by hand, the signatures and their overloads take
more lines than this file and its tables, and each repeats the options, which have one home.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import sys
from pathlib import Path

from types_of import FLAGS, HEADS, OF_FUNCTION, PARAMETERS, RETURNS, SECOND_FLAG, STUBS

PACKAGE = Path(__file__).resolve().parent.parent / "sagebwd"


@dataclasses.dataclass(frozen=True)
class Parameter:
    name: str
    kind: str  #: 'positional', 'several', 'keyword' or 'keywords'
    default: str | None  #: as the source has it
    annotation: str = ""

    def text(self):
        stars = {"several": "*", "keywords": "**"}.get(self.kind, "")
        shown = f" = {self.default}" if self.default is not None else ""
        typed = f": {self.annotation}" if self.annotation else ""
        return f"{stars}{self.name}{typed}{shown}"


# ---- what the sources say ------------------------------------------------------------------------


def definitions(module):
    """The functions and classes of a module of the package, and its constants, by name."""
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    found = {node.name: node for node in tree.body
             if isinstance(node, (ast.FunctionDef, ast.ClassDef))}  # fmt: skip
    constants = {target.id: node.value for node in tree.body if isinstance(node, ast.Assign)
                 for target in node.targets if isinstance(target, ast.Name)}  # fmt: skip
    return found, constants


def _literal(node, constants):
    """A value that the source writes out, there or as a constant of the module or of another."""
    if isinstance(node, ast.Attribute):
        return ast.literal_eval(definitions(f"core/{node.value.id}")[1][node.attr])
    return ast.literal_eval(constants[node.id] if isinstance(node, ast.Name) else node)


@dataclasses.dataclass(frozen=True)
class Option:
    name: str
    type: str
    default: object


def options_of(kind):
    """The fields of a class of options.py, its bases' first."""
    node = definitions("core/options")[0][kind]
    inherited = [option for base in node.bases for option in options_of(base.id)]
    return inherited + [
        Option(item.target.id, item.annotation.id, ast.literal_eval(item.value.args[0]))
        for item in node.body if isinstance(item, ast.AnnAssign)]  # fmt: skip


#: `has_front_end` and `has_direct_front_end` add these to a function's keywords.
FRONT_END = {**_literal(ast.Name("FRONT"), definitions("core/keywords")[1]), "gate": None}
#: And these, on torch tensors.
RECOMPUTE = _literal(ast.Name("RECOMPUTE"), definitions("core/keywords")[1])


def fields_taken(function, constants):
    """The options that `options.takes` puts among a function's keywords; None: it does not."""
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "options.takes":
            given = {k.arg: k.value for k in decorator.keywords}
            kind = decorator.args[0].attr if decorator.args else "Options"
            but = _literal(given["but"], constants) if "but" in given else ()
            return [option for option in options_of(kind) if option.name not in but]
    return None


def parameters(module, name, stub=None):
    """A function's, as callers see them, with the types that its stub gives them."""
    found, constants = definitions(module)
    arguments, taken = found[name].args, fields_taken(found[name], constants)
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = [None] * (len(positional) - len(arguments.defaults))
    listed = [Parameter(a.arg, "positional", _shown(default))
              for a, default in zip(positional, missing + arguments.defaults)]  # fmt: skip
    if arguments.vararg:
        listed.append(Parameter(arguments.vararg.arg, "several", None))
    listed += [Parameter(field.name, "keyword", _written(field.default)) for field in taken or ()]
    listed += [Parameter(a.arg, "keyword", _shown(default))
               for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults)
               if taken is None or a.arg != "chosen"]  # fmt: skip
    decorators = {ast.unparse(decorator) for decorator in found[name].decorator_list}
    if decorators & {"has_front_end", "has_direct_front_end"}:
        of_front = FRONT_END if module.startswith("integrations/") else FRONT_END | RECOMPUTE
        listed += [Parameter(of, "keyword", _written(default)) for of, default in of_front.items()]
    if arguments.kwarg:
        listed.append(Parameter(arguments.kwarg.arg, "keywords", None))
    types = {**PARAMETERS, **OF_FUNCTION.get((stub or module, name), {})}
    return [dataclasses.replace(p, annotation=_type(p, types)) for p in listed]


def _written(value):
    """As the formatter has it."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _shown(default):
    """A default's text: what the source writes out; `...` for what only it can name."""
    if default is None:
        return None
    try:
        return _written(ast.literal_eval(default))
    except ValueError:
        return "..."


def _type(parameter, types):
    if parameter.kind in ("several", "keywords"):
        return "Any"
    return types[parameter.name]


def returned(stub, name):
    """Returns the types of a function's result: one, or that without its flag and that with it, and
    the same two with the second flag."""
    given = RETURNS.get((stub, name)) or RETURNS[name]
    return given if isinstance(given, tuple) else (given,)


# ---- what a stub says ----------------------------------------------------------------------------


def signature(name, listed, gives):
    """One `def`."""
    texts, kinds = [], [p.kind for p in listed]
    for i, p in enumerate(listed):
        if p.kind == "keyword" and "several" not in kinds and "keyword" not in kinds[:i]:
            texts.append("*")
        texts.append(p.text())
    line = f"def {name}({', '.join(texts)}) -> {gives}: ..."
    if len(line) <= 100:
        return line
    return f"def {name}(\n    " + ",\n    ".join(texts) + f",\n) -> {gives}: ..."


def of_function(stub, module, name):
    listed, gives = parameters(module, name, stub), returned(stub, name)
    flag = next((p for p in listed if p.name in FLAGS), None)
    if any(p.name == SECOND_FLAG for p in listed):
        return of_two_flags(name, listed, flag.name, gives)
    gives = gives[:2]
    if len(gives) == 1 or flag is None:
        if len(gives) > 1:  # its flag is among keywords that are handed on
            gives = (" | ".join(gives),)
        return signature(name, listed, gives[0])

    def with_flag(kind, default):
        changed = dataclasses.replace(flag, annotation=kind, default=default)
        if default is not None:
            return [changed if p is flag else p for p in listed]
        before = [p for p in listed if p.kind == "positional" and p is not flag]
        keywords = [p for p in listed if p.kind not in ("positional",) and p is not flag]
        at = listed.index(flag) if flag.kind == "positional" else len(before)
        behind = [dataclasses.replace(p, kind="keyword") for p in before[at:]]
        changed = dataclasses.replace(changed, kind="keyword")
        return [*before[:at], changed, *behind, *keywords]

    kinds = [("Literal[False]", "False", gives[0]), ("Literal[True]", None, gives[1]),
             ("bool", "False", " | ".join(gives))]  # fmt: skip
    return "\n".join(f"@overload\n{signature(name, with_flag(kind, default), result)}"
                     for kind, default, result in kinds)  # fmt: skip


def of_two_flags(name, listed, flag, gives):
    """The overloads of a function with two flags, keywords both: `gives` without any, with each of
    them, and with both."""

    def overload(chosen, result):
        changed = [dataclasses.replace(p, annotation=chosen[p.name][0], default=chosen[p.name][1])
                   if p.name in chosen else p for p in listed]  # fmt: skip
        return f"@overload\n{signature(name, changed, result)}"

    off, on, either = ("Literal[False]", "False"), ("Literal[True]", None), ("bool", "False")
    pairs = [(off, off), (on, off), (off, on), (on, on), (either, either)]
    results = [*gives, " | ".join(dict.fromkeys(gives))]
    return "\n".join(overload({flag: first, SECOND_FLAG: second}, result)
                     for (first, second), result in zip(pairs, results))  # fmt: skip


def of_class(node):
    """A dataclass: its fields, methods and properties, as the source annotates them."""
    lines = [f"@dataclass(frozen=True)\nclass {node.name}:"]
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            lines.append(f"    {item.target.id}: {ast.unparse(item.annotation)}")
        elif isinstance(item, ast.FunctionDef) and item.decorator_list:
            lines.append(f"    @property\n    def {item.name}(self) -> {RETURNS[item.name]}: ...")
    return "\n".join(lines).replace(": dict", ": dict[str, Any]")


def spec_class():
    """`sagebwd.Spec`: an operation's options as keywords, and as attributes what they come to."""
    fields = options_of("Operation")
    listed = [Parameter(f.name, "keyword", _written(f.default), PARAMETERS[f.name]) for f in fields]
    lines = [f"    {f.name}: {f.type if f.type in ('int', 'bool') else 'str'}" for f in fields]
    init = signature("__init__", [Parameter("self", "positional", None), *listed], "None")
    init = init.replace("    self,\n", "    self,\n    line: str | None = None,\n    /,\n", 1)
    return "\n".join(["class Spec:", *lines, "    numerics: int", *(
        f"    {line}" for line in init.splitlines())])  # fmt: skip


def stub_text(stub):
    body = []
    for module, names in STUBS[stub].items():
        found, _ = definitions(module)
        body += [of_class(found[name]) if isinstance(found[name], ast.ClassDef)
                 else of_function(stub, module, name) for name in names]  # fmt: skip
    if stub == "__init__":
        body.insert(0, spec_class())
    head = HEADS[stub]
    whole = head + "\n" + "\n\n".join(body) + "\n"

    def used(*names):
        return [name for name in names if re.search(rf"\b{name}\b", whole)]

    given = used("Callable", "Iterable")
    imports = [f"from collections.abc import {', '.join(given)}"] if given else []
    if "@dataclass" in whole:
        imports.append("from dataclasses import dataclass")
    imports.append(f"from typing import {', '.join(used('Any', 'Literal', 'overload'))}")
    return "# Written by python/stubs/write.py: change that.\n\n" + "\n".join(imports) + whole


def main(folder):
    for stub in STUBS:
        path = Path(folder) / f"{stub}.pyi"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # an earlier version's is a link to the sources
        path.write_text(stub_text(stub))


if __name__ == "__main__":
    main(sys.argv[1])
