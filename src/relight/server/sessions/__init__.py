"""Conversations with agents and observers: messages become events, silence becomes a lost host."""
