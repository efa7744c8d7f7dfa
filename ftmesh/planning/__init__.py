"""Planning: choose an algorithm and an executor for a mesh and a payload."""
