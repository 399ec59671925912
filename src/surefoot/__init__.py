"""Surefoot keeps a large PyTorch training job on its feet."""


def __getattr__(name: str) -> str:
    """``surefoot.__version__``, looked up when somebody asks: every process of a run imports this package."""
    if name != "__version__":
        raise AttributeError(f"module 'surefoot' has no attribute {name!r}")
    from importlib import metadata

    try:
        return metadata.version("surefoot")
    except metadata.PackageNotFoundError:
        return "unknown"
