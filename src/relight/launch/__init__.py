"""`relight run`: starts the controller and the agent, shows what happens, and ends all of it."""
