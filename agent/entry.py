"""Find the function that a spec names as ``module:function``, and say clearly when there is none.

Used by ranks (train, data) and by whoever preloads a job. Imports the user's module and nothing of torch itself.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from surefoot.agent.failures import EntryPointError


def resolve(reference: str, *, key: str) -> Callable[..., Any]:
    """The function that `reference` names.

    Args:
        reference: ``module:function``, e.g. ``surefoot.examples.gpt:train``.
        key: the spec's key, for messages, e.g. ``program.train``.

    Raises:
        EntryPointError: no such module or function; the nearest name is given.
        Exception: whatever the module itself raises when it is imported.
    """
    module_name, _, name = reference.partition(":")
    if not module_name or not name:
        raise EntryPointError(f'{key} = "{reference}": write it as "module:function"')
    module = _import(module_name, key=key, reference=reference)
    function = getattr(module, name, None)
    if function is None:
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise EntryPointError(
            f'{key} = "{reference}": module {module_name} ({module.__file__}) has no function {name!r}'
            + _nearest(name, functions)
        )
    if not callable(function):
        raise EntryPointError(f'{key} = "{reference}": {name} is a {type(function).__name__}, not a function')
    return function


def _import(module_name: str, *, key: str, reference: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        # A missing import *inside* the user's module is its own error and must not be mistaken for a wrong spec.
        missing = e.name or ""
        if missing != module_name and not module_name.startswith(missing + "."):
            raise
        parent = missing.rpartition(".")[0]
        raise EntryPointError(
            f'{key} = "{reference}": there is no module {missing!r}'
            + _nearest(missing, _siblings(parent))
            + ". Is its folder the working directory, or on PYTHONPATH?"
        ) from None


def _siblings(parent: str) -> list[str]:
    """Full names of the modules beside a missing one: those of its package, or the top-level ones."""
    if not parent:
        return [m.name for m in pkgutil.iter_modules()]
    spec = importlib.util.find_spec(parent)
    locations = spec.submodule_search_locations if spec is not None else None
    return [f"{parent}.{m.name}" for m in pkgutil.iter_modules(locations)] if locations else []


def _nearest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; the nearest name is {close[0]!r}" if close else ""
