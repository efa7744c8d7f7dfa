"""The self-test: does what ftmesh says hold on the devices of this machine, or of this pod?

``ftmesh selftest`` starts a worker, which does all that needs JAX, and watches its journal: a check
that hangs or ends its process is recorded, and the next worker goes on with the rest.
"""
