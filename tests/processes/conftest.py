"""The loops are programs that tests run, not modules with doctests."""

collect_ignore_glob = ["loops/*"]
