"""Makes the toy server of tests/results importable from the tests beside this file."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "results"))
