"""State that a script carries from step to step by itself: found in its code and by values, kept, put back."""
