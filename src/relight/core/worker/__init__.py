"""The worker's half of the recovery protocol, decided: events in, actions out, over a value that can be copied."""
