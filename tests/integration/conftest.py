"""Makes the helper modules beside the tests importable; in pytest's import mode `importlib` they are in no package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
