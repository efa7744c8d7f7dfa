"""A web page that plays schedules: its data, the HTML file, and a server on loopback."""
