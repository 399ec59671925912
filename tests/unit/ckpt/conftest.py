"""Makes ckpt_images.py importable; in pytest's import mode `importlib` the tests are no package."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
