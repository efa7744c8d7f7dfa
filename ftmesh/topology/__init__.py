"""Chips, links, which of them have failed, and routes around the failures. Needs no JAX."""
