"""Breaks: fault plans, the nemesis that injects them, the checker that judges. No torch."""
