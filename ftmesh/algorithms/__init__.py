"""One file for each all-reduce algorithm, and what they share. Knows nothing of JAX."""
