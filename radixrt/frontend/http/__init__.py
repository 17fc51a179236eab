"""The HTTP server: connections, bodies, keys, hosts, errors, and information about the server."""
