"""Training code to start from."""
