"""A simulated job in virtual time: hosts, agents, connections and faults, each at its moment."""
