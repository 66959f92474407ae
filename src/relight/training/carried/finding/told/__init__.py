"""Values that can be neither undone nor carried: a recovery reports that they changed, and the job goes on."""
