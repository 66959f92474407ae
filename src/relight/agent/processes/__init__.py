"""Processes of a host: started, watched, adopted, asked for their stacks; their pages and their output."""
