"""The timing protocol, its inputs and the peers."""
