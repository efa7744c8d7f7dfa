"""Processes: starting them, joining them, and what they agree on."""
