"""The HTTP server: settings, what a request may say, one generating thread, routes, the page."""
