"""A job as the page and Prometheus show it. Pure."""
