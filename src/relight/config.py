"""Settings of a run: arguments beat files, files beat environment. No torch."""
