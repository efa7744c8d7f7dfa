"""Schedule: rounds of transfers as plain data; the proof that they are right; files of them."""
