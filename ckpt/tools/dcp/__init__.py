"""Torch DCP folders (torch.distributed.checkpoint, `FileSystemWriter`): import and export. (torch)

**Names.** DCP keeps the state by path. A plain tensor ``{"model": {"net.weight": t}}`` is ``model.net.weight`` on both sides.
An optimizer, ``{"optim": {"state": {fqn: {key: t}}, "param_groups": [{"params": [fqn], …}]}}`` as `get_state_dict` gives it,
becomes what Surefoot stores of an optimizer, and the other way round: there a parameter is called as in its model
(``net.weight``), here as in the state (``model.net.weight``). An export also carries Surefoot's own table of values
(as JSON text, under `OURS`), so that an export that is imported again is the same to the last bit.
"""

OURS = "surefoot"
"""Key of the table that an export carries: JSON of step, cursor, aliases and values."""
