"""Parts of which scripts are composed."""
