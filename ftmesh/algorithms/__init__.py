"""All-reduce algorithms: one module each, and what they share. Needs no JAX."""
