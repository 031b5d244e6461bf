"""Command groups, and options that several commands share. `kvservice.cli` assembles them."""
