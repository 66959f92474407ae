"""Values that are carried: remembered, compared, and written down for another process."""
