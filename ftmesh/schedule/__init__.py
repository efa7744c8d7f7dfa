"""Schedules: rounds of transfers as plain data, the proof that they are correct, and files."""
