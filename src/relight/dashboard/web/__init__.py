"""HTTP for one page: its address, its requests, and who may send them."""
