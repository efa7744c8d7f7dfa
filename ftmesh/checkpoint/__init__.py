"""Saved: states in files, each process with what it owns, that any other mesh can read."""
