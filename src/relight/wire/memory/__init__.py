"""Memory that processes of one host share."""
