"""Live training state to named tensors and values, and back. (torch)

`collect` walks a nested mapping of tensors, DTensors, declared boxes, modules, optimizers, objects with
`state_dict`/`load_state_dict` and plain values. Names are paths joined by dots; modules contribute parameters and persistent
buffers under canonical names, optimizers what they know of each parameter, by the parameter's name:

    model.layers.0.weight                              a tensor
    optim.params.model.layers.0.weight.exp_avg         a tensor
    optim.params.model.layers.0.weight                 a value: group number, and the parameter's state with references
    optim.param_groups                                 a value: the groups' settings
    sched                                              a value: what state_dict() gave
    quantised.weight, quantised.weight.data            a tensor subclass: a value, and its inner tensors
    rng@rank3                                          what rank 3 keeps for itself (`PerRank`)

`load_into` goes the other way, in place: it matches names, creates optimizer state that is absent, asks a `Source` to fill
tensors (which verifies what it reads), and only then sets plain values and calls `load_state_dict`.

    declared    what callers say of their tensors: Boxes, PerRank         values, kinds   plain values as JSON
    leaves      one live tensor, the boxes held of it, where they lie     wrapped         tensor subclasses, taken apart
    walking     through the mapping and modules; names, ties              optimizers      their state by parameter name
    collecting  all of a state, by name                                   source          where a load comes from
    filling     a load: gather what there is to do (gathering, placing, optimizer_load, scratch), refuse or do it
"""

from surefoot.ckpt.live.collecting import Collected, collect, missing_optimizer_nbytes
from surefoot.ckpt.live.declared import Boxes, PerRank
from surefoot.ckpt.live.filling import Fit, load_into
from surefoot.ckpt.live.leaves import Leaf, dtype_name, dtype_of, fill_part, leaf_of, part_of
from surefoot.ckpt.live.source import Source, Want
from surefoot.ckpt.live.walking import Entry, entries, is_stateful

__all__ = [
    "Boxes",
    "Collected",
    "Entry",
    "Fit",
    "Leaf",
    "PerRank",
    "Source",
    "Want",
    "collect",
    "dtype_name",
    "dtype_of",
    "entries",
    "fill_part",
    "is_stateful",
    "leaf_of",
    "load_into",
    "missing_optimizer_nbytes",
    "part_of",
]
