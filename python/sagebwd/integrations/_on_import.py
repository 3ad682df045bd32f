"""Doors that open by themselves, once the package that they lead to has been imported."""

import importlib
import logging
import sys


def when_imported(module, door):
    """Imports `door` as soon as `module` has been imported: now, or at the end of its own import.

    `module` is not imported here. A door that does not open leaves `module` as it is, and says why
    when it is imported by its own name.
    """
    if module not in sys.modules:
        wanted = module, door
        mine = [finder for finder in sys.meta_path if wanted == (
            getattr(finder, "module", None), getattr(finder, "door", None))]  # fmt: skip
        if not mine:  # sagebwd itself may be imported again
            sys.meta_path.insert(0, _Finder(module, door))
    elif not getattr(sys.modules[module].__spec__, "_initializing", False):
        _open(door)


def _open(door):
    try:
        importlib.import_module(door)
    except Exception as error:  # the user imports somebody else's package, which must succeed
        logging.getLogger("sagebwd").info("%s does not import: %s", door, error)


class _Finder:
    """Finds `module` as the other finders do, until it has been imported."""

    def __init__(self, module, door):
        self.module, self.door = module, door

    def find_spec(self, name, path=None, target=None):
        if name != self.module:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            if spec := find(name, path, target):
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self)
                return spec
        return None


class _Loader:
    """A module's own loader, and what comes after it."""

    def __init__(self, loader, finder):
        self.loader, self.finder = loader, finder

    def __getattr__(self, name):
        return getattr(self.loader, name)

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        if self.finder in sys.meta_path:
            sys.meta_path.remove(self.finder)
        _open(self.finder.door)
