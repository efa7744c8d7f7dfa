"""Lower a schedule to small tables, and run it inside a jitted step."""
