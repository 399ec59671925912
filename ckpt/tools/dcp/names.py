"""From the paths by which DCP keeps a state to the names and values of ours. PURE.

What an optimizer keeps can be taken over where it is told of which parameter it is. Two forms do not tell: a plain
``optimizer.state_dict()``, where parameters are numbers in the order in which the optimizer was given them, and one that was
flattened into one level. Those are left out, and so is one whose parameters no model in the folder has (`left_out`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from surefoot.ckpt.format.values import encode_value, tensor_ref

KeyPath = tuple[str | int, ...]
"""Where DCP found an entry in the nested state: keys of mappings, places in lists."""

NUMBERED = (
    "it is a plain optimizer.state_dict(), which numbers parameters and does not name them",
    "save it with get_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict, which does, and import that; or "
    "load the folder into the live optimizer with torch, and call ckpt.save",
)
FLATTENED = (
    "it was flattened into one level",
    "save it without flatten_optimizer_state_dict and import that; or load the folder into the live optimizer with torch, and call "
    "ckpt.save",
)
HOMELESS = (
    "no model in the folder has the parameters that it names",
    "save model and optimizer together, and import that; or load both with torch, and call ckpt.save",
)
"""Why an optimizer is left out, and how to keep it."""


class Names:
    """From paths to names, and the values as Surefoot stores them. `left_out`: paths of optimizers that cannot be taken over, with
    the reason and how to keep them. They must not be asked for."""

    def __init__(
        self,
        tensors: Collection[KeyPath],
        values: Mapping[KeyPath, Any],
        known: Collection[str] | None = None,
    ) -> None:
        """`known`: names of values, where an export of ours tells them; then nothing is left out."""
        self._values = values
        everything = (*tensors, *values)
        found = {
            p[:i]
            for p in everything
            for i, k in enumerate(p[:-1])
            if k == "param_groups" and type(p[i + 1]) is int
        }
        self.left_out: dict[KeyPath, tuple[str, str]] = {}
        self._owners: dict[KeyPath, str] = {}
        inside = [p for p in tensors if any(p[: len(o)] == o for o in found)]
        plain = {joined(p) for p in tensors} - {joined(p) for p in inside}
        for o in sorted(found, key=joined):
            mine = [p[len(o) :] for p in everything if p[: len(o)] == o]
            params = self._params(o, mine)
            owner = _owner_of(o, params, plain, known or ())
            if owner is not None or known is not None:
                self._owners[o] = owner or ""
            else:
                numbers = all(str(f).isdecimal() for f in params)
                self.left_out[o] = NUMBERED if numbers else HOMELESS
        if known is None:
            flat = {p[:-1] for p in everything if str(p[-1]).startswith("param_groups.") and p[:-1]}
            self.left_out |= {
                o: FLATTENED for o in flat if not any(o[: len(other)] == other for other in found)
            }
        self._tensors = [p for p in tensors if self.takes(p)]

    def _params(self, o: KeyPath, mine: Iterable[KeyPath]) -> set[Any]:
        """What an optimizer calls its parameters: names, or numbers."""
        found: set[Any] = set()
        for p in mine:
            if p[:1] == ("state",) and len(p) > 1:
                found.add(p[1])
            elif p[:1] == ("param_groups",) and p[-1:] == ("params",):
                listed = self._values.get((*o, *p))
                found.update(cast("list[Any]", listed) if isinstance(listed, list) else ())
        return found

    def takes(self, path: KeyPath) -> bool:
        """It is of nothing that is left out."""
        return not any(path[: len(o)] == o for o in self.left_out)

    def name(self, path: KeyPath) -> str:
        for o, owner in self._owners.items():
            if path[: len(o)] == o and path[len(o) : len(o) + 1] == ("state",):
                fqn, *rest = path[len(o) + 1 :]
                return joined((*o, "params", f"{owner}{fqn}", *rest))
        return joined(path)

    def encoded_values(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for o in self._owners:
            found |= self._optimizer(o)
        rest = [p for p in self._values if self.takes(p) and not any(p[: len(o)] == o for o in self._owners)]
        with_tensors = {p[0] for p in self._tensors}
        for top in dict.fromkeys(p[0] for p in rest):
            mine = [p for p in rest if p[0] == top]
            if top in with_tensors:
                found |= {joined(p): encode_value(self._values[p], joined(p)) for p in mine}
            else:
                # What has no tensors in it was probably given by one state_dict(): one value.
                nested = _nested({p[1:]: self._values[p] for p in mine})
                found[str(top)] = encode_value(nested, str(top))
        return found

    def _optimizer(self, o: KeyPath) -> dict[str, Any]:
        leaves = {p[len(o) :]: self._values[p] for p in self._values if p[: len(o)] == o}
        leaves |= {p[len(o) :]: _TensorAt(self.name(p)) for p in self._tensors if p[: len(o)] == o}
        tree = _nested(leaves)
        state, groups = tree.get("state", {}), tree["param_groups"]
        found: dict[str, Any] = {}
        for number, group in enumerate(groups):
            for fqn in group.pop("params", ()):
                name = joined((*o, "params", f"{self._owners[o]}{fqn}"))
                known = {"group": number, "state": state.get(fqn, {})}
                found[name] = encode_value(known, name, _tensor_leaf)
        name = joined((*o, "param_groups"))
        found[name] = encode_value(groups, name, _tensor_leaf)
        return found


def _owner_of(
    o: KeyPath, params: Collection[Any], names: Collection[str], known: Collection[str]
) -> str | None:
    """What stands before a parameter's name in its model, to make it its name in the state: ``model.``, or nothing. None where no
    model has them all.

    It is not written down there, so it is the part of the state that has a tensor for each of them: the nearest, if there
    are several.
    """
    fqns = {str(f) for f in params}
    if not fqns:
        return ""
    one = min(fqns)
    heads = {n[: len(n) - len(one)] for n in names if n == one or n.endswith(f".{one}")}
    fits = [head for head in heads if all(head + f in names for f in fqns)]
    prefix = joined((*o, "params", ""))
    told = [head for head in fits if any(prefix + head + f in known for f in fqns)]

    def distance(head: str) -> tuple[Any, ...]:
        shared = 0
        for a, b in zip(head.split("."), map(str, o), strict=False):
            if a != b:
                break
            shared += 1
        return head != "", -shared, not head.endswith("model."), len(head), head

    return min(told or fits, key=distance, default=None)


class _TensorAt:
    """Stands for a tensor inside a value."""

    def __init__(self, name: str) -> None:
        self.name = name


def _tensor_leaf(path: str, value: Any) -> Any:
    return tensor_ref(value.name) if isinstance(value, _TensorAt) else NotImplemented


def joined(path: Iterable[str | int]) -> str:
    return ".".join(map(str, path))


def _nested(leaves: Mapping[KeyPath, Any]) -> Any:
    """Mappings and lists out of paths: an integer is a place in a list."""
    if () in leaves:
        return leaves[()]
    heads = dict.fromkeys(p[0] for p in leaves)
    inner = {h: _nested({p[1:]: v for p, v in leaves.items() if p[0] == h}) for h in heads}
    if heads and all(type(h) is int for h in heads):
        return [inner[h] for h in sorted(heads)]
    return inner
