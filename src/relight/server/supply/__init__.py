"""Orders for hosts, carried out: each becomes a command, of the user's or of a cluster manager."""
