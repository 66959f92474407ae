"""The state that a script hands over: what replicas have in common, and what only one rank has."""
