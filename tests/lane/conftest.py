"""Adds this directory to the path, so that its tests share `lane_rig`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
