"""Command-line options of all commands, parsed before heavy imports."""
