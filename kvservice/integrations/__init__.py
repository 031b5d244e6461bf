"""Integrations of inference libraries that keep their K/V in the daemon. Each is optional and imported separately."""
