"""The page that plays schedules in a browser: what it shows, the file, and a server on loopback."""
