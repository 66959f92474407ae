"""The objects that a script handed over: their names, their `state_dict`, and those that are refused."""
