"""`relight run`: starts the controller and the agent, shows what happens, and leaves nothing behind."""
