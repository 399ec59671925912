"""From a committed checkpoint back into live state, by all ranks together."""
