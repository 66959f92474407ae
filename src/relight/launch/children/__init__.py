"""Child processes of `relight run`: controller, agent and page, and when one is started again."""
