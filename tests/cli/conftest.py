"""Makes the toy server of tests/results and the stand-in here importable from the tests beside this file."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "results"), str(Path(__file__).parent)]
