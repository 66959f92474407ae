"""The connection of an agent or an observer to the controller."""
