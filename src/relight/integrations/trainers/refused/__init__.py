"""Settings of trainers that relight cannot honour, as tables: what refuses them, and what docs/integrations/ shows."""
