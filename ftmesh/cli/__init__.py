"""The commands of ``ftmesh``, one file each; `ftmesh.cli.main` dispatches to them."""
