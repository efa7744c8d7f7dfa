"""TPU: what the compiler is told, and what it makes of programs; no TPU is needed."""
