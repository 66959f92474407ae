"""Plans and decisions about updates: without input or output, clock or torch."""
