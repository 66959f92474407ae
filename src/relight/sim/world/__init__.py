"""A simulated job around the production core, in every order of events: no time passes here."""
