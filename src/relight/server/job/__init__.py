"""The job around the core: each event goes to the journal and the core, each command to processes and files."""
