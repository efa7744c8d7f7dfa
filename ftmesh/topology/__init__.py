"""Topology: chips, links, what has failed, and routes around it."""
