"""Decides for the controller, a module for each stage of the job; core/controller.py puts them together."""
