"""The command line: ``ftmesh plan 16x32 --failed 4x2@6,14``. One file per command."""
