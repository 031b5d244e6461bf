"""Groups of commands, and options that several commands share; `kvservice.cli` puts them together."""
