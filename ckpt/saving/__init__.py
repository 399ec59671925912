"""From live state to a committed checkpoint, on one's own."""
