"""Layout: pytrees as flat buckets of equal chunks, and back."""
