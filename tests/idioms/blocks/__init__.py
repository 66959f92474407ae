"""What a composed script is made of."""
