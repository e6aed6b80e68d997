"""The server as a process: start, signals, frontends, end."""
