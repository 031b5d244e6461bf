"""How large tiers should be: traces of requests, what they reuse, and what a tier holds and saves."""
