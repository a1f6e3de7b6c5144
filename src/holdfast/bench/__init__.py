"""Continual-learning experiments: tasks, methods, and a runner that measures what is kept."""
