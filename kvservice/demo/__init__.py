"""`kvservice demo`: a small model generates with its K/V in a daemon, and every token is checked."""

from kvservice.demo.runner import DemoResult, run
from kvservice.demo.tiers import TiersResult, run_tiers

__all__ = ["DemoResult", "TiersResult", "run", "run_tiers"]
