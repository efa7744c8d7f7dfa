"""Mesh: chips, links, what has failed, and the ways around it."""
