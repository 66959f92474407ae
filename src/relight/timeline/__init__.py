"""Shows: from journal to spans to terminal, HTML and Perfetto. Only reads; no torch."""
