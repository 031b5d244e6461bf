"""Engines over models of the Hugging Face library, with their K/V in the daemon."""
