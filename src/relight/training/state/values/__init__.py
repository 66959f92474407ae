"""Values that scripts keep: their kinds, how they were, whether they changed, and how they are put back."""
