"""Execute: a schedule lowered to small tables, and run inside a jitted step."""
