"""Shared fixtures. etcd3 0.12.0 was generated for protobuf 3 and imports only with the pure-Python implementation."""

import os

os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
os.environ.setdefault("OMP_NUM_THREADS", "1")
