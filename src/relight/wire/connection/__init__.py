"""Opens, proves and keeps connections: addresses, frames, the handshake, TLS, messages that must arrive once."""
