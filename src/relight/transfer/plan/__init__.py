"""What is moved when: decided without input or output, clock or torch."""
