"""Wrong configurations, and a process without torch that refuses them."""
