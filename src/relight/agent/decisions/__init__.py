"""The decisions of an agent: pure functions of events and time. Sockets, clocks and processes are outside."""
