"""This process and the controller: orders that it receives, reports and notices that it sends."""
