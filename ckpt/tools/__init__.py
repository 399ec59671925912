"""What `surefoot ckpt` does: list, show, verify, compare, export, import."""
