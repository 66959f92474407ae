"""Shows: from report and trace to tables, and to spans drawn in the terminal. Only reads; no torch."""
