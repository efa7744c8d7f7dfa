"""The processes of a pod: who is there, what all of them agree on, and how they end together."""
