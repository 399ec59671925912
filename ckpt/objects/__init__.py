"""Object storage as checkpoints need it: on files, on S3, streamed, probed. Knows nothing of checkpoints."""
