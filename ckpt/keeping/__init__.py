"""Which checkpoints stay, and the removal of the rest."""
