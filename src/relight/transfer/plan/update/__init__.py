"""One update of every engine, decided as values: its orders, its way, its progress and its result."""
