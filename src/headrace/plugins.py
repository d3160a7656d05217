"""Look-up of "module:attr" names: import, protocol check, near-miss hints."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from headrace.errors import PluginError, did_you_mean


def resolve(name: str, *, what: str, search: Path | None = None) -> Any:
    """Import the object behind "module:attr".

    `what` says what it is for ("reward", "env") and appears in errors; `search` is a folder that is put on the
    import path first (the recipe's folder, so that a user's module beside the recipe is found).
    Raises PluginError that names the module or the nearest attributes.
    """
    module_name, _, attr = name.partition(":")
    if not module_name or not attr:
        raise PluginError(f"{what} = {name!r} must look like 'module:attribute'")
    if search is not None and str(search) not in sys.path:
        sys.path.insert(0, str(search))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if exc.name is not None and not (module_name + ".").startswith(exc.name + "."):
            raise PluginError(
                f"{what} = {name!r}: module {module_name!r} needs {exc.name!r}, which is missing"
            ) from exc
        where = f" (looked in {search} and on the Python path)" if search is not None else ""
        raise PluginError(f"{what} = {name!r}: there is no module {module_name!r}{where}") from exc
    if not hasattr(module, attr):
        public = [n for n in vars(module) if not n.startswith("_")]
        raise PluginError(f"{what} = {name!r}: module {module_name!r} has no {attr!r}; {did_you_mean(attr, public)}")
    return getattr(module, attr)


def require_methods(obj: object, methods: tuple[str, ...], *, what: str) -> None:
    """Raise PluginError unless `obj` has every one of `methods` as a callable."""
    missing = [m for m in methods if not callable(getattr(obj, m, None))]
    if missing:
        have = [n for n, _ in inspect.getmembers(obj, callable) if not n.startswith("_")]
        raise PluginError(f"{what} {obj!r} lacks {', '.join(missing)}; it has {', '.join(have) or 'no public methods'}")
