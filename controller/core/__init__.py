"""The pure core: decisions as functions of state, events and time."""
