"""Connections to agents and observers, from the port to the handshake, and the rendezvous store."""
