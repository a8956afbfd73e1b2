"""The search (docs/architecture.md): `tune.py` is the loop, `command.py` the command."""
