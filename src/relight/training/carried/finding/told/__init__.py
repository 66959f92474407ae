"""Values that can be neither undone nor carried: their changes are told after a recovery, and end no job."""
