"""Add this directory to the path, so that its tests share `attention_reference` and `attention_cases`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
