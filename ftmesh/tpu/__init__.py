"""Compile plans for TPUs, and report on the compiled programs; no TPU is needed."""
