"""`kvservice demo`: a small model generates with its K/V in a daemon, and every token is checked."""

from kvservice.demo.runner import DemoResult, run

__all__ = ["DemoResult", "run"]
