"""Surefoot keeps a large PyTorch training job on its feet."""
