"""What an agent decides: pure functions of events and time. Sockets, clocks and processes are outside of this room."""
