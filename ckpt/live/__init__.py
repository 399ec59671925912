"""Live training state: walked, named, copied out, and put back in place."""
