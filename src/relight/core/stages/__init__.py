"""The controller's decisions, by stage of the job; core/controller.py puts them together."""
