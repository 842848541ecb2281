"""The HTTP server: requests, scheduling, connections and the page."""
