"""holdfast in other people's trainers: a module for each, and none is imported before it is asked for."""
