"""What the experiments learn from: pictures found on disk or fetched, and text that every Python carries."""
