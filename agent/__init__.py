"""One supervisor per node, and what ranks import."""
