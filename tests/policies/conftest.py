"""Make the twin importable as `twin`, and the engine's runner beside these tests as `engine`."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))
