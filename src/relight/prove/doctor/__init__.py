"""`relight doctor`: one short job of a script, and a diagnosis of what relight protects there. No torch."""
